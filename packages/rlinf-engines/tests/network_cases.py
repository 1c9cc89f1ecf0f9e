"""Networks that are no causal LM, for tests of trainer backends: specs, batches, a loss, and what must come out.

``reference`` is a plain loop over the whole batch that shares nothing with the trainers but the network's classes.

Shape legend: B rows, O outputs, F features.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from rlinf_core.types import Batch, NetworkSpec

FEATURES, OUTPUTS = 5, 3


class Mlp(nn.Module):
    """Two heads on one body, a vector of its own, and running statistics: the usual actor-critic."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(FEATURES, dtype=torch.float64))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.full((FEATURES,), 0.5), persistent=False)
        self.body = nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
        self.actor = nn.Linear(16, OUTPUTS)
        self.value = nn.Linear(16, 1)
        self.log_std = nn.Parameter(torch.zeros(OUTPUTS))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.body(((x - self.mean) * self.scale).to(self.log_std.dtype))
        return {"out": self.actor(hidden) * self.log_std.exp(), "values": self.value(hidden)[:, 0]}


class Conv(nn.Module):
    """A convolution, a layer without a bias and a tied one."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.first = nn.Linear(4 * 3 * 3, OUTPUTS, bias=False)
        self.again = self.first
        self.value = nn.Linear(36, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.conv(x).relu().flatten(1)
        return {"out": self.first(hidden) + self.again(hidden.tanh()), "values": self.value(hidden)[:, 0]}


class Partial(nn.Module):
    """Layers that no output or no loss depends on, as the last ones of a vision encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 8)
        self.spare = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        self.out = nn.Linear(8, OUTPUTS)
        self.value = nn.Linear(8, 1)
        self.other = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.first(x).relu()
        return {"out": self.out(hidden), "values": self.value(hidden)[:, 0], "other": self.other(hidden)}


KINDS: dict[str, Callable[[], nn.Module]] = {"mlp": Mlp, "conv": Conv, "partial": Partial}


def spec(kind: str = "mlp", dtype: str = "float32") -> NetworkSpec:
    """The description of one of ``KINDS``."""

    def build(seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return KINDS[kind]()

    def forward(network: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
        return network(batch["x"])  # type: ignore[no-any-return]

    def export(network: nn.Module, weights: dict[str, torch.Tensor], path: Path) -> None:
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, path / "weights.safetensors")
        (path / "config.json").write_text(json.dumps({"kind": type(network).__name__}))

    return NetworkSpec(build, forward, lambda: make_batch(kind, dtype, [0]), export, dtype)


def make_batch(kind: str, dtype: str, rows: Sequence[int], step: int = 0) -> dict[str, Any]:
    """Some rows of the eight of a step."""
    generator = torch.Generator().manual_seed(100 + step)
    number = torch.float64 if dtype == "float64" else torch.float32
    shape = (8, 3, 5, 5) if kind == "conv" else (8, FEATURES)
    x = torch.randn(shape, generator=generator, dtype=torch.float64).to(number)
    y = torch.randn(8, OUTPUTS, generator=generator, dtype=torch.float64).to(number)
    picked = list(rows)
    return {"ids": [f"row{i}" for i in picked], "x": x[picked], "y": y[picked]}


def loss(outputs: dict[str, torch.Tensor], batch: Batch) -> tuple[torch.Tensor, float, dict[str, float]]:
    """Squared errors of both heads, summed."""
    apart = (outputs["out"] - batch["y"]).square().sum() + (outputs["values"] - batch["y"][:, 0]).square().sum()
    return apart, float(len(batch["ids"])), {"rows": float(len(batch["ids"]))}


def observe(network: Any) -> None:
    """A change of running statistics, as ``update_buffers`` takes it."""
    network.mean.add_(torch.arange(FEATURES, dtype=torch.float64) / 7)
    network.seen.add_(8)


@dataclass
class Found:
    """What some steps give: mean loss and gradient norm of each; of the first, gradients as AdamW saw them (clipped);
    weights and persistent buffers after the last."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


def reference(kind: str, cfg: Any, dtype: str = "float32", steps: int = 3) -> Found:
    """The numbers of a bare loop; running statistics change after the first step."""
    network = spec(kind, dtype).build(0)
    for parameter in network.parameters():
        parameter.data = parameter.data.to(torch.float64 if dtype == "float64" else torch.float32)
    named = dict(network.named_parameters())
    groups = [
        {"params": [p for p in named.values() if p.dim() > 1], "weight_decay": cfg.weight_decay},
        {"params": [p for p in named.values() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=cfg.lr, betas=tuple(cfg.betas), eps=cfg.eps)
    found = Found()
    for step in range(steps):
        batch = make_batch(kind, dtype, range(8), step)
        total, count, _ = loss(network(batch["x"]), batch)
        found.losses.append(float(total.detach()) / count)
        (total / count).backward()
        for parameter in named.values():  # one that has no part in it is decayed all the same
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        found.norms.append(math.sqrt(sum(float(p.grad.square().sum()) for p in named.values())))
        for parameter in named.values():
            if 0.0 < cfg.grad_clip < found.norms[-1]:
                parameter.grad.mul_(cfg.grad_clip / found.norms[-1])
        if not step:
            found.gradients = {name: p.grad.clone() for name, p in named.items()}
        adam.step()
        adam.zero_grad()
        if kind == "mlp" and not step:
            with torch.no_grad():
                observe(network)
    found.weights = {name: tensor.clone() for name, tensor in network.state_dict().items() if "again" not in name}
    return found


def train(trainer: Any, kind: str, parts: Sequence[Sequence[int]], dtype: str = "float32", steps: int = 3) -> Found:
    """The same by a trainer that is set up; ``parts`` are the rows of each micro-batch of this rank."""
    found = Found()
    for step in range(steps):
        batches = [make_batch(kind, dtype, part, step) for part in parts]
        total, count, _ = trainer.accumulate(batches, loss)
        sums = trainer.reduce({"loss": total, "count": count})
        found.norms.append(trainer.step(sums["count"]).grad_norm)
        found.losses.append(sums["loss"] / sums["count"])
        if not step:
            state = trainer._whole_state()
            averages = state["optimizer"] if state else {}
            found.gradients = {n: s["exp_avg"].clone() / (1.0 - trainer.cfg.betas[0]) for n, s in averages.items()}
        if kind == "mlp" and not step:
            trainer.update_buffers(observe)
    found.weights = weights(trainer)
    return found


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in trainer.weights()}


def check(found: Found, expected: Found, limit: float) -> None:
    """Fail unless everything that ``found`` has agrees: losses and norms relative, tensors absolute."""
    far = {}
    for what in ("losses", "norms"):
        pairs = zip(getattr(found, what), getattr(expected, what), strict=True)
        far[what] = max(abs(a - b) / abs(b) for a, b in pairs)
    for what in ("gradients", "weights"):
        mine, theirs = getattr(found, what), getattr(expected, what)
        if mine.keys() != theirs.keys():
            raise AssertionError(f"{what}: only one side has {sorted(mine.keys() ^ theirs.keys())}")
        formats = {name: (t.dtype, theirs[name].dtype) for name, t in mine.items() if t.dtype != theirs[name].dtype}
        if formats:
            raise AssertionError(f"{what}: other formats: {formats}")
        far[what] = max(float((t.double() - theirs[name].double()).abs().max()) for name, t in mine.items())
    if not all(value <= limit for value in far.values()):
        raise AssertionError(f"further apart than {limit}: {far}")


def read_export(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "weights.safetensors")
