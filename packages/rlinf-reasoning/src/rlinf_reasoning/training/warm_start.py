"""The supervised phase before the reinforcement learning."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

from rlinf_core.config import Config
from rlinf_core.types import ParallelInfo, Prompt
from rlinf_reasoning.batch import Row, collate, micro_batches
from rlinf_reasoning.losses import supervised_loss
from rlinf_reasoning.tasks.chat import PromptEncoder, Prompting, refusal, room_for_prompts
from rlinf_reasoning.training.backend import accumulate


class WarmStart:
    """Supervised training on (prompt, answer) pairs until a share of held-out problems is answered right.

    Reads ``cfg.warm_start``, ``cfg.trainer``, and of ``cfg.task`` how prompts become tokens, as the generator does: in
    the model's chat template, and with those that are too long refused, left out or cut. The answer is the whole
    response, so that being right greedily is the same as every target token (the end token too) being the most likely
    one, which needs no decoding.
    """

    def __init__(self, trainer: Any, cfg: Any, parallel: ParallelInfo, seed: int) -> None:
        self.trainer = trainer
        self.cfg = cfg.warm_start
        self.trainer_cfg = cfg.trainer
        self.parallel = parallel
        self.seed = seed
        how = Prompting.of(cfg.task) if "task" in cfg else Prompting()
        self.encode = PromptEncoder(trainer.tokenizer, how, room=room_for_prompts(cfg))

    def __call__(
        self, problems: Sequence[Prompt], progress: Callable[[str], None] = lambda text: None
    ) -> dict[str, float]:
        """Train on ``problems`` (all of them on every rank); the first ``held_out`` are only measured on. Collective.

        Returns ``warm_start/steps``, ``warm_start/accuracy``, ``warm_start/loss`` (the last step's).
        """
        rows = [row for problem in problems if (row := self._row(problem)) is not None]
        held_out, rows = rows[: self.cfg.held_out], rows[self.cfg.held_out :]
        settings = {"lr": self.cfg.lr, "warmup_steps": self.cfg.lr_warmup_steps, "schedule": "constant"}
        self.trainer.restart_optimizer(Config({**self.trainer_cfg.to_dict(), **settings}))
        order = random.Random(f"{self.seed}/warm_start")
        accuracy, loss, steps = self.accuracy(held_out), math.nan, 0
        queue: list[Row] = []
        while steps < self.cfg.max_steps and accuracy < self.cfg.target_accuracy:
            if len(queue) < self.cfg.batch_size:
                queue = order.sample(rows, len(rows))
            batch, queue = queue[: self.cfg.batch_size], queue[self.cfg.batch_size :]
            totals = accumulate(self.trainer, self._mine(batch), supervised_loss)
            self.trainer.step(totals["count"])
            steps, loss = steps + 1, totals["loss"] / totals["count"]
            if steps % self.cfg.check_every == 0 or steps == self.cfg.max_steps:
                accuracy = self.accuracy(held_out)
                progress(f"warm start: step {steps}, loss {loss:.3f}, held-out accuracy {accuracy:.1%}")
        self.trainer.restart_optimizer(self.trainer_cfg)
        if accuracy < self.cfg.target_accuracy and self.cfg.max_steps > 0:
            progress(
                f"warm start: ended at warm_start.max_steps={self.cfg.max_steps} with {accuracy:.1%} right, short of "
                f"warm_start.target_accuracy={self.cfg.target_accuracy:.1%} (few problems? see warm_start.problems)"
            )
        return {"warm_start/steps": float(steps), "warm_start/accuracy": accuracy, "warm_start/loss": loss}

    def accuracy(self, rows: Sequence[Row]) -> float:
        """Share of rows whose whole response is the greedy one. Collective."""
        parts = micro_batches(self._mine(rows), self.trainer.micro_batch_tokens, self.trainer.most)
        right = 0
        for part, output in zip(parts, self.trainer.forward([collate(part) for part in parts]), strict=True):
            greedy = output["greedy"].cpu().split([row.places for row in part])
            right += sum(bool(own.all()) for own in greedy)
        return self.trainer.reduce({"right": float(right)})["right"] / max(len(rows), 1)

    def _mine(self, rows: Sequence[Row]) -> list[Row]:
        """The part of this rank's replica."""
        return self.trainer.share(list(rows[self.parallel.rank :: self.parallel.world_size]))

    def _row(self, problem: Prompt) -> Row | None:
        """The problem and its answer as tokens; ``None`` for one that ``task.too_long`` leaves out."""
        found = self.encode(problem)
        if found.problem:
            if self.encode.how.too_long == "drop":
                return None
            raise refusal(problem, found)
        tokenizer = self.trainer.tokenizer
        answer = [*tokenizer.encode(problem.answer, add_special_tokens=False), tokenizer.eos_token_id]
        return Row(problem.id, found.ids, answer)
