"""The keys that every recipe has. Stdlib and dataclasses only, like every conf package.

A conf package is named by a ``rlinf.recipes`` entry point. YAML files lie beside its ``__init__``: a recipe is one
with a ``program``, the others are options of the config group whose folder they are in. ``SCHEMAS`` maps
``group/name`` of a YAML file to the dataclass that types it. A field may carry
``metadata={"help": …, "choices": (…), "min": …, "max": …}``, checked when composing (numbers must be finite unless it
has ``"allow_inf": True``; ``"entry"`` is what messages call a key of a mapping), and a dataclass may define
``validate(self, root) -> list[str]`` for what spans keys; both arguments are read-only ``Config`` nodes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MISSING: Any = "???"
"""Default of a key that must be given."""


@dataclass
class ClusterConfig:
    address: str | None = field(
        default=None, metadata={"help": "Ray cluster to join; null starts one on this machine (or joins RAY_ADDRESS)"}
    )
    virtual_devices: int | None = field(
        default=None,
        metadata={
            "min": 0,
            "max": 1024,  # a plan lists them: 10**8 of them would fill the memory
            "help": "CPU slots that stand for devices on this machine, also where it has accelerators; null: two where "
            "it has none",
        },
    )
    virtual_device_bytes: int | None = field(
        default=None,
        metadata={"min": 1, "help": "memory that a CPU slot stands for when it is planned; null: as much as is needed"},
    )
    debug: bool = field(default=False, metadata={"help": "run everything in one process, with threads"})
    launch_timeout_s: float = field(
        default=300.0, metadata={"min": 0.1, "help": "longest time for a group to become ready"}
    )
    stall_timeout_s: float = field(
        default=1800.0,
        metadata={"min": 0.1, "help": "longest time without a word from any worker before the run fails"},
    )


@dataclass
class ChannelsConfig:
    max_items: int = field(default=4096, metadata={"min": 1, "help": "items a channel holds before writers wait"})
    max_bytes: int = field(default=1 << 30, metadata={"min": 1, "help": "bytes a channel holds before writers wait"})
    link: str = field(
        default="auto",
        metadata={
            "help": "how items reach workers of the same machine: shm (shared memory, from rlinf-comm), socket, or "
            "auto (shm where it is installed and works)"
        },
    )
    link_bytes: int = field(
        default=0,
        metadata={"min": 0, "help": "most memory that a worker's link takes; 0: a quarter of the machine's"},
    )
    deals: dict[str, str] = field(
        default_factory=dict,
        metadata={
            "entry": "CHANNEL",
            "help": "how a channel's items are dealt to the ranks that read it, instead of what the program says: "
            "shared, round_robin or weight by channel, or group:way for one of its reading groups",
        },
    )

    def validate(self, root: Any) -> list[str]:
        from rlinf_core.deals import read_deal
        from rlinf_core.links import wrong_name

        problems = [f"channels.link: {why}"] if (why := wrong_name(self.link)) else []
        for channel, deal in self.deals.items():
            try:
                read_deal(deal)
            except ValueError as error:
                problems.append(f"channels.deals.{channel}: {error}")
        return problems


@dataclass
class CheckpointConfig:
    every: int = field(default=0, metadata={"min": 0, "help": "steps between checkpoints; 0 saves only at the end"})
    keep_last: int = field(default=1, metadata={"min": 1, "help": "checkpoints that are kept"})
    keep_best: str = field(
        default="",
        metadata={
            "help": "metric whose largest value marks one more checkpoint to keep, such as accuracy (with - before it: "
            "the smallest); empty: none"
        },
    )


@dataclass
class ProfileConfig:
    steps: int = field(default=2, metadata={"min": 1, "help": "measured steps of each short run of rlinf profile"})
    overrides: dict[str, Any] = field(
        default_factory=dict, metadata={"help": "keys that are set otherwise while profiling, nested as in the recipe"}
    )


@dataclass
class CoreConfig:
    program: str = field(default=MISSING, metadata={"help": "the recipe's function, as module:function"})
    num_steps: int = field(default=MISSING, metadata={"min": 0, "help": "training steps"})
    seed: int = field(default=0, metadata={"min": 0, "help": "root of all random numbers of the run"})
    plan: str = field(
        default="temporal", metadata={"help": "temporal, spatial, hybrid, auto, or the path of a plan's YAML file"}
    )
    portion: int | None = field(
        default=None, metadata={"min": 1, "help": "items moved downstream at once; null is the plan's own choice"}
    )
    placement: dict[str, str] = field(
        default_factory=dict,
        metadata={"entry": "GROUP", "help": "devices per group (group: 0-3), instead of what the plan says"},
    )
    resume: str = field(
        default="none",
        metadata={
            "help": "auto: go on with the newest run of this configuration that has steps left (a finished one too, "
            "when num_steps is larger now); a run directory: with that one; a checkpoint in one: a new run from it; "
            "none"
        },
    )
    run_dir: str = field(default="runs", metadata={"help": "folder under which runs make their directories"})
    loggers: list[str] = field(
        default_factory=lambda: ["jsonl", "tensorboard"], metadata={"help": "plugins that metrics are written with"}
    )
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    channels: ChannelsConfig = field(default_factory=ChannelsConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    scheduler: str = field(default="m2flow", metadata={"help": "plugin that plans for plan=auto and plan=hybrid"})

    def validate(self, root: Any) -> list[str]:
        from rlinf_core.errors import ConfigError
        from rlinf_core.placement import check_syntax
        from rlinf_core.plan import SCHEDULED, check_spec
        from rlinf_core.registry import check_name, check_plugin

        problems: list[str] = []
        for index, name in enumerate(self.loggers):
            if name in self.loggers[:index]:
                problems.append(f"loggers: {name!r} is there twice; each logger writes a run once")
            else:
                problems += check_plugin("rlinf.loggers", name, "loggers")
        if self.plan in SCHEDULED:
            problems += check_name("rlinf.schedulers", self.scheduler, "scheduler")
        else:
            try:
                check_spec(self.plan)
            except ConfigError as error:
                problems.append(str(error))
        for group in self.placement:
            try:
                check_syntax(self.placement[group], where=f"placement.{group}")
            except ConfigError as error:
                problems.append(str(error))
        return problems


SCHEMAS: dict[str, type] = {}
