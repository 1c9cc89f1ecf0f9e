"""Weights and gradients laid end to end: a step is AdamW's own, whatever came before it."""

from __future__ import annotations

import copy
import math

import pytest

torch = pytest.importorskip("torch")

from rlinf_engines.trainers.flat import FlatState  # noqa: E402

KEYS = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "fused": True}


def network() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))


def draw(parameters: list[torch.nn.Parameter], seed: int) -> None:
    """Gradients that are added to what is there."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        assert parameter.grad is not None
        parameter.grad += torch.randn(parameter.shape, generator=generator)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_a_step_is_adamw_s_own_to_the_last_bit_and_leaves_a_zero_gradient(decay: float) -> None:
    ours, theirs = network(), network()
    flat, other = FlatState(ours), FlatState(theirs)
    mine, adam = (torch.optim.AdamW(x.groups(decay), **KEYS) for x in (flat, other))
    for step in range(6):
        if step == 3:  # as after a load
            flat.install(mine, copy.deepcopy(dict(flat.averages(mine))))
        for optimizer, parameters in ((mine, ours.parameters()), (adam, theirs.parameters())):
            draw(list(parameters), step)
            for group in optimizer.param_groups:
                group["lr"] = 0.01 / (step + 1)
        exact = math.sqrt(sum(float(p.grad.double().square().sum()) for p in ours.parameters()))
        assert flat.norm() == pytest.approx(exact, rel=1e-12)
        flat.update(mine)
        adam.step()
        other.gradient.zero_()
        assert not flat.gradient.any()
        for one, two in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(one, two)
    found, expected = dict(flat.averages(mine)), dict(other.averages(adam))
    assert found.keys() == expected.keys() == dict(ours.named_parameters()).keys()
    for name, state in expected.items():
        assert state.keys() == found[name].keys()
        assert all(torch.equal(found[name][key], value) for key, value in state.items())


def test_gradients_of_many_elements_keep_their_digits() -> None:
    flat = FlatState(torch.nn.Linear(1000, 900))
    flat.gradient.fill_(0.1)
    exact = float(torch.tensor(0.1).double()) * math.sqrt(flat.gradient.numel())
    assert flat.norm() == pytest.approx(exact, rel=1e-10)
