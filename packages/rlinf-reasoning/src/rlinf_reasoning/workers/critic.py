"""The stage that says what states are worth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlinf_core import In, Out, Sample, Worker, task
from rlinf_core.config import Config
from rlinf_core.errors import NonFiniteError
from rlinf_core.rundir import guard
from rlinf_reasoning.workers.updating import barrier_of, ranks_problem, save_failed


class Critic(Worker):
    """Values of states, and their training; the policy's model with one number per position in place of logits.

    The backend is the policy's (``cfg.trainer.name``), with the keys of ``cfg.critic`` in place of those of
    ``cfg.trainer``. Its ranks are data parallel, or as the backend splits the model. Reads ``cfg.model``,
    ``cfg.algorithm`` and ``cfg.sampling.max_new_tokens``. It is built when it is first needed: from ``cfg.model``, or
    from the policy that ``begin`` names.
    """

    collective = True
    barrier = "batch"

    barrier_of = staticmethod(barrier_of)

    @classmethod
    def check_ranks(cls, cfg: Any, ranks: int) -> str:
        problem = ranks_problem(Config({**cfg.trainer.to_dict(), **cfg.critic.to_dict()}), ranks)
        return problem.replace("trainer.", "critic.") if set(cfg.critic) & {"tp", "pp"} else problem

    def setup(self) -> None:
        from rlinf_reasoning import training

        self._training = training
        self.trainer: Any = None
        self._update: Any = None

    def teardown(self) -> None:
        if self.trainer is not None:
            self.trainer.close()

    def onload(self) -> None:
        if self.trainer is not None:
            self.trainer.onload()

    def offload(self) -> None:
        if self.trainer is not None:
            self.trainer.offload()

    @task
    def begin(self, path: str) -> None:
        """Begin as the policy of the Hugging Face directory ``path``, with a head that nobody trained."""
        with self.on_device():
            self._build(path)

    @task
    def value(self, scored: In[Sample], valued: Out[Sample]) -> None:
        """Set ``info["values"]`` of every sample, see ``training.add_values``, and pass it on."""
        for samples in scored.batches():
            with self.on_device():
                self._build()
                self._training.add_values(self.trainer, samples)
            valued.put_many(samples, [s.group for s in samples], [s.num_tokens for s in samples])

    @task
    def train(self, valued: In[Sample]) -> dict[str, float]:
        """One update towards the returns of the step's samples. Returns ``critic/…``, see ``training.ValueUpdate``."""
        samples: list[Sample] = []
        began = False
        try:
            for samples in valued.batches():
                with self.on_device():
                    self._build()
                    began = True
                    self._update.add(samples)
                self.trained(samples)
            if not began:
                return {}
            with self.on_device():
                metrics: dict[str, float] = self._update.finish()
        except NonFiniteError as error:
            path = save_failed(self.run_dir, self.step, f"{self.name}-rank{self.rank}", samples)
            raise NonFiniteError(f"{error}; its samples are in {path}") from error
        return metrics

    @task
    def save_checkpoint(self, path: str) -> None:
        """Save the exact training state below ``path``."""
        with self.on_device(), guard(Path(path)):
            self._build()
            self.trainer.save(Path(path) / self.name)

    @task
    def load_checkpoint(self, path: str) -> None:
        """Go on from what ``save_checkpoint`` saved."""
        with self.on_device():
            self._build()
            self.trainer.load(Path(path) / self.name)

    def _build(self, path: str | None = None) -> None:
        """The backend, once; in a section, so that it lies on the devices. Collective the first time."""
        if self.trainer is not None:
            return
        cfg = self.cfg
        if path is not None:
            cfg = Config({**cfg.to_dict(), "model": {**cfg.model.to_dict(), "path": path}})
        self.trainer = self._training.load_trainer(
            cfg, self.parallel, self.seed, role="critic", settings=self.cfg.critic
        )
        self._update = self._training.ValueUpdate(self.trainer, self.cfg, self.seed)
