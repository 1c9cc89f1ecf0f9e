"""Config group ``algorithm``: what is computed from the scored samples of a step. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rlinf_reasoning.conf.algorithm_checks import check_algorithm

AGGREGATIONS = ("token_mean", "sequence_mean_of_token_means", "sequence_mean_of_token_sums", "constant")


def _key(default: Any, text: str, **limits: Any) -> Any:
    """A dataclass field with its help text and limits."""
    return field(default=default, metadata={"help": text, **limits})


@dataclass
class Algorithm:
    """GRPO, and what all algorithms have. ``advantage`` and ``loss`` are names of rlinf-algos or of a plugin."""

    name: str = _key("grpo", "what the choice is called in messages")
    group_size: int = _key(8, "responses per prompt", min=1)
    advantage: str = _key("group", "advantage by name: group, dr_grpo, rloo, pass_at_k, gae, or a plugin's")
    advantage_options: dict[str, Any] = field(
        default_factory=dict,
        metadata={"help": "further options of the advantage, such as k of pass_at_k", "entry": "OPTION"},
    )
    normalise_std: bool = _key(True, "divide advantages by the group's standard deviation")
    loss: str = _key("ppo", "loss by name: ppo, dapo, gspo, cispo, decoupled_ppo, policy_gradient, or a plugin's")
    loss_options: dict[str, Any] = field(
        default_factory=dict,
        metadata={"help": "further options of the loss, such as the clip widths of gspo and cispo", "entry": "OPTION"},
    )
    clip_low: float = _key(0.2, "lower clip width of the ratio of loss ppo, dapo, decoupled_ppo", min=0.0, max=1.0)
    clip_high: float = _key(0.2, "upper clip width of the importance ratio", min=0.0)
    dual_clip: float | None = _key(None, "bound of the ratio for negative advantages; null: none", min=1.0)
    aggregation: str = _key("token_mean", "how token losses become one number", choices=AGGREGATIONS)
    divisor: float | None = _key(None, "what aggregation=constant divides each response's sum by", min=1.0e-6)
    kl_coef: float = _key(0.0, "weight of the KL to the policy after the warm start; 0: no reference", min=0.0)
    kl_kind: str = _key("k3", "estimator of that KL; k1 only in the reward", choices=("k1", "k2", "k3"))
    kl_in: str = _key("loss", "where the KL goes", choices=("loss", "reward"))
    entropy_coef: float = _key(0.0, "weight of the entropy bonus", min=0.0)
    minibatches: int = _key(2, "optimizer steps per pass over a batch; 1 lets whole groups stream into it", min=1)
    epochs: int = _key(1, "passes over a batch", min=1)
    max_staleness: int = _key(0, "updates that the sampling policy may be behind; 0: on-policy", min=0)
    old_logprobs: str = _key(
        "rollout",
        "what the ratio is taken against: the rollout engine's own log-probs, or the trainer's before the update",
        choices=("rollout", "recompute"),
    )
    correction: str = _key(
        "none",
        "weights for engine against trainer: none, tis (truncated), mask (left out)",
        choices=("none", "tis", "mask"),
    )
    correction_cap: float = _key(2.0, "largest such weight; mask leaves out those outside [1/cap, cap]", min=1.0e-6)
    behaviour_cap: float = _key(5.0, "largest weight trainer / behaviour of loss=decoupled_ppo", min=1.0e-6)
    overlong_cache: int = _key(0, "tokens before the limit in which the penalty grows; 0: no penalty", min=0)
    overlong_penalty: float = _key(1.0, "penalty of a response that reaches the limit", min=0.0)
    overlong_filter: bool = _key(False, "leave responses that the limit cut out of training")

    def validate(self, root: Any) -> list[str]:
        return check_algorithm(self, root)


@dataclass
class Dapo(Algorithm):
    """DAPO: clip-higher, token mean, dynamic sampling."""

    name: str = _key("dapo", "what the choice is called in messages")
    loss: str = _key("dapo", "loss by name")
    clip_high: float = _key(0.28, "upper clip width of the importance ratio", min=0.0)
    dynamic_sampling: bool = _key(True, "draw new prompts for groups whose rewards are all equal")
    max_refills: int = _key(4, "rounds of new prompts in a step", min=0)
    on_shortage: str = _key(
        "train", "when groups are missing after them: train with fewer, or stop the run", choices=("train", "fail")
    )


@dataclass
class Ppo(Algorithm):
    """PPO with a critic: advantages per token by GAE."""

    name: str = _key("ppo", "what the choice is called in messages")
    group_size: int = _key(4, "responses per prompt", min=1)
    advantage: str = _key("gae", "advantage by name")
    gamma: float = _key(1.0, "discount per token", min=0.0, max=1.0)
    lam: float = _key(1.0, "lambda of GAE", min=0.0, max=1.0)
    whiten: bool = _key(True, "whiten advantages over the batch, which then must be whole")
    value_clip: float | None = _key(0.2, "how far a value may move in an update; null: no bound", min=1.0e-6)
    value_loss: str = _key("square", "loss of the critic", choices=("square", "huber"))
    critic_warmup_steps: int = _key(0, "first steps in which the critic alone learns", min=0)
    bootstrap_truncated: bool = _key(False, "a response that the limit cut goes on with the critic's value, not with 0")


@dataclass
class AsyncPpo(Algorithm):
    """Decoupled PPO for samples of older policies."""

    name: str = _key("async_ppo", "what the choice is called in messages")
    loss: str = _key("decoupled_ppo", "loss by name")
    max_staleness: int = _key(1, "updates that the sampling policy may be behind; 0: on-policy", min=0)
    old_logprobs: str = _key("recompute", "policy that the ratio is taken against", choices=("rollout", "recompute"))


SCHEMAS: dict[str, type] = {
    "algorithm/grpo": Algorithm,
    "algorithm/dapo": Dapo,
    "algorithm/ppo": Ppo,
    "algorithm/async_ppo": AsyncPpo,
}
