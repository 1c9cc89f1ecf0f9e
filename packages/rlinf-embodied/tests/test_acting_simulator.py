"""Simulators that decide for themselves: what comes out is what simulators and a policy worker come to together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from channel_lists import Answers, Items, worker
from counting_env import counting

from rlinf_core.errors import NonFiniteError, RLinfError
from rlinf_embodied.conf.models import Mlp
from rlinf_embodied.slots import evaluation_slots, training_slots
from rlinf_embodied.workers import ActingSimulator, PolicyWorker, Simulator
from rlinf_embodied.workers import environments as module
from rlinf_embodied.workers.replica import Replica

EVAL = {"episodes": 7, "every": 0, "num_envs": 4, "seed": 0, "greedy": False, "videos": 0, "video_size": 256}


@pytest.fixture(autouse=True)
def environments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "load_env", lambda cfg, indices, seed, what="": counting(indices))


def config(dtype: str = "float32", **changes: Any) -> dict[str, Any]:
    base = {"seed": 5, "num_envs": 6, "num_stages": 1, "rollout_steps": 8, "env": {}, "algorithm": {"name": "ppo"}}
    return {**base, "eval": EVAL, "model": asdict(Mlp(dtype=dtype, chunk=2)), **changes}


def weights(policy: Any) -> list[tuple[str, torch.Tensor]]:
    """Others than those that a policy begins with."""
    generator = torch.Generator().manual_seed(1)
    return [
        (name, value + 0.1 * torch.randn(value.shape, generator=generator, dtype=value.dtype))
        for name, value in policy.state_dict().items()
    ]


def acting(cfg: dict[str, Any], run_dir: Path, rank: int = 0, ranks: int = 1) -> Any:
    made = worker(ActingSimulator, cfg, run_dir, rank, ranks)
    made.setup()
    if rank == 0:
        made.describe()
    made.begin()
    made.install_weights(3, weights(made.replica.policy))
    return made


class Cycle:
    """A simulator and a policy worker over lists."""

    def __init__(self, cfg: dict[str, Any], run_dir: Path) -> None:
        self.simulator, self.policy = worker(Simulator, cfg, run_dir), worker(PolicyWorker, cfg, run_dir)
        for made in (self.simulator, self.policy):
            made.setup()
        self.simulator.describe()
        self.policy.begin()
        self.policy.install_weights(3, weights(self.policy.replica.policy))

    def run(self, task: str, slots: Any) -> Any:
        observations, found = Items(), Items()
        actions = Answers(observations, self.policy._answer)
        getattr(self.simulator, task)(Items(slots), actions, observations, found)
        return found


def same(a: Any, b: Any) -> bool:
    equal = all((a.arrays[name] == b.arrays[name]).all() for name in a.arrays)
    return a.id == b.id and a.info == b.info and a.arrays.keys() == b.arrays.keys() and equal


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("stages", "ranks"), [(1, 1), (3, 1), (1, 2), (1, 3)])
def test_trajectories_are_those_of_the_cycle(dtype: str, stages: int, ranks: int, tmp_path: Path) -> None:
    cycle = Cycle(config(dtype, num_stages=stages), tmp_path)
    alone = [acting(config(dtype), tmp_path, rank, ranks) for rank in range(ranks)]
    for step in (0, 1):
        slots, have = training_slots(cycle.simulator.cfg, step), Items()
        for made in (cycle.simulator, *alone):
            made._ctx.step_index = step
        want = cycle.run("rollout", slots)
        for made in alone:
            mine = Items()
            report = made.rollout(Items([s for s in slots if s.env % ranks == made.rank]), mine)
            have.put_many(mine)
            assert report["rollout/env_steps"] == sum(t.arrays["mask"].sum() for t in mine)
            assert report["rollout/inference_s"] > 0 and "rollout/waiting_s" not in report
        pairs = zip(*(sorted(found, key=lambda t: t.id) for found in (want, have)), strict=True)
        assert len(have) == 6 and all(same(a, b) for a, b in pairs)
        assert {t.info["version"] for t in have} == {3}


def test_evaluated_episodes_are_those_of_the_cycle(tmp_path: Path) -> None:
    cycle, alone = Cycle(config(num_stages=2), tmp_path), acting(config(), tmp_path)
    for _ in range(2):
        slots, have = evaluation_slots(alone.cfg), Items()
        assert alone.evaluate(Items(slots), have) == {"episodes/dropped": 0.0}
        want = cycle.run("evaluate", slots)
        assert len(have) == 7 and sorted(have, key=lambda one: one.id) == sorted(want, key=lambda one: one.id)


def test_a_checkpoint_brings_environments_back(tmp_path: Path) -> None:
    made, again = acting(config(), tmp_path), acting(config(), tmp_path)
    made.rollout(Items(training_slots(made.cfg, 0)), Items())
    made.save_checkpoint(str(tmp_path))
    again.load_checkpoint(str(tmp_path))
    found = [Items(), Items()]
    for one, to in zip((made, again), found, strict=True):
        one._ctx.step_index = 1
        one.rollout(Items(training_slots(one.cfg, 1)), to)
    assert all(same(a, b) for a, b in zip(*found, strict=True))


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    made = acting(config(), tmp_path)
    with pytest.raises(RLinfError, match=r"weight 'bias' \[1\] cannot be installed"):
        made.install_weights(4, [("bias", torch.ones(1))])
    bad = [(name, torch.full_like(value, np.nan)) for name, value in weights(made.replica.policy)]
    made.install_weights(4, bad)
    with pytest.raises(NonFiniteError, match=r"not finite.*environment\(s\) 0, 1, 2, 3, 4, 5 in step train/0"):
        made.rollout(Items(training_slots(made.cfg, 0)), Items())


def test_a_policy_that_acts_in_numpy_stays_on_the_cpu(tmp_path: Path) -> None:
    """From another device it would copy its weights in every decision. Here the other device is torch's ``meta``."""
    made = acting(config(), tmp_path)
    there = Replica(made.cfg, tmp_path, 5, "meta")
    there.offload()
    there.onload()
    assert {parameter.device.type for parameter in there.policy.parameters()} == {"cpu"}


def test_a_whole_step_is_one_device_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each further one would ask the hub for the devices once more."""
    entered: list[str] = []

    def counted(name: str) -> Any:
        @contextmanager
        def on_device() -> Iterator[None]:
            entered.append(name)
            yield

        def section() -> AbstractContextManager[None]:
            return on_device()

        return section

    cycle, alone = Cycle(config(num_stages=2), tmp_path), acting(config(), tmp_path)
    for name, made in (("simulator", cycle.simulator), ("policy", cycle.policy), ("alone", alone)):
        monkeypatch.setattr(made._ctx, "on_device", counted(name))
    asked = Items()
    slots = training_slots(alone.cfg, 0)
    cycle.simulator.rollout(Items(slots), Answers(asked, cycle.policy._answer), asked, Items())
    cycle.policy.act(list(asked), Items())
    alone.rollout(Items(slots), Items())
    assert len(asked) > 8 and sorted(entered) == ["alone", "policy", "simulator"]
    cycle.policy.act([], Items())
    assert entered.count("policy") == 1, "nothing was asked: nobody needs to give way"
