"""Embodied reinforcement learning of RLinf. Here so far: what an episode amounts to."""

from rlinf_embodied.episodes import Episode, EpisodeTracker, summarise

__all__ = ["Episode", "EpisodeTracker", "summarise"]
