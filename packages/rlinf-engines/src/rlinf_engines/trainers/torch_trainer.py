"""Trainer backend ``torch``: AdamW over any Hugging Face causal LM, one process or data parallel.

Gradients of loss *sums* accumulate; ``step`` divides once by the global count, so ranks may have different numbers of
micro-batches and the result does not depend on how samples were split, up to floating-point order. With
``sharding: ddp`` each rank holds the whole model and gradients are added over ranks once, in ``step``. With ``fsdp2``
(torch's ``fully_shard``) each rank holds a part of weights, gradients and optimizer state (``sharded.py``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rlinf_core.errors import ConfigError
from rlinf_core.types import StepInfo
from rlinf_engines.trainers.base import TrainerBase

if TYPE_CHECKING:
    import torch


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
                self.optimizer.zero_grad(set_to_none=True)
                raise error
            lr = self.learning_rate()
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
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
            whole = _whole(tensor)
            yield name, whole.to(self.dtype) if whole.is_floating_point() else whole

    def _build(self, model: Any, role: str) -> None:
        import torch
        import torch.distributed as dist

        from rlinf_engines.models import load_model
        from rlinf_engines.trainers.attention import check_packing, use_packed_attention

        if str(self.cfg.sharding) not in ("ddp", "fsdp2"):
            raise ConfigError(f"trainer.sharding: {self.cfg.sharding!r} is unknown; choose ddp or fsdp2")
        master = torch.float32 if self.dtype == torch.bfloat16 else self.dtype
        network = load_model(model, self._seed, master, role).requires_grad_(True)
        if not self.sharded:
            network.to(self.device)
        use_packed_attention(network)
        check_packing(network)
        if self.cfg.activation_checkpointing:
            checkpoint_activations(network)
        if self.parallel.world_size > 1:
            with self._ranks().talking("copying rank 0's weights"), torch.no_grad():
                for parameter in network.parameters():
                    dist.broadcast(parameter, src=0)
        if self.sharded:
            from rlinf_engines.trainers.sharded import shard

            self.lockstep = True
            shard(network, self.device, self.parallel.world_size, self.dtype)
        self.model = network

    def _new_optimizer(self) -> None:
        import torch

        # Norms and biases are not decayed: only their scale would shrink (usual practice).
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        vectors = [p for p in self.model.parameters() if p.dim() <= 1]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": float(self.cfg.weight_decay)},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=float(self.cfg.lr),
            betas=(float(self.cfg.betas[0]), float(self.cfg.betas[1])),
            eps=float(self.cfg.eps),
        )

    def _call(self, **inputs: Any) -> Any:
        import torch

        # Sharded weights are gathered in bfloat16 as they are.
        enabled = self.dtype == torch.bfloat16 and not self.sharded
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=enabled):
            return self.model(**inputs)

    def _averaged_gradients(self, count: float) -> float:
        """Add gradients over ranks, divide by ``count``, clip; returns the norm before clipping."""
        if self.sharded:
            from rlinf_engines.trainers.sharded import average_and_clip

            return average_and_clip(self.model, count, float(self.cfg.grad_clip), self._ranks())
        from rlinf_engines.trainers.norms import sum_of_squares

        flat = self._summed_gradients()
        flat.div_(count)
        norm = math.sqrt(float(sum_of_squares([flat], flat.device)))
        clip = float(self.cfg.grad_clip)
        if math.isfinite(norm) and 0.0 < clip < norm:
            flat.mul_(clip / (norm + 1e-12))
        return norm

    def _summed_gradients(self) -> torch.Tensor:
        """All gradients in one buffer, summed over ranks; each ``p.grad`` becomes a view of it."""
        import torch
        import torch.distributed as dist

        parameters = list(self.model.parameters())
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
                weights[name] = whole
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
            self.optimizer.zero_grad(set_to_none=True)
            self.optimizer.state.clear()
            for name, parameter in self.model.named_parameters():
                for key, whole in state["optimizer"].get(name, {}).items():
                    self.optimizer.state[parameter][key] = self._like(parameter, whole)

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
