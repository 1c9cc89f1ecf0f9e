"""The simulator worker over channels that are lists: sub-batches, evaluation, checkpoints, failures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from channel_lists import Answers, Items, worker
from counting_env import LIMIT, Counter, CountingEnv, Settings, answer, counting

from rlinf_core.config import Config
from rlinf_core.errors import RLinfError
from rlinf_embodied.envs import SimulatorError, episode_seed
from rlinf_embodied.slots import evaluation_slots, training_slots
from rlinf_embodied.specfile import read_spec
from rlinf_embodied.workers import Simulator
from rlinf_embodied.workers import environments as module
from rlinf_embodied.workers.environments import sub_batches

EVAL = {"episodes": 7, "every": 0, "num_envs": None, "seed": 0, "greedy": True, "videos": 0, "video_size": 256}


def config(**changes: Any) -> dict[str, Any]:
    base = {"seed": 5, "num_envs": 6, "num_stages": 2, "rollout_steps": 8, "env": {}, "algorithm": {"name": "ppo"}}
    return {**base, "eval": EVAL, **changes}


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """By environment, the step at which its simulator fails."""
    found: dict[int, int] = {}
    monkeypatch.setattr(module, "load_env", lambda cfg, indices, seed, what="": counting(indices, found))
    return found


def make(cfg: dict[str, Any], run_dir: Path, rank: int = 0, ranks: int = 1) -> Any:
    made = worker(Simulator, cfg, run_dir, rank, ranks)
    made.setup()
    return made


def rollout(made: Any, step: int = 0, portion: int | None = None, chunk: int = 1) -> tuple[dict[str, Any], Any, Any]:
    made._ctx.step_index = step
    slots = [slot for slot in training_slots(made.cfg, step) if slot.env % made.world_size == made.rank]
    observations, trajectories = Items(), Items()
    actions = Answers(observations, lambda asked: answer(asked, chunk), portion)
    report = made.rollout(Items(slots), actions, observations, trajectories)
    assert observations.closed
    return report, trajectories, observations


def same(a: Any, b: Any) -> bool:
    return a.id == b.id and a.info == b.info and all((a.arrays[name] == b.arrays[name]).all() for name in a.arrays)


def test_sub_batches() -> None:
    assert sub_batches([0, 2, 4, 6, 8], None, 2) == [[0, 2], [4, 6, 8]]
    assert sub_batches([0, 2, 4, 6, 8], 2, 2) == [[0, 2], [4, 6], [8]]
    assert sub_batches([0, 2, 4, 6], 8, 2) == [[0, 2], [4, 6]], "a portion of more than that is no reason for fewer"
    assert sub_batches([3], None, 2) == [[3]] and sub_batches([], None, 2) == []


@pytest.mark.parametrize(
    ("stages", "portion", "ranks"), [(1, None, 1), (3, None, 1), (2, 2, 1), (2, 4, 1), (1, None, 2)]
)
def test_trajectories_do_not_depend_on_how_environments_are_cut(
    failing: Any, tmp_path: Path, stages: int, portion: int | None, ranks: int
) -> None:
    want = [
        sorted(rollout(whole, step)[1], key=lambda t: t.id) for whole in [make(config(), tmp_path)] for step in (0, 1)
    ]
    cut = [make(config(num_stages=stages), tmp_path, rank, ranks) for rank in range(ranks)]
    for step in (0, 1):
        have = sorted((t for made in cut for t in rollout(made, step, portion)[1]), key=lambda t: t.id)
        assert len(have) == 6 and all(same(a, b) for a, b in zip(want[step], have, strict=True))


def test_a_plan_that_changes_does_not_break_episodes_off(failing: Any, tmp_path: Path) -> None:
    steady, changed = make(config(), tmp_path), make(config(), tmp_path)
    for step, portion in enumerate((None, 1)):
        want, have = rollout(steady, step)[1], rollout(changed, step, portion)[1]
        assert all(same(a, b) for a, b in zip(want, have, strict=True))
    grouped = make(config(algorithm={"name": "grpo", "group_size": 3}), tmp_path)
    asked = [rollout(grouped, step, portion)[2] for step, portion in enumerate((None, 1))]
    assert [len({question.place for question in found}) for found in asked] == [2, 6], "every step begins anew"


def test_the_report_counts_steps(failing: Any, tmp_path: Path) -> None:
    made = make(config(), tmp_path)
    report, found, observations = rollout(made, chunk=2)
    assert report["rollout/env_steps"] == sum(t.arrays["mask"].sum() for t in found) <= 48
    assert (
        report["episodes/dropped"] == 0 and report["rollout/stepping_s"] > 0 and report["rollout/env_steps_per_s"] > 0
    )
    assert [q.place for q in observations[:4]] == [(0, 0), (0, 1), (0, 0), (0, 1)]


def test_slots_of_other_environments_are_refused(failing: Any, tmp_path: Path) -> None:
    made = make(config(), tmp_path, rank=0, ranks=2)
    slots = training_slots(Config(config()), 0)[:3]
    with pytest.raises(RLinfError, match=r"rank 0 has environments \[0, 2, 4\] and was given slots of \[0, 1, 2\]"):
        made.rollout(Items(slots), Answers(Items(), answer), Items(), Items())


def test_ranks_that_environments_cannot_be_shared_out_over() -> None:
    assert Simulator.check_ranks(Config(config()), 3) == ""
    problem = Simulator.check_ranks(Config(config()), 2)
    assert "num_envs=6" in problem and "2 ranks × num_stages=2" in problem and "num_envs=8" in problem


def test_a_failed_simulator_is_dropped_by_name(failing: dict[int, int], tmp_path: Path) -> None:
    failing[4] = 3
    made = make(config(), tmp_path)
    report, found, _ = rollout(made)
    assert report["episodes/dropped"] == 1 and len(found) == 5
    ((kind, ids, why),) = made._ctx.accounted
    assert (kind, ids) == ("drop", ("000000/00004",)) and "environment 4 failed" in why and "fell over" in why


def test_groups_begin_with_equal_states(failing: Any, tmp_path: Path) -> None:
    made = make(config(algorithm={"name": "grpo", "group_size": 3}, num_stages=1), tmp_path)
    firsts = []
    for step in (0, 1):
        _, found, _ = rollout(made, step)
        states = [tuple(t.arrays["obs/state"][0]) for t in sorted(found, key=lambda t: t.id)]
        assert states[0] == states[1] == states[2] and states[3] == states[4] == states[5] != states[0]
        assert [t.info["group_size"] for t in found] == [3] * 6
        assert all(len(t.info["episodes"]) == 1 for t in found)
        firsts += [states[0], states[3]]
    assert len(set(firsts)) == 4


def test_a_checkpoint_brings_environments_back(failing: Any, tmp_path: Path) -> None:
    left = [make(config(num_stages=1), tmp_path, rank, 2) for rank in range(2)]
    for made in left:
        rollout(made, 0)
        made.save_checkpoint(str(tmp_path))
    again = [make(config(num_stages=3), tmp_path, rank, 2) for rank in range(2)]
    for made, fresh in zip(left, again, strict=True):
        fresh.load_checkpoint(str(tmp_path))
        fresh.cfg.to_dict()
        assert len(fresh.blocks) == 1, "sub-batches are those that were saved"
        _, want, _ = rollout(made, 1)
        _, have, _ = rollout(fresh, 1, portion=3)
        assert all(same(a, b) for a, b in zip(want, have, strict=True))


def test_environments_shared_out_otherwise_begin_new_episodes(
    failing: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = make(config(), tmp_path)
    rollout(made, 0)
    made.save_checkpoint(str(tmp_path))
    other = make(config(), tmp_path, 0, 3)
    other.load_checkpoint(str(tmp_path))
    assert "begin new episodes" in caplog.text and "[0, 3]" in caplog.text
    assert len(rollout(other, 1)[1]) == 2


@pytest.mark.parametrize("envs", [None, 2, 50])
def test_evaluation_makes_each_episode_once(failing: Any, tmp_path: Path, envs: int | None) -> None:
    made = make(config(eval={**EVAL, "num_envs": envs, "videos": 2, "video_size": 20}), tmp_path)
    for _ in range(2):
        slots = evaluation_slots(made.cfg)
        observations, episodes = Items(), Items()
        actions = Answers(observations, answer)
        report = made.evaluate(Items(slots), actions, observations, episodes)
        assert observations.closed and report == {"episodes/dropped": 0.0}
        assert all(asked.greedy and asked.act for asked in observations)
        found = {one.id: one for one in episodes}
        assert len(episodes) == len(found) == 7
        for slot in slots:
            one, length = found[slot.id], min(slot.seed % 7 + 1, LIMIT)
            assert one.seed == slot.seed and one.episode.env == slot.env and one.episode.length == length
            assert one.episode.ret == sum(slot.env * 1000 + 10 * t for t in range(length))
            assert one.episode.truncated == (slot.seed % 7 + 1 > LIMIT)
            assert (one.frames is not None) == (slot.env < 2)
            if one.frames is not None:
                assert one.frames.shape == (length, 13, 20, 3)
                assert one.frames[:, 0, 0, 0].tolist() == list(range(length))


def test_evaluation_leaves_training_alone(failing: Any, tmp_path: Path) -> None:
    with_evaluation, without = make(config(), tmp_path), make(config(), tmp_path)
    for made in (with_evaluation, without):
        rollout(made, 0)
    observations = Items()
    with_evaluation.evaluate(
        Items(evaluation_slots(with_evaluation.cfg)), Answers(observations, answer), observations, Items()
    )
    _, have, _ = rollout(with_evaluation, 1)
    _, want, _ = rollout(without, 1)
    assert all(same(a, b) for a, b in zip(want, have, strict=True))


def test_evaluation_goes_on_without_what_failed(failing: dict[int, int], tmp_path: Path) -> None:
    failing[1] = 1
    made = make(config(num_stages=1), tmp_path)
    observations, episodes = Items(), Items()
    slots = evaluation_slots(made.cfg)
    report = made.evaluate(Items(slots), Answers(observations, answer), observations, episodes)
    assert report == {"episodes/dropped": 1.0} and len(episodes) == 6
    assert [(kind, ids) for kind, ids, _ in made._ctx.accounted] == [("drop", ("eval/00001",))]


def test_an_idle_environment_is_lost_without_harm(
    failing: dict[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process takes all its environments along, also those for which no episode is left."""

    class DiesAtTheEnd(CountingEnv):
        def step(self, actions: Any, active: Any = None) -> Any:
            result = super().step(actions, active)
            if active is not None and not active.all():
                result.dropped |= dict.fromkeys(range(self.num_envs), "its process was killed")
            return result

    monkeypatch.setattr(
        module, "load_env", lambda cfg, indices, seed, what="": DiesAtTheEnd(Settings(max_restarts=9), indices, seed=3)
    )
    made = make(config(num_stages=1), tmp_path)
    observations, episodes = Items(), Items()
    report = made.evaluate(Items(evaluation_slots(made.cfg)), Answers(observations, answer), observations, episodes)
    lost = {one for _, ids, _ in made._ctx.accounted for one in ids}
    assert report["episodes/dropped"] == len(lost) > 0 and len(episodes) + len(lost) == 7
    assert not lost & {one.id for one in episodes}


def test_pictures_of_several_sizes(failing: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counter, "render", lambda self: np.zeros((20 + self.at, 20, 3), np.uint8))
    made = make(config(eval={**EVAL, "videos": 7}), tmp_path)
    observations = Items()
    with pytest.raises(
        SimulatorError, match=r"evaluation episode \d cannot be filmed: .* several sizes, \[20, 20\] and"
    ):
        made.evaluate(Items(evaluation_slots(made.cfg)), Answers(observations, answer), observations, Items())


def test_environments_that_cannot_be_shown_are_evaluated_without_videos(
    failing: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def dark(self: Any) -> Any:
        raise RuntimeError("no display")

    monkeypatch.setattr(Counter, "render", dark)
    made = make(config(eval={**EVAL, "videos": 7}), tmp_path)
    for _ in range(2):
        observations, episodes = Items(), Items()
        made.evaluate(Items(evaluation_slots(made.cfg)), Answers(observations, answer), observations, episodes)
        assert len(episodes) == 7 and all(one.frames is None for one in episodes)
    (said,) = caplog.messages
    assert "cannot be shown: RuntimeError: no display" in said and "eval.videos=0" in said


def test_evaluation_of_nothing(failing: Any, tmp_path: Path) -> None:
    made = make(config(), tmp_path)
    observations = Items()
    report = made.evaluate(Items(), Answers(observations, answer), observations, Items())
    assert report == {"episodes/dropped": 0.0} and observations.closed and not observations


def test_description(failing: Any, tmp_path: Path) -> None:
    made = make(config(), tmp_path)
    made.describe()
    spec, want = read_spec(tmp_path), made.blocks[0].env.spec
    assert spec.max_episode_steps == LIMIT and (spec.action.low == want.action.low).all()
    assert (spec.observations["state"].high == want.observations["state"].high).all()


def test_evaluation_episodes_are_not_those_of_training() -> None:
    cfg = Config(config(algorithm={"group_size": 2}))
    train = {slot.seed for step in range(50) for slot in training_slots(cfg, step)}
    train |= {episode_seed(5, env, k) for env in range(50) for k in range(50)}
    evaluated = [slot.seed for slot in evaluation_slots(cfg)]
    assert len(set(evaluated)) == 7 and not train & set(evaluated)
