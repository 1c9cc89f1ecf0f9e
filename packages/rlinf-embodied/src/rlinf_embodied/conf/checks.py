"""What spans keys in the embodied recipes. Each check returns messages ``key: what is wrong, what would be right``."""

from __future__ import annotations

from typing import Any


def check_rollout(root: Any) -> list[str]:
    """That environments and steps can be shared out. What the number of ranks adds is checked with the plan."""
    problems = []
    envs, stages, steps = root.num_envs, root.num_stages, root.rollout_steps
    if envs % stages:
        problems.append(
            f"num_envs: {envs} environments cannot be shared out over num_stages={stages} sub-batches; give "
            f"{-(-envs // stages) * stages}, or num_stages={_divisor(envs, stages)}"
        )
    chunk = root.model.chunk if "chunk" in root.model else 1
    if steps % chunk:
        problems.append(
            f"rollout_steps: {steps} steps are not a whole number of decisions of model.chunk={chunk} steps; give "
            f"{-(-steps // chunk) * chunk}"
        )
    return problems


def check_evaluation(root: Any) -> list[str]:
    """Impossible combinations of the ``eval`` keys."""
    videos, episodes = root.eval.videos, root.eval.episodes
    if videos > episodes:
        return [f"eval.videos: {videos} is more than eval.episodes={episodes}; give at most {episodes}"]
    return []


def _divisor(number: int, below: int) -> int:
    """The largest divisor of ``number`` that is at most ``below``."""
    return next(n for n in range(min(number, below), 0, -1) if number % n == 0)
