"""What megatron-core needs to run in a process without an accelerator.

It allocates on ``torch.cuda.current_device()``, keeps CUDA random states and synchronises CUDA streams. Without an
accelerator the modules listed below see a ``torch`` whose ``cuda`` is the CPU; torch itself is not touched. With one,
only two functions of torch's are given under their new names.
"""

from __future__ import annotations

import importlib
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from rlinf_core.errors import MissingExtraError
from rlinf_core.registry import install_command

# The modules that allocate on, or wait for, the current CUDA device in what this backend runs.
_ON_CURRENT_DEVICE = (
    "megatron.core.models.common.embeddings.rotary_pos_embedding",
    "megatron.core.pipeline_parallel.p2p_communication",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.tensor_parallel.layers",
    "megatron.core.tensor_parallel.mappings",
    "megatron.core.utils",
)


def import_megatron() -> None:
    """Load megatron-core, and without an accelerator make it run on the CPU. ``MissingExtraError`` without it."""
    accelerator = torch.cuda.is_available()
    compile_ = torch.compile
    if not accelerator:
        # Its modules decorate fused kernels at import; none of them runs here, and loading the compiler takes seconds.
        torch.compile = _no_compile  # type: ignore[assignment]
    try:
        with quiet():
            importlib.import_module("megatron.core")
            for name in _ON_CURRENT_DEVICE:
                importlib.import_module(name)
    except ImportError as error:
        raise MissingExtraError(
            f"trainer 'megatron' of rlinf-engines needs megatron-core, which does not load here ({error}); "
            f"install it with: {install_command('rlinf-engines[megatron]')}"
        ) from error
    finally:
        torch.compile = compile_
    _use_new_names()
    if not accelerator:
        _run_on_cpu()


@contextmanager
def quiet() -> Iterator[None]:
    """Without megatron's warnings: of Apex and Transformer Engine that are missing, of defaults that it sets itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _use_new_names() -> None:
    """The collectives of sequence parallelism under the names that torch has now; the old ones warn at every use."""
    if hasattr(dist, "all_gather_single"):
        for name in ("layers", "mappings"):
            module: Any = importlib.import_module(f"megatron.core.tensor_parallel.{name}")
            module.dist_all_gather_func = dist.all_gather_single
            module.dist_reduce_scatter_func = dist.reduce_scatter_single


def _run_on_cpu() -> None:
    """Replace, in megatron's own modules, the few names that assume CUDA. Doing it twice changes nothing."""
    for name in _ON_CURRENT_DEVICE:
        module: Any = importlib.import_module(name)
        if not isinstance(module.torch, _CpuTorch):
            module.torch = _CpuTorch()
    # Advice about CUDA streams.
    layers: Any = importlib.import_module("megatron.core.tensor_parallel.layers")
    layers.linear_with_grad_accumulation_and_async_allreduce.warned = True
    random: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    # Models here have no dropout: nothing draws from these states, which activation checkpointing saves and restores.
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.empty(0, dtype=torch.uint8)
    random._set_cuda_rng_state = lambda *args, **kwargs: None
    random.CudaRNGStatesTracker.fork = lambda self, *args, **kwargs: nullcontext()


def _no_compile(function: Any = None, **kwargs: Any) -> Any:
    return (lambda inner: inner) if function is None else function


class _CpuCuda:
    """Stands for ``torch.cuda``."""

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def synchronize(self, device: Any = None) -> None:
        """Nothing runs asynchronously on a CPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


class _CpuTorch(types.ModuleType):
    """Stands for the module ``torch``: ``cuda`` is the CPU, and ``zeros(device="cuda")`` makes a CPU tensor."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.cuda = _CpuCuda()

    def zeros(self, *size: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        return torch.zeros(*size, device="cpu" if device == "cuda" else device, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)
