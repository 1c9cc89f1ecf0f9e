"""The parts of the update by themselves: advantages against a loop over time, levels, dealing of minibatches."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learning import CONTINUOUS, PlainTrainer, config, ppo

from rlinf_core.errors import ConfigError, NonFiniteError
from rlinf_core.types import Trajectory
from rlinf_embodied.policies.mlp import MlpPolicy
from rlinf_embodied.training import levels
from rlinf_embodied.training.advantages import OverTime
from rlinf_embodied.training.batch import collect
from rlinf_embodied.training.losses import UpdateLoss
from rlinf_embodied.training.minibatches import Dealing
from rlinf_embodied.training.scaling import RewardScale

NUMBERS = st.floats(-2.0, 2.0, width=16)
FATES = st.sampled_from(["on", "on", "on", "terminated", "truncated", "both", "idle"])
"""What becomes of a step; an idle one leaves the rest of its chunk idle."""


@st.composite
def slots(draw: Any, chunk: int, per_chunk: bool) -> list[Trajectory]:
    """Slots of unequal length in which anything may happen."""
    found = []
    for number in range(draw(st.integers(1, 3))):
        length = draw(st.integers(1, 5))
        shape = (length, chunk)
        flags = {name: np.zeros(shape, bool) for name in ("mask", "terminated", "truncated", "success")}
        for t in range(length):
            for c in range(chunk):
                fate = draw(FATES)
                if fate == "idle":
                    break
                flags["mask"][t, c] = True
                flags["terminated"][t, c] = fate in ("terminated", "both")
                flags["truncated"][t, c] = fate in ("truncated", "both")
                if fate != "on":
                    break
        counts = {"rewards": shape, "values": (length, 1 if per_chunk else chunk), "final_values": shape}
        numbers = {
            name: np.array(draw(st.lists(NUMBERS, min_size=math.prod(s), max_size=math.prod(s))), float).reshape(s)
            for name, s in counts.items()
        }
        arrays = {
            **flags,
            **numbers,
            "obs/state": np.zeros((length, 3), np.float32),
            "taken": np.zeros((length, chunk, 2)),
            "logprobs": np.zeros((length, chunk, 2)),
            "last_values": np.array([draw(NUMBERS)]),
        }
        found.append(Trajectory(f"{number}", arrays, {"env": number, "episodes": []}))
    return found


def loop(t: Trajectory, gamma: float, lam: float, per_chunk: bool) -> list[tuple[float, float]]:
    """(advantage, return) of each step (or chunk) that was made, backwards over time."""
    a = t.arrays
    advantage, ahead, found = 0.0, float(a["last_values"][0]), []
    for i in reversed(range(len(a["mask"]))):
        places = [[c for c in range(a["mask"].shape[1]) if a["mask"][i, c]]]
        if not per_chunk:
            places = [[c] for c in reversed(places[0])]
        for part in places:
            if not part:
                continue
            last = part[-1]
            if a["terminated"][i, last]:
                advantage, ahead = 0.0, 0.0
            elif a["truncated"][i, last]:
                advantage, ahead = 0.0, a["final_values"][i, last]
            value = a["values"][i, 0 if per_chunk else last]
            delta = a["rewards"][i, part].sum() + gamma * ahead - value
            advantage = delta + gamma * lam * advantage
            ahead = value
            found.append((advantage, advantage + value))
    return found[::-1]


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 3), st.booleans(), st.sampled_from([0.0, 0.9, 1.0]), st.sampled_from([0.0, 0.8, 1.0]))
def test_advantages_are_those_of_a_loop_over_time(data, chunk, per_chunk, gamma, lam):
    trajectories = data.draw(slots(chunk, per_chunk))
    level = "chunk" if per_chunk else "action"
    cfg = config(ppo(reward_level=level, gamma=gamma, lam=lam, whiten=False), chunk=chunk, value_level=level)
    policy = MlpPolicy(cfg.model, CONTINUOUS, 0)
    rollout = collect(trajectories, policy)
    found = OverTime(cfg.algorithm)(PlainTrainer(policy), rollout)
    steps = rollout.of_decisions(rollout.steps)
    mask = steps.any(-1, keepdim=True) if per_chunk else steps
    expected = [pair for t in trajectories for pair in loop(t, gamma, lam, per_chunk)]
    assert found.returns is not None
    ours = list(zip(found.advantages[mask].tolist(), found.returns[mask].tolist(), strict=True))
    assert len(ours) == len(expected)
    np.testing.assert_allclose(np.array(ours).reshape(-1, 2), np.array(expected).reshape(-1, 2), rtol=1e-9, atol=1e-9)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_whitened_advantages(data):
    trajectories = data.draw(slots(2, False))
    cfg, plain = (config(ppo(whiten=w), chunk=2) for w in (True, False))
    policy = MlpPolicy(cfg.model, CONTINUOUS, 0)
    rollout = collect(trajectories, policy)
    white, raw = (OverTime(c.algorithm)(PlainTrainer(policy), rollout).advantages for c in (cfg, plain))
    mask = rollout.of_decisions(rollout.steps)
    values = raw[mask]
    if len(values) < 2 or float(values.std(correction=0)) < 1e-3:
        return
    torch.testing.assert_close(white[mask], (values - values.mean()) / (values.std(correction=0) + 1e-8))


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.data())
def test_levels_add_up_and_spread_out(n, chunk, tokens, data):
    values = torch.randn(n, chunk, tokens, dtype=torch.float64, generator=torch.Generator().manual_seed(n + 7 * chunk))
    made = [data.draw(st.integers(1, chunk)) for _ in range(n)]
    steps = torch.tensor([[c < count for c in range(chunk)] for count in made])
    for level in levels.LEVELS:
        joined, mask = levels.join(values, steps, level), levels.mask_of(steps, tokens, level)
        assert joined.shape == mask.shape
        expected = values.masked_fill(~steps[..., None], 0.0).sum()
        torch.testing.assert_close(joined.masked_fill(~mask, 0.0).sum(), expected)
        one = levels.spread(torch.arange(n, dtype=torch.float64)[:, None], chunk, tokens, level)
        assert one.shape == mask.shape
        assert (one == torch.arange(n)[:, None]).all()
        if level != "chunk":
            of_steps = levels.spread(values[..., 0], chunk, tokens, level).view(n, chunk, -1)
            assert (of_steps == values[..., :1]).all()
    if chunk > 1:
        with pytest.raises(AssertionError):
            levels.spread(values[..., 0], chunk, tokens, "chunk")


@settings(deadline=None)
@given(
    st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 9), min_size=1),
    st.integers(1, 30),
    st.integers(-5, 2**70),
    st.integers(0, 5),
    st.data(),
)
def test_minibatches_take_every_decision_once_whoever_has_it(counts, size, seed, step, data):
    owners = {slot: data.draw(st.integers(0, 2)) for slot in counts}
    deals = [Dealing(counts, sorted(s for s in counts if owners[s] == r), size, seed, step) for r in range(3)]
    whole = Dealing(counts, sorted(counts), size, seed, step)
    total = sum(counts.values())
    assert whole.total == total
    if not total:
        return
    everyone, _ = whole.epoch(1)
    assert sorted(torch.cat(everyone).tolist()) == list(range(total))
    sizes = [len(part) for part in everyone]
    assert max(sizes) <= size
    assert max(sizes) - min(sizes) <= 1
    for number in range(len(everyone)):
        found = []
        for deal in deals:
            theirs, own = deal.epoch(1)
            assert torch.equal(theirs[number], everyone[number])
            found += deal.numbers[own[number]].tolist()
        assert sorted(found) == sorted(everyone[number].tolist())


def test_constant_rewards_are_not_scaled_away():
    cfg = config(ppo(gamma=0.0))
    policy = MlpPolicy(cfg.model, CONTINUOUS, 0)
    arrays = {
        "mask": np.ones((4, 1), bool),
        **{name: np.zeros((4, 1), bool) for name in ("terminated", "truncated", "success")},
        **{name: np.zeros((4, 1)) for name in ("values", "final_values")},
        "rewards": np.ones((4, 1)),
        "obs/state": np.zeros((4, 3), np.float32),
        "taken": np.zeros((4, 1, 2)),
        "logprobs": np.zeros((4, 1, 2)),
        "last_values": np.zeros(1),
    }
    rollout = collect([Trajectory("a", arrays, {"env": 0})], policy)
    scale = RewardScale(0.0)
    assert scale(PlainTrainer(policy), rollout).tolist() == [[[1.0]] * 4]


def test_text_and_slots_of_unequal_length_come_together():
    """Observations may be lists of strings; decisions in which nothing was done are left out."""

    class Reader:
        chunk, tokens, value_level = 1, 1, "none"

        def prepare(self, obs: Any) -> dict[str, torch.Tensor]:
            return {"length": torch.tensor([float(len(text)) for text in obs["instruction"]])}

    def slot(name: str, made: list[bool]) -> Trajectory:
        shape = (len(made), 1)
        arrays = {
            "obs/instruction": [f"{name}{'x' * t}" for t in range(len(made))],
            "mask": np.array(made)[:, None],
            **{key: np.zeros(shape, bool) for key in ("terminated", "truncated", "success")},
            **{key: np.zeros(shape) for key in ("rewards", "final_values")},
            "taken": np.arange(len(made)).reshape(-1, 1, 1),
            "logprobs": np.zeros((len(made), 1, 1)),
            "last_values": np.zeros(1),
        }
        return Trajectory(name, arrays, {"env": 0})

    rollout = collect([slot("b", [True]), slot("a", [True, False, True])], Reader())
    assert rollout.slots == ["a", "b"]
    assert rollout.taken.flatten().tolist() == [0, 2, 0]
    assert rollout.inputs["length"].tolist() == [1.0, 3.0, 1.0]
    assert rollout.slot_of().tolist() == [0, 0, 1]


def test_what_the_policy_makes_of_observations_must_be_finite():
    class Reader:
        chunk, tokens, value_level = 1, 1, "none"

        def prepare(self, obs: Any) -> dict[str, torch.Tensor]:
            return {"x": torch.tensor([[1.0, math.inf]]), "ids": torch.tensor([[3]])}

    arrays = {
        "obs/x": np.zeros((1, 1)),
        "mask": np.ones((1, 1), bool),
        **{key: np.zeros((1, 1), bool) for key in ("terminated", "truncated", "success")},
        **{key: np.zeros((1, 1)) for key in ("rewards", "final_values")},
        "taken": np.zeros((1, 1, 1), int),
        "logprobs": np.zeros((1, 1, 1)),
        "last_values": np.zeros(1),
    }
    with pytest.raises(NonFiniteError, match=r"observation 'x' .* s/1 \(environment 7\)"):
        collect([Trajectory("s/1", arrays, {"env": 7})], Reader())


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"loss": "cispo", "loss_options": {"clip": 1.0}}, r"algorithm.loss \(cispo\): .*no option 'clip'"),
        ({"loss_options": {"aggregation": "mean"}}, r"algorithm.loss \(ppo\): .*aggregation"),
    ],
)
def test_options_of_the_loss_are_checked_before_anything_is_trained(keys, message):
    with pytest.raises(ConfigError, match=message):
        UpdateLoss(config(ppo(**keys)).algorithm, critic=True)
