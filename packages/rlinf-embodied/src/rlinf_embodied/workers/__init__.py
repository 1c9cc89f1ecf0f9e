"""The stages of embodied RL. Importing them loads neither torch nor a simulator; their ``setup`` does."""

from rlinf_embodied.workers.actor import Actor
from rlinf_embodied.workers.policy import PolicyWorker
from rlinf_embodied.workers.scorer import Scorer
from rlinf_embodied.workers.simulator import ActingSimulator, Simulator

__all__ = ["ActingSimulator", "Actor", "PolicyWorker", "Scorer", "Simulator"]
