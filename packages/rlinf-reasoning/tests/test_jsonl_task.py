"""Problems from JSON Lines files, and every way in which such a file can be wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rlinf_core.config import Config
from rlinf_core.errors import ConfigError
from rlinf_reasoning.tasks.jsonl_task import JsonlTask, read_jsonl

GOOD = '{"prompt": "1 + 1 =", "answer": "2"}\n'


def test_extra_fields_are_kept_and_blank_lines_skipped(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('\ufeff{"prompt": "π?", "answer": "3.14", "level": 2, "tags": ["a"]}\n\n' + GOOD, "utf-8")
    first, second = read_jsonl(path)
    assert (first.prompt, first.answer, first.fields) == ("π?", "3.14", {"level": 2, "tags": ["a"]})
    assert (second.prompt, second.answer, second.fields) == ("1 + 1 =", "2", {})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (GOOD + '{"prompt": "x", "ans\n', ["p.jsonl:2", "not valid JSON"]),
        (GOOD + "\n" + '{"prompt": "x"}\n', ["p.jsonl:3", "'answer' is missing", "has prompt"]),
        ('{"prompt": "x", "anwser": "1"}\n', ["p.jsonl:1", "'answer' is missing", "'anwser'"]),
        ('{"prompt": 3, "answer": "1"}\n', ["p.jsonl:1", "'prompt' is a number", "string"]),
        ('{"prompt": "x", "answer": null}\n', ["p.jsonl:1", "'answer' is a null"]),
        ('{"prompt": "x", "answer": true}\n', ["p.jsonl:1", "'answer' is a boolean"]),
        ('{"prompt": "", "answer": "1"}\n', ["p.jsonl:1", "'prompt' is empty"]),
        ('["prompt"]\n', ["p.jsonl:1", "a list where an object"]),
        ("", ["p.jsonl", "no line at all"]),
        ("\n \n", ["p.jsonl", "no line at all"]),
    ],
)
def test_faults_are_named_with_file_and_line(tmp_path: Path, text: str, said: list[str]) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_jsonl(path)
    assert all(part in str(caught.value) for part in ["task.path", *said])


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*absent\.jsonl: No such file"):
        read_jsonl(tmp_path / "absent.jsonl")
    with pytest.raises(ConfigError, match="directory"):
        read_jsonl(tmp_path)
    path = tmp_path / "latin.jsonl"
    path.write_bytes(GOOD.encode() + b'{"prompt": "\xe9", "answer": ""}\n')
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_jsonl(path)


def test_the_template_takes_fields(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "1+1", "answer": "2", "unit": "m"}\n')
    task = JsonlTask(Config({"path": str(path), "template": "{prompt} in {unit}: "}))
    (problem,) = task.problems(seed=0)
    assert problem.prompt == "1+1 in m: "
    bad = JsonlTask(Config({"path": str(path), "template": "{promt}"}))
    with pytest.raises(ConfigError, match=r"unknown name \{promt\}.*'prompt'"):
        bad.problems(seed=0)


def test_nothing_heavy_is_imported(tmp_path: Path) -> None:
    program = (
        "import sys, rlinf_reasoning.tasks.jsonl_task, rlinf_reasoning.tasks.base, rlinf_reasoning.conf, "
        "rlinf_reasoning.workers, rlinf_reasoning.recipes.grpo_arithmetic\n"
        "heavy = {'torch', 'ray', 'transformers', 'reasoning_gym', 'math_verify', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
