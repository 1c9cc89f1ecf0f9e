"""Problems from JSON Lines files, and every way in which such a file can be wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlinf_core.config import Config
from rlinf_core.errors import ConfigError
from rlinf_reasoning.conf.tasks import Jsonl
from rlinf_reasoning.tasks.jsonl_task import JsonlTask, Layout, read_jsonl


def task(path: Path, **keys: Any) -> JsonlTask:
    return JsonlTask(Config(vars(Jsonl(path=str(path), **keys))))


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
        ('{"prompt": "x", "answer": "2"\n' + GOOD, ["p.jsonl:1", "Expecting ',' delimiter at column 30"]),
        (GOOD + "\n" + '{"prompt": "x"}\n', ["p.jsonl:3", "'answer' is missing", "has prompt"]),
        ('{"prompt": "x", "anwser": "1"}\n', ["p.jsonl:1", "'answer' is missing", "'anwser'"]),
        ('{"prompt": 3, "answer": "1"}\n', ["p.jsonl:1", "'prompt' is a number", "string"]),
        ('{"question": "x", "answer": "1"}\n', ["p.jsonl:1", "'prompt' is missing", "task.prompt_field"]),
        ('{"prompt": [], "answer": "1"}\n', ["p.jsonl:1", "'prompt' must be", "messages"]),
        ('{"prompt": ["x"], "answer": "1"}\n', ["message 0 is not an object"]),
        ('{"prompt": [{"role": "usr", "content": ""}], "answer": ""}\n', ["message 0", "'usr'", "did you mean 'user'"]),
        ('{"prompt": [{"role": "user", "content": [1]}], "answer": ""}\n', ["message 0", "not a string"]),
        ('{"prompt": [{"role": "assistant", "content": "x"}], "answer": ""}\n', ["nothing to answer"]),
        ('{"prompt": "x", "answer": null}\n', ["p.jsonl:1", "'answer' is a null"]),
        ('{"prompt": "x", "answer": true}\n', ["p.jsonl:1", "'answer' is a boolean"]),
        ('{"prompt": "", "answer": "1"}\n', ["p.jsonl:1", "'prompt' is empty"]),
        ('{"prompt": "x\\uD83D", "answer": "1"}\n', ["p.jsonl:1", "'prompt' has half of a character (\\ud83d"]),
        (GOOD + '{"prompt": "x", "answer": "1", "tags": ["\\ude00"]}\n', ["p.jsonl:2", "'tags' has half"]),
        ('["prompt"]\n', ["p.jsonl:1", "a list where an object"]),
        (GOOD + '{"prompt": "x", "answer": NaN}\n', ["p.jsonl:2", "'answer' is nan", "finite"]),
        (GOOD + '{"prompt": "x", "answer": ' + "9" * 5000 + "}\n", ["p.jsonl:2", "ValueError", "4300 digits"]),
        (GOOD + '{"prompt": "x", "answer": ' + "[" * 100000 + "\n", ["p.jsonl:2", "RecursionError"]),
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


@pytest.mark.parametrize(
    ("fields", "layout", "meant"),
    [
        (["question", "answer"], Layout("question", "questions"), "answer"),  # not the field of the prompt
        (["question", "final"], Layout("question", "fnal"), "final"),
        (["question"], Layout("question", "questions"), ""),
        (["answer", "question"], Layout(), "question"),
        (["answer"], Layout("answers", "answer"), ""),
        (["text", "solution"], Layout("text", "answer"), "solution"),
    ],
)
def test_the_field_that_is_suggested_is_a_likely_one(
    tmp_path: Path, fields: list[str], layout: Layout, meant: str
) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps(dict.fromkeys(fields, "x")) + "\n")
    with pytest.raises(ConfigError) as caught:
        read_jsonl(path, layout)
    said = str(caught.value)
    assert f"(did you mean {meant!r}?)" in said if meant else "did you mean" not in said


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*absent\.jsonl: No such file"):
        read_jsonl(tmp_path / "absent.jsonl")
    with pytest.raises(ConfigError, match="directory"):
        read_jsonl(tmp_path)
    path = tmp_path / "latin.jsonl"
    path.write_bytes(GOOD.encode() * 3 + b'{"prompt": "\xe9", "answer": ""}\n')
    with pytest.raises(ConfigError, match=r"latin\.jsonl:4: not UTF-8"):
        read_jsonl(path)


def test_the_template_takes_fields(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "1+1", "answer": "2", "unit": "m"}\n')
    (problem,) = task(path, template="{prompt} in {unit}: ").problems(seed=0)
    assert problem.prompt == "1+1 in m: "
    bad = task(path, template="{promt}")
    with pytest.raises(ConfigError, match=r"unknown name \{promt\}.*'prompt'"):
        bad.problems(seed=0)


SCHOOL = """{"question": "How many eggs?", "answer": "16 - 3 = 13\\n#### 10 is wrong\\n#### 1,300", "level": 2}
{"question": "How much?", "answer": "#### 5"}
"""


def test_a_file_of_grade_school_problems_works_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "school.jsonl"
    path.write_text(SCHOOL)
    found = task(path, prompt_field="question", answer_pattern=r"####\s*(.+)", template="{prompt} ({question})")
    first, second = found.problems(seed=0)
    assert (first.prompt, first.answer) == ("How many eggs? (How many eggs?)", "1,300")
    assert first.fields["level"] == 2 and first.fields["answer"].startswith("16 - 3")
    assert second.answer == "5" and found.eval_problems(seed=0) is None


def test_an_answer_without_a_match_is_named(tmp_path: Path) -> None:
    path = tmp_path / "school.jsonl"
    path.write_text(SCHOOL + '{"question": "And now?", "answer": "who knows"}\n')
    with pytest.raises(ConfigError, match=r"school\.jsonl:3: task\.answer_pattern .*'who knows'"):
        read_jsonl(path, Layout("question", pattern="#### (.+)"))
    path.write_text('{"question": "x", "answer": "####  "}\n')
    with pytest.raises(ConfigError, match=r"finds nothing"):
        read_jsonl(path, Layout("question", pattern="####(.*)"))


def test_answers_may_be_numbers(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a", "answer": 56}\n{"prompt": "b", "answer": 0.5}\n')
    assert [p.answer for p in read_jsonl(path)] == ["56", "0.5"]


def test_messages_are_kept_and_the_template_fills_the_last(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1"}]
    lone = [{"role": "user", "content": "2+2"}]
    rows = [{"messages": m, "solution": "2"} for m in (messages, lone)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys = {"prompt_field": "messages", "answer_field": "solution"}
    first, second = task(path, **keys).problems(seed=0)
    assert first.messages == tuple(messages) and first.prompt == "system: Be brief.\n\nuser: 1+1"
    assert second.messages == tuple(lone) and second.prompt == "2+2"
    first, second = task(path, **keys, template="{prompt} = ?").problems(seed=0)
    assert first.messages == (messages[0], {"role": "user", "content": "1+1 = ?"})
    assert second.prompt == "2+2 = ?"


def test_the_file_for_evaluation_is_named_when_it_is_wrong(tmp_path: Path) -> None:
    path, other = tmp_path / "train.jsonl", tmp_path / "eval.jsonl"
    path.write_text(GOOD)
    other.write_text('{"prompt": "9", "answer": "9"}\n')
    found = task(path, eval_path=str(other)).eval_problems(seed=0)
    assert found is not None and [p.prompt for p in found] == ["9"]
    other.write_text("{")
    with pytest.raises(ConfigError, match=r"^task\.eval_path: .*eval\.jsonl:1: not valid JSON"):
        task(path, eval_path=str(other)).eval_problems(seed=0)


def test_nothing_heavy_is_imported(tmp_path: Path) -> None:
    program = (
        "import sys, rlinf_reasoning.tasks.jsonl_task, rlinf_reasoning.tasks.base, rlinf_reasoning.conf, "
        "rlinf_reasoning.workers, rlinf_reasoning.recipes.grpo_arithmetic, rlinf_reasoning.recipes.evaluate\n"
        "heavy = {'torch', 'ray', 'transformers', 'reasoning_gym', 'math_verify', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
