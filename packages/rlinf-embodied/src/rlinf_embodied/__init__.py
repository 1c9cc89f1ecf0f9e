"""Embodied reinforcement learning: environments, policies, stages, recipes. Importing it loads none of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlinf_embodied.episodes import Episode, EpisodeTracker, summarise

__all__ = ["Episode", "EpisodeTracker", "summarise"]


def __getattr__(name: str) -> Any:
    """Load ``episodes``, and numpy with it, when something of it is asked for: composing a configuration does not."""
    if name in __all__:
        from rlinf_embodied import episodes

        return getattr(episodes, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
