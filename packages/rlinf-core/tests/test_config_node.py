"""The read-only view of a composed configuration."""

from __future__ import annotations

import copy
import pickle

import pytest

from rlinf_core.config import Config
from rlinf_core.errors import ConfigError

DATA = {"a": 1, "node": {"lr": 0.5, "inner": {"x": None}}, "list": [{"k": 1}, {"k": 2}], "names": ["u", "v"], "map": {}}


def test_access_by_attribute_and_by_key() -> None:
    cfg = Config(DATA)
    assert cfg.a == 1 and cfg["node"]["lr"] == 0.5 and cfg.node.inner.x is None
    assert cfg.names == ["u", "v"] and cfg.list[1].k == 2
    assert "lr" in cfg.node and "zz" not in cfg.node and len(cfg.node) == 2 and list(cfg.node) == ["lr", "inner"]
    assert dict(cfg.node.inner.items()) == {"x": None} and bool(cfg.map)


def test_a_misspelt_key_names_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match=r"no configuration key 'lrr' in 'node' \(did you mean 'lr'\?\); keys there: lr, inner"
    ):
        _ = Config(DATA).node.lrr
    with pytest.raises(ConfigError, match="at the top level"):
        _ = Config(DATA)["nod"]
    assert not hasattr(Config(DATA), "account_ids")
    with pytest.raises(AttributeError):
        _ = Config(DATA).__array__


def test_it_is_read_only() -> None:
    cfg = Config(DATA)
    with pytest.raises(ConfigError, match="node.lr"):
        cfg.node.lr = 3
    with pytest.raises(ConfigError):
        cfg["a"] = 3
    with pytest.raises(ConfigError):
        del cfg.a
    cfg.names.append("w")
    cfg.to_dict()["a"] = 9
    assert cfg == DATA


def test_reads_are_absolute_and_shared_by_the_tree() -> None:
    cfg = Config(DATA)
    node = cfg.node
    assert node.inner.x is None and "a" in cfg
    assert cfg.reads == node.reads == {"node", "node.inner", "node.inner.x"}
    cfg.list[0].k  # noqa: B018
    assert "list.0.k" in cfg.take_reads() == cfg.take_reads()
    cfg.map.items()
    assert "map" in cfg.reads and "node.lr" not in cfg.reads
    node.to_dict()
    assert "node.lr" in cfg.reads
    cfg.to_dict()  # the whole is copied to be written down: no use of a key
    assert cfg.unread() == ["a", "names"] and node.unread() == []


def test_a_node_travels_without_its_reads_and_sends_them_home() -> None:
    cfg = Config(DATA)
    assert cfg.a
    away = pickle.loads(pickle.dumps(cfg.node))
    assert away == cfg.node and not away.reads
    assert away.lr == 0.5
    cfg.add_reads(away.take_reads())
    assert cfg.reads == {"a", "node", "node.lr"}
    assert copy.deepcopy(cfg) == cfg and repr(cfg).startswith("Config(")
    with pytest.raises(TypeError):
        hash(cfg)
