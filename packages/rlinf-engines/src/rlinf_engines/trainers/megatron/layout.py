"""Which ranks compute together. megatron's ``parallel_state`` is one per process; trainers of one process share it."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlinf_core.errors import ConfigError, RLinfError
from rlinf_core.types import ParallelInfo
from rlinf_engines.trainers.megatron.supported import world_problem

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Layout:
    """A rank's place: ``tp`` ranks per pipeline stage, ``pp`` stages per replica, ``dp`` replicas.

    A replica's ranks are neighbours: rank = (replica * pp + stage) * tp + part. The groups are torch.distributed ones:
    ``tensor`` (ranks of a stage), ``pipeline`` (the same part of all stages), ``replica``, ``data`` (the same place in
    all replicas), ``ends`` (first and last stage, ``None`` on stages between).
    """

    tp: int
    pp: int
    dp: int
    rank: int
    tensor: Any = None
    pipeline: Any = None
    replica: Any = None
    data: Any = None
    ends: Any = None

    @property
    def part(self) -> int:
        return self.rank % self.tp

    @property
    def stage(self) -> int:
        return self.rank // self.tp % self.pp

    @property
    def replica_index(self) -> int:
        return self.rank // (self.tp * self.pp)

    @property
    def first(self) -> bool:
        return self.stage == 0

    @property
    def last(self) -> bool:
        return self.stage == self.pp - 1

    def rank_of(self, stage: int, part: int) -> int:
        """The global rank of a place in this rank's replica."""
        return (self.replica_index * self.pp + stage) * self.tp + part


def check_world(world: int, tp: int, pp: int) -> None:
    """Refuse (``ConfigError``) a number of ranks that ``tp`` times ``pp`` does not divide."""
    if problem := world_problem(world, tp, pp):
        raise ConfigError(problem)


class _Held:
    """The layout of this process and how many trainers use it."""

    lock = threading.Lock()
    layout: Layout | None = None
    users = 0
    own_group = False


def enter(place: ParallelInfo, device: torch.device, tp: int, pp: int) -> Layout:
    """Open megatron's process groups, or share those that another trainer of this process has opened.

    Collective; with several ranks torch.distributed's default group is open already. Raises ``ConfigError`` when the
    process has another layout or ``tp * pp`` does not divide the ranks. Every ``enter`` wants its ``leave``.
    """
    check_world(place.world_size, tp, pp)
    with _Held.lock:
        held = _Held.layout
        if held is None:
            held = _Held.layout = _open_groups(place, device, tp, pp)
        elif (held.tp, held.pp, held.dp, held.rank) != (tp, pp, place.world_size // (tp * pp), place.rank):
            raise ConfigError(
                f"trainer.tp: {tp} with trainer.pp {pp} over {place.world_size} ranks, but a Megatron trainer of this "
                f"process has tp {held.tp}, pp {held.pp} over {held.dp * held.tp * held.pp} ranks, and megatron has "
                "one layout per process; give both the same, or each a worker group of its own"
            )
        _Held.users += 1
        return held


def leave() -> None:
    """Give the layout back; the last trainer of the process closes megatron's groups."""
    with _Held.lock:
        _Held.users -= 1
        if _Held.users == 0:
            _close_groups()


def _open_groups(place: ParallelInfo, device: torch.device, tp: int, pp: int) -> Layout:
    import torch.distributed as dist
    from megatron.core import parallel_state

    if not dist.is_initialized():
        assert place.world_size == 1, "the trainer's ranks have not met"
        # A rank alone meets nobody, but megatron wants a group all the same.
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        _Held.own_group = True
    elif dist.get_world_size() != place.world_size:
        raise RLinfError(
            f"trainer: this process is in a torch.distributed group of {dist.get_world_size()} ranks of another "
            f"trainer, and a Megatron trainer of {place.world_size} ranks cannot share it; give it a worker group of "
            "its own"
        )
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            distributed_timeout_minutes=place.timeout_s / 60,
            order="tp-cp-ep-pp-dp",
            create_gloo_process_groups=False,
        )
    except BaseException:
        _close_groups()
        raise
    return Layout(
        tp=tp,
        pp=pp,
        dp=place.world_size // (tp * pp),
        rank=place.rank,
        tensor=parallel_state.get_tensor_model_parallel_group(),
        pipeline=parallel_state.get_pipeline_model_parallel_group(),
        replica=parallel_state.get_model_parallel_group(),
        data=parallel_state.get_data_parallel_group(),
        ends=parallel_state.get_embedding_group(check_initialized=False),
    )


def _close_groups() -> None:
    import torch.distributed as dist
    from megatron.core import parallel_state

    _Held.layout = None
    parallel_state.destroy_model_parallel()
    if _Held.own_group and dist.is_initialized():
        dist.destroy_process_group()
    _Held.own_group = False
