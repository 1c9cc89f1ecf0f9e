"""The MLP policy: acting and learning agree, decisions do not depend on the block, draws have the distribution."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learning import CONTINUOUS, DISCRETE, box, config, ppo

from rlinf_core.errors import ConfigError, NonFiniteError
from rlinf_embodied.envs.base import Discrete, EnvSpec, Text
from rlinf_embodied.noise import uniforms
from rlinf_embodied.policies.mlp import MlpPolicy

KINDS = {
    "discrete": (DISCRETE, {}),
    "continuous": (CONTINUOUS, {"log_std_init": -0.3}),
    "squashed": (CONTINUOUS, {"squash": True}),
    "normalised": (CONTINUOUS, {"normalise_observations": True}),
    "shared": (DISCRETE, {"shared": True, "activation": "relu"}),
    "chunks": (CONTINUOUS, {"chunk": 3, "value_level": "chunk"}),
    "discrete chunks": (DISCRETE, {"chunk": 2}),
    "shared chunks": (CONTINUOUS, {"chunk": 2, "shared": True, "value_level": "none"}),
}


def policy(spec: EnvSpec, seed: int = 0, scale: float = 8.0, **model: Any) -> MlpPolicy:
    """With an actor that has a say."""
    made = MlpPolicy(config(ppo(), **model).model, spec, seed)
    with torch.no_grad():
        made.actor[-1].weight.mul_(scale)
        for parameter in made.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    return made


def observations(rows: int, seed: int = 0) -> dict[str, np.ndarray]:
    return {"state": np.random.default_rng(seed).normal(1.0, 2.0, (rows, 3)).astype(np.float32)}


def numbers(made: MlpPolicy, rows: int) -> np.ndarray:
    return uniforms(1, np.array([[0, i, 0] for i in range(rows)]), made.chunk, made.tokens)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 1e-6)])
@pytest.mark.parametrize("kind", KINDS)
def test_learning_finds_what_acting_said(kind, dtype, tolerance):
    spec, model = KINDS[kind]
    made = policy(spec, dtype=dtype, **model)
    obs = observations(13)
    made.observe(made.prepare(observations(50, 1)))
    for greedy in (False, True):
        decision = made.act(obs, numbers(made, 13), greedy=greedy)
        inputs = made.prepare(obs)
        assert inputs["state"].dtype == made.dtype
        found = made.evaluate(inputs, torch.from_numpy(decision.taken))
        assert decision.logprobs.dtype == np.dtype(dtype)
        assert decision.logprobs.shape == (13, made.chunk, made.tokens) == found["entropy"].shape
        scale = max(1.0, float(np.abs(decision.logprobs).max()))
        np.testing.assert_allclose(found["logprobs"].detach(), decision.logprobs, rtol=0, atol=tolerance * scale)
        if made.value_level == "none":
            assert decision.values is None
            assert "values" not in found
        else:
            assert decision.values.shape == (13, made.chunk if made.value_level == "action" else 1)
            np.testing.assert_allclose(found["values"].detach(), decision.values, rtol=tolerance, atol=tolerance)
            np.testing.assert_array_equal(made.value(obs), decision.values)


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(sorted(KINDS)), st.sampled_from(["float32", "float64"]), st.data())
def test_a_decision_does_not_depend_on_who_else_is_asked_for(kind, dtype, data):
    spec, model = KINDS[kind]
    made = policy(spec, dtype=dtype, hidden=[64, 64], **model)
    made.observe(made.prepare(observations(50, 1)))
    rows = data.draw(st.integers(1, 21))
    obs, uniform = observations(rows)["state"], numbers(made, rows)
    whole = made.act({"state": obs}, uniform)
    some = data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=12))
    part = made.act({"state": obs[some]}, uniform[some])
    for name in ("actions", "taken", "logprobs", "values"):
        if getattr(whole, name) is not None:
            np.testing.assert_array_equal(getattr(part, name), getattr(whole, name)[some])


def test_nothing_to_decide():
    made = policy(CONTINUOUS)
    decision = made.act({"state": np.zeros((0, 3), np.float32)}, np.zeros((0, 1, 2)))
    assert decision.actions.shape == (0, 1, 2)
    assert decision.values.shape == (0, 1)


def test_acting_follows_the_weights():
    made = policy(DISCRETE)
    obs, uniform = observations(4), numbers(made, 4)
    made.act(obs, uniform)
    other = policy(DISCRETE, seed=5)
    expected = other.act(obs, uniform)
    made.load_state_dict(other.state_dict())
    np.testing.assert_array_equal(made.act(obs, uniform).logprobs, expected.logprobs)
    for parameter in made.parameters():  # other memory, as after an offload
        parameter.data = parameter.data * 2.0
    again = made.act(obs, uniform)
    found = made.evaluate(made.prepare(obs), torch.from_numpy(again.taken))
    np.testing.assert_allclose(found["logprobs"].detach(), again.logprobs, atol=1e-12)


def test_actions_without_bounds():
    made = policy(EnvSpec({"state": box(3)}, box(2), 5))
    assert made.act(observations(2), numbers(made, 2)).actions.shape == (2, 1, 2)


def test_equal_seeds_give_equal_weights_and_leave_torch_alone():
    state = torch.get_rng_state()
    one, two, three = (MlpPolicy(config(ppo()).model, CONTINUOUS, seed) for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), state)
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(one.actor[0].weight, three.actor[0].weight)
    weight = one.critic[1].weight.detach()
    torch.testing.assert_close(weight @ weight.T, 2.0 * torch.eye(6, dtype=torch.float64))


def test_categorical_against_torch():
    made = policy(DISCRETE)
    obs = observations(6)
    inputs = made.prepare(obs)
    logits = made._through(made.actor, inputs["state"]).view(6, 1, 4)
    expected = torch.distributions.Categorical(logits=logits)
    taken = torch.arange(6).remainder(4).view(6, 1, 1)
    found = made.evaluate(inputs, taken)
    torch.testing.assert_close(found["logprobs"][..., 0], expected.log_prob(taken[..., 0]))
    torch.testing.assert_close(found["entropy"][..., 0], expected.entropy())
    assert made.act(obs, numbers(made, 6), greedy=True).actions.tolist() == logits.argmax(-1).tolist()


def test_actions_are_drawn_by_their_probabilities():
    made = policy(DISCRETE)
    obs = {"state": np.repeat(observations(1)["state"], 20_000, 0)}
    drawn = made.act(obs, numbers(made, 20_000))
    probability = np.exp(
        [
            float(made.evaluate(made.prepare(observations(1)), torch.full((1, 1, 1), a))["logprobs"].detach())
            for a in range(4)
        ]
    )
    assert probability.sum() == pytest.approx(1.0)
    counts = np.bincount(drawn.actions[:, 0], minlength=4)
    expected = 20_000 * probability
    assert ((counts - expected) ** 2 / expected).sum() < 16.3  # chi squared, three degrees, one in a thousand


def test_an_action_without_probability_is_never_drawn():
    made = policy(DISCRETE)
    with torch.no_grad():
        made.actor[-1].weight.zero_()
        made.actor[-1].bias.copy_(torch.tensor([-1e9, 0.0, -1e9, 0.0]))
    uniform = np.array([2.0**-53, 0.25, 0.5, 0.75, 1.0 - 2.0**-53])[:, None, None]
    assert made.act(observations(5), uniform).actions[:, 0].tolist() == [1, 1, 1, 3, 3]


def test_gaussian_against_torch():
    made = policy(CONTINUOUS, log_std_init=0.4)
    obs = observations(5)
    inputs = made.prepare(obs)
    mean = made._through(made.actor, inputs["state"]).view(5, 1, 2)
    expected = torch.distributions.Normal(mean, made.head.log_std.exp().view(1, 2).expand(5, 1, 2))
    decision = made.act(obs, numbers(made, 5))
    found = made.evaluate(inputs, torch.from_numpy(decision.taken))
    torch.testing.assert_close(found["logprobs"], expected.log_prob(torch.from_numpy(decision.taken)))
    torch.testing.assert_close(found["entropy"], expected.entropy())
    torch.testing.assert_close(torch.from_numpy(decision.taken), expected.icdf(torch.from_numpy(numbers(made, 5))))
    np.testing.assert_array_equal(decision.actions, decision.taken)
    torch.testing.assert_close(torch.from_numpy(made.act(obs, numbers(made, 5), greedy=True).actions), mean.detach())


def test_squashed_actions_keep_the_bounds_and_their_density():
    spec = EnvSpec({"state": box(3)}, box(2, 1.0), 20)
    spec.action.low[:], spec.action.high[:] = [-1.0, 2.0], [3.0, 2.5]
    made = policy(spec, squash=True, log_std_init=1.0)
    obs = observations(400)
    decision = made.act(obs, numbers(made, 400))
    actions = decision.actions[:, 0]
    assert (actions >= spec.action.low).all()
    assert (actions <= spec.action.high).all()
    inputs = made.prepare(obs)
    mean = made._through(made.actor, inputs["state"]).view(400, 2).detach()
    normal = torch.distributions.Normal(mean, made.head.log_std.exp().detach())
    half = torch.tensor([2.0, 0.25], dtype=torch.float64)
    parts = [
        torch.distributions.TanhTransform(cache_size=1),
        torch.distributions.AffineTransform(torch.tensor([1.0, 2.25], dtype=torch.float64), half),
    ]
    expected = torch.distributions.TransformedDistribution(normal, parts)
    inside = np.abs(decision.taken[:, 0]).max(-1) < 4.0  # further out the action cannot be taken back
    found = torch.from_numpy(decision.logprobs[:, 0])[inside]
    torch.testing.assert_close(found, expected.log_prob(torch.from_numpy(actions))[inside], rtol=1e-6, atol=1e-6)


def test_running_normalisation():
    made = policy(CONTINUOUS, normalise_observations=True)
    parts = [observations(n, n)["state"] for n in (1, 7, 30)]
    for part in parts:
        made.observe(made.prepare({"state": part}))
    everything = np.concatenate(parts).astype(np.float64)
    norm = made.norm
    assert float(norm.count) == 38
    np.testing.assert_allclose(norm.mean, everything.mean(0), rtol=1e-12)
    np.testing.assert_allclose(norm.square / norm.count, everything.var(0), rtol=1e-12)
    far = torch.full((1, 3), 1e6, dtype=torch.float64)
    assert norm(far).tolist() == [[10.0] * 3]
    expected = (everything - everything.mean(0)) / np.sqrt(everything.var(0) + 1e-8)
    np.testing.assert_allclose(norm(torch.from_numpy(everything)), expected, atol=1e-12)
    made.observe({"state": torch.zeros(0, 3, dtype=torch.float64)})
    assert float(norm.count) == 38
    assert set(dict(made.named_buffers())) == {f"norm.{n}" for n in ("count", "mean", "square", "shift", "scale")}


def test_decisions_follow_the_statistics():
    made = policy(CONTINUOUS, normalise_observations=True)
    obs, uniform = observations(3), numbers(made, 3)
    before = made.act(obs, uniform).actions
    made.observe(made.prepare(obs))
    assert not np.allclose(made.act(obs, uniform).actions, before)


def test_observations_of_any_shape_are_flattened():
    spec = EnvSpec({"state": box(6)}, Discrete(2), 5)
    flat = policy(spec)
    shaped = EnvSpec({"state": type(box(6))(np.full((2, 3), -1.0), np.full((2, 3), 1.0))}, Discrete(2), 5)
    other = policy(shaped)
    x = np.random.default_rng(0).standard_normal((4, 2, 3))
    one, two = flat.act({"state": x.reshape(4, 6)}, numbers(flat, 4)), other.act({"state": x}, numbers(flat, 4))
    np.testing.assert_array_equal(one.logprobs, two.logprobs)
    assert other.prepare({"state": x})["state"].shape == (4, 6)


@pytest.mark.parametrize("spec", [CONTINUOUS, DISCRETE])
def test_numbers_that_are_none_are_refused_by_row(spec):
    made = policy(spec)
    obs = observations(12)
    obs["state"][9, 1] = np.nan
    with pytest.raises(NonFiniteError, match=r"rows 9 of the block"):
        made.act(obs, numbers(made, 12))


@pytest.mark.parametrize(
    ("spec", "model", "message"),
    [
        (EnvSpec({"stats": box(3)}, Discrete(2), 5), {}, r"model.observation: .*'state' \(did you mean 'stats'\?\)"),
        (EnvSpec({"state": Text()}, Discrete(2), 5), {}, "model.observation: 'state' is text"),
        (DISCRETE, {"squash": True}, "model.squash: .*no numbers"),
        (EnvSpec({"state": box(3)}, box(2), 5), {"squash": True}, "model.squash: .*no bounds"),
        (EnvSpec({"state": box(3)}, box(2, 0.0), 5), {"squash": True}, "model.squash: .*lower bound"),
    ],
)
def test_an_environment_that_does_not_fit_is_refused(spec, model, message):
    with pytest.raises(ConfigError, match=message):
        policy(spec, **model)


def test_values_of_a_policy_without_a_critic():
    with pytest.raises(ConfigError, match="value_level"):
        policy(DISCRETE, value_level="none").value(observations(2))


def test_export_has_what_a_load_needs(tmp_path):
    made = policy(CONTINUOUS, normalise_observations=True)
    made.observe(made.prepare(observations(9)))
    MlpPolicy.export(made, made.state_dict(), tmp_path)
    data = json.loads((tmp_path / "policy.json").read_text())
    assert data["model"]["hidden"] == [8, 6]
    assert data["environment"]["action"]["shape"] == [2]
    again = MlpPolicy.load(tmp_path)
    obs = observations(5)
    np.testing.assert_array_equal(again.act(obs, numbers(made, 5)).logprobs, made.act(obs, numbers(made, 5)).logprobs)
    assert math.isfinite(float(again.norm.scale.sum()))
    (tmp_path / "weights.pt").write_bytes(b"half")
    for broken in (tmp_path, tmp_path / "none"):
        with pytest.raises(ConfigError, match=f"{broken} has no exported policy mlp"):
            MlpPolicy.load(broken)
