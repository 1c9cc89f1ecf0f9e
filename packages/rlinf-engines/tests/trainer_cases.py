"""Cases for tests of trainer backends: tiny models, rows, a packer, a head, losses, and what must come out.

``reference`` computes with a plain Hugging Face model on padded rows and torch's AdamW, and shares nothing with the
trainers but the initial weights, so that a backend which agrees with it packs, masks, sums, clips and updates right.

Shape legend: N tokens, M predicted ones, B rows, T padded positions, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from rlinf_core.types import Batch, VocabShard
from rlinf_engines.models import load_model, named_weights

CHARACTERS = "0123456789+-*= "
VOCABULARY = len(CHARACTERS) + 2
CLIP = 0.2


def model_config(family: str = "qwen2", dtype: str = "float32", path: str | None = None, **sizes: Any) -> Any:
    """A ``model`` config node; keywords replace sizes of the tiny model."""
    tiny = {
        "family": family,
        "hidden_size": 64,
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "intermediate_size": 96,
        "max_positions": 64,
        "characters": CHARACTERS,
    }
    return SimpleNamespace(path=path, dtype=dtype, tiny=SimpleNamespace(**{**tiny, **sizes}))


def trainer_config(name: str = "torch", **keys: Any) -> Any:
    """A ``trainer`` config node with the keys of every backend; keywords replace and add."""
    common = {
        "name": name,
        "lr": 1e-3,
        "betas": [0.9, 0.95],
        "eps": 1e-8,
        "weight_decay": 0.01,
        "grad_clip": 0.1,
        "warmup_steps": 0,
        "schedule": "constant",
        "schedule_steps": 0,
        "min_lr_ratio": 0.0,
        "micro_batch_tokens": 1024,
        "activation_checkpointing": False,
        "share_prompts": True,
    }
    if name == "torch":
        common["sharding"] = "ddp"
    return SimpleNamespace(**{**common, **keys})


@dataclass(frozen=True)
class Row:
    """A prompt with a response, and what a loss reads of it."""

    id: str
    prompt: list[int]
    response: list[int]
    old_logprobs: list[float] = field(default_factory=list)
    advantage: float = 1.0
    returns: list[float] = field(default_factory=list)


def make_rows(count: int = 8, step: int = 0) -> list[Row]:
    """Random rows of different lengths, from 2 tokens (the shortest there can be) to 20. Those of places 2 and 3, 5 and
    6, and so on have a prompt in common, as responses of a group have."""
    generator = torch.Generator().manual_seed(3000 + step)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    rows = []
    for i in range(count):
        prompt, response = (1, 1) if i == 1 else (number(1, 8), number(1, 12))
        ids = torch.randint(2, VOCABULARY, (prompt + response,), generator=generator).tolist()
        if i % 3 == 0 and i:
            ids = rows[-1].prompt + ids[prompt:]
            prompt = len(rows[-1].prompt)
        noise = torch.randn(2 * response, generator=generator, dtype=torch.float64)
        old = (-math.log(VOCABULARY) + 0.3 * noise[:response]).tolist()
        advantage = float(torch.randn((), generator=generator, dtype=torch.float64))
        rows.append(Row(f"p{i}/0", ids[:prompt], ids[prompt:], old, advantage, noise[response:].tolist()))
    return rows


def collate(rows: Sequence[Row]) -> dict[str, Any]:
    """Rows laid end to end: see ``rlinf_core.types.Batch``, with ``old_logprobs``, ``advantages``, ``returns`` [M]."""
    ids: list[int] = []
    positions: list[int] = []
    predict: list[int] = []
    targets: list[int] = []
    segments: list[int] = []
    starts = [0]
    for number, row in enumerate(rows, start=1):
        begin = len(ids) + len(row.prompt) - 1
        ids += row.prompt + row.response
        positions += range(len(row.prompt) + len(row.response))
        predict += range(begin, begin + len(row.response))
        targets += row.response
        segments += [number] * len(row.response)
        starts.append(len(ids))
    return {
        "ids": [row.id for row in rows],
        "input_ids": torch.tensor(ids),
        "position_ids": torch.tensor(positions),
        "cu_seqlens": torch.tensor(starts, dtype=torch.int32),
        "max_len": max(b - a for a, b in pairwise(starts)),
        "predict": torch.tensor(predict),
        "targets": torch.tensor(targets),
        "mask": torch.ones(len(targets), dtype=torch.bool),
        "segments": torch.tensor(segments),
        "old_logprobs": torch.tensor([x for row in rows for x in row.old_logprobs], dtype=torch.float64),
        "advantages": torch.tensor([row.advantage for row in rows for _ in row.response], dtype=torch.float64),
        "returns": torch.tensor([x for row in rows for x in row.returns], dtype=torch.float64),
    }


def split(rows: Sequence[Row], sizes: Iterable[int]) -> list[dict[str, Any]]:
    """Micro-batches of so many rows each; what is left over comes last."""
    batches, start = [], 0
    for size in sizes:
        batches.append(collate(rows[start : start + size]))
        start += size
    return [*batches, collate(rows[start:])] if start < len(rows) else batches


class _Sum(torch.autograd.Function):
    """Sum over a group. Every rank computes the same loss from it, so a gradient passes as it is."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


def head(logits: torch.Tensor, batch: Batch, shard: VocabShard) -> dict[str, torch.Tensor]:
    """``logprobs`` and ``entropy`` [M] of logits [M, V], or of the part of V that this rank of ``shard`` has."""
    top = logits.detach().max(dim=-1).values
    if shard.group is not None:
        dist.all_reduce(top, dist.ReduceOp.MAX, group=shard.group)

    def total(x: torch.Tensor) -> torch.Tensor:
        return x if shard.group is None else _Sum.apply(x, shard.group)

    shifted = logits - top.unsqueeze(-1)
    sum_exp = total(shifted.exp().sum(-1))
    norm = sum_exp.log()
    local = batch["targets"] - shard.start
    mine = (local >= 0) & (local < logits.shape[-1])
    chosen = shifted.gather(-1, torch.where(mine, local, 0).unsqueeze(-1)).squeeze(-1)
    logprobs = total(torch.where(mine, chosen, 0.0)) - norm
    # Only sums over the vocabulary go through ``total``: nothing whole enters a rank's part of one.
    mean = total((shifted * shifted.exp()).sum(-1)) / sum_exp
    mask = batch["mask"]
    return {"logprobs": torch.where(mask, logprobs, 0.0), "entropy": torch.where(mask, norm - mean, 0.0)}


def _clipped(logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    ratio = (logprobs - old.to(logprobs)).exp()
    weight = advantages.to(logprobs)
    return -torch.minimum(ratio * weight, ratio.clamp(1 - CLIP, 1 + CLIP) * weight)


def policy_loss(outputs: dict[str, torch.Tensor], batch: Batch) -> tuple[torch.Tensor, float, dict[str, float]]:
    """Clipped surrogate minus a little entropy, summed over tokens."""
    mask = batch["mask"]
    each = _clipped(outputs["logprobs"], batch["old_logprobs"], batch["advantages"]) - 0.01 * outputs["entropy"]
    count = float(mask.sum())
    entropy = float(outputs["entropy"].detach().where(mask, 0.0).sum())
    return each.where(mask, 0.0).sum(), count, {"tokens": count, "entropy": entropy}


def value_loss(outputs: dict[str, torch.Tensor], batch: Batch) -> tuple[torch.Tensor, float, dict[str, float]]:
    """Squared error of ``values``, summed over tokens."""
    mask = batch["mask"]
    count = float(mask.sum())
    each = (outputs["values"] - batch["returns"].to(outputs["values"])).square()
    return each.where(mask, 0.0).sum(), count, {"tokens": count}


LOSSES = {"policy": policy_loss, "critic": value_loss}


@dataclass
class Numbers:
    """What steps give: mean loss and gradient norm (before clipping) of each, what the first forward gives for each
    row, weights after the last step."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    first: dict[str, torch.Tensor] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


def reference(model: Any, cfg: Any, steps: int = 2, role: str = "policy", seed: int = 0) -> Numbers:
    """The numbers of ``steps`` optimizer steps on ``make_rows(step=0)``, ``make_rows(step=1)``, ..."""
    network = load_model(model, seed, role=role).requires_grad_(True)
    decayed = [p for p in network.parameters() if p.dim() > 1]
    others = [p for p in network.parameters() if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": cfg.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=cfg.lr, betas=tuple(cfg.betas), eps=cfg.eps)
    numbers = Numbers()
    for step in range(steps):
        rows = make_rows(step=step)
        width = max(len(row.prompt) + len(row.response) for row in rows)
        ids = torch.zeros(len(rows), width, dtype=torch.int64)
        real = torch.zeros(len(rows), width, dtype=torch.int64)
        for i, row in enumerate(rows):
            whole = row.prompt + row.response
            ids[i, : len(whole)] = torch.tensor(whole)
            real[i, : len(whole)] = 1
        logits = network(input_ids=ids, attention_mask=real).logits
        total, count = torch.zeros((), dtype=logits.dtype), 0
        for i, row in enumerate(rows):
            span = slice(len(row.prompt) - 1, len(row.prompt) + len(row.response) - 1)
            if role == "critic":
                found = logits[i, span, 0]
                total = total + (found - torch.tensor(row.returns, dtype=found.dtype)).square().sum()
            else:
                logs = logits[i, span].log_softmax(-1)
                found = logs.gather(-1, torch.tensor(row.response).unsqueeze(-1)).squeeze(-1)
                old = torch.tensor(row.old_logprobs, dtype=torch.float64)
                each = _clipped(found, old, torch.tensor(row.advantage, dtype=torch.float64))
                total = total + (each + 0.01 * (logs.exp() * logs).sum(-1)).sum()
            count += len(row.response)
            if step == 0:
                numbers.first[row.id] = found.detach()
        numbers.losses.append(total.item() / count)
        optimizer.zero_grad()
        (total / count).backward()
        grads = [p.grad for p in network.parameters() if p.grad is not None]
        norm = math.sqrt(sum(float(g.square().sum()) for g in grads))
        numbers.norms.append(norm)
        if 0.0 < cfg.grad_clip < norm:
            for grad in grads:
                grad.mul_(cfg.grad_clip / norm)
        optimizer.step()
    numbers.weights = {name: tensor.clone() for name, tensor in named_weights(network)}
    return numbers


def train(trainer: Any, parts: Sequence[Sequence[int]], steps: int = 2, role: str = "policy") -> Numbers:
    """The same numbers by a trainer that is set up.

    ``parts`` gives the rows of each micro-batch of this rank's *replica*, by their places in ``make_rows``.
    """
    numbers = Numbers()
    for step in range(steps):
        rows = make_rows(step=step)
        batches = [collate([rows[i] for i in part]) for part in parts]
        if step == 0:
            for batch, outputs in zip(batches, trainer.forward(batches), strict=True):
                values = outputs["values" if role == "critic" else "logprobs"]
                for number, name in enumerate(batch["ids"], start=1):
                    numbers.first[name] = values[batch["segments"] == number].cpu()
        total, count, _ = trainer.accumulate(batches, LOSSES[role])
        sums = trainer.reduce({"loss": total, "count": count})
        info = trainer.step(sums["count"])
        numbers.losses.append(sums["loss"] / sums["count"])
        numbers.norms.append(info.grad_norm)
    numbers.weights = {name: tensor.detach().cpu().clone() for name, tensor in trainer.weights()}
    return numbers


def differences(found: Numbers, expected: Numbers) -> dict[str, float]:
    """How far ``found`` is from ``expected``: losses and norms relative, forward and weights absolute, the rows that
    ``found`` has; empty weights (a rank that is given none) do not count."""

    def relative(a: list[float], b: list[float]) -> float:
        return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))

    apart = {"losses": relative(found.losses, expected.losses), "norms": relative(found.norms, expected.norms)}
    apart["first"] = max([float((t - expected.first[n]).abs().max()) for n, t in found.first.items()], default=0.0)
    if found.weights:
        if found.weights.keys() != expected.weights.keys():
            raise AssertionError(
                f"weights {sorted(found.weights.keys() ^ expected.weights.keys())} are on one side only"
            )
        apart["weights"] = max(float((t - expected.weights[n]).abs().max()) for n, t in found.weights.items())
    return apart


def check_equal(found: Numbers, expected: Numbers, *, relative: float = 1e-4, absolute: float = 1e-5) -> None:
    """Fail unless losses and norms agree within ``relative``, forward within ``absolute`` and weights within five times
    that: Adam divides a gradient by its own size, so that the rounding of one near zero moves its weight by much."""
    apart = differences(found, expected)
    limits = {"losses": relative, "norms": relative, "first": absolute, "weights": 5 * absolute}
    far = {name: value for name, value in apart.items() if not value <= limits[name]}
    if far:
        raise AssertionError(f"too far from the reference: {far}; all: {apart}")
