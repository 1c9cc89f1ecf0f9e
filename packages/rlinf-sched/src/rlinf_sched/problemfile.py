"""Problems as plain data, in YAML or JSON.

::

    devices: 8                 # how many there are; overhead: seconds of every step beside its stages
    items: 512                 # of one step
    device_bytes: 80e9         # optional, with host_bytes (per device), node (devices of one), portions
    flow: 1f0c9a…              # optional fingerprints, compared with those of the profile
    hardware: h100
    stages:
      generator: {group: 8, cost: {kind: stream, lengths: {weibull: [1.8, 70, 260]}, slots: [64], alpha: 0.02}}
      trainer: {barrier: group, group: 8, multiple: 2, micro: [1, 2, 4]}     # no cost: fitted from the profile
    edges: [[generator, trainer]]
    cycles: [{members: [simulator, policy], rounds: 80, ends: simulator}]

A cost has the kind ``formula`` (fixed, serial, spread, step, log, micro), ``table`` (points: a list of
[devices, portion, seconds]) or ``stream`` (lengths, slots, alpha, beta, fixed, group), and with each: memory
(resident, sharded, item, remainder), load, offload, replica, error.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlinf_sched import streaming
from rlinf_sched.calibrate import calibrated
from rlinf_sched.costmodel import Cost, FormulaCost, Memory, StreamCost, TableCost
from rlinf_sched.fit import fit_stage
from rlinf_sched.graph import Graph, GraphError, SchedError, known, near
from rlinf_sched.problem import Problem
from rlinf_sched.profile import Profile
from rlinf_sched.units import counted

_KINDS: dict[str, type[Cost]] = {"formula": FormulaCost, "table": TableCost, "stream": StreamCost}
_TOP = ("devices", "items", "device_bytes", "host_bytes", "node", "portions", "max_portions", "hardware", "overhead")
_GRAPH = ("stages", "edges", "cycles", "inputs", "flow")


def read_data(path: Path) -> dict[str, Any]:
    """The mapping in a JSON or YAML file; SchedError names the file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise SchedError(f"{path}: cannot be read: {why}") from error
    if path.suffix in (".yaml", ".yml"):
        if find_spec("yaml") is None:
            raise SchedError(f"{path}: YAML needs pyyaml (rlinf-sched[yaml]); without it, give JSON")
        import yaml

        try:
            data = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise SchedError(f"{path}: not valid YAML: {error}") from error
    else:
        try:
            data = json.loads(text)
        except ValueError as error:
            raise SchedError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise SchedError(f"{path}: a mapping, not {type(data).__name__}")
    return data


def problem_from_dict(
    data: Mapping[str, Any], profile: Profile | None = None, *, source: str = "problem"
) -> tuple[Problem, list[str]]:
    """The problem, and warnings (a profile from other code or hardware). Raises SchedError by name."""
    known(data, (*_TOP, *_GRAPH), source)
    for key in ("devices", "items", "stages"):
        if key not in data:
            raise SchedError(f"{source} lacks {key!r}")
    stages: dict[str, dict[str, Any]] = {}
    given: dict[str, Any] = {}
    micro: dict[str, tuple[int, ...]] = {}
    if not isinstance(data["stages"], Mapping):
        raise GraphError(f"{source}.stages: a mapping from names to stages, not {data['stages']!r}")
    for name, body in data["stages"].items():
        body = dict(body or {})
        if "cost" in body:
            given[name] = body.pop("cost")
        if "micro" in body:
            micro[name] = tuple(body.pop("micro"))
        stages[name] = body
    graph = Graph.from_dict({**{key: data[key] for key in _GRAPH if key in data}, "stages": stages}, source=source)
    costs: dict[str, Cost] = {
        name: cost_from_dict(body, f"{source}.stages.{name}.cost") for name, body in given.items()
    }
    warnings: list[str] = []
    missing = [name for name in graph.stages if name not in costs]
    if missing and profile is None:
        raise SchedError(f"stage {missing[0]!r} has no cost: give one, or a profile (--profile)")
    if missing and profile is not None:
        for name in missing:
            mine = [sample for sample in profile.samples if sample.stage == name]
            if not mine:
                raise SchedError(f"the profile has no sample of stage {name!r}; profile again, or give its cost")
            costs[name] = fit_stage(mine, graph.stages[name], micro.get(name, ()))
        warnings = profile.warnings(
            flow=graph.flow or profile.flow, hardware=str(data.get("hardware") or profile.hardware)
        )
    problem = Problem(
        graph,
        costs,
        data["devices"],
        data["items"],
        device_bytes=float(data.get("device_bytes") or math.inf),
        host_bytes=float(data.get("host_bytes") or math.inf),
        portions=tuple(data.get("portions") or ()),
        max_portions=data.get("max_portions", 8),
        node=data.get("node", 8),
        overhead=float(data.get("overhead") or 0.0),
    )
    problem.validate()
    if profile is not None:
        strange = sorted({sample.stage for sample in profile.samples} - graph.stages.keys())
        warnings += [f"the profile has samples of {name!r}, which is no stage of {source}" for name in strange]
    if missing and profile is not None:
        problem = calibrated(problem, profile)
    return problem, warnings


def cost_from_dict(data: object, where: str) -> Cost:
    """A cost from plain data; unknown keys and wrong values are refused by name."""
    if not isinstance(data, Mapping):
        raise GraphError(f"{where}: a mapping, not {data!r}")
    body = dict(data)
    kind = body.pop("kind", "formula")
    if kind not in _KINDS:
        raise GraphError(f"{where}.kind: {kind!r} is not one of {', '.join(_KINDS)}{near(str(kind), _KINDS)}")
    made = _KINDS[kind]
    known(body, [f.name for f in fields(made)], where)
    if "memory" in body:
        known(body["memory"], [f.name for f in fields(Memory)], f"{where}.memory")
        body["memory"] = _memory(body["memory"])
    if kind == "table":
        body["points"] = _points(body.get("points"), where)
    for key in ("micro", "slots"):
        if key in body:
            body[key] = tuple(body[key])
    if "lengths" in body:
        body["lengths"] = _lengths(body["lengths"], f"{where}.lengths")
    for key, value in body.items():
        if isinstance(value, int | float) and not isinstance(value, bool) and (value < 0 or not math.isfinite(value)):
            raise GraphError(f"{where}.{key}: finite and not negative, not {value!r}")
    return made(**body)


def _memory(data: Mapping[str, Any]) -> Memory:
    sizes = {key: float(value) for key, value in data.items() if key != "sharded"}
    return Memory(**sizes, sharded=bool(data.get("sharded")))


def _points(data: object, where: str) -> dict[tuple[int, int], float]:
    if not isinstance(data, list) or not data or any(not isinstance(row, list) or len(row) != 3 for row in data):
        raise GraphError(f"{where}.points: a list of [devices, portion, seconds], not {data!r}")
    return {(int(n), int(c)): float(s) for n, c, s in data}


def _lengths(data: object, where: str) -> tuple[float, ...]:
    if isinstance(data, Mapping):
        known(data, ("weibull",), where)
        shape, scale, clip = data["weibull"]
        return streaming.weibull(float(shape), float(scale), float(clip))
    if not isinstance(data, list) or not data:
        raise GraphError(f"{where}: a list of decoding steps, or weibull: [shape, scale, clip], not {data!r}")
    return tuple(sorted(float(x) for x in data))


def beyond_profile(problem: Problem, profile: Profile) -> list[str]:
    """What speaks against so many devices, one sentence at most: that none as many were profiled."""
    most = max((sample.devices for sample in profile.samples), default=0)
    if not 0 < most < problem.devices:
        return []
    return [
        f"the profile was taken on at most {counted(most, 'device')}: what stages take on more, up to "
        f"{problem.devices}, is extrapolated"
    ]


def resized(problem: Problem, devices: int | None, items: int | None) -> Problem:
    """The problem on other devices or with other items."""
    changed = replace(
        problem,
        devices=problem.devices if devices is None else devices,
        items=problem.items if items is None else items,
    )
    changed.validate()
    return changed
