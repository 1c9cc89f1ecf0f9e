"""One way to score, whatever the reward: in place for those that cannot misbehave, in the pool for all others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlinf_core.registry import Registry
from rlinf_reasoning.rewards._child import as_reward, describe
from rlinf_reasoning.rewards.pool import RewardItem, RewardPool, Score


class Scorer:
    """Scores with the reward that a config node names.

    ``name: function`` takes ``function: module:function``; every other name is a plugin of ``rlinf.rewards``: a
    function ``(text, answer, fields) -> number``, or a class whose instances are called like that. It runs in
    processes that can be killed (``processes``, ``timeout_s``, ``memory_mb``) unless it says ``isolated = False``. A
    class with ``options``, names of keys of the node, is constructed with those that the node has.

    Raises:
        PluginError, MissingExtraError: the name is unknown or cannot be imported.
        ConfigError: the function cannot be loaded.
    """

    def __init__(self, cfg: Any) -> None:
        self.name: str = cfg.name
        self.pool: RewardPool | None = None
        self._function: Any = None
        options: dict[str, Any] = {}
        if self.name == "function":
            target = self.name = cfg.function
        else:
            registry = Registry("rlinf.rewards")
            plugin = registry.load(self.name)
            target = registry.entry(self.name).value
            if isinstance(plugin, type):
                options = {key: cfg[key] for key in getattr(plugin, "options", ()) if key in cfg}
            if not getattr(plugin, "isolated", True):
                self._function = plugin(**options) if isinstance(plugin, type) else plugin
                return
        self.pool = RewardPool(
            target, processes=cfg.processes, timeout_s=cfg.timeout_s, memory_mb=cfg.memory_mb, options=options
        )
        self.pool.start()

    def score(self, items: Sequence[RewardItem]) -> list[Score]:
        """Score every item, in order; one that could not be scored has no value and says why."""
        if self.pool is not None:
            return self.pool.score(items)
        return [self._in_place(item) for item in items]

    def close(self) -> None:
        """End the processes, if there are any."""
        if self.pool is not None:
            self.pool.close()

    def _in_place(self, item: RewardItem) -> Score:
        try:
            found = self._function(item.text, item.answer, item.fields)
        except Exception as error:  # a plugin's fault becomes the item's, as in the pool
            return Score(None, describe(error))
        value, problem = as_reward(found)
        return Score(value, problem)
