"""The stage that trains the policy."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rlinf_core import In, Prompt, Sample, Worker, task
from rlinf_core.errors import NonFiniteError
from rlinf_core.rundir import guard, to_json

if TYPE_CHECKING:
    import torch


class Actor(Worker):
    """Trains the policy with the trainer backend that ``cfg.trainer.name`` names; its ranks are data parallel.

    Reads ``cfg.model``, ``cfg.trainer``, ``cfg.algorithm``, ``cfg.sampling.temperature``, ``cfg.warm_start`` and
    ``cfg.checkpoint.keep_last``.
    """

    collective = True
    barrier = "batch"

    @staticmethod
    def barrier_of(cfg: Any) -> str:
        """What must be complete before training: a group for its advantages; with several minibatches, the batch."""
        return "group" if cfg.algorithm.minibatches == 1 else "batch"

    def setup(self) -> None:
        from rlinf_reasoning import training

        self._training = training
        self.trainer = training.load_trainer(self.cfg, self.parallel, self.seed)
        self._update: Any = None

    def onload(self) -> None:
        self.trainer.onload()

    def offload(self) -> None:
        self.trainer.offload()

    @task
    def warm_start(self, problems: list[Prompt]) -> dict[str, float]:
        """Supervised training on problems with answers; see ``training.WarmStart``."""
        with self.on_device():
            phase = self._training.WarmStart(self.trainer, self.cfg, self.parallel, self.seed)
            return phase(problems, self.log.info if self.rank == 0 else lambda text: None)

    @task
    def train(self, scored: In[Sample]) -> dict[str, float]:
        """One GRPO update on the samples of the step, which are then written to ``samples.jsonl``.

        Returns the step's metrics, the same on every rank; see ``training.GrpoUpdate``.
        """
        update: Any = None
        try:
            for samples in scored.batches():
                with self.on_device():
                    update = self._grpo()
                    update.add(samples)
                self._write_samples(samples)
                self.trained(samples)
            if update is None:
                return {}
            with self.on_device():
                metrics: dict[str, float] = update.finish()
        except NonFiniteError as error:
            raise NonFiniteError(f"{error}; its samples are in {self._save_failed(update.samples)}") from error
        return metrics

    @task
    def save_checkpoint(self, step: int) -> None:
        """Save the exact training state after ``step`` steps below ``checkpoints/``; older ones are pruned."""
        path = self.run_dir / "checkpoints" / f"step-{step:08d}"
        with self.on_device(), guard(path):
            if self.rank == 0:
                path.parent.mkdir(parents=True, exist_ok=True)
            self.trainer.save(path)
            if self.rank == 0:
                for old in sorted(path.parent.glob("step-*"))[: -self.cfg.checkpoint.keep_last]:
                    shutil.rmtree(old)

    @task
    def export(self) -> None:
        """Write the policy as a Hugging Face directory ``export/``."""
        path = self.run_dir / "export"
        with self.on_device(), guard(path):
            self.trainer.export(path)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.trainer.weights()

    def _grpo(self) -> Any:
        """The update, made at the first training step, so that the reference is the policy after the warm start."""
        if self._update is None:
            reference = None
            if self.cfg.algorithm.kl_coef > 0.0:
                path = self.run_dir / "reference"
                reference = self._training.Reference(self.trainer, self.cfg, path, self.parallel, self.seed)
            self._update = self._training.GrpoUpdate(self.trainer, self.cfg, reference)
        return self._update

    def _write_samples(self, samples: Sequence[Sample]) -> None:
        """Append to ``samples.jsonl``: every rank its own, in one write, so that lines stay whole."""
        lines = [to_json(_line(self.step, sample))[0] for sample in sorted(samples, key=lambda s: s.id)]
        data = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode()
        path = self.run_dir / "samples.jsonl"
        with guard(path), open(path, "ab", buffering=0) as file:
            written = file.write(data)
            if written != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _save_failed(self, samples: Sequence[Sample]) -> str:
        """Keep a batch that broke the numbers, with token ids and log-probs, for a look afterwards."""
        path = self.run_dir / "failed" / f"{self.step.replace('/', '-')}-rank{self.rank}.jsonl"
        with guard(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "w", encoding="utf-8") as file:
                for sample in samples:
                    file.write(json.dumps(to_json(asdict(sample))[0], ensure_ascii=False) + "\n")
                file.flush()
                os.fsync(file.fileno())
        return str(path)


def _line(step: str, sample: Sample) -> dict[str, Any]:
    return {
        "step": step,
        "id": sample.id,
        "prompt": sample.prompt_text,
        "response": sample.response_text,
        "answer": sample.answer,
        "reward": sample.reward,
        "advantage": sample.info.get("advantage"),
        "finish_reason": sample.finish_reason,
        "response_ids": sample.response_ids,
        "versions": sorted(set(sample.versions)),
        "info": {k: v for k, v in sample.info.items() if k != "advantage"},
    }
