"""Whole recipes by name: which advantage, loss, KL and aggregation a paper puts together, with its numbers.

A preset is data. ``note`` says what it reproduces and where it departs from the library's own defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from rlinf_algos import _check, composition
from rlinf_algos.aggregation import LossSum
from rlinf_algos.composition import AdvantageInputs, Advantages, LossInputs
from rlinf_algos.errors import AlgorithmError, nearest


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """Advantage and loss by name with their options, and the terms added to the loss.

    ``kl_coefficient`` and ``entropy_coefficient`` of 0 leave the term out. ``kl_in`` is where the KL goes: ``loss``,
    or ``reward`` (the caller then subtracts ``kl_coefficient * kl_penalty(..., kl_kind)`` from the reward, or gives
    it to an advantage that takes ``kl``).
    """

    name: str
    source: str
    note: str
    advantage: str
    loss: str
    advantage_options: Mapping[str, Any] = field(default_factory=dict)
    loss_options: Mapping[str, Any] = field(default_factory=dict)
    kl_coefficient: float = 0.0
    kl_kind: str = "k2"
    kl_in: str = "loss"
    entropy_coefficient: float = 0.0

    def __post_init__(self) -> None:
        _check.choice("kl_in", self.kl_in, ("loss", "reward"))
        _check.not_negative(kl_coefficient=self.kl_coefficient, entropy_coefficient=self.entropy_coefficient)

    def compute_advantages(self, inputs: AdvantageInputs) -> Advantages:
        """The preset's advantage of ``inputs``."""
        return composition.advantage(self.advantage)(inputs, **self.advantage_options)

    def compute_loss(self, inputs: LossInputs) -> LossSum:
        """Policy loss, plus KL and entropy where their coefficients are not 0: one sum with one count."""
        total = composition.loss(self.loss)(inputs, **self.loss_options)
        shared = self._aggregation()
        terms = replace(inputs, weights=None)
        if self.kl_coefficient and self.kl_in == "loss":
            kl = composition.loss("kl")(terms, kind=self.kl_kind, **shared)
            total = total.plus(kl, self.kl_coefficient)
        if self.entropy_coefficient:
            total = total.plus(composition.loss("entropy")(terms, **shared), self.entropy_coefficient)
        return total

    def _aggregation(self) -> dict[str, Any]:
        """The aggregation of the policy loss, which the other terms share."""
        options = composition.loss(self.loss).make_options(self.loss_options)
        return {name: getattr(options, name) for name in ("aggregation", "divisor")}

    def with_options(
        self,
        *,
        advantage_options: Mapping[str, Any] | None = None,
        loss_options: Mapping[str, Any] | None = None,
        **changes: Any,
    ) -> Preset:
        """A copy with some options changed; they are checked at once."""
        changed = replace(
            self,
            advantage_options={**self.advantage_options, **(advantage_options or {})},
            loss_options={**self.loss_options, **(loss_options or {})},
            **changes,
        )
        changed.check()
        return changed

    def check(self) -> None:
        """Refuse names and options that do not exist or cannot be right."""
        composition.advantage(self.advantage).make_options(self.advantage_options)
        composition.loss(self.loss).make_options(self.loss_options)
        if self.kl_coefficient and self.kl_in == "loss":
            composition.loss("kl").make_options({"kind": self.kl_kind})


_ALL = (
    Preset(
        name="grpo",
        source="DeepSeekMath, arXiv 2402.03300, section 4.2",
        note="KL coefficient 0.04 on the k3 estimate, as the paper has it: on-policy its gradient is that of"
        " the forward"
        " KL(ref || pi), not of the reverse KL that the text means. The library's own default, k2, has that one:"
        " preset('grpo').with_options(kl_kind='k2'). The clip width is PPO's 0.2; the paper gives none.",
        advantage="group",
        loss="ppo",
        loss_options={"aggregation": "sequence_mean_of_token_means"},
        kl_coefficient=0.04,
        kl_kind="k3",
    ),
    Preset(
        name="dr_grpo",
        source="Dr.GRPO, arXiv 2503.20783, section 3.2",
        note="No division by the standard deviation or the length; the constant divisor is the response limit"
        " of the paper's"
        " runs, 3000: set your own.",
        advantage="dr_grpo",
        loss="ppo",
        loss_options={"aggregation": "constant", "divisor": 3000.0},
    ),
    Preset(
        name="dapo",
        source="DAPO, arXiv 2503.14476, section 4.1",
        note="Clip 0.2 / 0.28, token mean, no KL. The paper's other parts are functions: groups_with_signal"
        " (dynamic sampling),"
        " overlong_penalty(max_length=20480, cache=4096), overlong_filter.",
        advantage="group",
        loss="dapo",
    ),
    Preset(
        name="gspo",
        source="GSPO, arXiv 2507.18071, section 5.1",
        note="Sequence ratios with clip 3e-4 / 4e-4.",
        advantage="group",
        loss="gspo",
    ),
    Preset(
        name="cispo",
        source="MiniMax-M1, arXiv 2506.13585",
        note="Token mean, no KL, no lower bound. The paper gives no number for the upper bound; 1 + 4 is this"
        " library's.",
        advantage="group",
        loss="cispo",
    ),
    Preset(
        name="ppo",
        source="PPO, arXiv 1707.06347, table 3",
        note="Continuous control: gamma 0.99, lambda 0.95, clip 0.2. Advantages are whitened, as in the authors' code.",
        advantage="gae",
        loss="ppo",
        advantage_options={"gamma": 0.99, "lam": 0.95, "whiten": True},
    ),
    Preset(
        name="ppo_llm",
        source="Open-Reasoner-Zero, arXiv 2503.24290",
        note="PPO on tokens with gamma = lambda = 1 and no KL; clip 0.2.",
        advantage="gae",
        loss="ppo",
        advantage_options={"gamma": 1.0, "lam": 1.0},
    ),
    Preset(
        name="rloo",
        source="RLOO, arXiv 2402.14740",
        note="Leave-one-out baseline, plain policy gradient on whole sequences, KL 0.03 in the reward.",
        advantage="rloo",
        loss="policy_gradient",
        loss_options={"aggregation": "sequence_mean_of_token_sums"},
        kl_coefficient=0.03,
        kl_kind="k1",
        kl_in="reward",
    ),
    Preset(
        name="reinforce_pp",
        source="REINFORCE++, arXiv 2501.03262",
        note="KL of the tokens in the reward, whitened over the batch, clip 0.2. The coefficient 0.01 is this"
        " library's.",
        advantage="reinforce_pp",
        loss="ppo",
        advantage_options={"kl_coefficient": 0.01},
        kl_coefficient=0.01,
        kl_kind="k1",
        kl_in="reward",
    ),
    Preset(
        name="reinforce_pp_baseline",
        source="REINFORCE++, arXiv 2501.03262",
        note="Group mean as the baseline, whitened over the batch; KL as a k2 loss, as the paper argues. The"
        " coefficient 0.001 is"
        " this library's.",
        advantage="reinforce_pp_baseline",
        loss="ppo",
        kl_coefficient=0.001,
        kl_kind="k2",
    ),
    Preset(
        name="remax",
        source="ReMax, arXiv 2310.10505, algorithm 1",
        note="The greedy response's reward as the baseline; plain policy gradient on whole sequences.",
        advantage="remax",
        loss="policy_gradient",
        loss_options={"aggregation": "sequence_mean_of_token_sums"},
    ),
    Preset(
        name="async_ppo",
        source="AReaL, arXiv 2505.24298",
        note="Decoupled PPO for stale samples, with group advantages and no critic; clip 0.2. The weight"
        " pi_prox / pi_behav is"
        " capped at 5, this library's number.",
        advantage="group",
        loss="decoupled_ppo",
    ),
)
PRESETS: dict[str, Preset] = {p.name: p for p in _ALL}


def preset(name: str) -> Preset:
    """The preset of that name; an unknown one is refused with the nearest."""
    if name not in PRESETS:
        raise AlgorithmError(f"no preset {name!r}{nearest(name, PRESETS)}; there are {', '.join(PRESETS)}")
    return PRESETS[name]


def reward_with_kl(rewards: torch.Tensor, kl: torch.Tensor, mask: torch.Tensor, coefficient: float) -> torch.Tensor:
    """Sequence rewards [B] less ``coefficient`` times the sum of the KL estimate [B, T] over true positions, a
    constant."""
    _check.floating(rewards=rewards, kl=kl)
    _check.not_negative(coefficient=coefficient)
    _check.ndim(1, "[B]", rewards=rewards)
    _check.same_shape(kl=kl, mask=mask)
    if kl.shape[0] != rewards.shape[0]:
        raise AlgorithmError(f"kl has {kl.shape[0]} rows for {rewards.shape[0]} rewards")
    total = torch.where(_check.boolean(mask), kl.detach(), 0.0).sum(1)
    return rewards - coefficient * total
