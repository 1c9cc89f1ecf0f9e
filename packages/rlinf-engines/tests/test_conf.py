"""Schemas: what is refused when a config is composed, and that this loads nothing heavy."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlinf_core.config import Config
from rlinf_engines import conf
from rlinf_engines.conf.rollouts import VLLM_HEAD_SIZES, check_head_size, may_have_accelerator
from rlinf_engines.model_check import check_lengths, check_model_path, head_size, max_positions


def root(model: Any) -> SimpleNamespace:
    return SimpleNamespace(model=model, cluster=SimpleNamespace(address=None, virtual_devices=None))


def test_composing_and_reading_metadata_load_nothing_heavy() -> None:
    code = (
        "import sys, rlinf_engines.conf, rlinf_engines.model_check\n"
        "from types import SimpleNamespace\n"
        "root = SimpleNamespace(model=rlinf_engines.conf.Model())\n"
        "assert rlinf_engines.conf.MegatronTrainer(tp=3).validate(root)[0].startswith('trainer.tp: 3')\n"
        "from rlinf_engines.trainers.torch_trainer import TorchTrainer\n"
        "from rlinf_engines.rollouts.transformers_rollout import TransformersRollout\n"
        "from rlinf_engines.rollouts.vllm_rollout import VllmRollout\n"
        "assert VllmRollout.requires == ('vllm', 'transformers')\n"
        "print([m for m in ('torch', 'transformers', 'ray', 'vllm', 'numpy') if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_option_has_a_yaml_file_and_every_key_a_help_text() -> None:
    folder = Path(conf.__file__).parent
    files = {p.relative_to(folder).with_suffix("").as_posix() for p in folder.rglob("*.yaml")}
    assert files == set(conf.SCHEMAS)
    for schema in [*conf.SCHEMAS.values(), conf.TinyModel]:
        for field in dataclasses.fields(schema):
            assert field.metadata["help"], f"{schema.__name__}.{field.name}"


def test_the_defaults_are_valid() -> None:
    for name, schema in conf.SCHEMAS.items():
        assert schema().validate(root(conf.Model())) == [] if hasattr(schema, "validate") else True, name


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"heads": 3}, "model.tiny.heads: 3 does not divide hidden_size 128"),
        ({"hidden_size": 12, "heads": 4}, "model.tiny.heads: hidden_size / heads is 3; it must be even"),
        ({"kv_heads": 3}, "model.tiny.kv_heads: 3 does not divide heads 4"),
        ({"family": "gpt2"}, "model.tiny.family: 'gpt2' is unknown; choose from qwen2, llama"),
        ({"characters": ""}, "model.tiny.characters: is empty"),
        ({"characters": "0120"}, "model.tiny.characters: '0' is there twice"),
    ],
)
def test_tiny_sizes_that_do_not_go_together(keys: dict[str, Any], message: str) -> None:
    model = conf.Model(tiny=conf.TinyModel(**keys))
    assert [p for p in model.validate(root(model)) if p.startswith(message)]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"name": "tork"}, "trainer.name: no trainer 'tork' is installed (did you mean 'torch'?)"),
        ({"betas": [0.9]}, "trainer.betas"),
        ({"betas": [0.9, 1.0]}, "trainer.betas"),
        ({"schedule": "cosine"}, "trainer.schedule_steps: 0 leaves no step"),
        ({"schedule": "linear", "warmup_steps": 5, "schedule_steps": 5}, "trainer.schedule_steps: 5 leaves"),
    ],
)
def test_trainer_values_that_cannot_be(keys: dict[str, Any], message: str) -> None:
    (problem,) = conf.TorchTrainer(**keys).validate(root(conf.Model()))
    assert problem.startswith(message)


@pytest.mark.parametrize("schema", [conf.TransformersRollout, conf.VllmRollout])
def test_rollouts_that_are_not_there(schema: type) -> None:
    (problem,) = schema(name="transformer").validate(root(conf.Model()))
    assert problem.startswith("rollout.name: no rollout 'transformer' is installed (did you mean 'transformers'?)")


def test_vllm_takes_some_models_only() -> None:
    rollout = conf.VllmRollout()
    (problem,) = rollout.validate(root(conf.Model(dtype="float64")))
    assert problem.startswith("model.dtype: vllm does not compute in float64")
    (problem,) = rollout.validate(root(conf.Model(tiny=conf.TinyModel(heads=8))))
    assert problem.startswith("model.tiny.heads: vllm takes head sizes 32, 64")
    assert problem.endswith("hidden_size / heads is 16; change either")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"max_model_len": 65}, "rollout.max_model_len: 65 is more than the 64 tokens that the model takes"),
        (
            {"tensor_parallel_size": 3},
            "rollout.tensor_parallel_size: 3 does not divide the model's 4 attention heads and 2 key-value heads",
        ),
    ],
)
def test_vllm_values_that_do_not_fit_the_model(keys: dict[str, Any], message: str) -> None:
    (problem,) = conf.VllmRollout(**keys).validate(root(conf.Model()))
    assert problem.startswith(message)


def test_heads_of_a_directory_bound_tensor_parallelism(tmp_path: Path) -> None:
    config = {"num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 128}
    model = conf.Model(path=str(write(tmp_path / "smol", config)))
    assert conf.VllmRollout(tensor_parallel_size=3).validate(root(model)) == []
    (problem,) = conf.VllmRollout(tensor_parallel_size=2).validate(root(model))
    assert problem.startswith("rollout.tensor_parallel_size: 2 does not divide the model's 9 attention heads")


@pytest.mark.parametrize(
    ("config", "size"),
    [
        ({"hidden_size": 64, "num_attention_heads": 4}, 16),
        ({"hidden_size": 64, "num_attention_heads": 4, "head_dim": 24}, 24),
        ({"text_config": {"n_embd": 96, "n_head": 2}}, 48),
        ({"hidden_size": 64, "num_attention_heads": 4, "kv_lora_rank": 8}, None),
        ({"hidden_size": 576, "num_attention_heads": 9}, 64),
        ({}, None),
    ],
)
def test_vllm_on_a_cpu_takes_heads_of_some_sizes(
    tmp_path: Path, config: dict[str, Any], size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = conf.Model(path=str(write(tmp_path / "model", config)))
    assert head_size(model) == size
    monkeypatch.setattr("rlinf_engines.conf.rollouts.may_have_accelerator", lambda cluster: cluster)
    rollout = Config(vars(conf.VllmRollout()))
    for accelerator in (True, False):
        data = {"model": vars(model), "cluster": accelerator}
        problems = conf.VllmRollout.validate(rollout, Config(data))
        refused = not accelerator and size is not None and size not in VLLM_HEAD_SIZES
        assert len(problems) == refused
        assert all(f" {size}; use rollout=transformers" in p and "32, 64, 80" in p for p in problems)


def test_vllm_s_own_list_of_head_sizes_is_ours() -> None:
    """Read from its source: importing vLLM takes seconds."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("vllm is not installed")
    source = (Path(spec.submodule_search_locations[0]) / "v1/attention/backends/cpu_attn.py").read_text()
    found = re.search(r"def get_supported_head_sizes\(cls\)[^\n]*\n\s+return \[([\d, ]+)\]", source)
    assert found is not None and tuple(map(int, found[1].split(","))) == VLLM_HEAD_SIZES
    assert check_head_size(64) == check_head_size(None) == []


def test_where_an_accelerator_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    here = SimpleNamespace(address=None, virtual_devices=None)
    there = SimpleNamespace(address="10.0.0.1:6379", virtual_devices=None)
    assert not may_have_accelerator(here, tmp_path) and may_have_accelerator(there, tmp_path)
    (tmp_path / "nvidia0").touch()
    assert may_have_accelerator(here, tmp_path)
    here.virtual_devices = 2
    assert not may_have_accelerator(here, tmp_path), "CPU slots were asked for"


def write(path: Path, config: dict[str, Any]) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    (path / "model.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}")  # no weights, in good order
    (path / "tokenizer.json").write_text("{}")
    return path


def test_model_paths(tmp_path: Path) -> None:
    good = write(tmp_path / "good", {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 2048})
    assert check_model_path(str(good)) == []
    assert conf.Model(path=str(good)).validate(None) == []
    (problem,) = conf.Model(path=str(tmp_path / "gone")).validate(None)
    assert problem.startswith(f"model.path: {tmp_path}/gone does not exist") and "hf download" not in problem
    assert check_model_path("")[0].startswith("model.path: the path is empty; give a directory with config.json")
    (problem,) = check_model_path("some-org/Small-1.5B")
    assert "is not downloaded by a run: `hf download some-org/Small-1.5B --local-dir DIR`" in problem


@pytest.mark.parametrize(
    ("tokenizer", "said"),
    [
        ({}, ""),
        ({"model": {"vocab": {"a": 0, "b": 7}}}, ""),
        ({"model": {"vocab": {"a": 0, "b": 8}}}, "ids up to 8 ('b') and a model for 8 tokens (ids up to 7)"),
        ({"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 9, "content": "<end>"}]}, "ids up to 9 ('<end>')"),
        ({"model": {"vocab": [["a", -1.0]] * 8}}, ""),
        ({"model": {"vocab": [["a", -1.0]] * 8 + [["b", -1.0]]}}, "ids up to 8 ('b')"),
        ([], "has a tokenizer.json that cannot be read"),
        ({"added_tokens": [{"id": 1}]}, "has a tokenizer.json that cannot be read (KeyError: 'content')"),
    ],
)
def test_a_tokenizer_with_ids_beyond_the_model(tmp_path: Path, tokenizer: Any, said: str) -> None:
    path = write(tmp_path / "model", {"vocab_size": 8})
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    problems = conf.Model(path=str(path)).validate(None)
    assert len(problems) == bool(said) and all(said in p and p.startswith("model.path: ") for p in problems)
    (path / "tokenizer.json").unlink()
    (path / "vocab.json").write_text("{}")  # a tokenizer of another kind is the worker's to load
    assert conf.Model(path=str(path)).validate(None) == []


def test_lengths_are_read_from_the_config(tmp_path: Path) -> None:
    nested = write(tmp_path / "nested", {"text_config": {"max_position_embeddings": 100}})
    silent = write(tmp_path / "silent", {})
    names = {"prompt_key": "data.max_prompt_tokens", "response_key": "sampling.max_new_tokens"}
    assert max_positions(conf.Model(path=str(nested))) == 100
    assert max_positions(conf.Model(path=str(silent))) is None
    assert check_lengths(conf.Model(path=str(silent)), 10**6, 10**6, **names) == []
    assert check_lengths(conf.Model(), 56, 8, **names) == []
    (problem,) = check_lengths(conf.Model(), 57, 8, **names)
    assert problem == (
        "sampling.max_new_tokens: data.max_prompt_tokens 57 and sampling.max_new_tokens 8 are 65 tokens together, "
        "the model takes 64; lower one of them"
    )
