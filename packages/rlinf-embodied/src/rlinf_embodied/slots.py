"""What is fed to a step: one slot for each environment, or for each episode of an evaluation."""

from __future__ import annotations

from typing import Any

from rlinf_embodied.data import Slot
from rlinf_embodied.envs.seeds import derive_seed


def group_size_of(cfg: Any) -> int:
    """Environments that begin a step with the same initial state; 1 where episodes go on over steps."""
    return int(cfg.algorithm.group_size) if "group_size" in cfg.algorithm else 1


def training_slots(cfg: Any, step: int) -> list[Slot]:
    """One slot for each of ``cfg.num_envs`` environments.

    Without ``cfg.algorithm.group_size``, or with one of 1, episodes go on over steps. With a larger one so many
    environments in a row begin the same episode, another one in each step, and their slots are a group.
    """
    size = group_size_of(cfg)
    if size == 1:
        return [Slot(f"{step:06d}/{env:05d}", env, f"{step:06d}/{env:05d}") for env in range(cfg.num_envs)]
    slots = []
    for env in range(cfg.num_envs):
        group, index = divmod(env, size)
        name = f"{step:06d}/{group:05d}"
        slots.append(Slot(f"{name}/{index:03d}", env, name, size, derive_seed(cfg.seed, "group", step, group)))
    return slots


def evaluation_slots(cfg: Any) -> list[Slot]:
    """``cfg.eval.episodes`` episodes, always the same ones for a ``cfg.eval.seed``; ``env`` is the episode's number."""
    return [
        Slot(f"eval/{k:05d}", k, f"eval/{k:05d}", seed=derive_seed(cfg.eval.seed, "evaluation", k))
        for k in range(cfg.eval.episodes)
    ]
