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


def check_inference(root: Any) -> list[str]:
    """Keys that mean nothing where every simulator decides for itself."""
    if root.inference != "local":
        return []
    problems = []
    if root.num_stages > 1:
        problems.append(
            f"num_stages: {root.num_stages} sub-batches have nothing to overlap with while every simulator decides for "
            "itself (inference=local); give 1, or inference=channel"
        )
    named = ["placement.policy: there is"] if "policy" in root.placement else []
    if _places(root.plan, "policy"):
        named.append(f"plan: {root.plan!r} places the group policy, and there is")
    why = "no such group while every simulator decides for itself (inference=local)"
    return problems + [f"{one} {why}; remove it, or give inference=channel" for one in named]


def check_evaluation(root: Any) -> list[str]:
    """Impossible combinations of the ``eval`` keys."""
    videos, episodes = root.eval.videos, root.eval.episodes
    if videos > episodes:
        return [f"eval.videos: {videos} is more than eval.episodes={episodes}; give at most {episodes}"]
    return []


def _places(spec: str, stage: str) -> bool:
    """Whether the plan that the key ``plan`` names is a file with a leaf for this stage."""
    from rlinf_core.errors import ConfigError
    from rlinf_core.plan import SCHEDULED, check_spec, leaves

    try:
        plan = None if spec in SCHEDULED else check_spec(spec)
    except ConfigError:
        return False  # what is wrong with it is said by the check of the key itself
    return plan is not None and any(leaf.stage == stage for leaf in leaves(plan.tree))


def _divisor(number: int, below: int) -> int:
    """The largest divisor of ``number`` that is at most ``below``."""
    return next(n for n in range(min(number, below), 0, -1) if number % n == 0)
