"""The stage that trains the policy."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlinf_core import In, Out, Prompt, Sample, Worker, task
from rlinf_core.errors import NonFiniteError, RLinfError
from rlinf_core.rundir import guard, to_json
from rlinf_reasoning.workers.updating import barrier_of, ranks_problem, save_failed

if TYPE_CHECKING:
    import torch

# What is for the next stage alone and does not belong in ``samples.jsonl``.
NOT_WRITTEN = ("advantage", "values", "last_value", "kl")
EMPTY_STEPS = 3
"""Steps in a row without a sample that end a run."""


class Actor(Worker):
    """Trains the policy with the trainer backend that ``cfg.trainer.name`` names.

    Its ranks are data parallel, or as the backend splits the model. Reads ``cfg.model``, ``cfg.trainer``,
    ``cfg.algorithm``, ``cfg.sampling``, ``cfg.warm_start``.
    """

    collective = True
    barrier = "batch"

    barrier_of = staticmethod(barrier_of)

    @classmethod
    def check_ranks(cls, cfg: Any, ranks: int) -> str:
        return ranks_problem(cfg.trainer, ranks)

    def setup(self) -> None:
        from rlinf_reasoning import training

        self._training = training
        self.trainer = training.load_trainer(self.cfg, self.parallel, self.seed)
        self._update: Any = None
        self._reference: Any = None
        self._version = 0
        self._silence = training.Silence()
        self._empty = 0

    def teardown(self) -> None:
        if self._reference is not None:
            self._reference.close()
        self.trainer.close()

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
    def reference(self, scored: In[Sample], compared: Out[Sample]) -> None:
        """Set ``info["kl"]``, the KL to the reference per token, for a critic whose returns count it."""
        for samples in scored.batches():
            with self.on_device():
                reference = self._frozen()
                self._training.add_kl(self.trainer, reference, samples, self.cfg.algorithm.kl_kind)
            compared.put_many(samples, [s.group for s in samples], [s.num_tokens for s in samples])

    @task
    def train(self, scored: In[Sample]) -> dict[str, float]:
        """One policy update on the samples of the step, which are then written to ``samples.jsonl``.

        Returns the step's metrics, the same on every rank; see ``training.PolicyUpdate``. In the first
        ``algorithm.critic_warmup_steps`` steps the policy stays as it is.
        """
        update: Any = None
        try:
            for samples in scored.batches():
                with self.on_device():
                    update = self._policy()
                    update.add(samples, learn=self.step_index >= self._warmup())
                self._write_samples(samples)
                self.trained(samples)
            if update is None:
                self._without_samples()
                return {}
            self._empty = 0
            with self.on_device():
                metrics: dict[str, float] = update.finish(self._version)
        except NonFiniteError as error:
            path = save_failed(self.run_dir, self.step, f"rank{self.rank}", update.samples)
            raise NonFiniteError(f"{error}; its samples are in {path}") from error
        # With a critic, answers that all have the same reward teach too.
        by_group = self.cfg.algorithm.advantage != "gae"
        if self.rank == 0 and by_group and (text := self._silence.word(self.step, metrics)):
            self.log.warning(text)
        return metrics

    @task
    def save_checkpoint(self, path: str) -> None:
        """Save the exact training state, and the reference where there is one, below ``path``."""
        with self.on_device(), guard(Path(path)):
            self.trainer.save(Path(path) / self.name)
            reference = self._exported()
            if self.rank == 0 and reference.is_dir():
                shutil.copytree(reference, Path(path) / reference.name, dirs_exist_ok=True)

    @task
    def load_checkpoint(self, path: str) -> None:
        """Go on from what ``save_checkpoint`` saved."""
        with self.on_device():
            reference, kept = self._exported(), Path(path) / self._exported().name
            if self.rank == 0 and kept.is_dir():
                with guard(reference):
                    shutil.copytree(kept, reference, dirs_exist_ok=True)
            self.trainer.load(Path(path) / self.name)  # every rank waits here until the files are there

    @task
    def export(self) -> None:
        """Write the policy as a Hugging Face directory ``export/``."""
        path = self.run_dir / "export"
        with self.on_device(), guard(path):
            self.trainer.export(path)

    @task
    def publish_weights(self, channel: Out[Any], version: int, targets: int) -> None:
        self._version = version
        super().publish_weights(channel, version, targets)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.trainer.weights()

    def _without_samples(self) -> None:
        """Nothing came in this step. That goes on where samples are dropped for faults of theirs, and a run that has
        trained on nothing must not end as if it had; only dynamic sampling leaves steps empty in good order."""
        self._empty += 1
        algorithm = self.cfg.algorithm
        steps = min(EMPTY_STEPS, self.cfg.num_steps) if "num_steps" in self.cfg else EMPTY_STEPS
        if self._empty >= steps and not ("dynamic_sampling" in algorithm and algorithm.dynamic_sampling):
            steps_in_a_row = f"{self._empty} steps in a row" if self._empty > 1 else "one step"
            error = RLinfError(
                f"nothing to train on in {steps_in_a_row}, last {self.step}: every sample was dropped before it came "
                "here, as the lines above say (task.too_long=drop? reward.on_error=drop?); mend the data or the keys"
            )
            error.bad_input = True
            raise error

    def _warmup(self) -> int:
        """Steps in which the critic alone learns."""
        algorithm = self.cfg.algorithm
        return int(algorithm.critic_warmup_steps) if algorithm.advantage == "gae" else 0

    def _policy(self) -> Any:
        """The update, made at the first training step, so that the reference is the policy after the warm start."""
        if self._update is None:
            wanted = self.cfg.algorithm.kl_coef > 0.0
            reference = self._frozen() if wanted else None
            self._update = self._training.PolicyUpdate(self.trainer, self.cfg, self.seed, reference)
        return self._update

    def _exported(self) -> Path:
        return self.run_dir / "reference"

    def _frozen(self) -> Any:
        """The reference: the model of ``cfg.model.path`` where nothing was trained before, else the policy as it is the
        first time."""
        if self._reference is None:
            path, model = self._exported(), self.cfg.model.path
            if model is not None and not self.cfg.warm_start.max_steps:
                path = Path(model)
            elif self.trainer.most(int(not path.is_dir())):  # none that a checkpoint brought
                self.trainer.export(path)
            self._reference = self._training.Reference(self.cfg, path, self.parallel, self.seed)
        return self._reference

    def _write_samples(self, samples: Sequence[Sample]) -> None:
        """Append to ``samples.jsonl``: one write per portion, so that ranks do not mix their lines."""
        lines = [to_json(_line(self.step, sample))[0] for sample in sorted(samples, key=lambda s: s.id)]
        data = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode()
        path = self.run_dir / "samples.jsonl"
        with guard(path), open(path, "ab", buffering=0) as file:
            written = file.write(data)
            if written != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


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
        "info": {k: v for k, v in sample.info.items() if k not in NOT_WRITTEN},
    }
