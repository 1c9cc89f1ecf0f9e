"""Which process runs on which devices, as text and as data.

Syntax, segments separated by commas::

    0-3            devices 0 to 3, one process each
    0,2            devices 0 and 2, one process each
    0-3:0-1        devices 0 to 3 for processes 0 and 1: two devices each
    0-1:0-3        devices 0 and 1 for processes 0 to 3: two processes on each device
    all            every device, one process each
    all:0          every device for one process
    gpu_a:0-3      devices 0 to 3 *of the nodes labelled gpu_a* (counted through those nodes in order)
    gpu_a:0-3:0-1  the same, for processes 0 and 1

A segment without processes continues the count of the segments before it. Together the segments must name
every process from 0 on exactly once and no device twice; a process may not straddle two nodes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rlinf_core.errors import PlacementError, nearest

MAX_PER_DEVICE = 64
"""Most processes on one device: beyond, a slip of the pen is likelier than a wish."""
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_LABEL = re.compile(r"[A-Za-z_][\w.-]*")


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """``id`` counts over the cluster, ``local_id`` on its node. ``kind``: ``cpu`` (a slot) or its name."""

    id: int
    node: str
    local_id: int
    uuid: str = ""
    kind: str = "cpu"


@dataclass(frozen=True, slots=True)
class NodeInfo:
    name: str
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ClusterInfo:
    """Devices in the order of their ids (0, 1, ...), and the nodes that they are on."""

    devices: tuple[DeviceInfo, ...]
    nodes: tuple[NodeInfo, ...] = ()

    @classmethod
    def virtual(cls, count: int, node: str = "local") -> ClusterInfo:
        """``count`` CPU slots on one node."""
        slots = tuple(DeviceInfo(i, node, i, f"{node}/cpu{i}", "cpu") for i in range(count))
        return cls(slots, (NodeInfo(node),))

    def labelled(self, label: str) -> tuple[int, ...]:
        """Ids of the devices on nodes with this label (or name), in order."""
        names = {node.name for node in self.nodes if label in node.labels or label == node.name}
        return tuple(device.id for device in self.devices if device.node in names)

    def labels(self) -> tuple[str, ...]:
        """All labels and node names."""
        found = [label for node in self.nodes for label in (node.name, *node.labels)]
        return tuple(dict.fromkeys(found))


@dataclass(frozen=True, slots=True)
class Placement:
    """``processes[rank]``: ids of the devices of that process, in order."""

    processes: tuple[tuple[int, ...], ...]

    @property
    def devices(self) -> frozenset[int]:
        return frozenset(device for process in self.processes for device in process)


def parse_placement(text: str, cluster: ClusterInfo, *, where: str = "placement") -> Placement:
    """Placement from its text form; ``where`` is the config key or plan path that errors name.

    Raises ``PlacementError`` for bad syntax, unknown labels, devices that do not exist or come twice,
    processes that come twice or leave a gap, counts that do not divide, a process on two nodes.
    """
    return _Parser(text, cluster, where).parse()


def check_syntax(text: str, *, where: str = "placement") -> None:
    """What can be said of a placement's text without a cluster; raises ``PlacementError`` like ``parse_placement``."""
    _Parser(text, ClusterInfo(()), where).check()


def format_placement(processes: Sequence[Sequence[int]]) -> str:
    """The text form that parses to ``processes``; ``PlacementError`` when there is none (devices shared unevenly)."""
    owners: dict[int, list[int]] = {}
    for rank, process in enumerate(processes):
        for device in process:
            owners.setdefault(device, []).append(rank)
    segments: list[list[list[int]]] = []
    rank = 0
    while rank < len(processes):
        devices = list(processes[rank])
        mates = owners[devices[0]] if devices else [rank]
        same = all(list(processes[mate]) == devices for mate in mates)
        contiguous = devices == list(range(devices[0], devices[-1] + 1)) if devices else False
        if not contiguous or not same or mates != list(range(rank, rank + len(mates))):
            raise PlacementError(f"processes {tuple(map(tuple, processes))} have no text form")
        last = segments[-1] if segments else None
        if last and _shape(last) == (len(devices), len(mates)) and last[0][-1] + 1 == devices[0]:
            last[0].extend(devices)
            last[1].extend(mates)
        else:
            segments.append([devices, list(mates)])
        rank += len(mates)
    return ",".join(_segment_text(devices, ranks) for devices, ranks in segments)


def _shape(segment: list[list[int]]) -> tuple[int, int]:
    devices, ranks = segment
    if len(ranks) >= len(devices):
        return 1, len(ranks) // len(devices)
    return len(devices) // len(ranks), 1


def _segment_text(devices: list[int], ranks: list[int]) -> str:
    text = _span(devices)
    return text if len(devices) == len(ranks) else f"{text}:{_span(ranks)}"


def _span(numbers: list[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"


class _Parser:
    def __init__(self, text: str, cluster: ClusterInfo, where: str) -> None:
        self.text = text
        self.cluster = cluster
        self.where = where

    def check(self) -> None:
        """The grammar of all segments, and how many processes each puts on a device."""
        for segment in self._segments():
            _, devices, ranks = self._split(segment)
            if devices is not None and ranks is not None:
                self._deal(segment, devices, ranks)

    def _segments(self) -> list[str]:
        if not isinstance(self.text, str) or not self.text.strip():
            raise self._error("is empty; give device ids such as 0-3, or all")
        return [segment.strip() for segment in self.text.split(",")]

    def parse(self) -> Placement:
        found: dict[int, tuple[int, ...]] = {}
        used: dict[int, str] = {}
        for segment in self._segments():
            devices, ranks = self._segment(segment, next_rank=max(found, default=-1) + 1)
            for device in devices:
                if device in used:
                    raise self._error(f"names device {device} twice, in {used[device]!r} and {segment!r}")
                used[device] = segment
            for rank, process in self._deal(segment, devices, ranks):
                if rank in found:
                    raise self._error(f"names process {rank} twice (again in {segment!r})")
                found[rank] = process
        missing = [rank for rank in range(max(found) + 1) if rank not in found]
        if missing:
            named = ", ".join(map(str, sorted(found)[:10])) + (", …" if len(found) > 10 else "")
            lacking = ", ".join(map(str, missing[:10])) + (", …" if len(missing) > 10 else "")
            raise self._error(
                f"leaves a gap: processes {named} are named but not {lacking}; processes count from 0 without gaps"
            )
        processes = tuple(found[rank] for rank in sorted(found))
        for rank, process in enumerate(processes):
            nodes = list(dict.fromkeys(self.cluster.devices[device].node for device in process))
            if len(nodes) > 1:
                raise self._error(
                    f"gives process {rank} devices {', '.join(map(str, process))}, which are on nodes "
                    f"{' and '.join(nodes)}; the devices of a process must be on one node"
                )
        return Placement(processes)

    def _split(self, segment: str) -> tuple[str, list[int] | None, list[int] | None]:
        """Label, numbers of devices (None: all), numbers of processes (None: not given)."""
        parts = [part.strip() for part in segment.split(":")]
        label = ""
        if len(parts) > 1 and _LABEL.fullmatch(parts[0]) and parts[0] != "all":
            label = parts.pop(0)
        if len(parts) > 2:
            raise self._error(f"has {segment!r}, which is not devices, devices:processes or label:devices:processes")
        devices = None if parts[0] == "all" else self._range(segment, parts[0], "devices")
        return label, devices, self._range(segment, parts[1], "processes") if len(parts) > 1 else None

    def _segment(self, segment: str, next_rank: int) -> tuple[list[int], list[int]]:
        label, numbers, ranks = self._split(segment)
        pool = self.cluster.labelled(label) if label else tuple(range(len(self.cluster.devices)))
        among = f" of the nodes labelled {label!r}" if label else ""
        if label and not pool:
            known = self.cluster.labels()
            raise self._error(
                f"names node label {label!r}, which no node with devices has{nearest(label, known)}; "
                f"labels here: {', '.join(known) or 'none'}"
            )
        devices = list(pool) if numbers is None else [self._pick(pool, index, among) for index in numbers]
        if not devices:
            raise self._error("asks for devices but the cluster has none; set cluster.virtual_devices")
        return devices, list(range(next_rank, next_rank + len(devices))) if ranks is None else ranks

    def _pick(self, pool: Sequence[int], index: int, among: str) -> int:
        if index >= len(pool):
            have = f"0-{len(pool) - 1}" if len(pool) > 1 else "0" if pool else "none"
            hint = "" if among else "; more CPU slots: cluster.virtual_devices"
            raise self._error(f"names device {index}{among}, but there are {len(pool)} (ids {have}){hint}")
        return pool[index]

    def _range(self, segment: str, part: str, what: str) -> list[int]:
        match = _RANGE.fullmatch(part)
        if match is None:
            raise self._error(
                f"has {segment!r}, where {part!r} is not {what}: give a number (2), a range (0-3)"
                + (" or all" if what == "devices" else "")
            )
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise self._error(f"has {segment!r}, where the range {part} runs backwards; did you mean {last}-{first}?")
        if last - first >= 1_000_000:
            raise self._error(f"has {segment!r}, where the range {part} is too long")
        return list(range(first, last + 1))

    def _deal(self, segment: str, devices: list[int], ranks: list[int]) -> list[tuple[int, tuple[int, ...]]]:
        many, few = max(len(devices), len(ranks)), min(len(devices), len(ranks))
        if many % few:
            raise self._error(
                f"has {segment!r}: {len(devices)} devices and {len(ranks)} processes do not divide evenly; "
                "one count must be a multiple of the other"
            )
        each = many // few
        if len(ranks) > len(devices) and each > MAX_PER_DEVICE:
            raise self._error(
                f"has {segment!r}, which puts {each} processes on each device; at most {MAX_PER_DEVICE} may share one"
            )
        if len(devices) >= len(ranks):
            return [(rank, tuple(devices[i * each : (i + 1) * each])) for i, rank in enumerate(ranks)]
        return [(rank, (devices[i // each],)) for i, rank in enumerate(ranks)]

    def _error(self, what: str) -> PlacementError:
        return PlacementError(f"{self.where}: {self.text!r} {what}")
