"""The split of problems into phases, and the batches of a step."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlinf_core.config import Config
from rlinf_core.errors import ConfigError
from rlinf_reasoning.tasks.base import Problem, PromptData, check_longest, load_data
from rlinf_reasoning.tasks.chat import PromptEncoder, Prompting


def problems(count: int) -> list[Problem]:
    return [Problem(f"{i}+1=", str(i + 1), {"number": i}) for i in range(count)]


def data(source: list[Problem], seed: int = 0, **sizes: Any) -> PromptData:
    wanted: dict[str, Any] = {
        "eval_problems": 10,
        "warm_start_problems": 20,
        "prompts_per_step": 8,
        "group_size": 4,
        **sizes,
    }
    return PromptData(source, seed=seed, source="sums", **wanted)


def test_a_file_with_a_prompt_that_is_too_long_is_refused_before_anything_is_drawn(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    texts = [f"{i}+1=" for i in range(200)] + ["1" * 20]
    path.write_text("".join(json.dumps({"prompt": text, "answer": "2"}) + "\n" for text in texts))
    task = {"name": "jsonl", "path": str(path), "eval_path": None, "template": "{prompt}"}
    task |= {"prompt_field": "prompt", "answer_field": "answer", "answer_pattern": None}
    data = {"seed": 0, "task": task, "eval": {"problems": 4}, "prompts_per_step": 4, "algorithm": {"group_size": 2}}
    cfg = Config({**data, "model": {"path": str(tmp_path)}, "sampling": {"max_new_tokens": 4}})
    tokenizer = SimpleNamespace(encode=lambda text: [ord(c) for c in text])
    with pytest.raises(ConfigError, match=r"a problem of .*p\.jsonl has 20 tokens.*task\.too_long=drop"):
        check_longest(cfg, PromptEncoder(tokenizer, Prompting(most=19)))
    check_longest(cfg, PromptEncoder(tokenizer, Prompting(most=20)))
    check_longest(cfg, PromptEncoder(tokenizer, Prompting(most=19, too_long="drop")))


def test_evaluation_shares_no_prompt_with_training_and_nothing_is_lost() -> None:
    found = data(problems(100))
    held = {p.prompt for p in found.eval}
    trained = {p.prompt for p in found.train}
    assert len(held) == 10
    assert not held & trained
    assert held | trained == {p.prompt for p in problems(100)}
    assert len(found.warm_start) == 20
    assert {p.prompt for p in found.warm_start} <= trained


def test_a_repeated_prompt_counts_once_with_its_first_answer() -> None:
    again = [Problem(p.prompt, "wrong") for p in problems(100)]
    found = data(problems(100) + again)
    assert len(found.eval) + len(found.train) == 100
    assert all(p.answer != "wrong" for p in (*found.eval, *found.train))


def test_the_split_depends_on_the_seed_and_not_on_the_order() -> None:
    one, other = data(problems(100)), data(problems(100)[::-1])
    assert one.eval == other.eval
    assert one.train == other.train
    assert one.batch(3) == other.batch(3)
    assert data(problems(100), seed=1).eval != one.eval


def test_a_batch_is_a_pure_function_of_seed_and_step() -> None:
    forward, fresh = data(problems(100)), data(problems(100))
    in_order = [forward.batch(step) for step in range(40)]
    assert [fresh.batch(step) for step in reversed(range(40))] == in_order[::-1]
    assert data(problems(100), seed=1).batch(0) != in_order[0]


def test_epochs_are_shuffled_and_do_not_repeat() -> None:
    found = data(problems(100))  # 90 to train on: 11 whole batches of 8
    assert found.batches_per_epoch == 11
    epochs = [[p.text for step in range(11) for p in found.batch(11 * epoch + step)] for epoch in range(2)]
    assert all(max(Counter(epoch).values()) == 1 for epoch in epochs)
    assert epochs[0] != epochs[1]
    many = {p.text for step in range(11 * 40) for p in found.batch(step)}
    assert many == {p.prompt for p in found.train}


def test_prompts_carry_what_keys_and_scores_them() -> None:
    found = data(problems(100))
    prompt = found.batch(12)[3]
    assert (prompt.id, prompt.step, prompt.group_size, prompt.greedy) == ("train/12/p3", 12, 4, False)
    assert prompt.text == f"{prompt.fields['number']}+1="
    assert prompt.account_ids() == tuple(f"train/12/p3/{i}" for i in range(4))
    evaluated = found.eval_prompts()
    assert all(p.greedy and p.group_size == 1 for p in evaluated)
    assert [p.text for p in evaluated] == [p.prompt for p in found.eval]
    assert [p.answer for p in found.warm_start_prompts()] == [p.answer for p in found.warm_start]


@pytest.mark.parametrize(
    ("count", "sizes", "numbers"),
    [
        (29, {}, ("29", "30", "10", "20", "8")),
        (17, {"warm_start_problems": 0}, ("17", "18")),
    ],
)
def test_too_few_problems_are_refused_with_the_numbers(
    count: int, sizes: dict[str, int], numbers: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        data(problems(count), **sizes)
    assert all(number in str(caught.value) for number in numbers)
    assert "eval.problems" in str(caught.value)
    data(problems(count + 1), **sizes)


class Disagreeing:
    source = "a file with two minds"

    def problems(self, seed: int) -> list[Problem]:
        return [*problems(200), Problem("5+1=", "7"), Problem("6+1=", "7"), Problem("8+1=", "7")]


def test_prompts_with_two_answers_are_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    load_data(recipe(), Disagreeing(), tell=False)
    assert caplog.messages == []
    for _ in range(2):
        assert load_data(recipe(), Disagreeing()).conflicts == 2
    (text,) = caplog.messages
    assert text.startswith("task: a file with two minds has 2 problem(s) whose prompt came before with another answer")


class Sums:
    source = "sums"

    def problems(self, seed: int) -> list[Problem]:
        return problems(200)


def recipe(**changes: Any) -> Config:
    return Config(
        {
            "seed": 0,
            "eval": {"problems": 10},
            "warm_start": {"problems": 20, "max_steps": 1},
            "prompts_per_step": 8,
            "algorithm": {"group_size": 4},
            "sampling": {"max_new_tokens": 4},
            "model": {"path": None, "tiny": {"max_positions": 16, "characters": "0123456789+="}},
            **changes,
        }
    )


def test_load_data_reads_the_recipe() -> None:
    found = load_data(recipe(), Sums())
    assert len(found.warm_start) == 20
    assert len(found.batch(0)) == 8
    assert not load_data(recipe(warm_start={"problems": 20, "max_steps": 0}), Sums()).warm_start


def test_a_prompt_that_leaves_no_room_for_a_response_is_named() -> None:
    with pytest.raises(ConfigError, match=r"takes 9 tokens; the longest prompt has 6.*\d\d\d\+1="):
        load_data(recipe(model={"path": None, "tiny": {"max_positions": 9}}), Sums())
    load_data(recipe(model={"path": "/a/model", "tiny": {"max_positions": 9}}), Sums())


def test_an_alphabet_that_lacks_a_character_is_named() -> None:
    def model(characters: str) -> dict[str, Any]:
        return {"path": None, "tiny": {"max_positions": 16, "characters": characters}}

    with pytest.raises(ConfigError) as caught:
        load_data(recipe(model=model("0123456789")), Sums())
    assert "model.tiny.characters: the alphabet '0123456789' lacks '+' (U+002B), '=' (U+003D)" in str(caught.value)
    odd = type(
        "Odd", (), {"source": "odd", "problems": lambda self, seed: [Problem(f"{i}=", "x") for i in range(99)]}
    )()
    alphabet = model("0123456789=")
    with pytest.raises(ConfigError, match=r"lacks 'x' \(U\+0078\).*text: 'x'"):
        load_data(recipe(model=alphabet), odd)
    load_data(recipe(model=alphabet, warm_start={"problems": 20, "max_steps": 0}), odd)  # answers are not written


def test_evaluation_from_elsewhere_is_kept_out_of_training() -> None:
    held = [Problem(f"{i}+1=", "held") for i in range(5, 30)]
    found = data(problems(100), eval_problems=10, evaluation=held)
    assert len(found.eval) == 10 and all(p.answer == "held" for p in found.eval)
    assert len(found.train) == 75 and not {p.prompt for p in found.train} & {p.prompt for p in held}
    assert len(data(problems(100), evaluation=held[:3]).eval) == 3
    with pytest.raises(ConfigError, match="has 15 distinct problems beside those for evaluation, fewer than the 20"):
        data(problems(40), evaluation=held)


def test_a_recipe_that_trains_on_nothing_evaluates_on_all() -> None:
    keys = recipe().to_dict()
    for key in ("prompts_per_step", "algorithm", "warm_start"):
        del keys[key]
    everything = load_data(Config({**keys, "eval": {"problems": None}}), Sums())
    assert len(everything.eval) == 200 and not everything.train
    # a run's seed and eval.problems give the very problems that the run did not train on
    assert load_data(Config(keys), Sums()).eval == load_data(recipe(), Sums()).eval
    nothing = type("Nothing", (), {"source": "nothing", "problems": lambda self, seed: []})()
    with pytest.raises(ConfigError, match="nothing has no problem to evaluate on"):
        load_data(Config(keys), nothing)


def test_several_answers_are_drawn_and_a_lone_one_is_greedy() -> None:
    found = data(problems(100))
    assert [(p.group_size, p.greedy) for p in found.eval_prompts(0, 8)[:1]] == [(8, False)]
    assert [(p.group_size, p.greedy) for p in found.eval_prompts(0, 1, False)[:1]] == [(1, False)]


def test_messages_for_a_model_without_a_chat_template_are_refused(tmp_path: Path) -> None:
    chat = [Problem(f"{i}+1=", "1", {}, ({"role": "user", "content": f"{i}+1="},)) for i in range(200)]
    task = type("Chat", (), {"source": "chat", "problems": lambda self, seed: chat})()
    with pytest.raises(ConfigError, match=r"model\.path: the model has no chat template"):
        load_data(recipe(), task)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="no chat template"):
        load_data(recipe(model={"path": str(tmp_path)}), task)
    (tmp_path / "chat_template.jinja").write_text("x")
    prompt = load_data(recipe(model={"path": str(tmp_path)}), task).batch(0)[0]
    assert prompt.messages == [{"role": "user", "content": prompt.text}]
