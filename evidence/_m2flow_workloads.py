"""The workloads of the M2Flow experiment: recipe, what is profiled, and plans by hand that were not profiled."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

FAMILIES = ("temporal", "spatial", "hybrid")
Tree = dict[str, Any]


# ------------------------------------------------------------------ plans by hand


def leaf(stage: str, devices: str, portion: int | None = None) -> Tree:
    return {"leaf": {"stage": stage, "devices": devices} | ({} if portion is None else {"portion": portion})}


def share(first: Tree, then: Tree) -> Tree:
    return {"share": {"first": first, "then": then}}


def pipe(up: Tree, down: Tree, portion: int) -> Tree:
    return {"pipe": {"up": up, "down": down, "portion": portion}}


def parallel(a: Tree, b: Tree) -> Tree:
    return {"parallel": {"a": a, "b": b}}


def cycle(a: Tree, b: Tree, portion: int | None) -> Tree:
    return {"cycle": {"a": a, "b": b, "portion": portion}}


@dataclass(frozen=True)
class Case:
    """A plan by hand that uses device counts or portions which were not profiled."""

    label: str
    tree: Tree
    cpu: dict[str, int] = field(default_factory=dict)
    cpu_portion: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Workload:
    recipe: str
    devices: int
    profile_devices: str
    cases: tuple[Case, ...] = ()
    other_devices: tuple[int, ...] = (6, 3)
    families: tuple[str, ...] = FAMILIES
    overrides: tuple[str, ...] = ()
    sleeps: bool = True


SCORED = {"cpu": {"reward": 1}, "cpu_portion": {"reward": 4}}
GEN, TRAIN = "generator", "trainer"
TWO = ("temporal", "spatial")  # a hybrid plan needs three stages on devices
GRPO = (
    "prompts_per_step=48",
    "algorithm.minibatches=1",
    "model.tiny.hidden_size=256",
    "model.tiny.intermediate_size=768",
    "eval.problems=16",
    "warm_start.max_steps=1",
)
TIGHT = (
    "cluster.virtual_device_bytes=100",
    "generator.bytes=40",
    "reference.bytes=30",
    "critic.bytes=30",
    "trainer.bytes=60",
)
WORKLOADS = {
    "training_heavy": Workload(
        "examples/m2flow/training_heavy.py",
        8,
        "2,4,8",
        (
            Case("2 + 6 devices, portion 2", pipe(leaf(GEN, "0-1", 2), leaf(TRAIN, "2-7"), 2), **SCORED),
            Case("generator on 5 of 8, in turn", share(leaf(GEN, "0-4"), leaf(TRAIN, "0-7")), **SCORED),
        ),
        families=TWO,
    ),
    "long_tail": Workload(
        "examples/m2flow/long_tail.py",
        8,
        "2,4,8",
        (
            Case("5 + 3 devices, portions 2, 12", pipe(leaf(GEN, "0-4", 2), leaf(TRAIN, "5-7", 12), 12), **SCORED),
            Case("3 + 5 devices, portions 8, 20", pipe(leaf(GEN, "0-2", 8), leaf(TRAIN, "3-7", 20), 20), **SCORED),
        ),
        families=TWO,
    ),
    "ppo": Workload(
        "examples/m2flow/ppo.py",
        8,
        "2,4,8",
        (
            Case(
                "critic 5, reference 3 side by side",
                share(
                    leaf(GEN, "0-7"),
                    share(parallel(leaf("reference", "0-2", 6), leaf("critic", "3-7", 6)), leaf(TRAIN, "0-7")),
                ),
            ),
            Case(
                "3 + 1 + 2 + 2 devices, portion 6",
                pipe(
                    leaf(GEN, "0-2", 3),
                    pipe(parallel(leaf("reference", "3", 6), leaf("critic", "4-5", 6)), leaf(TRAIN, "6-7"), 6),
                    6,
                ),
            ),
        ),
    ),
    "ppo_tight": Workload(  # the same where a device cannot hold all four stages: switching is part of the price
        "examples/m2flow/ppo.py",
        8,
        "2,4,8",
        (
            Case(
                "reference and critic side by side, all swapped",
                share(
                    leaf(GEN, "0-7"),
                    share(parallel(leaf("reference", "0-2"), leaf("critic", "3-7")), leaf(TRAIN, "0-7")),
                ),
            ),
        ),
        other_devices=(6,),
        overrides=TIGHT,
    ),
    "embodied": Workload(
        "examples/m2flow/embodied.py",
        8,
        "2,4,8",
        (
            Case(
                "5 + 3 devices, sub-batches of 6",
                share(cycle(leaf("simulator", "0-4"), leaf("policy", "5-7"), 6), leaf(TRAIN, "0-7")),
            ),
            Case(
                "6 + 2 devices, sub-batches of 3",
                share(cycle(leaf("simulator", "0-5"), leaf("policy", "6-7"), 3), leaf(TRAIN, "0-7")),
            ),
        ),
    ),
    "grpo": Workload("reasoning/grpo_arithmetic", 2, "1,2", (), (), TWO, GRPO, sleeps=False),
}
