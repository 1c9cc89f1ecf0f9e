"""The stage that trains the policy."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlinf_core import In, Trajectory, Worker, task
from rlinf_core.errors import NonFiniteError
from rlinf_core.registry import Registry
from rlinf_core.rundir import guard
from rlinf_embodied.specfile import read_spec

if TYPE_CHECKING:
    import torch

SMALL = 1_000_000
"""A network with fewer parameters is small."""

SMALL_WIDTH = 512
"""An MLP with no wider layer is trained by one rank."""


class Actor(Worker):
    """Trains the policy with the trainer backend that ``cfg.trainer.name`` names; its ranks are data parallel.

    Reads ``cfg.model``, ``cfg.trainer`` and ``cfg.algorithm``. ``begin`` builds it, once the environment has been
    described.
    """

    collective = True
    barrier = "batch"

    @classmethod
    def check_ranks(cls, cfg: Any, ranks: int) -> str:
        ask = getattr(Registry("rlinf.trainers").load(cfg.trainer.name), "ranks_problem", None)
        return str(ask(cfg.trainer, ranks)) if callable(ask) else ""

    @classmethod
    def most_ranks(cls, cfg: Any) -> int | None:
        """One for a small MLP: exchanging gradients takes longer than computing them."""
        small = cfg.model.name == "mlp" and max(cfg.model.hidden, default=0) <= SMALL_WIDTH
        return 1 if small else None

    def setup(self) -> None:
        from rlinf_embodied import training

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
    def begin(self) -> None:
        """Build the trainer for the environments that the simulators have described; see ``Simulator.describe``."""
        with self.on_device():
            spec = read_spec(self.run_dir)
            self.trainer, policy = self._training.load_trainer(self.cfg, spec, self.parallel, self.seed)
            self._update = self._training.load_update(self.cfg, self.trainer, policy, self.seed)
            size = sum(parameter.numel() for parameter in policy.parameters())
            if size < SMALL:
                self._one_thread()
        if self.rank == 0:
            names = f"{self.cfg.algorithm.name} by the trainer {self.cfg.trainer.name}"
            self.log.info(f"policy {self.cfg.model.name} with {size:,} parameters; {names}")

    @task
    def train(self, trajectories: In[Trajectory]) -> dict[str, float]:
        """One update of the policy with the trajectories of the step. Returns its metrics, the same on every rank; see
        ``rlinf_embodied.training``."""
        mine: list[Trajectory] = []
        metrics: dict[str, float] = {}
        try:
            for mine in trajectories.batches():
                with self.on_device():
                    metrics = self._update(mine, self.step_index)
                self.trained(mine)
        except NonFiniteError as error:
            path = self._keep(mine)
            raise NonFiniteError(f"{error}; its trajectories are in {path}") from error
        return metrics

    @task
    def save_checkpoint(self, path: str) -> None:
        """Save the exact training state below ``path``."""
        with self.on_device(), guard(Path(path)):
            self.trainer.save(Path(path) / self.name)
            if self.rank == 0:
                (Path(path) / f"{self.name}-update.json").write_text(json.dumps(self._update.state()))

    @task
    def load_checkpoint(self, path: str) -> None:
        """Go on from what ``save_checkpoint`` saved."""
        with self.on_device():
            self.trainer.load(Path(path) / self.name)
            self._update.restore(json.loads((Path(path) / f"{self.name}-update.json").read_text()))

    @task
    def export(self) -> None:
        """Write the policy as a directory ``export/``; see ``Policy.export``."""
        path = self.run_dir / "export"
        with self.on_device(), guard(path):
            self.trainer.export(path)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.trainer.weights()

    def _one_thread(self) -> None:
        """A small network is no faster with more threads, and far slower with them where others want the cores too."""
        import torch

        torch.set_num_threads(1)

    def _keep(self, trajectories: Sequence[Trajectory]) -> Path:
        """Keep a batch that broke the numbers, for a look afterwards."""
        path = self.run_dir / "failed" / f"{self.step.replace('/', '-')}-rank{self.rank}.pickle"
        with guard(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(pickle.dumps(list(trajectories), protocol=5))
        return path
