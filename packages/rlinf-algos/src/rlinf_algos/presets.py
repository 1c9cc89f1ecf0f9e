"""Whole recipes by name: which advantage, loss, KL and aggregation a paper puts together, with its numbers.

A preset is data. ``note`` says what it reproduces and where it departs from the library's own defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any

import torch

from rlinf_algos import _check, composition
from rlinf_algos.aggregation import LossSum
from rlinf_algos.composition import AdvantageInputs, Advantages, LossInputs
from rlinf_algos.errors import AlgorithmError, nearest
from rlinf_algos.kl import KINDS
from rlinf_algos.masking import zero_masked


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """Advantage and loss by name with their options, and the terms added to the loss.

    ``kl_coefficient`` and ``entropy_coefficient`` of 0 leave the term out. ``kl_in`` is where the KL goes: ``loss``
    (needs ``ref_logprobs``), or ``reward``: ``compute_advantages`` then needs ``kl``, the estimate per token
    (``kl_penalty(..., preset.kl_kind)``), and subtracts ``kl_coefficient`` times it. Do not subtract it yourself.
    A preset cannot be changed; ``with_options`` makes another.
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
        _check.choice("kl_kind", self.kl_kind, KINDS)
        _check.not_negative(kl_coefficient=self.kl_coefficient, entropy_coefficient=self.entropy_coefficient)
        if "kl_coefficient" in self.advantage_options:
            raise AlgorithmError("kl_coefficient belongs to the preset itself, not to its advantage_options")
        for name in ("advantage_options", "loss_options"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    def __reduce__(self) -> tuple[Any, ...]:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return _remade, ({k: dict(v) if isinstance(v, MappingProxyType) else v for k, v in values.items()},)

    def compute_advantages(self, inputs: AdvantageInputs) -> Advantages:
        """The preset's advantage of ``inputs``, with the KL in the reward where ``kl_in`` says so."""
        algorithm = composition.advantage(self.advantage)
        if not (self.kl_coefficient and self.kl_in == "reward"):
            return algorithm(inputs, **self.advantage_options)
        if inputs.kl is None:
            raise AlgorithmError(
                f"preset {self.name!r} has the KL in the reward: give kl in AdvantageInputs, the estimate per token"
                f" (kl_penalty(..., {self.kl_kind!r})), or leave it out by with_options(kl_coefficient=0.0)"
            )
        if algorithm.options is not None and "kl_coefficient" in {f.name for f in fields(algorithm.options)}:
            return algorithm(inputs, **self.advantage_options, kl_coefficient=self.kl_coefficient)
        if inputs.rewards is None or inputs.mask is None:
            raise AlgorithmError(f"preset {self.name!r} has the KL in the reward: it needs rewards and mask as well")
        rewards = reward_with_kl(inputs.rewards, inputs.kl, inputs.mask, self.kl_coefficient)
        return algorithm(replace(inputs, rewards=rewards, kl=None), **self.advantage_options)

    def compute_loss(self, inputs: LossInputs) -> LossSum:
        """Policy loss, plus KL and entropy where their coefficients are not 0: one sum with one count."""
        total = composition.loss(self.loss)(inputs, **self.loss_options)
        terms = replace(inputs, weights=None)
        if self.kl_coefficient and self.kl_in == "loss":
            kl = composition.loss("kl")(terms, kind=self.kl_kind, **self._aggregation())
            total = total.plus(kl, self.kl_coefficient)
        if self.entropy_coefficient:
            entropy = composition.loss("entropy")(terms, **self._aggregation())
            total = total.plus(entropy, self.entropy_coefficient)
        return total

    def _aggregation(self) -> dict[str, Any]:
        """The aggregation of the policy loss, which the other terms share: theirs by default, where it has none."""
        options = composition.loss(self.loss).make_options(self.loss_options)
        values = options if isinstance(options, Mapping) else composition.as_dict(options)
        return {name: values[name] for name in ("aggregation", "divisor") if name in values}

    def with_options(
        self,
        *,
        advantage_options: Mapping[str, Any] | None = None,
        loss_options: Mapping[str, Any] | None = None,
        **changes: Any,
    ) -> Preset:
        """A copy with some options changed; they are checked at once."""
        known = [f.name for f in fields(self)]
        for name in changes:
            if name not in known:
                raise AlgorithmError(
                    f"a preset has no field {name!r}{nearest(name, known)}; it has {', '.join(known)}. Options of the"
                    " algorithms go into advantage_options and loss_options"
                )
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


def _remade(values: dict[str, Any]) -> Preset:
    """A preset from plain values: what a pickle or a copy holds (a read-only mapping cannot be pickled)."""
    return Preset(**values)


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
        note="PPO on tokens with gamma = lambda = 1 and no KL; clip 0.2. Advantages are whitened over the"
        " batch, as Open-Reasoner-Zero does: the whole batch is needed (advantage_options={'whiten': False} streams).",
        advantage="gae",
        loss="ppo",
        advantage_options={"gamma": 1.0, "lam": 1.0, "whiten": True},
    ),
    Preset(
        name="rloo",
        source="RLOO, arXiv 2402.14740",
        note="Leave-one-out baseline, plain policy gradient on whole sequences, k1 KL in the reward. The"
        " coefficient 0.03 is this library's: set your own.",
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
        kl_coefficient=0.01,
        kl_kind="k1",
        kl_in="reward",
    ),
    Preset(
        name="reinforce_pp_baseline",
        source="REINFORCE++, arXiv 2501.03262",
        note="Group mean as the baseline (whole groups on one rank), whitened over the batch; KL as a k2 loss, as the"
        " paper argues. The coefficient 0.001 is this library's.",
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
        note="Decoupled PPO for stale samples; clip 0.2. The weight pi_prox / pi_behav is clamped at 5, this library's"
        " number; AReaL drops tokens above its cap instead (rollout_correction(mode='mask') does). Advantages by"
        " group with its standard deviation, without a critic, are this library's choice too.",
        advantage="group",
        loss="decoupled_ppo",
    ),
)
PRESETS: Mapping[str, Preset] = MappingProxyType({p.name: p for p in _ALL})


def preset(name: str) -> Preset:
    """The preset of that name; an unknown one is refused with the nearest."""
    if name not in PRESETS:
        raise AlgorithmError(f"no preset {name!r}{nearest(name, PRESETS)}; there are {', '.join(PRESETS)}")
    return PRESETS[name]


def reward_with_kl(rewards: torch.Tensor, kl: torch.Tensor, mask: torch.Tensor, coefficient: float) -> torch.Tensor:
    """Rewards less ``coefficient`` times the KL estimate [B, T] at true positions, a constant.

    Rewards per sequence [B] lose the sum over the row, rewards per position [B, T] each its own.
    """
    _check.floating(rewards=rewards, kl=kl)
    _check.not_negative(coefficient=coefficient)
    _check.ndim((1, 2), "[B] or [B, T]", rewards=rewards)
    _check.same_shape(kl=kl, mask=mask)
    terms = zero_masked(kl.detach(), _check.boolean(mask))
    if rewards.ndim == 2:
        _check.same_shape(kl=kl, rewards=rewards)
        return rewards - coefficient * terms
    if kl.shape[0] != rewards.shape[0]:
        raise AlgorithmError(f"kl has {kl.shape[0]} rows for {rewards.shape[0]} rewards")
    return rewards - coefficient * terms.sum(1)
