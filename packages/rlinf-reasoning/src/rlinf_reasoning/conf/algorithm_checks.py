"""Impossible combinations of ``algorithm`` keys. Messages are ``key: what is wrong, what would be right``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlinf_core.registry import check_name

# Advantages and losses of rlinf-algos that a recipe here cannot feed, and why.
OTHER_ADVANTAGES = {
    "remax": "needs the reward of a greedy response to each prompt, which is not drawn",
    "reinforce_pp": "whitens over the tokens of the whole batch on one rank",
    "reinforce_pp_baseline": "whitens over the tokens of the whole batch on one rank",
    "turn_gae": "needs turns, and a response is one turn",
    "trajectory_group": "needs trajectories of several turns",
    "gigpo": "needs trajectories of several turns",
}
OTHER_LOSSES = {
    "sft": "learns from given responses",
    "dpo": "learns from pairs",
    "value": "is the critic's",
    "kl": "is set by algorithm.kl_coef",
    "entropy": "is set by algorithm.entropy_coef",
}
BY_GROUP = ("group", "dr_grpo", "rloo", "pass_at_k")
CLIPPED = ("ppo", "dapo", "decoupled_ppo")


def check_algorithm(algorithm: Any, root: Any) -> list[str]:
    """What is wrong in ``algorithm`` by itself, or with the sampling and the batch of ``root``."""
    return [*_names(algorithm), *_loss(algorithm), *_kl(algorithm), *_engine(algorithm), *_batch(algorithm, root)]


def _names(algorithm: Any) -> Iterator[str]:
    for key, others in (("advantage", OTHER_ADVANTAGES), ("loss", OTHER_LOSSES)):
        name = algorithm[key]
        if name in others:
            yield f"algorithm.{key}: {name!r} {others[name]}; choose another"
        else:
            yield from check_name(f"rlinf.{key}s".replace("losss", "losses"), name, f"algorithm.{key}")
    if algorithm.advantage in BY_GROUP and algorithm.group_size < 2:
        yield (
            f"algorithm.group_size: {algorithm.group_size} leaves no other response to compare with, every advantage "
            "would be 0; use at least 2"
        )
    if algorithm.advantage == "pass_at_k" and "k" not in algorithm.advantage_options:
        yield "algorithm.advantage_options.k: pass_at_k needs it; give a number from 1 to algorithm.group_size"
    gae = algorithm.advantage == "gae"
    if gae and "gamma" not in algorithm:
        yield "algorithm.advantage: gae has keys of its own (gamma, lam, …); choose it with algorithm=ppo"
    if not gae and "gamma" in algorithm:
        yield (
            f"algorithm.advantage: {algorithm.advantage!r} reads no values, and algorithm=ppo trains a critic; "
            "use gae, or algorithm=grpo"
        )
    if not algorithm.normalise_std and algorithm.advantage in ("rloo", "pass_at_k", "gae"):
        yield f"algorithm.normalise_std: not read by advantage={algorithm.advantage}; leave it at true"


def _loss(algorithm: Any) -> Iterator[str]:
    bound, loss = algorithm.dual_clip, algorithm.loss
    if loss not in CLIPPED and (algorithm.clip_low != 0.2 or algorithm.clip_high not in (0.2, 0.28)):
        yield (
            f"algorithm.clip_low, algorithm.clip_high: read by {', '.join(CLIPPED)} alone; for loss={loss} set "
            "algorithm.loss_options, or leave them as they are"
        )
    if bound is not None and loss not in CLIPPED:
        yield f"algorithm.dual_clip: {bound} is not read by loss={loss}; leave it at null"
    elif bound is not None and bound <= 1.0 + algorithm.clip_high:
        yield (
            f"algorithm.dual_clip: {bound} must be above 1 + algorithm.clip_high = {1.0 + algorithm.clip_high:g}; "
            "3 is usual"
        )
    constant = algorithm.aggregation == "constant"
    if constant and algorithm.divisor is None:
        yield "algorithm.divisor: aggregation=constant needs it; the response limit is usual"
    if not constant and algorithm.divisor is not None:
        yield f"algorithm.divisor: read by aggregation=constant alone, not by {algorithm.aggregation}; set it to null"


def _kl(algorithm: Any) -> Iterator[str]:
    if algorithm.kl_coef and algorithm.kl_kind == "k1" and algorithm.kl_in == "loss":
        yield (
            "algorithm.kl_kind: the gradient of k1 in the loss is zero in expectation; use k2 or k3, or "
            "algorithm.kl_in=reward"
        )


def _engine(algorithm: Any) -> Iterator[str]:
    recompute, decoupled = algorithm.old_logprobs == "recompute", algorithm.loss == "decoupled_ppo"
    if decoupled and not recompute:
        yield (
            "algorithm.old_logprobs: loss=decoupled_ppo clips against the trainer's policy before the update; "
            "use recompute"
        )
    if algorithm.correction == "none":
        return
    if decoupled:
        yield (
            "algorithm.correction: loss=decoupled_ppo corrects for the sampling policy itself (behaviour_cap); use none"
        )
    elif not recompute:
        yield (
            f"algorithm.correction: with old_logprobs=rollout the ratio covers the engine's differences already, "
            f"{algorithm.correction} would count them twice; use algorithm.old_logprobs=recompute"
        )
    if algorithm.correction == "mask" and algorithm.correction_cap < 1.0:
        cap = algorithm.correction_cap
        yield f"algorithm.correction_cap: {cap} leaves nothing between 1/cap and cap; give at least 1"


def _batch(algorithm: Any, root: Any) -> Iterator[str]:
    limit = root.sampling.max_new_tokens
    if algorithm.overlong_cache > limit:
        yield (
            f"algorithm.overlong_cache: {algorithm.overlong_cache} is more than a response may have "
            f"(sampling.max_new_tokens={limit})"
        )
    if root.prompts_per_step % algorithm.minibatches:
        yield (
            f"prompts_per_step: {root.prompts_per_step} is not a multiple of algorithm.minibatches="
            f"{algorithm.minibatches}; try {_multiple(root.prompts_per_step, algorithm.minibatches)}"
        )


def check_flow(root: Any, recipes: Mapping[str, str], *, critic: bool = False, sampler: bool = False) -> list[str]:
    """What the recipe's program can't do with the chosen algorithm. ``recipes`` names the ones that can.

    ``critic``, ``sampler``: whether the program has a critic, and a sampler that draws prompts again.
    """
    algorithm = root.algorithm
    wants_critic = algorithm.advantage == "gae"
    wants_sampler = "dynamic_sampling" in algorithm and algorithm.dynamic_sampling
    problems = []
    if wants_critic and not critic:
        problems.append(f"algorithm.advantage: gae needs a critic, which this recipe has not; run {recipes['critic']}")
    if critic and not wants_critic:
        problems.append(
            f"algorithm.advantage: {algorithm.advantage!r} reads no values, and this recipe trains a critic; "
            f"use algorithm=ppo, or run {recipes['plain']}"
        )
    if wants_sampler and not sampler:
        problems.append(
            "algorithm.dynamic_sampling: this recipe draws each prompt once; run "
            f"{recipes['sampler']}, or set algorithm.dynamic_sampling=false"
        )
    if sampler and not wants_sampler:
        problems.append(
            f"algorithm: without dynamic sampling this is the program of {recipes['plain']}; run that, or choose "
            "algorithm=dapo with algorithm.dynamic_sampling=true"
        )
    if wants_sampler and root.reward.on_error == "drop":
        problems.append(
            "reward.on_error: a dropped response never comes back to the sampler, which would wait for a group that is "
            "dropped whole; use zero or fail"
        )
    if wants_sampler and root.task.too_long == "drop":
        problems.append(
            "task.too_long: a dropped prompt never comes back to the sampler, which would wait for it; use refuse or "
            "truncate"
        )
    return problems


def check_critic(critic: Any, trainer: Any, root: Any) -> list[str]:
    """The keys of ``critic`` are keys of ``trainer`` with other values, and as possible."""
    from rlinf_core.config import Config
    from rlinf_core.config.schema import slots_of
    from rlinf_core.config.sources import schema_of
    from rlinf_core.errors import nearest

    problems = []
    values, known = critic.to_dict(), trainer.to_dict()
    for key, value in values.items():
        if key == "name" or key not in known:
            hint = "; the critic has the backend of trainer" if key == "name" else nearest(key, known)
            problems.append(
                f"critic.{key}: no key of the critic{hint}; keys there: {', '.join(k for k in known if k != 'name')}"
            )
        elif not _same_kind(value, known[key]):
            problems.append(f"critic.{key}: {value!r} is a {type(value).__name__}; trainer.{key} is {known[key]!r}")
    schema = schema_of(f"trainer/{trainer.name}")
    if problems or schema is None:
        return problems
    for key, slot in slots_of(schema).items():
        value, low, high = values.get(key), slot.metadata.get("min"), slot.metadata.get("max")
        choices = slot.metadata.get("choices")
        if value is None:
            continue
        if choices is not None and value not in choices:
            problems.append(f"critic.{key}={value}: must be one of {', '.join(map(str, choices))}")
        elif low is not None and not value >= low:
            problems.append(f"critic.{key}={value}: must be at least {low}")
        elif high is not None and not value <= high:
            problems.append(f"critic.{key}={value}: must be at most {high}")
    hook = getattr(schema, "validate", None)
    if not problems and callable(hook):
        own = set(hook(Config(known), root))  # what is wrong with the trainer is said of the trainer
        wrong = [text for text in hook(Config({**known, **values}), root) if text not in own]
        problems += [text.replace("trainer.", "critic.") for text in wrong]
    return problems


def _same_kind(value: Any, like: Any) -> bool:
    if like is None or value is None:
        return True
    if isinstance(like, bool) or isinstance(value, bool):
        return isinstance(like, bool) and isinstance(value, bool)
    if isinstance(like, float):
        return isinstance(value, int | float)
    return isinstance(value, type(like))


def _multiple(value: int, of: int) -> int:
    return max(of, value // of * of)
