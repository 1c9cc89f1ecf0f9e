"""A trainer of the tests' own: a small model in float64, ranks that are threads, some of them one replica."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rlinf_core.config import Config
from rlinf_core.errors import NonFiniteError
from rlinf_core.types import Batch, HeadFn, LossFn, ParallelInfo, Sample, StepInfo, VocabShard
from rlinf_reasoning.batch import Row, TokenHead, collate, per_row
from rlinf_reasoning.conf import Algorithm

VOCABULARY = 14


class Tokenizer:
    pad_token_id, eos_token_id = 0, 1

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [2 + "0123456789+=".index(c) for c in text]


class Model(torch.nn.Module):
    """Sees the last four tokens of a sequence; enough to learn a few answers by heart."""

    def __init__(self, outputs: int = VOCABULARY) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embed = torch.nn.Parameter(torch.randn(4, VOCABULARY, 32, generator=generator, dtype=torch.float64) * 0.3)
        self.out = torch.nn.Parameter(torch.randn(32, outputs, generator=generator, dtype=torch.float64) * 0.1)

    def forward(self, batch: Batch) -> torch.Tensor:
        ids, positions = batch["input_ids"], batch["position_ids"]
        hidden = self.embed[0][ids]
        for back in (1, 2, 3):
            shifted = torch.where(positions >= back, ids.roll(back), 0)
            hidden = hidden + self.embed[back][shifted]
        return (torch.tanh(hidden) @ self.out)[batch["predict"]]


class World:
    """Sums over ranks that are threads of the test; ``together`` ranks in a row are one replica."""

    def __init__(self, size: int, together: int = 1) -> None:
        self.size = size
        self.together = together
        self.barrier = threading.Barrier(size, timeout=60)
        self.slots: list[Any] = [None] * size

    def gather(self, rank: int, value: Any) -> list[Any]:
        self.slots[rank] = value
        self.barrier.wait()
        everyone = list(self.slots)
        self.barrier.wait()
        return everyone


class SmallTrainer:
    """The trainer protocol with Adam on ``Model``."""

    def __init__(self, world: World | None = None, rank: int = 0, *, role: str = "policy", tokens: int = 40) -> None:
        self.tokenizer = Tokenizer()
        self.model = Model(1 if role == "critic" else VOCABULARY)
        self.head: HeadFn | None = None if role == "critic" else TokenHead()
        self.world = world or World(1)
        self.rank = rank
        self.micro_batch_tokens = tokens
        self.steps: list[float] = []
        self.gradients: list[list[torch.Tensor]] = []
        self.forwards = 0
        self.restart_optimizer(Config({"lr": 0.01}))

    def restart_optimizer(self, cfg: Any) -> None:
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=cfg.lr)

    def _outputs(self, batch: Batch) -> dict[str, torch.Tensor]:
        outputs = self.model(batch)
        return {"values": outputs[:, 0]} if self.head is None else self.head(outputs, batch, VocabShard())

    def share(self, items: Sequence[Any]) -> list[Any]:
        parts = self.world.gather(self.rank, list(items))
        first = self.rank // self.world.together * self.world.together
        return [item for part in parts[first : first + self.world.together] for item in part]

    def most(self, number: int) -> int:
        return max(self.world.gather(self.rank, number))

    def forward(self, batches: Sequence[Batch]) -> list[dict[str, torch.Tensor]]:
        self.forwards += 1
        with torch.no_grad():
            return [self._outputs(batch) for batch in batches]

    def accumulate(self, batches: Sequence[Batch], loss_fn: LossFn) -> tuple[float, float, dict[str, float]]:
        total, count, sums = 0.0, 0.0, dict[str, float]()
        for batch in batches:
            loss, counted, metrics = loss_fn(self._outputs(batch), batch)
            if not math.isfinite(float(loss.detach())):
                raise NonFiniteError("loss")
            loss.backward()
            total, count = total + float(loss.detach()), count + counted
            for name, value in metrics.items():
                sums[name] = sums.get(name, 0.0) + value
        return total, count, sums

    def step(self, count: float) -> StepInfo:
        own = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.model.parameters()]
        parts = self.world.gather(self.rank, own)[:: self.world.together]
        summed = [sum(part[i] for part in parts) / count for i in range(len(own))]
        for parameter, gradient in zip(self.model.parameters(), summed, strict=True):
            parameter.grad = gradient.clone()
        self.gradients.append(summed)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps.append(count)
        return StepInfo(grad_norm=float(sum((g**2).sum() for g in summed)) ** 0.5, lr=0.1)

    def reduce(self, values: Mapping[str, float]) -> dict[str, float]:
        total: dict[str, float] = {}
        for part in self.world.gather(self.rank, dict(values))[:: self.world.together]:
            for name, value in part.items():
                total[name] = total.get(name, 0.0) + value
        return total

    def onload(self) -> None:
        pass

    def offload(self) -> None:
        pass

    def close(self) -> None:
        pass

    def export(self, path: Path) -> None:
        path.mkdir()
        torch.save(self.model.state_dict(), path / "weights.pt")


class ReferenceTrainer(SmallTrainer):
    """As ``Reference`` loads a backend: made from its config, set up from an exported directory."""

    def __init__(self, cfg: Any) -> None:
        super().__init__()

    def setup(self, model: Any, head: Any, parallel: ParallelInfo, *, seed: int, role: str = "policy") -> None:
        assert parallel.world_size == 1
        self.model.load_state_dict(torch.load(Path(model.path) / "weights.pt"))
        self.head = head


def recipe(schema: type = Algorithm, **algorithm: Any) -> Config:
    """A recipe's configuration with these ``algorithm`` keys, in one minibatch unless told otherwise."""
    return Config(
        {
            "algorithm": {**vars(schema()), "minibatches": 1, "group_size": 4, **algorithm},
            "trainer": {"name": "small", "lr": 0.05},
            "model": {"path": None, "tiny": {"max_positions": 64}},
            "rollout": {},
            "sampling": {"temperature": 1.0, "max_new_tokens": 2},
            "warm_start": {
                "held_out": 4,
                "max_steps": 300,
                "batch_size": 8,
                "target_accuracy": 0.9,
                "check_every": 5,
                "lr": 0.05,
                "lr_warmup_steps": 0,
            },
        }
    )


def samples(
    groups: int = 6, size: int = 4, reward: Callable[[int, int], float] | None = None, drift: float = 0.0
) -> list[Sample]:
    """Scored samples of ``Model`` as it begins; ``drift``: how far the engine's log-probs are off, at most."""
    trainer = SmallTrainer()
    found = []
    for g in range(groups):
        for i in range(size):
            prompt, response = [2 + g, 12, 3, 13], [2 + (g * 3 + i) % 10, 1][: 1 + (g + i) % 2]
            row = Row("x", prompt, response)
            logprobs = per_row(trainer.forward([collate([row])])[0]["logprobs"], [row])[0]
            found.append(
                Sample(
                    id=f"train/0/p{g}/{i}",
                    group=f"train/0/p{g}",
                    index=i,
                    group_size=size,
                    prompt_text="",
                    prompt_ids=prompt,
                    response_ids=response,
                    response_text="",
                    logprobs=[v + drift * math.sin(7 * g + 3 * i + k) for k, v in enumerate(logprobs)],
                    versions=[0] * len(response),
                    finish_reason="stop" if response[-1] == 1 else "length",
                    reward=float((g + i) % 3 == 0) if reward is None else reward(g, i),
                )
            )
    return found


def over_ranks(
    parts: Sequence[Sequence[Sample]],
    run: Callable[[SmallTrainer, list[Sample]], Any],
    *,
    together: int = 1,
    role: str = "policy",
    tokens: int = 40,
) -> list[tuple[SmallTrainer, Any]]:
    """(trainer, what ``run(trainer, part)`` returned) of each rank; the first error of a rank is raised."""
    world = World(len(parts), together)
    trainers = [SmallTrainer(world, rank, role=role, tokens=tokens) for rank in range(len(parts))]
    found: dict[int, Any] = {}
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            found[rank] = run(trainers[rank], list(parts[rank]))
        except BaseException as error:
            errors.append(error)
            world.barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]
    return [(trainers[rank], found[rank]) for rank in range(len(parts))]


def equal(a: Sequence[Sequence[torch.Tensor]], b: Sequence[Sequence[torch.Tensor]], atol: float = 1e-12) -> bool:
    """Whether the gradients of all steps agree."""
    return len(a) == len(b) and all(
        torch.allclose(x, y, atol=atol, rtol=1e-9)
        for one, two in zip(a, b, strict=True)
        for x, y in zip(one, two, strict=True)
    )
