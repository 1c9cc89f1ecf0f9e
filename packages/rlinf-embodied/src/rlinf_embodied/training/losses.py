"""The loss of a micro-batch: the policy's, the critic's and the entropy bonus.

Shape legend: b decisions, C steps, D log-probs per step, U units per decision (``levels``), V values per decision.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rlinf_algos import LossInputs, entropy_loss, loss, masked_sum
from rlinf_algos.errors import AlgorithmError
from rlinf_core.errors import ConfigError
from rlinf_core.types import Batch
from rlinf_embodied.training import levels
from rlinf_embodied.training.closed_form import ClosedForm

CLIPPED = ("ppo", "dapo", "decoupled_ppo")


class UpdateLoss:
    """Sum of the policy loss + entropy bonus over units, + value loss over values, weighed so that one count, that of
    the policy loss, divides all of it.

    Reads of the micro-batch: ``mask``, ``old_logprobs``, ``advantages`` [b, U], ``weights`` [b, U] where episodes weigh
    the same, ``steps`` [b, C] for log-probs of chunks; with a critic ``returns``, ``old_values`` where values are
    clipped, ``value_mask`` [b, V] where it is not ``mask``, and ``value_share``: by what a value's loss is multiplied
    (the policy loss's count over values, of the whole minibatch).
    What it reports is added up here, not returned: on a GPU a number each would cost more than it is worth. On a CPU
    the usual losses are computed in closed form.
    """

    def __init__(self, algorithm: Any, *, critic: bool) -> None:
        self.level: str = algorithm.logprob_level
        self.entropy: float = algorithm.entropy_coef
        self.value: float = algorithm.value_coef if critic else 0.0
        self.policy, self.options = _chosen(algorithm)
        how = {name: getattr(self.options, name, None) for name in ("aggregation", "divisor")}
        self.by_rows = (how["aggregation"] or "token_mean") != "token_mean"
        """Whether the loss counts decisions, not units."""
        self.bonus = {name: value for name, value in how.items() if value is not None}
        self.critic = None
        if critic:
            self.critic = loss("value")
            self.critic_options = self.critic.make_options({"clip": algorithm.value_clip, "kind": algorithm.value_loss})
        self.closed: ClosedForm | None = None
        if ClosedForm.applies(self.policy, self.options, self.critic):
            self.closed = ClosedForm(self.options, self.critic_options if critic else None, self.entropy, self.value)
        self.names: tuple[str, ...] = ()
        self.sums: Tensor | None = None
        self.known: dict[str, float] = {}

    def start(self) -> None:
        """Forget what was added up."""
        self.sums = None
        self.known = {}

    def totals(self) -> dict[str, float]:
        """What was added up since ``start``."""
        found = dict(self.known)
        if self.sums is not None:
            for name, number in zip(self.names, self.sums.tolist(), strict=True):
                found[name] = found.get(name, 0.0) + number
        return found

    def __call__(self, outputs: Mapping[str, Tensor], batch: Batch) -> tuple[Tensor, float, dict[str, float]]:
        steps = batch.get("steps")
        logprobs = levels.join(outputs["logprobs"], steps, self.level)
        entropy = outputs["entropy"] if self.entropy else outputs["entropy"].detach()
        entropy = levels.join(entropy, steps, self.level)
        if self.closed is not None:
            found = self.closed(logprobs, entropy, outputs["values"] if self.critic is not None else None, batch)
            if found is not None:
                total, count, noted = found
                for name, number in noted.items():
                    self.known[name] = self.known.get(name, 0.0) + number
                return total, count, {}
        return self._general(logprobs, entropy, outputs, batch)

    def _general(
        self, logprobs: Tensor, entropy: Tensor, outputs: Mapping[str, Tensor], batch: Batch
    ) -> tuple[Tensor, float, dict[str, float]]:
        """Any loss, on any device."""
        mask = batch["mask"]
        checked = self.sums is not None  # what a batch has, and the options, are the same in all of an update
        policy = (self.policy.compute if checked else self.policy)(
            LossInputs(
                logprobs=logprobs,
                old_logprobs=batch["old_logprobs"],
                advantages=batch["advantages"],
                mask=mask,
                weights=batch.get("weights"),
            ),
            self.options,
        )
        total = policy.sum
        noted: dict[str, Tensor] = {"policy": policy.sum.detach(), **policy.metrics}
        if self.entropy:
            bonus = entropy_loss(entropy, mask, **self.bonus)
            total = total + self.entropy * bonus.sum
            noted["entropy"] = bonus.metrics["entropy"]
        else:
            noted["entropy"] = masked_sum(entropy, mask)
        if self.critic is not None:
            value = (self.critic.compute if checked else self.critic)(
                LossInputs(
                    values=outputs["values"],
                    returns=batch["returns"],
                    old_values=batch.get("old_values"),
                    mask=batch.get("value_mask", mask),
                ),
                self.critic_options,
            )
            total = total + (self.value * batch["value_share"]) * value.sum
            noted |= {"value": value.sum.detach(), "values": value.metrics["tokens"]}
            noted |= {name: number for name, number in value.metrics.items() if name != "tokens"}
        self._note(noted)
        return total, policy.count, {}

    def _note(self, noted: dict[str, Tensor]) -> None:
        row = torch.stack(list(noted.values()))
        if self.sums is None:
            self.names, self.sums = tuple(noted), row.to(torch.float64)
        else:
            self.sums += row


def _chosen(algorithm: Any) -> tuple[Any, Any]:
    """The policy loss by name, and its options."""
    try:
        found = loss(algorithm.loss)
        own = {}
        if algorithm.loss in CLIPPED:
            own = {name: algorithm[name] for name in ("clip_low", "clip_high", "dual_clip")}
        return found, found.make_options({**own, **algorithm.loss_options.to_dict()})
    except AlgorithmError as error:
        raise ConfigError(f"algorithm.loss ({algorithm.loss}): {error}") from error
