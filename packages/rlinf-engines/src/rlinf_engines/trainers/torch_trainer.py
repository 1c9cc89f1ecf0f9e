"""Trainer backend ``torch``: AdamW over any Hugging Face causal LM or torch module, one process or data parallel.

Gradients of loss *sums* accumulate; ``step`` divides once by the global count, so ranks may have different numbers of
micro-batches and the result does not depend on how samples were split, up to floating-point order. With
``sharding: ddp`` each rank holds the whole model and gradients are added over ranks once, in ``step``. With ``fsdp2``
(torch's ``fully_shard``) each rank holds a part of weights, gradients and optimizer state (``sharded.py``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from rlinf_core.errors import ConfigError
from rlinf_core.types import Batch, NetworkSpec, StepInfo
from rlinf_engines.trainers.base import TrainerBase

if TYPE_CHECKING:
    import torch

    from rlinf_engines.trainers.flat import FlatState


class TorchTrainer(TrainerBase):
    """One rank of the ``torch`` backend (see ``rlinf_core.types.Trainer``).

    ``model.dtype: bfloat16`` keeps float32 master weights and computes the forward in bfloat16 (autocast; with
    ``fsdp2`` the gathered weights are bfloat16); ``weights`` and ``export`` give bfloat16. float32 and float64 hold and
    compute in that format.
    """

    memory_knobs = (
        "lower trainer.micro_batch_tokens, set trainer.activation_checkpointing=true, or with several ranks "
        "trainer.sharding=fsdp2"
    )

    def __init__(self, cfg: Any) -> None:
        super().__init__(cfg)
        self._flat: FlatState | None = None

    @property
    def sharded(self) -> bool:
        """Whether this rank holds a part of the state only."""
        return str(self.cfg.sharding) == "fsdp2" and self.parallel.world_size > 1

    def step(self, count: float) -> StepInfo:
        """Add gradients over ranks, divide by ``count``, clip, update, zero. Collective.

        ``count`` is the global one (see ``reduce``). A gradient that is NaN or infinite raises
        ``NonFiniteError`` on every rank, naming the parameter, before anything is updated.
        """
        self._check_loaded("step")
        self.check_count(count)
        with self.memory_guard("step"):
            norm = self._averaged_gradients(count)
            if not math.isfinite(norm):
                error = self.bad_gradient((n, _local(p.grad)) for n, p in self.model.named_parameters())
                self._zero_gradients()
                raise error
            lr = self.learning_rate()
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            if self._flat is not None:
                self._flat.update(self.optimizer)
            else:
                self.optimizer.step()
                self._zero_gradients()
        self.steps_done += 1
        return StepInfo(grad_norm=norm, lr=lr)

    def gradients(self) -> dict[str, torch.Tensor]:
        """Copies of the gradient sums since the last step, by name: this rank's own; with ``fsdp2`` whole ones, added
        over ranks (collective)."""
        self._check_loaded("gradients")
        return {n: _whole(p.grad).detach().clone() for n, p in self.model.named_parameters() if p.grad is not None}

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole parameters under Hugging Face names in ``model.dtype``, tied ones once. Collective with ``fsdp2``.

        The tensors are the live ones where the format allows: use them before the next ``step`` or ``offload``.
        """
        from rlinf_engines.models import named_weights

        for name, tensor in named_weights(self.model):
            self._check_loaded("weights")
            if self._flat is not None:  # a view of all weights, which nobody should be given
                tensor = tensor.clone()
            yield name, self._in_format(name, _whole(tensor))

    def _build(self, model: Any, role: str) -> None:
        import torch
        import torch.distributed as dist

        from rlinf_engines.models import load_model
        from rlinf_engines.trainers.attention import check_packing, use_packed_attention
        from rlinf_engines.trainers.flat import FlatState, is_small
        from rlinf_engines.trainers.network import build_network
        from rlinf_engines.trainers.sharing import can_share

        if str(self.cfg.sharding) not in ("ddp", "fsdp2"):
            raise ConfigError(f"trainer.sharding: {self.cfg.sharding!r} is unknown; choose ddp or fsdp2")
        master = torch.float32 if self.dtype == torch.bfloat16 else self.dtype
        network: Any
        if self.spec is None:
            network = load_model(model, self._seed, master, role).requires_grad_(True)
        else:
            network = build_network(self.spec, self._seed, master)
        if not self.sharded:
            network.to(self.device)
        if self.spec is None:
            use_packed_attention(network)
            check_packing(network)
            self.shares_prompts = bool(self.cfg.share_prompts) and can_share(network)
        if self.cfg.activation_checkpointing:
            checkpoint_activations(network)
        if self.parallel.world_size > 1:
            with self._ranks().talking("copying rank 0's weights"), torch.no_grad():
                for tensor in [*network.parameters(), *(network.buffers() if self.spec is not None else ())]:
                    dist.broadcast(tensor, src=0)
        if self.sharded:
            from rlinf_engines.trainers.sharded import shard

            self.lockstep = True
            shard(network, self.device, self.parallel.world_size, self.dtype, plain=self.spec is not None)
        elif self.spec is not None and is_small(network):
            self._flat = FlatState(network)
        self.model = network

    def _new_optimizer(self) -> None:
        import torch

        decay = float(self.cfg.weight_decay)
        if self._flat is not None:
            groups = self._flat.groups(decay)
        else:
            # Norms and biases are not decayed: only their scale would shrink (usual practice).
            matrices = [p for p in self.model.parameters() if p.dim() > 1]
            vectors = [p for p in self.model.parameters() if p.dim() <= 1]
            groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(
            groups,
            lr=float(self.cfg.lr),
            betas=(float(self.cfg.betas[0]), float(self.cfg.betas[1])),
            eps=float(self.cfg.eps),
            fused=True if self._flat is not None else None,
        )

    def _call(self, **inputs: Any) -> Any:
        with self._autocast():
            return self.model(**inputs)

    def _call_network(self, spec: NetworkSpec, batch: Batch) -> dict[str, torch.Tensor]:
        with self._autocast():
            return spec.forward(self.model, batch)

    def _autocast(self) -> AbstractContextManager[Any]:
        import torch

        # Sharded weights are gathered in bfloat16 as they are.
        if self.dtype != torch.bfloat16 or self.sharded:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    def _averaged_gradients(self, count: float) -> float:
        """Add gradients over ranks, divide by ``count``, clip; returns the norm before clipping."""
        if self.sharded:
            from rlinf_engines.trainers.sharded import average_and_clip

            return average_and_clip(self.model, count, float(self.cfg.grad_clip), self._ranks())
        from rlinf_engines.trainers.norms import sum_of_squares

        flat = self._summed_gradients()
        if self._flat is not None:
            norm = self._flat.norm() / count
        else:
            norm = math.sqrt(float(sum_of_squares([flat], flat.device))) / count
        clip = float(self.cfg.grad_clip)
        if math.isfinite(norm) and 0.0 < clip < norm:
            count *= (norm + 1e-12) / clip
        flat.div_(count)
        return norm

    def _summed_gradients(self) -> torch.Tensor:
        """All gradients in one buffer, summed over ranks; each ``p.grad`` becomes a view of it."""
        import torch
        import torch.distributed as dist

        parameters = [] if self._flat is not None else list(self.model.parameters())
        if self._flat is not None:
            flat = self._flat.gradient
        else:
            flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in parameters])
        if self.parallel.world_size > 1:
            with self._ranks().talking(f"adding gradients at optimizer step {self.steps_done}"):
                dist.all_reduce(flat)
        start = 0
        for parameter in parameters:
            parameter.grad = flat[start : start + parameter.numel()].view_as(parameter)
            start += parameter.numel()
        return flat

    def _whole_state(self) -> dict[str, Any] | None:
        from rlinf_engines.models import named_weights

        keep = self.parallel.rank == 0
        weights: dict[str, torch.Tensor] = {}
        optimizer: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in named_weights(self.model):
            whole = _whole(tensor).cpu()
            if keep:
                weights[name] = whole if self._flat is None else whole.clone()
        if self._flat is not None:
            return {"weights": weights, "optimizer": dict(self._flat.averages(self.optimizer))} if keep else None
        for name, parameter in self.model.named_parameters():
            if parameter in self.optimizer.state:
                state = {key: _whole(value).cpu() for key, value in self.optimizer.state[parameter].items()}
                if keep:
                    optimizer[name] = state
        return {"weights": weights, "optimizer": optimizer} if keep else None

    def _install_state(self, state: Mapping[str, Any]) -> None:
        import torch

        from rlinf_engines.models import named_weights

        with torch.no_grad():
            for name, tensor in named_weights(self.model):
                _local(tensor).copy_(self._part(tensor, state["weights"][name]))
            if self._flat is not None:
                self._flat.install(self.optimizer, state["optimizer"])
                return
            self.optimizer.zero_grad(set_to_none=True)
            self.optimizer.state.clear()
            for name, parameter in self.model.named_parameters():
                for key, whole in state["optimizer"].get(name, {}).items():
                    self.optimizer.state[parameter][key] = self._like(parameter, whole)

    def _zero_gradients(self) -> None:
        if self._flat is not None:
            self._flat.gradient.zero_()
        else:
            self.optimizer.zero_grad(set_to_none=True)

    def _part(self, target: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        """What this rank holds of ``whole``, when it holds ``target``."""
        if not _is_sharded(target):
            return whole
        from rlinf_engines.trainers.sharded import part_of

        return part_of(whole, self.parallel.rank, self.parallel.world_size)

    def _like(self, parameter: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        """Optimizer state from a checkpoint, split and placed as ``parameter``; the step counter stays on the CPU."""
        if whole.dim() == 0:
            return whole.clone()
        part = self._part(parameter, whole).to(self.device, copy=True)
        if not _is_sharded(parameter):
            return part
        from rlinf_engines.trainers.sharded import wrap_part

        return wrap_part(part, parameter)

    def _device_tensors(self) -> Iterator[torch.Tensor]:
        return (_local(tensor) for tensor in super()._device_tensors())


def checkpoint_activations(network: Any) -> None:
    """Let each block of a Hugging Face model keep its input only, and run again in the backward."""
    if not hasattr(network, "gradient_checkpointing_enable"):
        raise ConfigError(
            f"trainer.activation_checkpointing: {type(network).__name__} has no gradient_checkpointing_enable (a "
            "method of Hugging Face models); set it to false"
        )
    try:
        network.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    except ValueError as error:
        raise ConfigError(f"trainer.activation_checkpointing: {error}; set it to false") from error


def _is_sharded(tensor: Any) -> bool:
    return hasattr(tensor, "full_tensor")


def _whole(tensor: Any) -> Any:
    """A tensor of which each rank may have a part. Collective then."""
    return tensor.full_tensor() if _is_sharded(tensor) else tensor


def _local(tensor: Any) -> Any:
    """This rank's part of a tensor, or the tensor."""
    return tensor.to_local() if _is_sharded(tensor) else tensor
