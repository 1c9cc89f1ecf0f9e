"""One small dataclass of options per algorithm. Each checks itself when made; defaults are the papers'."""

from __future__ import annotations

from dataclasses import dataclass

from rlinf_algos import _check, kl, value_losses
from rlinf_algos.advantages import check_group_size
from rlinf_algos.aggregation import AGGREGATIONS, check_divisor
from rlinf_algos.errors import AlgorithmError
from rlinf_algos.policy_losses import check_clip


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregated:
    """How a loss per token becomes a sum and a count (see ``aggregate``)."""

    aggregation: str = "token_mean"
    divisor: float | None = None

    def __post_init__(self) -> None:
        _check.choice("aggregation", self.aggregation, AGGREGATIONS)
        check_divisor(self.aggregation, self.divisor)


@dataclass(frozen=True, slots=True, kw_only=True)
class PPO(Aggregated):
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None

    def __post_init__(self) -> None:
        Aggregated.__post_init__(self)
        check_clip(self.clip_low, self.clip_high, self.dual_clip)


@dataclass(frozen=True, slots=True, kw_only=True)
class DAPO(PPO):
    clip_high: float = 0.28


@dataclass(frozen=True, slots=True, kw_only=True)
class GSPO(Aggregated):
    clip_low: float = 3e-4
    clip_high: float = 4e-4
    aggregation: str = "sequence_mean_of_token_means"

    def __post_init__(self) -> None:
        Aggregated.__post_init__(self)
        check_clip(self.clip_low, self.clip_high)


@dataclass(frozen=True, slots=True, kw_only=True)
class CISPO(Aggregated):
    clip_low: float | None = None
    clip_high: float = 4.0

    def __post_init__(self) -> None:
        Aggregated.__post_init__(self)
        check_clip(0.0 if self.clip_low is None else self.clip_low, self.clip_high)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoupledPPO(PPO):
    behaviour_cap: float | None = 5.0

    def __post_init__(self) -> None:
        PPO.__post_init__(self)
        _check.positive(**_check.given(behaviour_cap=self.behaviour_cap))


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyGradient(Aggregated):
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class SFT(Aggregated):
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class DPO:
    beta: float = 0.1
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        _check.positive(beta=self.beta)
        _check.number(label_smoothing=self.label_smoothing)
        if not 0.0 <= self.label_smoothing < 0.5:
            raise AlgorithmError(f"label_smoothing must lie in [0, 0.5), got {self.label_smoothing}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Value(Aggregated):
    clip: float | None = None
    kind: str = "square"
    huber_delta: float = 1.0

    def __post_init__(self) -> None:
        Aggregated.__post_init__(self)
        _check.choice("kind", self.kind, value_losses.KINDS)
        _check.positive(huber_delta=self.huber_delta, **_check.given(clip=self.clip))


@dataclass(frozen=True, slots=True, kw_only=True)
class KL(Aggregated):
    kind: str = "k2"
    straight_through: bool = False
    off_policy: bool = False
    """Weigh each token by pi / behaviour, which keeps the gradient exact off-policy."""

    def __post_init__(self) -> None:
        Aggregated.__post_init__(self)
        _check.choice("kind", self.kind, kl.KINDS)
        _check.flag(straight_through=self.straight_through, off_policy=self.off_policy)
        if self.kind == "k1" and not self.straight_through:
            raise AlgorithmError("kind 'k1' cannot be a loss: its gradient is zero in expectation; use 'k2'")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entropy(Aggregated):
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Group-normalised advantage. ``group_size`` is the configured one, to be checked."""

    normalise_std: bool = True
    eps: float = 1e-6
    group_size: int | None = None

    def __post_init__(self) -> None:
        _check.not_negative(eps=self.eps)
        _check.flag(normalise_std=self.normalise_std)
        check_group_size(self.group_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrGRPO(Group):
    normalise_std: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RLOO:
    group_size: int | None = None

    def __post_init__(self) -> None:
        check_group_size(self.group_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReMax:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class ReinforcePP:
    kl_coefficient: float = 0.0
    gamma: float = 1.0
    eps: float = 1e-8

    def __post_init__(self) -> None:
        _check.not_negative(kl_coefficient=self.kl_coefficient, eps=self.eps)
        _check.unit(gamma=self.gamma)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReinforcePPBaseline:
    eps: float = 1e-8
    group_size: int | None = None

    def __post_init__(self) -> None:
        _check.not_negative(eps=self.eps)
        check_group_size(self.group_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassAtK:
    k: int
    threshold: float = 0.5
    group_size: int | None = None

    def __post_init__(self) -> None:
        check_group_size(self.group_size)
        _check.whole(k=self.k)
        _check.number(threshold=self.threshold)
        if self.k < 1 or (self.group_size is not None and self.k > self.group_size):
            raise AlgorithmError(f"k must lie in 1..group_size, got {self.k}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GAE:
    gamma: float = 1.0
    lam: float = 0.95
    whiten: bool = False
    """Whiten the advantages over the batch (and ``ranks``); needs the whole batch."""

    def __post_init__(self) -> None:
        _check.unit(gamma=self.gamma, lam=self.lam)
        _check.flag(whiten=self.whiten)


@dataclass(frozen=True, slots=True, kw_only=True)
class GiGPO:
    step_weight: float = 1.0
    normalise_std: bool = True
    eps: float = 1e-6

    def __post_init__(self) -> None:
        _check.not_negative(step_weight=self.step_weight, eps=self.eps)
        _check.flag(normalise_std=self.normalise_std)
