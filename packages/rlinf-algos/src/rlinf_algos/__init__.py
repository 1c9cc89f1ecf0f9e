"""Reinforcement-learning algorithms as pure functions on tensors. Needs torch alone.

Functions are named as in their papers and work on padded [B, T] tensors with a mask. A loss is a sum and a count
(``LossSum``). By
name: ``loss("gspo")``, ``advantage("rloo")``, ``preset("dapo")``.
"""

from rlinf_algos.advantages import (
    dr_grpo_advantage,
    gigpo_advantage,
    group_advantage,
    pass_at_k,
    pass_at_k_advantage,
    reinforce_pp_baseline_advantage,
    remax_advantage,
    rloo_advantage,
    trajectory_group_advantage,
    turn_group_advantage,
)
from rlinf_algos.aggregation import AGGREGATIONS, LossSum, aggregate
from rlinf_algos.balancing import first_fit_decreasing, imbalance, karmarkar_karp, micro_batches
from rlinf_algos.composition import (
    Advantage,
    AdvantageInputs,
    Advantages,
    Algorithm,
    Loss,
    LossInputs,
    advantage,
    advantage_names,
    loss,
    loss_names,
)
from rlinf_algos.correction import Correction, effective_sample_size, rollout_correction, rollout_metrics
from rlinf_algos.entropy import EntropyControl, KLControl, entropy_loss
from rlinf_algos.errors import AlgorithmError, NoSignalError
from rlinf_algos.filters import (
    DynamicSampling,
    RewardStatistics,
    groups_with_signal,
    normalise_rewards,
    overlong_filter,
    overlong_penalty,
    staleness_filter,
)
from rlinf_algos.kl import kl_full, kl_loss, kl_penalty
from rlinf_algos.logprobs import (
    entropy_from_logits,
    linear_token_logprobs,
    linear_token_logprobs_and_entropy,
    next_token_logprobs,
    token_logprobs,
    token_logprobs_and_entropy,
)
from rlinf_algos.masking import (
    last_trainable,
    masked_mean,
    masked_sum,
    position_ids,
    terminal_reward,
    turn_ids,
    whiten,
)
from rlinf_algos.packing import Packed, pack
from rlinf_algos.policy_losses import (
    cispo_loss,
    decoupled_ppo_loss,
    gspo_loss,
    policy_gradient_loss,
    ppo_clip_loss,
    sft_loss,
)
from rlinf_algos.preference import dpo_loss
from rlinf_algos.presets import PRESETS, Preset, preset, reward_with_kl
from rlinf_algos.returns import (
    chunk_rewards,
    discounted_returns,
    discounted_scan,
    gae,
    reinforce_pp_advantage,
    turn_gae,
)
from rlinf_algos.value_losses import value_loss

__all__ = [
    "AGGREGATIONS",
    "PRESETS",
    "Advantage",
    "AdvantageInputs",
    "Advantages",
    "Algorithm",
    "AlgorithmError",
    "Correction",
    "DynamicSampling",
    "EntropyControl",
    "KLControl",
    "Loss",
    "LossInputs",
    "LossSum",
    "NoSignalError",
    "Packed",
    "Preset",
    "RewardStatistics",
    "advantage",
    "advantage_names",
    "aggregate",
    "chunk_rewards",
    "cispo_loss",
    "decoupled_ppo_loss",
    "discounted_returns",
    "discounted_scan",
    "dpo_loss",
    "dr_grpo_advantage",
    "effective_sample_size",
    "entropy_from_logits",
    "entropy_loss",
    "first_fit_decreasing",
    "gae",
    "gigpo_advantage",
    "group_advantage",
    "groups_with_signal",
    "gspo_loss",
    "imbalance",
    "karmarkar_karp",
    "kl_full",
    "kl_loss",
    "kl_penalty",
    "last_trainable",
    "linear_token_logprobs",
    "linear_token_logprobs_and_entropy",
    "loss",
    "loss_names",
    "masked_mean",
    "masked_sum",
    "micro_batches",
    "next_token_logprobs",
    "normalise_rewards",
    "overlong_filter",
    "overlong_penalty",
    "pack",
    "pass_at_k",
    "pass_at_k_advantage",
    "policy_gradient_loss",
    "position_ids",
    "ppo_clip_loss",
    "preset",
    "reinforce_pp_advantage",
    "reinforce_pp_baseline_advantage",
    "remax_advantage",
    "reward_with_kl",
    "rloo_advantage",
    "rollout_correction",
    "rollout_metrics",
    "sft_loss",
    "staleness_filter",
    "terminal_reward",
    "token_logprobs",
    "token_logprobs_and_entropy",
    "trajectory_group_advantage",
    "turn_gae",
    "turn_group_advantage",
    "turn_ids",
    "value_loss",
    "whiten",
]
