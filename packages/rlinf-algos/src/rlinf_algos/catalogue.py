"""The built-in table: names, options, what each needs, and the function behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from rlinf_algos import _check, entropy, options, policy_losses, preference, returns, value_losses
from rlinf_algos import advantages as adv
from rlinf_algos import kl as kl_module
from rlinf_algos.aggregation import LossSum
from rlinf_algos.composition import Advantage, AdvantageInputs, Advantages, Loss, LossInputs, as_dict
from rlinf_algos.errors import AlgorithmError
from rlinf_algos.masking import whiten


def _loss(function: Callable[..., LossSum], opts: type[Any], source: str, *inputs: str, **renamed: str) -> Loss:
    """A loss whose function takes ``inputs`` by their own names, ``renamed`` (argument=input), ``mask``, segments and
    weights."""

    def compute(given: LossInputs, chosen: Any) -> LossSum:
        arguments = {name: getattr(given, name) for name in inputs}
        arguments |= {argument: getattr(given, name) for argument, name in renamed.items()}
        return function(**arguments, mask=given.mask, segments=given.segments, weights=given.weights, **as_dict(chosen))

    return Loss(compute, opts, (*inputs, *renamed.values(), "mask"), source)


def _no_weights(given: LossInputs, name: str) -> None:
    if given.weights is not None:
        raise AlgorithmError(f"{name} takes no weights: a rollout correction belongs to the policy loss")


def _value(given: LossInputs, chosen: options.Value) -> LossSum:
    _no_weights(given, "the value loss")
    old = given.old_values if chosen.clip is not None else None
    if chosen.clip is not None and old is None:
        raise AlgorithmError("clip needs old_values in LossInputs")
    return value_losses.value_loss(
        _given(given.values),
        _given(given.returns),
        _given(given.mask),
        old_values=old,
        segments=given.segments,
        **as_dict(chosen),
    )


def _kl(given: LossInputs, chosen: options.KL) -> LossSum:
    _no_weights(given, "the KL loss")
    if chosen.off_policy and given.behaviour_logprobs is None:
        raise AlgorithmError("off_policy needs behaviour_logprobs in LossInputs")
    return kl_module.kl_loss(
        _given(given.logprobs),
        _given(given.ref_logprobs),
        _given(given.mask),
        kind=chosen.kind,
        straight_through=chosen.straight_through,
        behaviour_logprobs=given.behaviour_logprobs if chosen.off_policy else None,
        aggregation=chosen.aggregation,
        divisor=chosen.divisor,
        segments=given.segments,
    )


def _entropy(given: LossInputs, chosen: options.Entropy) -> LossSum:
    _no_weights(given, "the entropy loss")
    return entropy.entropy_loss(_given(given.entropy), _given(given.mask), segments=given.segments, **as_dict(chosen))


def _dpo(given: LossInputs, chosen: options.DPO) -> LossSum:
    _no_weights(given, "DPO")
    return preference.dpo_loss(
        _given(given.logprobs),
        _given(given.rejected_logprobs),
        _given(given.ref_logprobs),
        _given(given.rejected_ref_logprobs),
        _given(given.mask),
        _given(given.rejected_mask),
        **as_dict(chosen),
    )


def _given(tensor: Tensor | None) -> Tensor:
    assert tensor is not None  # `needs` has been checked
    return tensor


_DPO_NEEDS = ("logprobs", "mask", "ref_logprobs", "rejected_logprobs", "rejected_ref_logprobs", "rejected_mask")
_RATIO = ("logprobs", "old_logprobs", "advantages")

PPO = _loss(policy_losses.ppo_clip_loss, options.PPO, "arXiv 1707.06347", *_RATIO)
DAPO = _loss(policy_losses.ppo_clip_loss, options.DAPO, "arXiv 2503.14476", *_RATIO)
GSPO = _loss(policy_losses.gspo_loss, options.GSPO, "arXiv 2507.18071", *_RATIO)
CISPO = _loss(policy_losses.cispo_loss, options.CISPO, "arXiv 2506.13585", *_RATIO)
DECOUPLED_PPO = _loss(
    policy_losses.decoupled_ppo_loss,
    options.DecoupledPPO,
    "arXiv 2110.00641",
    "logprobs",
    "behaviour_logprobs",
    "advantages",
    proximal_logprobs="old_logprobs",
)
POLICY_GRADIENT = _loss(
    policy_losses.policy_gradient_loss, options.PolicyGradient, "Williams 1992", "logprobs", "advantages"
)
SFT = _loss(policy_losses.sft_loss, options.SFT, "maximum likelihood", "logprobs")
DPO = Loss(_dpo, options.DPO, _DPO_NEEDS, "arXiv 2305.18290")
VALUE = Loss(_value, options.Value, ("values", "returns", "mask"), "arXiv 1707.06347")
KL = Loss(_kl, options.KL, ("logprobs", "ref_logprobs", "mask"), "Schulman 2020")
ENTROPY = Loss(_entropy, options.Entropy, ("entropy", "mask"), "Williams and Peng 1991")


def _grouped(function: Callable[..., Tensor], opts: type[Any], source: str, *inputs: str) -> Advantage:
    """An advantage whose function takes ``inputs`` by name, and ``valid``."""

    def compute(given: AdvantageInputs, chosen: Any) -> Advantages:
        arguments = {name: getattr(given, name) for name in inputs}
        return Advantages(function(**arguments, valid=_valid(given), **as_dict(chosen)))

    return Advantage(compute, opts, inputs, source)


def _valid(given: AdvantageInputs) -> Tensor | None:
    """``valid``, without the samples that ``mask`` (where it is given) leaves no token of."""
    return given.valid if given.mask is None else adv.valid_rows(_given(given.rewards), given.mask, given.valid)


def _valid_mask(mask: Tensor, valid: Tensor | None) -> Tensor:
    """The mask [B, T] without the samples that ``valid`` [B] leaves out."""
    mask = _check.boolean(mask)
    if valid is None:
        return mask
    _check.shape(mask.shape[:1], "[B]", valid=valid)
    return mask & _check.boolean(valid, "valid")[:, None]


def _reinforce_pp(given: AdvantageInputs, chosen: options.ReinforcePP) -> Advantages:
    rewards, mask = _given(given.rewards), _given(given.mask)
    mask = _valid_mask(mask, given.valid)
    result = returns.reinforce_pp_advantage(rewards, mask, kl=given.kl, ranks=given.ranks, **as_dict(chosen))
    return Advantages(result)


def _reinforce_pp_baseline(given: AdvantageInputs, chosen: options.ReinforcePPBaseline) -> Advantages:
    assert given.groups is not None
    result = adv.reinforce_pp_baseline_advantage(
        _given(given.rewards),
        given.groups,
        _given(given.mask),
        valid=given.valid,
        ranks=given.ranks,
        **as_dict(chosen),
    )
    return Advantages(result)


def _gae(given: AdvantageInputs, chosen: options.GAE) -> Advantages:
    mask = _given(given.mask)
    mask = _valid_mask(mask, given.valid)
    advantages, targets = returns.gae(
        _given(given.rewards),
        _given(given.values),
        mask,
        gamma=chosen.gamma,
        lam=chosen.lam,
        terminated=given.terminated,
        truncated=given.truncated,
        final_values=given.final_values,
        last_values=given.last_values,
    )
    return Advantages(_whitened(advantages, mask, given, chosen), targets)


def _turn_gae(given: AdvantageInputs, chosen: options.GAE) -> Advantages:
    mask, turns = _given(given.mask), _given(given.turns)
    mask = _valid_mask(mask, given.valid)
    advantages, targets = returns.turn_gae(
        _given(given.rewards), _given(given.values), mask, turns, gamma=chosen.gamma, lam=chosen.lam
    )
    return Advantages(_whitened(advantages, mask, given, chosen), targets)


def _whitened(advantages: Tensor, mask: Tensor, given: AdvantageInputs, chosen: options.GAE) -> Tensor:
    return whiten(advantages, mask, group=given.ranks) if chosen.whiten else advantages


_BY_GROUP = ("rewards", "groups")
GROUP = _grouped(adv.group_advantage, options.Group, "arXiv 2402.03300", *_BY_GROUP)
DR_GRPO = _grouped(adv.group_advantage, options.DrGRPO, "arXiv 2503.20783", *_BY_GROUP)
RLOO = _grouped(adv.rloo_advantage, options.RLOO, "arXiv 2402.14740", *_BY_GROUP)
PASS_AT_K = _grouped(adv.pass_at_k_advantage, options.PassAtK, "arXiv 2508.10751", *_BY_GROUP)
REMAX = _grouped(adv.remax_advantage, options.ReMax, "arXiv 2310.10505", "rewards", "greedy_rewards")
GIGPO = _grouped(
    adv.gigpo_advantage,
    options.GiGPO,
    "arXiv 2505.10978",
    "rewards",
    "returns",
    "groups",
    "trajectories",
    "anchors",
)
REINFORCE_PP = Advantage(_reinforce_pp, options.ReinforcePP, ("rewards", "mask"), "arXiv 2501.03262")
REINFORCE_PP_BASELINE = Advantage(
    _reinforce_pp_baseline, options.ReinforcePPBaseline, ("rewards", "groups", "mask"), "arXiv 2501.03262"
)
GAE = Advantage(_gae, options.GAE, ("rewards", "values", "mask"), "arXiv 1506.02438")
TURN_GAE = Advantage(_turn_gae, options.GAE, ("rewards", "values", "mask", "turns"), "arXiv 1506.02438")


def _trajectory(given: AdvantageInputs, chosen: options.Group) -> Advantages:
    assert given.groups is not None and given.trajectories is not None
    result = adv.trajectory_group_advantage(
        _given(given.rewards),
        given.groups,
        given.trajectories,
        normalise_std=chosen.normalise_std,
        eps=chosen.eps,
        valid=_valid(given),
    )
    return Advantages(result)


TRAJECTORY_GROUP = Advantage(
    _trajectory, options.Group, ("rewards", "groups", "trajectories"), "arXiv 2402.03300, per trajectory"
)

LOSS_TABLE: dict[str, Loss] = {
    "ppo": PPO,
    "dapo": DAPO,
    "gspo": GSPO,
    "cispo": CISPO,
    "decoupled_ppo": DECOUPLED_PPO,
    "policy_gradient": POLICY_GRADIENT,
    "sft": SFT,
    "dpo": DPO,
    "value": VALUE,
    "kl": KL,
    "entropy": ENTROPY,
}
ADVANTAGE_TABLE: dict[str, Advantage] = {
    "group": GROUP,
    "dr_grpo": DR_GRPO,
    "rloo": RLOO,
    "pass_at_k": PASS_AT_K,
    "remax": REMAX,
    "reinforce_pp": REINFORCE_PP,
    "reinforce_pp_baseline": REINFORCE_PP_BASELINE,
    "gae": GAE,
    "turn_gae": TURN_GAE,
    "trajectory_group": TRAJECTORY_GROUP,
    "gigpo": GIGPO,
}
