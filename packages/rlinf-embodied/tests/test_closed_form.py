"""The loss in closed form against the general one: sums, gradients and all that is reported."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from learning import config, ppo
from torch import Tensor

from rlinf_embodied.training.losses import UpdateLoss

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "dual": {"dual_clip": 1.3, "clip_high": 0.1},
    "dapo": {"loss": "dapo"},
    "values clipped": {"value_clip": 0.3},
    "huber": {"value_loss": "huber", "value_clip": 0.3},
    "entropy": {"entropy_coef": 0.05, "clip_low": 0.05},
}
Given = tuple[dict[str, Tensor], dict[str, Any]]


def given(dtype: torch.dtype, *, part: bool, weighed: bool = False, of_chunks: bool = False) -> Given:
    """Outputs of a policy and a micro-batch of 40 decisions of 3 steps; with ``part`` some steps were not made, and
    what stands there is no number."""
    generator = torch.Generator().manual_seed(7)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype, generator=generator)

    logprobs, old = drawn(40, 3, 1), drawn(40, 3)
    old = 0.3 * old + logprobs[..., 0]
    values = drawn(40, 1 if of_chunks else 3)
    outputs = {"logprobs": logprobs, "entropy": drawn(40, 3, 1).abs(), "values": values}
    mask = torch.ones(40, 3, dtype=torch.bool)
    batch = {"advantages": drawn(40, 3), "returns": drawn(*values.shape), "old_values": values + drawn(*values.shape)}
    if part:
        mask = torch.rand(40, 3, generator=generator) > 0.3
        old[~mask] = math.nan
        batch["advantages"][~mask] = math.inf
        if not of_chunks:
            batch["returns"][~mask] = math.nan
    if of_chunks:
        batch["value_mask"] = mask.any(-1, keepdim=True)
    if weighed:
        batch["weights"] = drawn(40, 3).abs()
    return outputs, {**batch, "old_logprobs": old, "mask": mask, "value_share": 0.7}


def told(loss: UpdateLoss, outputs: dict[str, Tensor], batch: dict[str, Any]) -> tuple[Any, ...]:
    """(sum, count, what is reported, gradients by output) of two micro-batches that are the same."""
    leaves = {name: x.clone().requires_grad_() for name, x in outputs.items()}
    loss.start()
    for _ in range(2):
        total, count, _ = loss(leaves, batch)
        (3.0 * total).backward()
    return total.detach(), count, loss.totals(), {name: x.grad for name, x in leaves.items()}


def general(loss: UpdateLoss) -> UpdateLoss:
    assert loss.closed is not None
    loss.closed = None
    return loss


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "how",
    [
        {"part": False},
        {"part": True},
        {"part": True, "weighed": True},
        {"part": True, "of_chunks": True},
        {"part": False, "of_chunks": True},
    ],
    ids=str,
)
def test_sums_gradients_and_reports_are_those_of_the_general_way(
    case: str, dtype: torch.dtype, how: dict[str, bool]
) -> None:
    algorithm = config(ppo(**CASES[case])).algorithm
    outputs, batch = given(dtype, **how)
    limit = 1e-12 if dtype == torch.float64 else 2e-5
    found = told(UpdateLoss(algorithm, critic=True), outputs, batch)
    expected = told(general(UpdateLoss(algorithm, critic=True)), outputs, batch)
    torch.testing.assert_close(found[0], expected[0], rtol=limit, atol=limit)
    assert found[1] == expected[1]
    assert found[2] == pytest.approx(expected[2], rel=limit, abs=limit)
    assert found[2]["clip_low"] > 0
    assert found[2]["clip_high"] > 0
    for name, gradient in expected[3].items():
        assert found[3][name] is not None or gradient is None or not gradient.any(), name
        if gradient is not None and found[3][name] is not None:
            torch.testing.assert_close(found[3][name], gradient, rtol=limit, atol=limit)


def test_without_a_critic() -> None:
    algorithm = config(ppo()).algorithm
    outputs, batch = given(torch.float64, part=True)
    del outputs["values"]
    found = told(UpdateLoss(algorithm, critic=False), outputs, batch)
    expected = told(general(UpdateLoss(algorithm, critic=False)), outputs, batch)
    assert found[2] == pytest.approx(expected[2], rel=1e-12)
    torch.testing.assert_close(found[3]["logprobs"], expected[3]["logprobs"], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("extreme", [25.0, -25.0, -math.inf])
def test_extreme_ratios_go_the_general_way_and_are_added_to_the_same_sums(extreme: float) -> None:
    algorithm = config(ppo()).algorithm
    outputs, batch = given(torch.float64, part=False)
    loss = UpdateLoss(algorithm, critic=True)
    loss(outputs, batch)
    usual = loss.totals()
    outputs["logprobs"] = outputs["logprobs"].clone()
    outputs["logprobs"][3, 1] = extreme
    batch["old_logprobs"][3, 1] = 0.0
    found = told(loss, outputs, batch)
    expected = told(general(UpdateLoss(algorithm, critic=True)), outputs, batch)
    assert found[2] == pytest.approx(expected[2], rel=1e-12)
    assert math.isfinite(float(found[0]))
    torch.testing.assert_close(found[3]["logprobs"], expected[3]["logprobs"], rtol=0, atol=0)
    loss.start()
    for x in (outputs, given(torch.float64, part=False)[0]):
        loss(x, batch if x is outputs else given(torch.float64, part=False)[1])
    both = loss.totals()
    assert both["tokens"] == usual["tokens"] + expected[2]["tokens"] / 2
    assert both["value"] == pytest.approx(usual["value"] + expected[2]["value"] / 2, rel=1e-12)


def test_what_is_no_number_is_seen_in_the_sum() -> None:
    outputs, batch = given(torch.float32, part=False)
    loss = UpdateLoss(config(ppo()).algorithm, critic=True)
    for name in ("logprobs", "values"):
        bad = {**outputs, name: outputs[name].clone()}
        bad[name][5] = math.nan
        assert not math.isfinite(float(loss(bad, batch)[0]))


@pytest.mark.parametrize(
    "keys", [{"loss": "cispo"}, {"loss_options": {"aggregation": "sequence_mean_of_token_means"}}], ids=str
)
def test_other_losses_go_the_general_way(keys: dict[str, Any]) -> None:
    assert UpdateLoss(config(ppo(**keys)).algorithm, critic=True).closed is None
