"""A sub-batch's trajectories, against what its environments say step by step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from counting_env import LIMIT, answer, counting

from rlinf_core.types import Trajectory
from rlinf_embodied.data import Slot
from rlinf_embodied.envs import episode_seed
from rlinf_embodied.workers.block import Block


def slots(envs: list[int], seeds: list[int] | None = None) -> list[Slot]:
    return [Slot(f"s{env}", env, f"g{env}", 1, None if seeds is None else seeds[i]) for i, env in enumerate(envs)]


def roll(block: Block, given: list[Slot], step: int, steps: int, chunk: int = 1, values: bool = True) -> list[Any]:
    """All questions of a step, and what it comes to."""
    asked = block.begin(given, step, steps)
    questions = [asked]
    found: list[Trajectory] | None = None
    while found is None:
        reply = answer(asked, chunk, values)
        if not asked.act:
            found = block.finish(reply)
            break
        following = block.advance(reply)
        if following is None:
            found = block.finish(None)
            break
        asked = following
        questions.append(asked)
    return [questions, found]


def lengths(env: int, seeds: list[int] | None = None) -> Any:
    """Steps of the episodes of an environment, with how they end: (steps, cut)."""
    k = 0
    while True:
        seed = episode_seed(3, env, k) if seeds is None else seeds[k]
        own = seed % 7 + 1
        yield min(own, LIMIT), own > LIMIT, seed
        k += 1


def test_segments_of_episodes_that_go_on() -> None:
    """Rewards, ends, values of cut episodes and of the segment's end, over two steps of the run."""
    block = Block((0, 0), counting([2, 5, 7]))
    made: dict[int, list[Any]] = {2: [], 5: [], 7: []}
    for step in range(2):
        questions, found = roll(block, slots([2, 5, 7]), step, steps=9)
        assert len(questions) == 10 and not questions[-1].act and block.made == 27
        assert [t.id for t in found] == ["s2", "s5", "s7"]
        for trajectory in found:
            a, env = trajectory.arrays, trajectory.info["env"]
            assert a["rewards"][:, 0].tolist() == [env * 1000.0 + t * 10 for t in range(9)]
            assert (a["taken"] == a["rewards"][..., None]).all() and (a["logprobs"] == -a["taken"]).all()
            assert a["mask"].all() and a["values"].shape == (9, 1) and trajectory.info["version"] == 4
            for t in range(9):
                seen = a["obs/state"][t]
                assert a["values"][t, 0] == np.float32(1000 + seen[0] + seen[1] / 10)
                made[env].append((seen, a, t))
    for env, steps in made.items():
        episodes = lengths(env)
        at, (length, cut, seed) = 0, next(episodes)
        for index, (seen, a, t) in enumerate(steps):
            assert seen.tolist() == [seed % 1000, at]
            at += 1
            over = at == length
            assert bool(a["terminated"][t, 0]) == (over and not cut) and bool(a["truncated"][t, 0]) == (over and cut)
            assert a["success"][t, 0] == (at == 1)
            assert a["final_values"][t, 0] == np.float32(2000 + seed % 1000 + at / 10 if over and cut else 0.0)
            if over:
                at, (length, cut, seed) = 0, next(episodes)
            if index % 9 == 8:
                assert a["last_values"][0] == np.float32(0.0 if over else 1000 + seed % 1000 + at / 10)


def test_episodes_are_told_once_with_the_number_of_their_environment() -> None:
    block = Block((0, 0), counting([2, 5]))
    told: dict[int, list[int]] = {2: [], 5: []}
    for step in range(4):
        _, found = roll(block, slots([2, 5]), step, steps=6)
        for trajectory in found:
            for episode in trajectory.info["episodes"]:
                assert episode.env == trajectory.info["env"]
                told[episode.env].append(episode.length)
    for env, seen in told.items():
        episodes = lengths(env)
        assert seen == [next(episodes)[0] for _ in seen] and 24 - LIMIT < sum(seen) <= 24


def test_what_follows_an_end_inside_a_chunk_is_masked() -> None:
    block = Block((0, 0), counting([2, 5]))
    _, found = roll(block, slots([2, 5]), 0, steps=12, chunk=4)
    for trajectory in found:
        a = trajectory.arrays
        assert a["rewards"].shape == (3, 4) and a["values"].shape == (3, 1)
        for t in range(3):
            over = a["terminated"][t] | a["truncated"][t]
            first = int(np.argmax(over)) if over.any() else 3
            assert a["mask"][t].tolist() == [c <= first for c in range(4)]
            assert (a["rewards"][t, first + 1 :] == 0).all() and over.sum() <= 1
            following = a["obs/state"][t + 1] if t < 2 else None
            if following is not None:
                assert (following[1] == 0) == bool(over.any())


def test_a_slot_with_a_seed_is_one_episode() -> None:
    """Environments are idle once their episode has ended, and not asked about; the step's end cuts a longer one."""
    block = Block((0, 0), counting([4, 5, 6]))
    seeds = [700, 701, 703]  # 1, 2 and 4 steps
    for step in range(2):
        questions, found = roll(block, slots([4, 5, 6], seeds), step, steps=3, values=False)
        assert [len(q.keys) for q in questions] == [3, 2, 1]
        assert all(q.act for q in questions), "a policy without values is not asked for any"
        assert [len(t.arrays["rewards"]) for t in found] == [1, 2, 3]
        assert [t.arrays["obs/state"][0].tolist() for t in found] == [[700, 0], [701, 0], [703, 0]]
        episodes = [t.info["episodes"] for t in found]
        assert [[e.length for e in told] for told in episodes] == [[1], [2], [3]]
        assert [told[0].truncated for told in episodes] == [False, False, True]
        assert [told[0].success_at_end for told in episodes] == [True, False, False]
        assert all(told[0].success_once for told in episodes)
        assert "values" not in found[0].arrays


def test_equal_seeds_begin_equal() -> None:
    block = Block((0, 0), counting([0, 1, 2]))
    asked = block.begin(slots([0, 1, 2], [44, 44, 45]), 0, 4)
    state = asked.obs["state"]
    assert (state[0] == state[1]).all() and not (state[0] == state[2]).all()
    assert asked.keys.tolist() == [[0, 0, 0], [0, 1, 0], [0, 2, 0]]


def test_a_simulator_that_fails_costs_its_slot_alone() -> None:
    block = Block((0, 0), counting([0, 1, 2], failing={1: 4}))
    _, found = roll(block, slots([0, 1, 2]), 0, steps=8)
    assert [t.id for t in found] == ["s0", "s2"]
    assert list(block.lost) == [1] and "fell over" in block.lost[1]
    _, whole = roll(Block((0, 0), counting([0, 1, 2])), slots([0, 1, 2]), 0, steps=8)
    assert (found[0].arrays["obs/state"] == whole[0].arrays["obs/state"]).all()
    _, after = roll(block, slots([0, 1, 2]), 1, steps=8)
    assert [t.id for t in after] == ["s0", "s1", "s2"] and not block.lost


def test_an_episode_that_has_ended_is_not_lost_with_its_simulator() -> None:
    """A process takes all its environments along, also those that are idle because their only episode is over."""
    env = counting([0, 1])
    step = env.step

    def dies(actions: Any, active: Any = None) -> Any:
        result = step(actions, active)
        if active is not None and not active.all():
            result.dropped |= {0: "its process was killed", 1: "its process was killed"}
        return result

    env.step = dies  # type: ignore[method-assign]
    block = Block((0, 0), env)
    _, found = roll(block, slots([0, 1], [7, 9]), 0, steps=6)  # one step, and three
    assert [t.id for t in found] == ["s0"] and block.lost == {1: "its process was killed"}
    assert [e.length for e in found[0].info["episodes"]] == [1]


@pytest.mark.parametrize("stages", [1, 2])
def test_state_brings_a_block_back(stages: int) -> None:
    envs = [0, 1, 2, 3]
    parts = [envs[k::stages] for k in range(stages)]
    left = [Block((0, k), counting(part)) for k, part in enumerate(parts)]
    for block, part in zip(left, parts, strict=True):
        roll(block, slots(part), 0, steps=7)
    again = [Block((0, k), counting(part)) for k, part in enumerate(parts)]
    for block, fresh in zip(left, again, strict=True):
        fresh.restore(block.state())
    for block, fresh, part in zip(left, again, parts, strict=True):
        _, want = roll(block, slots(part), 1, steps=7)
        _, have = roll(fresh, slots(part), 1, steps=7)
        for a, b in zip(want, have, strict=True):
            assert all((a.arrays[name] == b.arrays[name]).all() for name in a.arrays)
            assert a.info == b.info
