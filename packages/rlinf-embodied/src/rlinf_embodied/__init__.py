"""Embodied reinforcement learning: environments, policies, stages, recipes. Importing it loads none of them."""

from rlinf_embodied.episodes import Episode, EpisodeTracker, summarise

__all__ = ["Episode", "EpisodeTracker", "summarise"]
