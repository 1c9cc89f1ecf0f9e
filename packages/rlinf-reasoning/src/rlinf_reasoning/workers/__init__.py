"""The stages of language-model RL. Importing them loads neither torch nor transformers; their ``setup`` does."""

from rlinf_reasoning.workers.actor import Actor
from rlinf_reasoning.workers.generator import Generator
from rlinf_reasoning.workers.reward import Reward

__all__ = ["Actor", "Generator", "Reward"]
