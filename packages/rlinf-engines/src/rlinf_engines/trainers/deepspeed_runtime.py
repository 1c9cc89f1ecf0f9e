"""DeepSpeed in this process: its import, its communication, and what it prints. Loads DeepSpeed only when asked.

All trainers of a process share one runtime, because DeepSpeed keeps its process groups in module variables.

DeepSpeed compiles a shared-memory collective when its communication starts on a CPU (a minute, and for ever behind the
lock of a build that was killed). Only tensor-parallel inference calls that operation (``inference_all_reduce``), no
trainer does, so it is left out here: nothing is compiled, and no compiler is needed.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from rlinf_core.errors import RLinfError

if TYPE_CHECKING:
    import torch

    from rlinf_core.types import ParallelInfo

# What DeepSpeed warns of though it is meant: the optimizer is torch's AdamW, whose results are tested.
EXPECTED = ("untested optimizer",)

_lock = threading.RLock()
_users = 0
_alone = False  # whether the process group is the one of one rank that ``enter`` opened
_before: dict[str, str | None] = {}  # what environment variables were before the first trainer


def enter(place: ParallelInfo, device: torch.device) -> None:
    """Start DeepSpeed for one more trainer. With several ranks torch.distributed's default group must be open; a rank
    that is alone gets a group of its own, which the trainers of a process share."""
    global _users, _alone
    with _lock:
        import torch.distributed as dist

        if place.world_size == 1 and not _alone:
            if dist.is_initialized():
                raise RLinfError(
                    "trainer: this process is already in a torch.distributed group, which DeepSpeed would take for the "
                    "trainer's; give the trainer a process of its own"
                )
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
                store=dist.HashStore(),
                rank=0,
                world_size=1,
                timeout=timedelta(seconds=place.timeout_s),
            )
            _alone = True
        elif place.world_size > 1 and _alone:
            raise RLinfError(
                f"trainer: this process has a DeepSpeed trainer of one rank; one of {place.world_size} ranks needs a "
                "process of its own"
            )
        if not _users:
            # DeepSpeed reads these when it is imported, and now and then later.
            for name, value in {"LOCAL_RANK": str(device.index or 0), "DS_ACCELERATOR": device.type}.items():
                _before[name] = os.environ.get(name)
                os.environ[name] = value
        _users += 1
        # DeepSpeed calls collectives by names that torch is about to give up.
        warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
        try:
            with quietly():
                deepspeed = _load(device)
                if not deepspeed.comm.is_initialized():
                    with _without_shared_memory_operation():
                        deepspeed.comm.init_distributed(auto_mpi_discovery=False, verbose=False)
        except BaseException:
            leave()
            raise


def take_apart(engine: Any, network: Any) -> None:
    """End an engine."""
    engine.destroy()
    offload: Any = sys.modules.get("deepspeed.runtime.zero.parameter_offload")
    if offload is not None:  # stage 3 leaves its network in a module variable
        own = {id(module) for module in network.modules()}
        offload.FWD_MODULE_STACK[:] = [m for m in offload.FWD_MODULE_STACK if id(m) not in own]


def leave() -> None:
    """One trainer less; the last one closes the process group."""
    global _users, _alone
    with _lock:
        _users -= 1
        if _users > 0:
            return
        _alone = False
        for name, value in _before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        _before.clear()
        import torch.distributed as dist

        comm: Any = sys.modules.get("deepspeed.comm.comm")
        if comm is not None and comm.cdb is not None:
            if dist.is_initialized():
                comm.destroy_process_group()
            comm.cdb = None
        elif dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def quietly() -> Iterator[None]:
    """Around what may load modules of DeepSpeed or make an engine: nothing goes to stdout, and deprecations are third
    parties' business."""
    with _lock, redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        yield


def _load(device: torch.device) -> Any:
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    logger = logging.getLogger("DeepSpeed")
    if not logger.propagate:  # its own handler writes to stdout
        logger.handlers.clear()
        logger.propagate = True
        logger.addFilter(lambda record: not any(text in record.getMessage() for text in EXPECTED))
    if get_accelerator().device_name() != device.type:
        raise RLinfError(
            f"trainer: DeepSpeed was loaded for {get_accelerator().device_name()} in this process and cannot be used "
            f"on {device.type} any more; unset DS_ACCELERATOR, or use a process for each"
        )
    return deepspeed


@contextmanager
def _without_shared_memory_operation() -> Iterator[None]:
    """Let DeepSpeed's communication start without compiling anything (see the module's docstring)."""
    backend: Any = sys.modules["deepspeed.comm.torch"]
    build = getattr(backend, "build_shm_op", None)
    if build is None:
        import deepspeed

        raise RLinfError(
            f"trainer: deepspeed {deepspeed.__version__} is not supported; pip install 'deepspeed>=0.19.8,<0.20'"
        )
    backend.build_shm_op = lambda: None
    try:
        yield
    finally:
        backend.build_shm_op = build
