"""Config group ``algorithm``: what is learnt from the trajectories of a step. Standard library only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rlinf_core.registry import check_name

LEVELS = ("token", "action", "chunk")


def _key(default: Any, text: str, **limits: Any) -> Any:
    """A dataclass field with its help text and limits."""
    return field(default=default, metadata={"help": text, **limits})


@dataclass
class Algorithm:
    """What all algorithms have. ``advantage`` and ``loss`` are names of rlinf-algos or of a plugin."""

    name: str = _key("???", "what the choice is called in messages")
    advantage: str = _key("???", "advantage by name")
    advantage_options: dict[str, Any] = field(
        default_factory=dict,
        metadata={"help": "further options of the advantage", "entry": "OPTION"},
    )
    loss: str = _key("ppo", "loss by name: ppo, dapo, gspo, cispo, policy_gradient, or a plugin's")
    loss_options: dict[str, Any] = field(
        default_factory=dict,
        metadata={"help": "further options of the loss, such as the clip widths of gspo and cispo", "entry": "OPTION"},
    )
    clip_low: float = _key(0.2, "lower clip width of the ratio of loss ppo, dapo", min=0.0, max=1.0)
    clip_high: float = _key(0.2, "upper clip width of that ratio", min=0.0)
    dual_clip: float | None = _key(None, "bound of the ratio for negative advantages; null: none", min=1.0)
    logprob_level: str = _key(
        "action", "what has one ratio: a token (or number of an action), an action, or a chunk", choices=LEVELS
    )
    length_normalised: bool = _key(False, "each episode weighs the same in the policy's loss, however long it is")
    entropy_coef: float = _key(0.0, "weight of the entropy bonus", min=0.0)
    minibatch_size: int = _key(256, "decisions of one optimizer step, over all ranks", min=1)
    epochs: int = _key(4, "passes over the decisions of a step", min=1)
    target_kl: float | None = _key(
        None, "stop a step's update when a minibatch is 1.5 times as far from the old policy; null: never", min=1.0e-9
    )


@dataclass
class Ppo(Algorithm):
    """PPO with a critic: advantages over time."""

    name: str = _key("ppo", "what the choice is called in messages")
    advantage: str = _key("gae", "advantage by name: gae, or a plugin's that works over time")
    gamma: float = _key(0.99, "discount per action, or per chunk where rewards are those of chunks", min=0.0, max=1.0)
    lam: float = _key(0.95, "lambda of GAE", min=0.0, max=1.0)
    reward_level: str = _key(
        "action", "what one time step is: an action, or a chunk with the sum of its rewards", choices=LEVELS[1:]
    )
    whiten: bool = _key(True, "advantages with mean 0 and standard deviation 1 over all decisions of a step")
    scale_rewards: bool = _key(False, "divide rewards by the running standard deviation of discounted returns")
    value_coef: float = _key(0.5, "weight of the critic's loss", min=0.0)
    value_clip: float | None = _key(None, "how far a value may move in an update; null: no bound", min=1.0e-6)
    value_loss: str = _key("square", "the critic's loss", choices=("square", "huber"))

    def validate(self, root: Any) -> list[str]:
        return [*check_algorithm(self, root), *check_ppo(self, root)]


@dataclass
class Grpo(Algorithm):
    """GRPO: advantages of episodes among those that begin in the same state."""

    name: str = _key("grpo", "what the choice is called in messages")
    advantage: str = _key("group", "advantage by name: group, dr_grpo, rloo, pass_at_k, or a plugin's")
    group_size: int = _key(4, "environments that begin in the same state", min=2)
    score: str = _key(
        "return",
        "what is compared: the episode's return or success",
        choices=("return", "success_once", "success_at_end"),
    )
    success_filter: bool = _key(False, "leave out groups in which all episodes failed, or all succeeded")
    normalise_std: bool = _key(True, "divide advantages by the group's standard deviation")

    def validate(self, root: Any) -> list[str]:
        return [*check_algorithm(self, root), *check_grpo(self, root)]


OTHER_LOSSES = {
    "decoupled_ppo": "needs a policy between the acting one and the new one",
    "sft": "learns from given responses",
    "dpo": "learns from pairs",
    "value": "is the critic's",
    "kl": "needs a reference policy",
    "entropy": "is set by algorithm.entropy_coef",
}
CLIPPED = ("ppo", "dapo")
IN_GROUPS = ("group", "dr_grpo", "rloo", "pass_at_k")
OTHER_ADVANTAGES = {
    "remax": "needs the return of a greedy episode from each state",
    "reinforce_pp": "whitens on one rank",
    "reinforce_pp_baseline": "whitens on one rank",
    "turn_gae": "needs turns of a conversation",
    "trajectory_group": "needs episodes in several parts",
    "gigpo": "needs episodes in several parts",
}


def check_algorithm(algorithm: Any, root: Any) -> Iterator[str]:
    """What is wrong in ``algorithm`` by itself, for PPO and GRPO."""
    if algorithm.loss in OTHER_LOSSES:
        yield f"algorithm.loss: {algorithm.loss!r} {OTHER_LOSSES[algorithm.loss]}; choose another"
    else:
        yield from check_name("rlinf.losses", algorithm.loss, "algorithm.loss")
    if algorithm.advantage in OTHER_ADVANTAGES:
        yield f"algorithm.advantage: {algorithm.advantage!r} {OTHER_ADVANTAGES[algorithm.advantage]}; choose another"
    else:
        yield from check_name("rlinf.advantages", algorithm.advantage, "algorithm.advantage")
    if algorithm.loss not in CLIPPED:
        if algorithm.dual_clip is not None:
            yield f"algorithm.dual_clip: not read by loss={algorithm.loss}; leave it at null"
        if (algorithm.clip_low, algorithm.clip_high) != (0.2, 0.2):
            yield (
                f"algorithm.clip_low, algorithm.clip_high: read by {', '.join(CLIPPED)} alone; for "
                f"loss={algorithm.loss} set algorithm.loss_options, or leave them at 0.2"
            )
    elif algorithm.dual_clip is not None and algorithm.dual_clip <= 1.0 + algorithm.clip_high:
        yield (
            f"algorithm.dual_clip: {algorithm.dual_clip} must be above 1 + algorithm.clip_high = "
            f"{1.0 + algorithm.clip_high:g}; 3 is usual"
        )
    if algorithm.loss == "gspo" and algorithm.length_normalised:
        yield "algorithm.length_normalised: loss=gspo has one ratio per decision already; set it to false"


def check_ppo(algorithm: Any, root: Any) -> Iterator[str]:
    """What is wrong with the critic, or with levels that do not go together."""
    if algorithm.advantage in IN_GROUPS:
        yield f"algorithm.advantage: {algorithm.advantage!r} compares episodes in groups; use algorithm=embodied_grpo"
    level = algorithm.reward_level
    values = root.model.value_level if "value_level" in root.model else level  # a policy's own schema may not say
    if values == "none":
        yield (
            f"model.value_level: none, and algorithm=embodied_ppo trains a critic; use {level}, or "
            "algorithm=embodied_grpo"
        )
    elif values != level:
        yield (
            f"algorithm.reward_level: {level}, but model.value_level={values}: advantages are rewards against values, "
            f"so the two must be equal; set algorithm.reward_level={values}, or model.value_level={level} where the "
            "model has it"
        )
    if level == "action" and algorithm.logprob_level == "chunk":
        yield (
            "algorithm.logprob_level: chunk has one ratio for all actions of a decision, and "
            "algorithm.reward_level=action gives each its own advantage; use action or token, or "
            "algorithm.reward_level=chunk with model.value_level=chunk"
        )


def check_grpo(algorithm: Any, root: Any) -> Iterator[str]:
    """What is wrong with groups, or with a critic that nobody trains."""
    if algorithm.advantage == "gae":
        yield "algorithm.advantage: gae needs a critic; use algorithm=embodied_ppo"
    if "value_level" in root.model and root.model.value_level != "none":
        yield (
            f"model.value_level: {root.model.value_level}, and algorithm=embodied_grpo does not train a critic; use "
            "model.value_level=none"
        )
    if "k" not in algorithm.advantage_options and algorithm.advantage == "pass_at_k":
        yield "algorithm.advantage_options.k: pass_at_k needs it; give a number from 1 to algorithm.group_size"
    if not algorithm.normalise_std and algorithm.advantage in ("rloo", "pass_at_k"):
        yield f"algorithm.normalise_std: not read by advantage={algorithm.advantage}; leave it at true"
    if "num_envs" in root and root.num_envs % algorithm.group_size:
        size = algorithm.group_size
        yield (
            f"num_envs: {root.num_envs} is not a multiple of algorithm.group_size={size}; try "
            f"{max(size, root.num_envs // size * size)}"
        )


SCHEMAS: dict[str, type] = {"algorithm/embodied_ppo": Ppo, "algorithm/embodied_grpo": Grpo}
