"""What every worker does that holds a replica of the policy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rlinf_core import Worker, task
from rlinf_embodied.workers.replica import Replica

if TYPE_CHECKING:
    import torch


class HoldsReplica(Worker):
    """Builds the replica in ``begin``, moves it with the devices, and installs the trainer's weights.

    Reads ``cfg.model``.
    """

    def setup(self) -> None:
        import torch  # noqa: F401  (takes seconds: here, where every group takes them)

        super().setup()
        self.replica: Replica | None = None

    def onload(self) -> None:
        if self.replica is not None:
            self.replica.onload()

    def offload(self) -> None:
        if self.replica is not None:
            self.replica.offload()

    @task
    def begin(self) -> None:
        """Build the policy for the environments that the simulators have described; see ``Simulator.describe``."""
        with self.on_device():
            self.replica = Replica(self.cfg, self.run_dir, self.seed, self.parallel.device)

    def install_weights(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._there().install(version, weights)

    def _there(self) -> Replica:
        assert self.replica is not None, "begin() precedes"
        return self.replica
