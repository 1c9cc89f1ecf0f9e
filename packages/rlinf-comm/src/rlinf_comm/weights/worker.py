"""Weight transfer between shards for the workers of a flow: ``trainer.publish_weights(to=rollout)``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from rlinf_comm.weights.builders import replicated
from rlinf_comm.weights.errors import WeightsError
from rlinf_comm.weights.layout import Layout
from rlinf_comm.weights.movers import ChannelMover
from rlinf_comm.weights.plan import BUCKET_BYTES
from rlinf_comm.weights.receiver import Receiver
from rlinf_comm.weights.sender import TIMEOUT_S, Sender
from rlinf_core.worker import In, Out, Worker, task

if TYPE_CHECKING:
    import torch


class ShardedWeights(Worker):
    """Mix in at both ends, before ``Worker``'s other subclasses, so that ranks exchange parts and not whole parameters.

    The publishing class defines ``weight_layout`` (of its group) and ``weight_places`` (this rank's tensors), and
    ``target_layout`` unless every receiving rank wants every parameter whole. The receiving class defines
    ``weight_layout`` (of its group, the same that the publisher's ``target_layout`` gives: another is refused by name)
    and ``install_weights``, which gets this rank's places. Class attributes set the size of buckets, the checksum and
    the deadline in seconds.
    """

    weight_bucket_bytes: int = BUCKET_BYTES
    weight_checksum: str = "none"
    weight_timeout: float = TIMEOUT_S

    _weight_sender: Sender | None = None
    _weight_receiver: Receiver | None = None

    def weight_layout(self) -> Layout:
        """Who holds what in this group. The same on every rank."""
        raise WeightsError(f"{type(self).__name__} takes part in weight transfer but does not define weight_layout()")

    def weight_places(self) -> Mapping[str, torch.Tensor]:
        """This rank's tensors, by place; contiguous, as ``weight_layout`` says."""
        raise WeightsError(f"{type(self).__name__} publishes weights but does not define weight_places()")

    def target_layout(self, targets: int) -> Layout:
        """Who shall hold what in the receiving group of ``targets`` ranks."""
        own = self.weight_layout()
        return replicated(own.parameters, targets, own.aliases)

    def weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        return self.weight_places().items()

    def _member(self) -> str:
        return f"{self.name}[{self.rank}]"

    @task
    def publish_weights(self, channel: Out[Any], version: int, targets: int) -> None:
        """Send this rank's parts to the ``targets`` ranks of the receiving group."""
        with self.on_device():
            mover = ChannelMover(channel, self.rank, self._member())
            if self._weight_sender is None or self._weight_sender.targets != targets:
                self._weight_sender = Sender(
                    self.rank,
                    self.weight_layout(),
                    self.target_layout(targets),
                    mover,
                    bucket_bytes=self.weight_bucket_bytes,
                    checksum=self.weight_checksum,
                )
            self._weight_sender.connect(mover)
            self._weight_sender.send(version, self.weight_places(), self.weight_timeout)

    @task
    def receive_weights(self, channel: In[Any]) -> None:
        if self._weight_receiver is None:
            mover = ChannelMover(channel, self.rank, self._member())
            self._weight_receiver = Receiver(self.rank, self.weight_layout(), mover, install=self.install_weights)
        receiver = self._weight_receiver
        receiver.connect(ChannelMover(channel, self.rank, self._member()))
        receiver.stage(self.weight_timeout)  # before the section: the sender may need the same device
        with self.on_device():
            receiver.commit()
