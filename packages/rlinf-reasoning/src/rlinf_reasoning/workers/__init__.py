"""The stages of language-model RL. Importing them loads neither torch nor transformers; their ``setup`` does."""

from rlinf_reasoning.workers.actor import Actor
from rlinf_reasoning.workers.critic import Critic
from rlinf_reasoning.workers.generator import Generator
from rlinf_reasoning.workers.reward import Reward
from rlinf_reasoning.workers.sampler import PromptSampler

__all__ = ["Actor", "Critic", "Generator", "PromptSampler", "Reward"]
