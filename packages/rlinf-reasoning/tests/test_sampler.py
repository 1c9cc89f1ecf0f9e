"""Dynamic sampling: what is drawn and kept is a function of prompts and rewards alone, and bounded."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from lists import Items, worker

from rlinf_algos import groups_with_signal
from rlinf_core import Prompt, Sample
from rlinf_core.errors import RLinfError
from rlinf_reasoning.refill import Refill, candidates
from rlinf_reasoning.tasks.base import Problem, PromptData
from rlinf_reasoning.workers import PromptSampler

# A loaded machine is slow to draw examples, which hypothesis would take for a fault.
SLOW_MACHINE = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def data(problems: int = 40, prompts: int = 4, seed: int = 0) -> PromptData:
    return PromptData(
        [Problem(f"{i}+1=", str(i + 1), {"number": i}) for i in range(problems)],
        seed=seed,
        source="sums",
        eval_problems=4,
        warm_start_problems=0,
        prompts_per_step=prompts,
        group_size=2,
    )


def group(prompt: Prompt | str, *rewards: float | None, finish: str = "stop") -> list[Sample]:
    name = prompt if isinstance(prompt, str) else prompt.id
    return [
        Sample(
            id=f"{name}/{i}",
            group=name,
            index=i,
            group_size=len(rewards),
            prompt_text="?",
            prompt_ids=[2],
            response_ids=[3, 1],
            response_text="",
            logprobs=[-1.0, -1.0],
            versions=[0, 0],
            finish_reason=finish,
            reward=reward,
        )
        for i, reward in enumerate(rewards)
    ]


def test_candidates_are_a_function_of_seed_and_step_and_never_repeat() -> None:
    found = candidates(data(), 3, 4)
    assert found == candidates(data(), 3, 4)
    assert found[:4] == data().batch(3), "the step's own prompts come first"
    assert len(found) == 20
    assert len({p.text for p in found}) == len({p.id for p in found}) == 20
    assert [p.id for p in found] == [f"train/3/p{n}" for n in range(20)]
    assert {(p.step, p.group_size) for p in found} == {(3, 2)}
    assert all(p.text == f"{p.fields['number']}+1=" and p.answer == str(p.fields["number"] + 1) for p in found)
    assert found[:6] == candidates(data(), 3, 6)[:6] or len(candidates(data(), 3, 6)) == 28
    assert candidates(data(), 4, 4)[4:] != found[4:]
    assert candidates(data(seed=1), 3, 4) != found
    held = {p.prompt for p in data().eval}
    assert not held & {p.text for p in found}


def test_prompts_of_further_rounds_are_their_own_conversations() -> None:
    problems = [
        Problem(f"{i}+1=", str(i + 1), messages=({"role": "user", "content": f"{i}+1="},) if i % 2 else None)
        for i in range(40)
    ]
    cut = {"eval_problems": 4, "warm_start_problems": 0, "prompts_per_step": 4, "group_size": 2}
    for prompt in candidates(PromptData(problems, seed=0, source="sums", **cut), 3, 4):
        even = int(prompt.text.partition("+")[0]) % 2 == 0
        assert prompt.messages == (None if even else [{"role": "user", "content": prompt.text}])


def test_candidates_end_with_the_problems() -> None:
    assert len(candidates(data(problems=12), 0, 9)) == 8  # 12 less those for evaluation
    assert candidates(data(), 0, 0) == data().batch(0)


def play(refill: Refill, right: dict[str, bool]) -> tuple[list[str], dict[str, str]]:
    """(ids kept, reason by id dropped) when ``right`` says which groups have signal."""
    kept, dropped = [], {}
    while drawn := refill.draw():
        for name, reason in refill.judge({p.id: group(p, 1.0, 0.0 if right[p.id] else 1.0) for p in drawn}).items():
            if reason:
                dropped[name] = reason
            else:
                kept.append(name)
    return kept, dropped


@SLOW_MACHINE
@given(st.integers(1, 8), st.integers(0, 5), st.integers(0, 60), st.integers(0, 2**32), st.floats(0.0, 1.0))
def test_rounds_are_bounded_and_keep_the_first_groups_with_signal(
    target: int, refills: int, number: int, seed: int, share: float
) -> None:
    prompts = [Prompt(f"p{n:02d}", "?") for n in range(number)]
    dice = random.Random(seed)
    right = {p.id: dice.random() < share for p in prompts}
    refill = Refill(prompts, target, refills)
    kept, dropped = play(refill, right)
    drawn = [p.id for p in prompts[: refill.drawn]]
    assert kept == [name for name in drawn if right[name]][:target]
    assert sorted([*kept, *dropped]) == drawn, "everything that was drawn is accounted for"
    assert refill.rounds <= refills + 1 and refill.drawn <= target * (refills + 1)
    metrics = refill.metrics()
    assert metrics["groups/kept"] == len(kept) and metrics["groups/missing"] == target - len(kept)
    assert metrics["groups/drawn"] == len(drawn)
    assert sum(metrics[f"groups/{why}"] for why in ("all_right", "all_wrong", "equal", "surplus")) == len(dropped)
    if refill.missing:
        assert refill.rounds == refills + 1 or refill.drawn == number, "nothing was left to try"


def test_a_round_draws_as_many_as_the_groups_so_far_suggest() -> None:
    refill = Refill([Prompt(f"p{n}", "?") for n in range(99)], 8, 3)
    assert len(refill.draw()) == 8
    refill.judge({f"p{n}": group(f"p{n}", 1.0, float(n >= 4)) for n in range(8)})  # half have signal
    assert refill.missing == 4
    assert [p.id for p in refill.draw()] == [f"p{n}" for n in range(8, 16)]  # 4 / 0.5
    found = refill.judge({f"p{n}": group(f"p{n}", 0.0, 1.0) for n in range(8, 16)})
    assert list(found.values()) == [""] * 4 + ["surplus"] * 4
    assert refill.draw() == [] and refill.metrics()["groups/surplus"] == 4.0


REWARDS = st.lists(st.one_of(st.sampled_from([0.0, 1.0, -1.0, 1e-9, 0.3]), st.floats(-2, 2)), min_size=1, max_size=5)


@SLOW_MACHINE
@given(REWARDS, st.booleans())
@example([1.0, 1.0 + 1.5e-6], False)  # apart by more than the tolerance, but not from their mean
def test_signal_is_that_of_the_algorithms(rewards: list[float], one_missing: bool) -> None:
    values: list[float | None] = [None, *rewards[1:]] if one_missing else [*rewards]
    refill = Refill([Prompt("p", "?")], 1, 0)
    refill.draw()
    reason = refill.judge({"p": group("p", *values)})["p"]
    numbers = torch.tensor([float("nan") if v is None else v for v in values], dtype=torch.float64)
    assert (not reason) == bool(groups_with_signal(numbers, ["p"] * len(values)).any())


@pytest.mark.parametrize(
    ("samples", "reason"),
    [
        (group("p", 1.0, 1.0), "all right"),
        (group("p", 0.0, 0.0), "all wrong"),
        (group("p", -1.0, -1.0), "all wrong"),
        (group("p", 0.5, 0.5), "equal rewards"),
        (group("p", 1.0, None), "no peers"),
        (group("p", 1.0, 0.0), ""),
        ([*group("p", 1.0, 1.0), *group("p", 0.0, finish="length")], ""),
    ],
)
def test_groups_are_dropped_for_a_reason(samples: list[Sample], reason: str) -> None:
    refill = Refill([Prompt("p", "?")], 1, 0)
    refill.draw()
    assert refill.judge({"p": samples}) == {"p": reason}


def test_what_was_cut_off_is_no_peer_with_the_filter() -> None:
    refill = Refill([Prompt("p", "?")], 1, 0, filtered=True)
    refill.draw()
    assert refill.judge({"p": [*group("p", 1.0, 1.0), *group("p", 0.0, finish="length")]}) == {"p": "all right"}


def sampler(tmp_path: Path, **algorithm: Any) -> Any:
    keys = {"max_refills": 4, "on_shortage": "train", "overlong_filter": False, **algorithm}
    return worker(PromptSampler, {"algorithm": keys, "prompts_per_step": 4}, tmp_path, "sampler")


def answered(prompts: Items, right: set[str], pieces: int = 1) -> Items:
    """The scored samples of the prompts that are put, groups in an order of their own, ``pieces`` at a time."""
    waiting: list[list[Sample]] = []
    seen = 0

    def more() -> list[Any]:
        nonlocal seen
        new = prompts[seen:]
        seen += len(new)
        groups = [group(p, 1.0, 0.0) if p.id in right else group(p, 0.0, 0.0) for p in reversed(new)]
        waiting.extend([s for g in groups[k : k + pieces] for s in g] for k in range(0, len(groups), pieces))
        return waiting.pop(0) if waiting else []

    return Items(when_empty=more)


@pytest.mark.parametrize("pieces", [1, 3, 100])
def test_the_sampler_ends_the_cycle_with_the_groups_in_order(tmp_path: Path, pieces: int) -> None:
    drawn = [Prompt(f"train/0/p{n}", "?", group_size=2) for n in range(20)]
    right = {f"train/0/p{n}" for n in (1, 2, 6, 7, 8, 9)}
    made, prompts, kept = sampler(tmp_path), Items(), Items()
    metrics = made.sample(drawn, answered(prompts, right, pieces), prompts, kept)
    assert [p.id for p in prompts] == [f"train/0/p{n}" for n in range(8)] and prompts.closed
    assert list(dict.fromkeys(s.group for s in kept)) == [f"train/0/p{n}" for n in (1, 2, 6, 7)]
    assert kept.keys == [s.group for s in kept] and kept.weights == [s.num_tokens for s in kept]
    dropped = {name: reason for kind, ids, reason in made._ctx.accounted for name in ids if kind == "drop"}
    assert dropped == {f"train/0/p{n}/{i}": "all wrong" for n in (0, 3, 4, 5) for i in (0, 1)}
    assert metrics["groups/refills"] == 1.0 and metrics["groups/all_wrong"] == 4.0 and metrics["groups/missing"] == 0.0


def test_a_shortage_is_trained_with_fewer_or_stops_the_run(tmp_path: Path) -> None:
    drawn = [Prompt(f"train/0/p{n}", "?", group_size=2) for n in range(40)]
    made, prompts, kept = sampler(tmp_path, max_refills=2), Items(), Items()
    metrics = made.sample(drawn, answered(prompts, {"train/0/p9"}), prompts, kept)
    assert len(kept) == 2 and metrics["groups/missing"] == 3.0 and metrics["groups/drawn"] == 12.0 and prompts.closed
    made, prompts = sampler(tmp_path, max_refills=2, on_shortage="fail"), Items()
    with pytest.raises(
        RLinfError, match=r"train/0: 1 of 4 groups have signal after 12 \(11 all wrong\).*max_refills=2"
    ):
        made.sample(drawn, answered(prompts, {"train/0/p9"}), prompts, Items())
