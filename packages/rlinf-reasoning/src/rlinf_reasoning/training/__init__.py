"""What the actor and the critic do with a trainer backend.

Everything here gives the same result with one rank or several: rewards are gathered by sample id, losses are sums that
are divided once by the global count, and batches are cut by ids, never by who holds them.
"""

from rlinf_reasoning.training.backend import accumulate, forward_rows, load_trainer
from rlinf_reasoning.training.critic import ValueUpdate, add_values
from rlinf_reasoning.training.policy import PolicyUpdate
from rlinf_reasoning.training.reference import Reference, add_kl
from rlinf_reasoning.training.report import Silence
from rlinf_reasoning.training.warm_start import WarmStart

__all__ = [
    "PolicyUpdate",
    "Reference",
    "Silence",
    "ValueUpdate",
    "WarmStart",
    "accumulate",
    "add_kl",
    "add_values",
    "forward_rows",
    "load_trainer",
]
