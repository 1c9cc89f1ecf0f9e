"""The supervised phase: it stops at its target, and ranks make no difference."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from small_trainer import SmallTrainer, Tokenizer, World, recipe

from rlinf_core.config import Config
from rlinf_core.errors import ConfigError
from rlinf_core.types import ParallelInfo, Prompt
from rlinf_reasoning.training import WarmStart


def sums(count: int = 60) -> list[Prompt]:
    pairs = [(a, b) for a in range(10) for b in range(10) if a + b < 10][:count]
    return [Prompt(f"warm/p{i}", f"{a}+{b}=", str(a + b)) for i, (a, b) in enumerate(pairs)]


def test_warm_start_stops_at_its_target() -> None:
    trainer, told = SmallTrainer(), list[str]()
    problems = [*sums()[:8], *sums()]  # what is measured is also learnt here: the small model only learns by heart
    metrics = WarmStart(trainer, recipe(), ParallelInfo(), seed=0)(problems, told.append)
    assert 0.9 <= metrics["warm_start/accuracy"] <= 1.0
    assert 0 < metrics["warm_start/steps"] < 300
    assert metrics["warm_start/steps"] % 5 == 0
    assert told and "held-out accuracy" in told[-1]
    assert trainer.optimizer.param_groups[0]["lr"] == 0.05  # a fresh optimizer for what follows
    assert not trainer.optimizer.state


def test_ranks_and_replicas_make_no_difference() -> None:
    cfg = Config({**recipe().to_dict(), "warm_start": {**recipe().warm_start.to_dict(), "max_steps": 7}})

    def run(ranks: int, together: int = 1) -> list[torch.Tensor]:
        world = World(ranks, together)
        trainers = [SmallTrainer(world, rank) for rank in range(ranks)]
        threads = [
            threading.Thread(target=WarmStart(t, cfg, ParallelInfo(rank=r, world_size=ranks), seed=3), args=(sums(),))
            for r, t in enumerate(trainers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return [g for trainer in trainers[:1] for step in trainer.gradients for g in step]

    one = run(1)
    for other in (run(2), run(4, together=2)):
        assert len(one) == len(other) == 14
        assert all(torch.allclose(a, b, atol=1e-10) for a, b in zip(one, other, strict=True))


class ChatTokenizer(Tokenizer):
    chat_template = "user= text ="

    def apply_chat_template(self, messages: list[dict[str, str]], **how: Any) -> list[int]:
        assert how["add_generation_prompt"] and how["tokenize"]
        return [13, *(i for message in messages for i in self.encode(message["content"])), 13]


def test_prompts_become_tokens_as_the_generator_makes_them() -> None:
    def rows(task: dict[str, Any]) -> list[Any]:
        trainer = SmallTrainer()
        trainer.tokenizer = ChatTokenizer()
        phase = WarmStart(trainer, Config({**recipe().to_dict(), "task": task}), ParallelInfo(), seed=0)
        return [phase._row(problem) for problem in (Prompt("a", "1+2=", "3"), Prompt("b", "11+22=", "33"))]

    assert [(row.prompt_ids, row.response_ids) for row in rows({})] == [
        ([13, 3, 12, 4, 13, 13], [5, 1]),
        ([13, 3, 3, 12, 4, 4, 13, 13], [5, 5, 1]),
    ]
    assert [row.prompt_ids for row in rows({"chat_template": "false"})] == [[3, 12, 4, 13], [3, 3, 12, 4, 4, 13]]
    short, long = rows({"max_prompt_tokens": 6, "too_long": "drop"})
    assert short is not None and long is None
    assert rows({"max_prompt_tokens": 6, "too_long": "truncate"})[1].prompt_ids == [3, 12, 4, 4, 13, 13]
    with pytest.raises(ConfigError, match=r"task.max_prompt_tokens: b has 8 tokens"):
        rows({"max_prompt_tokens": 6})
