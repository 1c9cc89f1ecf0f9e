"""Environments by name, and the config group ``env``."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import simulators

from rlinf_core import registry
from rlinf_core.config.node import Config
from rlinf_core.config.schema import Schema, slots_of
from rlinf_core.errors import ConfigError, MissingExtraError, PluginError
from rlinf_embodied.conf.envs import SCHEMAS, Env
from rlinf_embodied.envs import SimulatorError, VectorEnv, load_env


def cfg(**keys: Any) -> Config:
    return Config({"name": "toys", **keys}, "env")


@pytest.fixture
def _toys(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [registry.Entry("rlinf.envs", "toys", "simulators:Toys", "toys")]
    for name in registry.KNOWN["rlinf.envs"]:
        value = f"rlinf_embodied.envs.{name}_env:{name}"
        entries.append(registry.Entry("rlinf.envs", name, value, "rlinf-embodied"))
    monkeypatch.setattr(registry, "installed_entries", lambda: tuple(entries))


@pytest.mark.usefixtures("_toys")
class Test_by_name:
    def test_loads(self) -> None:
        env = load_env(cfg(), (4, 5), 3)
        assert isinstance(env, simulators.Toys) and isinstance(env, VectorEnv) and env.seed == 3
        assert tuple(env.indices) == (4, 5)

    def test_unknown(self) -> None:
        with pytest.raises(PluginError, match=r"no env 'toy' is installed \(did you mean 'toys'\?\)"):
            load_env(cfg(name="toy"), (0,), 0)

    def test_says_which_environments_and_what_for(self) -> None:
        with pytest.raises(
            SimulatorError, match=r"environments 3-5 \(evaluation\) of env.name=toys cannot be made: OSErr"
        ):
            load_env(cfg(fault="start"), (3, 4, 5), 0, what="evaluation")
        with pytest.raises(ConfigError, match="no such task"):
            load_env(cfg(refuse="no such task"), (0,), 0, what="evaluation")

    @pytest.mark.parametrize("name", ["gymnasium", "metaworld", "maniskill"])
    def test_a_missing_simulator_comes_with_the_command_that_installs_it(
        self, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(registry, "missing_imports", lambda names: tuple(names))
        monkeypatch.setattr(
            registry.Entry, "load", lambda self: __import__(self.value.partition(":")[0], fromlist=["x"])
        )
        with pytest.raises(
            MissingExtraError, match=rf"env '{name}' .* needs .*install it with: .*rlinf-embodied\[{name}\]"
        ):
            load_env(cfg(name=name), (0,), 0)


class Test_config:
    def test_every_schema_builds_on_the_common_one(self) -> None:
        for name, schema in SCHEMAS.items():
            assert issubclass(schema, Env), name
            assert all(item.metadata.get("help") for item in fields(schema)), name
            assert slots_of(schema)["name"].default == name.partition("/")[2]
            assert (Path(__file__).parents[1] / "src/rlinf_embodied/conf" / f"{name}.yaml").is_file()

    @staticmethod
    def problems(option: str, **keys: Any) -> list[str]:
        schema = SCHEMAS[option]
        data = {name: slot.default for name, slot in slots_of(schema).items()} | keys
        return Schema([], {"env": schema}).problems(Config({"env": data}))

    @pytest.mark.usefixtures("_toys")
    def test_what_is_wrong_is_found_when_composing(self, tmp_path: Path) -> None:
        assert all(self.problems(option) == [] for option in SCHEMAS)
        assert self.problems("env/gymnasium", processes=2) == [
            "env.processes=2: without env.isolate=true environments run in the worker's own process"
        ]
        assert self.problems("env/gymnasium", processes=2, isolate=True) == []
        assert "did you mean 'gymnasium'" in self.problems("env/gymnasium", name="gymnasum")[0]
        assert self.problems("env/gymnasium", python=sys.executable, processes=2) == []
        (tmp_path / "python").write_text("")
        for path in ("/nowhere/python", str(tmp_path), str(tmp_path / "python")):
            found = self.problems("env/gymnasium", python=path)
            assert found == [
                f"env.python: {path} is not an interpreter that can be run; tools/install PACKAGE --env NAME makes "
                ".venv-NAME/bin/python"
            ]
        # What another interpreter has, this one need not know.
        assert self.problems("env/gymnasium", python=sys.executable, name="elsewhere") == []

    @pytest.mark.parametrize(
        ("option", "key", "value", "message"),
        [
            ("env/metaworld", "max_episode_steps", 501, "must be at most 500"),
            ("env/metaworld", "goals", -1, "must be at least 0"),
            ("env/gymnasium", "max_episode_steps", 0, "must be at least 1"),
            ("env/gymnasium", "step_timeout_s", 0.0, "must be at least 0.01"),
            ("env/gymnasium", "processes", 0, "must be at least 1"),
            ("env/gymnasium", "max_restarts", -1, "must be at least 0"),
            ("env/maniskill", "device", "gpu", "must be one of auto, cpu, cuda"),
            ("env/maniskill", "reward_mode", "praise", "must be one of sparse, dense"),
        ],
    )
    def test_limits(self, option: str, key: str, value: Any, message: str) -> None:
        (found,) = self.problems(option, **{key: value})
        assert found.startswith(f"env.{key}={value}: {message}")


def test_importing_loads_neither_torch_nor_a_simulator() -> None:
    code = (
        "import sys, rlinf_embodied.envs, rlinf_embodied.conf, rlinf_embodied.envs.isolated, "
        "rlinf_embodied.envs.conformance, rlinf_embodied.envs.gymnasium_env, rlinf_embodied.envs.metaworld_env, "
        "rlinf_embodied.envs.maniskill_env\n"
        "heavy = ('torch', 'ray', 'gymnasium', 'mujoco', 'metaworld', 'mani_skill', 'sapien')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
