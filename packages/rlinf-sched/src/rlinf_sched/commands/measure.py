"""Short runs of a recipe and what is taken from them: samples of the stages, and the problem that they describe.

Everything is counted in items of the step (what is fed: prompts, say). A stage that reads more items than were fed (the
samples of the prompts) has that as its ``per_item``. In a run a rank that works alone takes ``portion`` items of its
own at once; a collective group takes them dealt over its ranks. Samples say what the whole stage takes.
"""

from __future__ import annotations

import json
import math
import os
import platform
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlinf_sched.commands import feedback
from rlinf_sched.commands.feedback import Loop, Taken, block_size, summed
from rlinf_sched.commands.ranks_of import Accepted
from rlinf_sched.fit import resampled
from rlinf_sched.graph import SchedError
from rlinf_sched.profile import Profile, ProfileSample, StepSample
from rlinf_sched.units import counted

if TYPE_CHECKING:
    from rlinf_core.config import Config
    from rlinf_core.graph import FlowGraph, PhaseGraph, StageSpec
    from rlinf_core.placement import ClusterInfo

PHASE = "train"
HYBRID = "hybrid"
WARM_UP_STEPS = 1
"""Steps at the beginning of each short run that are not counted: they compile, allocate and warm caches."""
_WEIGHTS = "receive_weights"


@dataclass
class Step:
    """What one stage did in one step. By rank: ``work`` seconds over all its tasks. By task: ``items`` that each rank
    took from one channel, ``puts`` of each rank, ``released`` as a fraction of the work. By channel: what each rank
    took (``taken_from``)."""

    seconds: float = 0.0
    switch: float = 0.0
    peak: int = 0
    resident: int = 0
    room: int = 0
    work: list[float] = field(default_factory=list)
    waits: float = 0.0
    items: dict[str, list[int]] = field(default_factory=dict)
    puts: dict[str, list[int]] = field(default_factory=dict)
    released: dict[str, list[tuple[float, ...]]] = field(default_factory=dict)
    taken_from: dict[str, list[Taken]] = field(default_factory=dict)

    def taken(self) -> list[int]:
        """Items that each rank took, by the task that took most."""
        return max(self.items.values(), key=_total, default=[])


def _total(items: list[int]) -> int:
    return sum(items)


@dataclass
class Observed:
    """Collects the calls of one short run. ``inputs``: how many channels each task reads."""

    inputs: Mapping[tuple[str, str], int] = field(default_factory=dict)
    steps: dict[tuple[int, str], Step] = field(default_factory=lambda: defaultdict(Step))

    def __call__(self, call: Any, results: Sequence[Any]) -> None:
        phase, _, index = call.step.partition("/")
        if phase != PHASE or int(index) < WARM_UP_STEPS:
            return
        entry = self.steps[int(index), call.group]
        times = [result.times for result in results]
        entry.seconds += max(t.work for t in times)
        entry.switch += max(t.switch + float(getattr(t, "switch_before", 0.0)) for t in times)
        entry.peak = max(entry.peak, *(t.peak_bytes for t in times))
        entry.resident = max(entry.resident, *(int(getattr(t, "resident_bytes", 0)) for t in times))
        rooms = [t.device_bytes for t in times if t.device_bytes]
        entry.room = min(rooms, default=entry.room)
        before = entry.work or [0.0] * len(times)
        entry.work = [a + t.work for a, t in zip(before, times, strict=True)]
        if call.task == _WEIGHTS:
            return
        channels = max(self.inputs.get((call.group, call.task), 1), 1)
        entry.waits += sum(t.wait for t in times) / len(times)
        entry.items[call.task] = [round(t.items / channels) for t in times]
        entry.puts[call.task] = [int(getattr(t, "puts", 0)) for t in times]
        told = [{channel: (items, weight) for channel, items, weight in getattr(t, "taken", ())} for t in times]
        for channel in {channel for one in told for channel in one}:
            entry.taken_from[channel] = [one.get(channel, (0, 0.0)) for one in told]
        curves = [(t.work, tuple(getattr(t, "released", ()))) for t in times]
        entry.released[call.task] = [tuple(s / work for s in curve) for work, curve in curves if curve and work > 0]


def hardware() -> str:
    """A fingerprint of this machine: times of another kind are no evidence here."""
    return f"{platform.machine()}/{os.cpu_count()} cores"


# ------------------------------------------------------------------ the short runs


USABLE = 0.9
"""Part of a device's memory that is planned with: allocators lose some to fragments."""
PARTS = 4
"""Into how many portions a stage's part of a step is cut in the run with small portions."""


@dataclass(frozen=True)
class Setting:
    """One short run. ``portion``: what all stages are told (None: everything at once). ``each``: what each stage is
    told instead; with it, ``small`` is set."""

    devices: int
    portion: int | None = None
    small: bool = False
    each: Mapping[str, int] = field(default_factory=dict)

    def of(self, name: str) -> int:
        """Items that a rank (a collective group) of this stage takes at once; 0: everything."""
        return self.each.get(name, 0) if self.small else self.portion or 0


def settings(devices: Sequence[int], portions: Sequence[int | None] | None) -> list[Setting]:
    """All device counts with each portion; without portions everything at once, and a quarter of it on most and on
    fewest devices (so that the same items on a rank are seen with few and with many of them)."""
    if portions is None:
        whole = [Setting(n) for n in reversed(devices)]
        return [*whole, *(Setting(n, small=True) for n in sorted({devices[0], devices[-1]}, reverse=True))]
    return [Setting(n, portion) for n in reversed(devices) for portion in portions]


def measure(
    cfg: Config, recipe: str, devices: Sequence[int] | None, portions: Sequence[int | None] | None, out: Path
) -> tuple[Profile, dict[str, Any]]:
    """Short runs of a recipe; returns the profile and the problem that it describes. The progress goes to stderr.

    ``devices`` None: with all devices, half of them, one. Raises SchedError when the recipe has no ``train`` phase or
    nothing was measured, and what a run raises.
    """
    from rlinf_core import runner
    from rlinf_core.cluster import connect

    _, graph, groups = runner.prepare(cfg, out)
    if PHASE not in graph.phases:
        raise SchedError(f"the recipe has no phase {PHASE!r} to profile; it has {', '.join(graph.phases)}")
    if cfg.plan == HYBRID:
        check_hybrid(graph)
    fixed = [name for name in cfg.placement if name in graph.stages and graph.stages[name].device]
    if fixed:
        raise SchedError(
            f"placement.{fixed[0]}: where stages on devices run is what is being planned; leave it out, or write it "
            "into a plan file"
        )
    _merge(cfg.to_dict(), cfg.profile.overrides.to_dict(), "profile.overrides")  # refused before anything is started
    with connect(cfg.cluster, f"{recipe}/profile") as cluster:  # one Ray for all the short runs
        asked = counts(devices, cluster.info)
        flow = Flow(graph, Accepted(graph.stages, groups, max(asked)))
        return _measured(cfg, recipe, flow, cluster.info, asked, portions, out)


def _measured(
    cfg: Config,
    recipe: str,
    flow: Flow,
    cluster: ClusterInfo,
    devices: list[int],
    portions: Sequence[int | None] | None,
    out: Path,
) -> tuple[Profile, dict[str, Any]]:
    from rlinf_core import runner

    graph, phase = flow.graph, flow.phase
    inputs = {(call.group, call.task): len(call.inputs) for call in phase.calls}
    samples: list[ProfileSample] = []
    steps: list[StepSample] = []
    todo = settings(devices, portions)
    place, told = _free(out), False
    lines = _Lines(len(todo))
    lines.begin(cfg, out)
    for number, setting in enumerate(todo):
        if setting.small:
            setting = replace(setting, each=flow.quarter(setting.devices))
        lines.starts(number, setting)
        observed = Observed(inputs)
        own = place / str(number)
        try:
            runner.run(_short(cfg, setting, flow, cluster, own), recipe, observe=observed, quiet=True)
        except BaseException:
            lines.breaks()
            raise
        if not number:
            flow.read(observed)
        samples += flow.samples(observed, setting)
        mine = step_times(own, setting)
        steps += mine
        lines.ends(number, setting, [step.seconds for step in mine])
        part = flow.part(setting.devices)
        if setting.portion is not None and setting.portion > part and not told:
            told = True
            on = counted(setting.devices, "device")
            print(
                f"--portions {setting.portion}: on {on} a rank's part of a step is at most {part} items; some ranks "
                "take more than their part and leave others without",
                file=sys.stderr,
            )
    profile = Profile(graph.fingerprint(), hardware(), tuple(samples), tuple(steps))
    return profile, flow.problem(max(devices))


def _free(out: Path) -> Path:
    """A folder for the short runs that has none of an earlier profile."""
    names = ("runs" if number == 1 else f"runs-{number}" for number in count(1))
    return next(place for place in (out / name for name in names) if not place.exists())


class _Lines:
    """One line on stderr for each short run: what it is, seconds of a step, the time that the others will take. On a
    terminal it stands there while the run goes on."""

    def __init__(self, runs: int) -> None:
        self.runs = runs
        self.began = time.monotonic()
        self.live = sys.stderr.isatty()

    def begin(self, cfg: Config, out: Path) -> None:
        few = WARM_UP_STEPS + cfg.profile.steps
        steps = f"{few} to {WARM_UP_STEPS + 2 * cfg.profile.steps}"
        then = ""
        if cfg.plan in ("auto", HYBRID):
            then = f", then the plan; to keep it for other runs: plan={out / 'plan.yaml'}"
        print(f"profile: {counted(self.runs, 'short run')} of {steps} steps{then}", file=sys.stderr)

    def what(self, number: int, setting: Setting) -> str:
        portion = "everything at once" if setting.portion is None else f"portions of {setting.portion}"
        portion = "a quarter at once" if setting.small else portion
        return f"profile: run {number + 1} of {self.runs}: {counted(setting.devices, 'device')}, {portion}"

    def starts(self, number: int, setting: Setting) -> None:
        if self.live:
            print(f"{self.what(number, setting)} …", end="\r", file=sys.stderr, flush=True)

    def breaks(self) -> None:
        """What comes next has a line of its own."""
        if self.live:
            print(file=sys.stderr)

    def ends(self, number: int, setting: Setting, seconds: Sequence[float]) -> None:
        step = f": {float(np.mean(seconds)):.3g} s/step" if seconds else ""
        rest = self.runs - number - 1
        left = f", about {(time.monotonic() - self.began) / (number + 1) * rest:.0f} s left" if rest else ""
        print(f"{self.what(number, setting)}{step}{left}{'  ' * self.live}", file=sys.stderr)


def counts(asked: Sequence[int] | None, cluster: ClusterInfo) -> list[int]:
    """Device counts to measure at, rising. Raises SchedError when more are asked for than there are."""
    most = len(cluster.devices)
    if not most:
        raise SchedError("there is no device to measure on; set cluster.virtual_devices, or join a cluster with GPUs")
    if asked is None:
        return sorted({1, max(1, most // 2), most})
    if max(asked) > most:
        raise SchedError(f"--devices {max(asked)}: there are {most}; set cluster.virtual_devices, or ask for fewer")
    return sorted(asked)


def check_hybrid(graph: FlowGraph) -> None:
    """Raise SchedError for a flow that can have no hybrid plan, before anything is run."""
    used = {call.group for call in graph.phases[PHASE].calls}
    names = [name for name, stage in graph.stages.items() if stage.device and name in used]
    if len(names) < 3:
        raise SchedError(
            f"a hybrid plan needs three stages on devices, and this flow has {len(names)} ({', '.join(names)}); "
            "plan=auto finds the better of temporal and spatial"
        )


def _short(cfg: Config, setting: Setting, flow: Flow, cluster: ClusterInfo, place: Path) -> Config:
    """The recipe's configuration for one short run: temporal, so that every stage gets all the devices."""
    from rlinf_core.config import Config

    graph = flow.graph
    data = cfg.to_dict()
    _merge(data, cfg.profile.overrides.to_dict(), "profile.overrides")
    most = setting.portion is None and not setting.small and setting.devices == len(cluster.devices)
    data["num_steps"] = WARM_UP_STEPS + cfg.profile.steps * (2 if most else 1)  # most plans are near this setting
    cpu = {
        name: cfg.placement[name] for name, stage in graph.stages.items() if not stage.device and name in cfg.placement
    }
    data["plan"], data["portion"], data["placement"] = "temporal", setting.portion, cpu
    if setting.small:
        data["plan"] = str(_write_plan(flow, setting, place))
    data["run_dir"], data["loggers"] = str(place), ["jsonl"]
    data["checkpoint"]["every"] = 0
    data["resume"] = "none"
    data["placement"] = cpu | {
        name: _placed(stage, flow.on(name, setting.devices))
        for name, stage in graph.stages.items()
        if stage.device and flow.on(name, setting.devices) < len(cluster.devices)
    }
    return Config(data)


def _write_plan(flow: Flow, setting: Setting, place: Path) -> Path:
    """A temporal plan with a portion for every stage."""
    graph = flow.graph
    leaves: dict[str, Any] = {}
    for name, stage in graph.stages.items():
        if stage.device:
            body: dict[str, Any] = {"stage": name, "devices": _placed(stage, flow.on(name, setting.devices))}
            leaves[name] = {"leaf": body | ({"portion": setting.each[name]} if name in setting.each else {})}
    for loop in loops(graph):
        pair = [leaves.pop(name) for name in (loop.head, loop.other) if name in leaves]
        joined = {"a": pair[0], "b": pair[-1], "portion": setting.each.get(loop.head, 1)}
        leaves[loop.head] = {"cycle": joined} if len(pair) == 2 else pair[0]
    tree: Any = None
    for name in reversed([name for name in graph.order() if name in leaves]):
        tree = leaves[name] if tree is None else {"share": {"first": leaves[name], "then": tree}}
    cpu = {name: stage.ranks_fixed or 1 for name, stage in graph.stages.items() if not stage.device}
    small = {name: setting.each[name] for name in cpu if name in setting.each}
    place.mkdir(parents=True, exist_ok=True)
    path = place / "plan.yaml"
    data = {"name": "temporal", "cpu": cpu, "cpu_portion": small, "tree": tree}
    path.write_text(json.dumps({key: value for key, value in data.items() if value != {}}) + "\n")  # JSON is YAML
    return path


def loops(graph: FlowGraph) -> list[Loop]:
    """The cycles of the training phase; see ``feedback.loops``."""
    return feedback.loops(graph, PHASE)


def _placed(stage: StageSpec, devices: int) -> str:
    """The stage on the first devices, for clusters whose devices are fixed."""
    ranks = stage.ranks_fixed
    if ranks is None and stage.barrier == "batch" and not stage.collective:
        return "0"
    if ranks is None or ranks == devices:
        return f"0-{devices - 1}"
    used = max(n for n in range(1, devices + 1) if n % ranks == 0 or ranks % n == 0)
    return f"0-{used - 1}:0-{ranks - 1}"


def _merge(data: dict[str, Any], changes: dict[str, Any], where: str) -> None:
    from rlinf_core.errors import ConfigError, nearest

    for key, value in changes.items():
        if key not in data:
            raise ConfigError(f"{where}.{key}: there is no such key in this recipe{nearest(key, data)}")
        if isinstance(value, dict) and isinstance(data[key], dict):
            _merge(data[key], value, f"{where}.{key}")
        else:
            data[key] = value


def step_times(place: Path, setting: Setting) -> list[StepSample]:
    """Seconds of the counted steps, from the metrics that the run has written."""
    found = []
    for file in place.rglob("metrics.jsonl"):
        for line in file.read_text().splitlines():
            row = json.loads(line)
            if row.get("phase") == PHASE and row.get("step", 0) >= WARM_UP_STEPS and "time/step_s" in row:
                found.append(
                    StepSample(setting.devices, setting.portion or int(setting.small), float(row["time/step_s"]))
                )
    return found


# ------------------------------------------------------------------ what they say


class Flow:
    """Reads the observations of a traced flow."""

    def __init__(self, graph: FlowGraph, accepted: Accepted | None = None) -> None:
        self.graph = graph
        self.accepted = accepted or Accepted({}, {}, 0)
        self.phase: PhaseGraph = graph.phases[PHASE]
        self.loops = loops(graph)
        self.heads = {self.phase.calls[r].group for c in self.phase.feeds for r in self.phase.readers(c)}
        # Who is in a cycle waits for the other stage, not for messages alone.
        self.fed_alone = self.heads - {name for loop in self.loops for name in (loop.head, loop.other)}
        self.fed = 0
        self.per_item: dict[str, float] = {}
        self.rounds: dict[str, int] = {}
        self.cpu: dict[str, int] = {}
        self.room = 0

    def on(self, name: str, devices: int) -> int:
        """Devices that a stage gets where there are so many."""
        return self.accepted.most(name, devices)

    def read(self, observed: Observed) -> None:
        """Items fed in a step, what each stage reads for one of them, rounds of cycles; from a run in which every stage
        takes everything at once."""
        reads: dict[str, int] = defaultdict(int)
        self.room = min((step.room for step in observed.steps.values() if step.room), default=0)
        for (_, stage), step in observed.steps.items():
            reads[stage] = max(reads[stage], sum(step.taken()))
            if not self.graph.stages[stage].device:
                self.cpu[stage] = max(1, len(step.work))
        home = {name: loop for loop in self.loops for name in (loop.head, loop.other)}
        plain = [name for name in self.heads if name not in home]
        fed_loops = [loop for loop in self.loops if loop.head in self.heads]
        self.fed = max((reads[name] for name in plain), default=0)
        if not self.fed and fed_loops:
            self.fed = self._fed_into(fed_loops[0], observed)
        if not self.fed:  # nothing is fed: a cycle begins with what it owns, and what leaves it is counted
            outside = [name for name in self.graph.stages if name not in home and reads[name]]
            self.fed = max((reads[name] for name in outside), default=0) or max(reads.values(), default=0)
        if not self.fed:
            raise SchedError("no stage read any item in the profiled steps: nothing to plan by")
        self.per_item = {name: reads[name] / self.fed for name in self.graph.stages if reads.get(name)}
        for loop in self.loops:
            self.rounds[loop.head] = max(1, self._rounds(loop, observed, reads[loop.other]))
            self.per_item[loop.head] = self.per_item[loop.other] = 1.0

    def _rounds(self, loop: Loop, observed: Observed, answered: int) -> int:
        """How often an item of the step goes round, on average."""
        head = [step for (_, name), step in observed.steps.items() if name == loop.head]
        weighed = [turns for step in head if (turns := loop.turns(step.taken_from))]
        if weighed:
            return round(sum(items for turns in weighed for _, items in turns) / len(weighed) / self.fed)
        if loop.fed:
            return round(answered / self.fed)
        return max((max(step.taken(), default=1) for step in head), default=1)

    def _fed_into(self, loop: Loop, observed: Observed) -> int:
        """Items that came into a cycle from outside; where channels are not told apart, what its head read less what
        the other one put."""
        found = []
        indices = {index for index, _ in observed.steps}
        for index in indices:
            head, other = observed.steps[index, loop.head], observed.steps[index, loop.other]
            if came := summed(head.taken_from, loop.outside):
                found.append(sum(count for count, _ in came))
                continue
            taken = sum(n for items in head.items.values() for n in items)
            found.append(taken - sum(n for puts in other.puts.values() for n in puts))
        return max(found, default=0)

    def quarter(self, devices: int) -> dict[str, int]:
        """By stage: a quarter of what a rank (a collective group) takes of a step."""
        return {name: max(1, math.ceil(own / PARTS - 1e-9)) for name, own in self._parts(devices).items()}

    def part(self, devices: int) -> int:
        """The largest fair part of a step that a rank (a collective group) has, in items of its own."""
        return math.ceil(max(self._parts(devices).values(), default=0.0))

    def _parts(self, devices: int) -> dict[str, float]:
        found = {}
        for name, each in self.per_item.items():
            stage = self.graph.stages[name]
            ranks = stage.ranks_fixed or (self.on(name, devices) if stage.device else self.cpu.get(name, 1))
            if stage.barrier != "batch":
                found[name] = self.fed * each / (1 if stage.collective else ranks)
        return found

    def samples(self, observed: Observed, setting: Setting) -> list[ProfileSample]:
        """One sample for each stage and step."""
        home = {name: loop for loop in self.loops for name in (loop.head, loop.other)}
        found = []
        for (_, name), step in sorted(observed.steps.items()):
            if not self.per_item.get(name):
                continue
            if name in home:
                found.append(self._in_loop(home[name], name, step, setting))
            else:
                found.append(self._alone(name, step, setting))
        return found

    def _alone(self, name: str, step: Step, setting: Setting) -> ProfileSample:
        stage, taken = self.graph.stages[name], step.taken()
        each = 0 if stage.barrier == "batch" else setting.of(name)
        if each and stage.barrier == "group":  # whole groups: what belongs to one item of the step
            groups = max(math.ceil(each / self.per_item[name]), len(taken) if stage.collective else 1)
            each = math.ceil(groups * self.per_item[name])
        at_once = each * (1 if stage.collective else max(len(taken), 1))
        whole = not each or sum(taken) <= at_once
        c = self.fed if whole else min(self.fed, max(1, round(at_once / self.per_item[name])))
        return self._sample(name, step, setting, c, self.fed, taken, each)

    def _in_loop(self, loop: Loop, name: str, step: Step, setting: Setting) -> ProfileSample:
        """A member of a cycle: seconds of a round are its work over the rounds."""
        rounds = self.rounds[loop.head]
        taken = step.taken()
        ranks = max(len(taken), 1)
        own = math.ceil(self.fed / ranks)
        each = min(own, setting.of(name) or own)
        if turns := loop.turns(step.taken_from):
            each = block_size(turns)
            taken = [round(items) for _, items in turns]
        elif not loop.fed and any(taken):  # its items are sub-batches of so many of ours
            share = self.fed * rounds / sum(taken) if name == loop.other else None
            each = max(1, round(share)) if share else each
            if name == loop.head:
                each = max(1, round(self.fed * rounds / ranks / max(1, max(taken))))
            taken = [k * each for k in taken]
        c = min(self.fed, max(1, each * ranks))
        return self._sample(name, step, setting, c, self.fed * rounds, taken, each)

    def _sample(
        self, name: str, step: Step, setting: Setting, portion: int, items: int, taken: list[int], each: int
    ) -> ProfileSample:
        stage = self.graph.stages[name]
        devices = self.on(name, setting.devices) if stage.device else 0
        if stage.device and stage.barrier == "batch" and not stage.collective and stage.ranks_fixed is None:
            devices = 1  # its only rank has one device
        curves = [resampled(curve) for task in step.released.values() for curve in task]
        same = len(step.work) == len(taken)
        return ProfileSample(
            name,
            devices,
            portion,
            items,
            step.seconds,
            step.peak if stage.device else 0,
            step.switch,
            ranks=tuple(step.work) if same else (),
            taken=tuple(taken) if same else (),
            each=each,
            puts=max((max(puts, default=0) for puts in step.puts.values()), default=0),
            released=tuple(float(v) for v in np.maximum.accumulate(np.mean(curves, axis=0))) if curves else (),
            resident_bytes=step.resident if stage.device else 0,
            waits=step.waits if name in self.fed_alone else 0.0,
        )

    # ------------------------------------------------------------------ the problem

    def problem(self, devices: int) -> dict[str, Any]:
        """The problem file's data: stages, edges, cycles, devices and items; costs come from the profile."""
        used = {call.group for call in self.phase.calls}
        stages: dict[str, Any] = {}
        for name, stage in self.graph.stages.items():
            if name not in used:
                continue
            body: dict[str, Any] = {"barrier": stage.barrier, "device": stage.device}
            body["per_item"] = self.per_item.get(name, 1.0)
            if stage.collective:
                body["collective"] = True
            ranks = stage.ranks_fixed or self.cpu.get(name)
            if ranks is not None:
                body["ranks"] = ranks
            elif stage.device and stage.barrier == "batch" and not stage.collective:
                body["most"] = 1  # its only rank has one device
            elif name in self.accepted.counts:
                body["counts"] = list(self.accepted.counts[name])
            stages[name] = body
        edges = self.graph.edges()
        data = {
            "devices": devices,
            "items": self.fed,
            "flow": self.graph.fingerprint(),
            "hardware": hardware(),
            "stages": stages,
            "edges": [[a, b] for a, ends in edges.items() for b in sorted(ends) if a in stages and b in stages],
        }
        if self.loops:
            data["cycles"] = [
                {
                    "members": [loop.head, loop.other],
                    "rounds": self.rounds[loop.head],
                    "ends": loop.ends,
                    "collocate": True,
                }
                for loop in self.loops
            ]
        if self.room:
            data["device_bytes"] = int(self.room * USABLE)
        return data
