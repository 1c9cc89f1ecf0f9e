"""The worker classes, with channels that are lists and backends of the test's own."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlinf_core import Prompt, Sample
from rlinf_core.config import Config
from rlinf_core.errors import ConfigError, RLinfError
from rlinf_core.types import Generated, ParallelInfo
from rlinf_reasoning.rewards.pool import RewardItem
from rlinf_reasoning.workers import Generator, Reward
from rlinf_reasoning.workers import generator as generator_module


class Context:
    """What a host gives a worker, and a record of what the worker does with it."""

    def __init__(self, cfg: Config, run_dir: Path) -> None:
        self.cfg = cfg
        self.name, self.rank, self.world_size, self.seed = "stage", 0, 1, 5
        self.parallel = ParallelInfo()
        self.slots: int | None = None
        self.step, self.step_index = "train/0", 0
        self.run_dir = run_dir
        self.accounted: list[tuple[str, tuple[str, ...], str]] = []

    def on_device(self) -> AbstractContextManager[None]:
        return nullcontext()

    def account(self, kind: str, ids: tuple[str, ...], detail: str) -> None:
        self.accounted.append((kind, ids, detail))


class Items(list[Any]):
    """Both ends of a channel."""

    def __init__(self, *portions: Sequence[Any]) -> None:
        super().__init__()
        self.portions = portions
        self.keys: list[Any] = []
        self.weights: list[float] = []

    def batches(self, n: int | None = None) -> Iterator[list[Any]]:
        yield from map(list, self.portions)

    def put_many(self, items: Any, keys: Any, weights: Any) -> None:
        for item, key, weight in zip(items, keys, weights, strict=True):
            self.put(item, key, weight)

    def put(self, item: Any, key: Any = None, weight: float = 1.0) -> None:
        self.append(item)
        self.keys.append(key)
        self.weights.append(weight)


def worker(cls: type, cfg: dict[str, Any], run_dir: Path) -> Any:
    made = cls()
    made._ctx = Context(Config(cfg), run_dir)
    return made


class Engine:
    """Answers every prompt with its own tokens, then the end token."""

    def __init__(self, cfg: Any) -> None:
        self.cfg = cfg
        self.tokenizer = SimpleNamespace(
            encode=lambda text: [ord(c) for c in text],
            decode=lambda ids, skip_special_tokens: "".join(chr(i) for i in ids if i != 1),
        )
        self.installed: list[Any] = []

    def setup(self, model: Any, parallel: ParallelInfo, *, seed: int) -> None:
        self.seed = seed

    def generate(self, requests: Any, sampling: Any) -> Iterator[Generated]:
        self.keys = [r.key for r in requests]
        self.greedy = [r.greedy for r in requests]
        for request in reversed(requests):
            ids = [*request.prompt_ids, 1]
            yield Generated(request.id, ids, [-0.5] * len(ids), [3] * len(ids), "stop")

    def load_weights(self, version: int, weights: Any) -> None:
        self.installed.append((version, list(weights)))

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def generator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    loaded = type("Registry", (), {"__init__": lambda self, group: None, "load": lambda self, name: Engine})
    monkeypatch.setattr(generator_module, "Registry", loaded)
    sampling = {"max_new_tokens": 4, "temperature": 0.5, "top_p": 1.0, "top_k": 0, "stop": ["\n"], "ignore_eos": False}
    made = worker(Generator, {"rollout": {"name": "own"}, "model": {}, "sampling": sampling}, tmp_path)
    made.setup()
    return made


def test_the_plan_decides_how_many_are_decoded_together(generator: Any) -> None:
    made = worker(Generator, generator._ctx.cfg.to_dict() | {"rollout": {"name": "own", "max_num_seqs": 64}}, Path())
    made._ctx.slots = 8
    made.setup()
    assert made.engine.cfg.max_num_seqs == 8
    generator._ctx.slots = 8
    with pytest.raises(ConfigError, match="the plan gives stage slots=8, and rollout=own has no slots"):
        generator.setup()


def test_generator_makes_a_sample_of_every_response(generator: Any) -> None:
    prompt = Prompt("train/2/p0", "ab", "x", group_size=2, step=2, fields={"level": 1})
    out = Items()
    generator.generate(Items([prompt, Prompt("e", "c", greedy=True)], []), out)
    by_id = {s.id: s for s in out}
    assert set(by_id) == {"train/2/p0/0", "train/2/p0/1", "e/0"}
    sample = by_id["train/2/p0/1"]
    assert (sample.group, sample.index, sample.group_size, sample.answer) == ("train/2/p0", 1, 2, "x")
    assert (sample.prompt_ids, sample.response_ids, sample.response_text) == ([97, 98], [97, 98, 1], "ab")
    assert (sample.logprobs, sample.versions, sample.fields) == ([-0.5] * 3, [3] * 3, {"level": 1})
    assert generator.engine.keys == [(2, "train/2/p0", 0), (2, "train/2/p0", 1), (0, "e", 0)]
    assert generator.engine.greedy == [False, False, True]
    assert out.keys == [s.group for s in out] and out.weights == [s.num_tokens for s in out]
    assert generator.sampling.temperature == 0.5 and generator.sampling.seed == 5
    generator.install_weights(4, [("w", 1)])
    assert generator.engine.installed == [(4, [("w", 1)])]
    assert generator.sampling.stop == ("\n",)
    generator.teardown()
    assert generator.engine.closed


def test_an_empty_prompt_is_named(generator: Any) -> None:
    with pytest.raises(ConfigError, match=r"prompt p7 is empty"):
        generator.generate(Items([Prompt("p7", "")]), Items())


def limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str) -> Any:
    loaded = type("Registry", (), {"__init__": lambda self, group: None, "load": lambda self, name: Engine})
    monkeypatch.setattr(generator_module, "Registry", loaded)
    sampling = {"max_new_tokens": 4, "temperature": 0.5, "top_p": 1.0, "top_k": 0, "stop": ["\n"], "ignore_eos": False}
    task = {"max_prompt_tokens": 3, "too_long": policy}
    made = worker(Generator, {"rollout": {"name": "own"}, "model": {}, "sampling": sampling, "task": task}, tmp_path)
    made.setup()
    return made


def test_prompts_that_are_too_long_follow_the_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [Prompt("a", "123", group_size=2), Prompt("b", "12345", group_size=2), Prompt("c", "1")]
    with pytest.raises(ConfigError, match=r"task\.max_prompt_tokens: b has 5 tokens.*task\.too_long=drop"):
        limited(tmp_path, monkeypatch, "refuse").generate(Items(prompts), Items())

    made, out = limited(tmp_path, monkeypatch, "drop"), Items()
    assert made.generate(Items(prompts[:2], prompts[1:]), out) == {"prompt/dropped": 2.0, "prompt/truncated": 0.0}
    assert sorted(s.id for s in out) == ["a/0", "a/1", "c/0"]
    reason = "prompt longer than 3 tokens (task.max_prompt_tokens)"
    assert made._ctx.accounted == [("drop", ("b/0", "b/1"), reason)] * 2

    made, out = limited(tmp_path, monkeypatch, "truncate"), Items()
    assert made.generate(Items(prompts), out) == {"prompt/dropped": 0.0, "prompt/truncated": 1.0}
    (cut,) = (s for s in out if s.id == "b/1")
    assert cut.prompt_ids == [ord(c) for c in "345"] and cut.prompt_text == "12345"


def sample(index: int, text: str = "", answer: str = "", reward: float | None = None) -> Sample:
    return Sample(
        id=f"p/{index}",
        group="p",
        index=index,
        group_size=4,
        prompt_text="?",
        prompt_ids=[2, 3],
        response_ids=[4, 1],
        response_text=text,
        logprobs=[-1.0, -1.0],
        versions=[0, 0],
        finish_reason="stop",
        answer=answer,
        reward=reward,
    )


REWARDS = "def hang(text, answer, fields):\n    while text == 'hang': pass\n    return 2.0 if text == answer else 0.0\n"


@pytest.fixture
def hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    (tmp_path / "rewards_that_hang.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return {
        "name": "function",
        "function": "rewards_that_hang:hang",
        "timeout_s": 0.3,
        "processes": 1,
        "memory_mb": 0,
        "on_error": "fail",
    }


def reward_worker(cfg: dict[str, Any], tmp_path: Path) -> Any:
    made = worker(Reward, {"reward": cfg}, tmp_path)
    made.setup()
    return made


@pytest.mark.parametrize("policy", ["fail", "drop", "zero"])
def test_a_reward_that_hangs_follows_the_policy(hanging: dict[str, Any], tmp_path: Path, policy: str) -> None:
    made = reward_worker({**hanging, "on_error": policy}, tmp_path)
    samples = [sample(0, "a", "a"), sample(1, "hang", "a"), sample(2, "b", "a")]
    out = Items()
    try:
        if policy == "fail":
            with pytest.raises(RLinfError, match=r"sample p/1 took longer than 0\.3 s.*'hang'.*on_error"):
                made.score(Items(samples), out)
            return
        metrics = made.score(Items(samples[:2], samples[2:]), out)
    finally:
        made.teardown()
    assert metrics == {"reward/errors": 1.0}
    assert "longer than" in samples[1].info["reward_error"]
    if policy == "zero":
        assert [(s.id, s.reward) for s in out] == [("p/0", 2.0), ("p/1", 0.0), ("p/2", 0.0)]
        assert made._ctx.accounted == []
    else:
        assert [(s.id, s.reward) for s in out] == [("p/0", 2.0), ("p/2", 0.0)]
        ((kind, ids, reason),) = made._ctx.accounted
        assert (kind, ids) == ("drop", ("p/1",)) and "longer than" in reason


def test_a_reward_that_is_not_there_leaves_nothing_to_take_down(hanging: dict[str, Any], tmp_path: Path) -> None:
    made = worker(Reward, {"reward": {**hanging, "function": "no_such_module:score"}}, tmp_path)
    with pytest.raises(ConfigError, match="no_such_module"):
        made.setup()
    made.teardown()


@pytest.mark.parametrize(
    ("given", "said"), [("1.0", "returned a str, not a number: '1.0'"), (float("nan"), "returned nan, not a finite")]
)
def test_what_is_no_number_in_place(tmp_path: Path, given: Any, said: str) -> None:
    made = reward_worker(
        {"name": "exact", "timeout_s": 1.0, "processes": 1, "memory_mb": 0, "on_error": "fail"}, tmp_path
    )
    made.scorer._function = lambda text, answer, fields: given
    (score,) = made.scorer.score([RewardItem("a", "b", {})])
    assert score.value is None and score.error.startswith(said)
    made.teardown()


def test_exact_reward_is_scored_in_place_and_evaluation_uses_samples_up(tmp_path: Path) -> None:
    cfg = {"name": "exact", "timeout_s": 1.0, "processes": 1, "memory_mb": 0, "on_error": "fail"}
    made = reward_worker(cfg, tmp_path)
    assert made.scorer.pool is None
    metrics = made.evaluate(Items([sample(0, "1 ", "1"), sample(1, "2", "1")], [sample(2, "1", "1")]))
    assert metrics["accuracy"] == metrics["pass@1"] == pytest.approx(2 / 3)  # three answers to one problem
    assert metrics["accuracy/low"] < 2 / 3 < metrics["accuracy/high"]
    found = {name: metrics[name] for name in metrics if not name.startswith(("accuracy", "pass@"))}
    assert found == {
        "problems": 1.0,
        "answers": 3.0,
        "reward/mean": pytest.approx(2 / 3),
        "reward/errors": 0.0,
        "response/length": 2.0,
        "response/truncated": 0.0,
    }
    assert [ids for _, ids, _ in made._ctx.accounted] == [("p/0", "p/1"), ("p/2",)]
    made.teardown()


def test_an_evaluation_estimates_pass_at_k_and_keeps_every_answer(tmp_path: Path) -> None:
    made = worker(
        Reward, {"reward": {"name": "exact", "on_error": "fail"}, "eval": {"k": [2], "threshold": 0.5}}, tmp_path
    )
    made.setup()
    answers = [sample(i, text, "1") for i, text in enumerate(("1", "2", "3", "1"))]
    other = [replace(sample(i, "π", "1"), id=f"q/{i}", group="q", finish_reason="length") for i in range(4)]
    metrics = made.evaluate(Items(answers, other), "step 20", 8)
    assert metrics["pass@2"] == pytest.approx((1 - 1 / 6) / 2)  # 2 of 4 right: one of six pairs has none; and 0 of 4
    assert metrics["accuracy"] == pytest.approx(1 / 4) and metrics["response/truncated"] == 0.5
    lines = [json.loads(line) for line in (tmp_path / "evaluations" / "step-20.jsonl").read_text().splitlines()]
    assert len(lines) == 8
    kept = {
        key: lines[0][key] for key in ("problem", "sample", "response", "reward", "right", "length", "finish_reason")
    }
    assert kept == {
        "problem": "p",
        "sample": 0,
        "response": "1",
        "reward": 1.0,
        "right": True,
        "length": 2,
        "finish_reason": "stop",
    }
    assert (lines[-1]["response"], lines[-1]["right"], lines[-1]["finish_reason"]) == ("π", False, "length")
    made.teardown()
