"""Learning rate by optimizer step. Standard library only."""

from __future__ import annotations

import math
from typing import Any

from rlinf_core.errors import ConfigError


def learning_rate(cfg: Any, step: int) -> float:
    """The learning rate of optimizer step ``step`` (0-based).

    It rises linearly over ``warmup_steps`` (the first step has ``lr / warmup_steps``), then follows
    ``schedule`` down to ``lr * min_lr_ratio`` at ``schedule_steps`` and stays there.
    """
    lr, warmup, schedule = float(cfg.lr), int(cfg.warmup_steps), str(cfg.schedule)
    end, floor = int(cfg.schedule_steps), float(cfg.min_lr_ratio)
    if schedule not in ("constant", "linear", "cosine"):
        raise ConfigError(f"trainer.schedule: {schedule!r} is unknown; choose constant, linear or cosine")
    if step < warmup:
        return lr * (step + 1) / warmup
    if schedule == "constant":
        return lr
    progress = min(1.0, (step - warmup) / max(1, end - warmup))
    left = 1.0 - progress if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return lr * (floor + (1.0 - floor) * left)
