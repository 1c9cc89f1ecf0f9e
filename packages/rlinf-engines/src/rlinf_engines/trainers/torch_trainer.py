"""Trainer backend ``torch``: AdamW over any Hugging Face causal LM, one process or data parallel.

Each rank holds the whole model. Gradients of loss *sums* accumulate on every rank; ``step`` adds them over the
ranks once, in a fixed order, and divides by the global count, so ranks may have different numbers of
micro-batches and the result does not depend on how samples were split, up to floating-point order.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlinf_core.errors import ConfigError, NonFiniteError, RLinfError
from rlinf_core.types import Batch, ForwardFn, LossFn, ParallelInfo, StepInfo
from rlinf_engines.trainers.schedule import learning_rate

if TYPE_CHECKING:
    import torch

    from rlinf_engines.offload import DeviceStore


class TorchTrainer:
    """One rank of the ``torch`` backend (see ``rlinf_core.types.Trainer``).

    ``model.dtype: bfloat16`` keeps float32 master weights and computes the forward in bfloat16 (autocast);
    ``weights`` and ``export`` give bfloat16. float32 and float64 hold and compute in that format.

    Between ``offload`` and ``onload`` nothing works but ``reduce``, ``barrier`` and ``close``; all else is refused.
    """

    requires: tuple[str, ...] = ("transformers", "tokenizers", "safetensors")

    def __init__(self, cfg: Any) -> None:
        self.cfg = cfg
        self.tokenizer: Any = None
        self.model: Any = None
        self.steps_done = 0
        self._store: DeviceStore | None = None

    @property
    def micro_batch_tokens(self) -> int:
        """The most padded tokens that a micro-batch should have; who cuts the batch reads it."""
        return int(self.cfg.micro_batch_tokens)

    def setup(self, model: Any, forward_fn: ForwardFn, parallel: ParallelInfo, *, seed: int) -> None:
        """Build model and optimizer. ``model`` is the config node, ``seed`` the root seed.

        With ``world_size`` above 1 this opens torch.distributed's default group (gloo on a CPU, nccl on a
        GPU) and copies rank 0's weights to the others; a peer that does not come within
        ``parallel.timeout_s`` is an error.
        """
        import torch

        from rlinf_engines.models import load_model, load_tokenizer, torch_dtype
        from rlinf_engines.offload import DeviceStore
        from rlinf_engines.seeds import derive_seed

        torch.set_num_threads(parallel.threads)
        self.parallel = parallel
        self._seed = seed
        self._forward_fn = forward_fn
        self._device = torch.device(parallel.device)
        self._dtype = torch_dtype(model.dtype)
        master = torch.float32 if self._dtype == torch.bfloat16 else self._dtype
        self.tokenizer = load_tokenizer(model)
        self.model = load_model(model, seed, master).to(self._device)
        self.model.requires_grad_(True)
        self.model.config.use_cache = False
        if self._dtype == torch.bfloat16:
            _forward_in_bfloat16(self.model, self._device.type)
        if parallel.world_size > 1:
            self._join_group()
        self._new_optimizer()
        self._store = DeviceStore("trainer", self._device, self._state, parallel.threads)
        # For what a forward may draw (dropout); ranks see different samples and draw different numbers.
        torch.manual_seed(derive_seed(seed, "trainer", parallel.rank))

    def restart_optimizer(self, cfg: Any) -> None:
        """Begin another phase: a fresh optimizer and schedule from the node ``cfg``, the weights kept."""
        self._check_loaded("restart_optimizer")
        self.cfg = cfg
        self._new_optimizer()

    def logprobs(self, batch: Batch) -> Any:
        """``forward_fn`` without gradients, in evaluation mode (dropout off)."""
        import torch

        self._check_loaded("logprobs")
        self.model.eval()
        with torch.no_grad():
            return self._forward_fn(self.model, self._to_device(batch))

    def accumulate(self, batch: Batch, loss_fn: LossFn) -> tuple[float, float, dict[str, float]]:
        """Forward and backward of one micro-batch; returns (loss sum, count, metric sums) of this rank.

        Gradients of the loss sum add up until ``step``. A loss that is NaN or infinite raises
        ``NonFiniteError`` before anything is added.
        """
        self._check_loaded("accumulate")
        self.model.train()
        batch = self._to_device(batch)
        outputs = self._forward_fn(self.model, batch)
        loss, count, metrics = loss_fn(outputs, batch)
        value = float(loss.detach())
        if not math.isfinite(value):
            raise NonFiniteError(f"loss sum is {value} at optimizer step {self.steps_done}{_ids_of(batch)}")
        if loss.requires_grad:  # a micro-batch in which everything is masked has no gradient
            loss.backward()
        return value, float(count), {name: float(total) for name, total in metrics.items()}

    def step(self, count: float) -> StepInfo:
        """Add gradients over ranks, divide by ``count``, clip, update, zero. Collective.

        ``count`` is the global one (see ``reduce``). A gradient that is NaN or infinite raises
        ``NonFiniteError`` on every rank, naming the parameter, before anything is updated.
        """
        import torch

        self._check_loaded("step")
        if not (count > 0 and math.isfinite(count)):
            raise RLinfError(f"trainer.step: count is {count}; a step needs at least one counted token or sample")
        flat = self._summed_gradients()
        flat.div_(count)
        grad_norm = float(torch.linalg.vector_norm(flat))
        if not math.isfinite(grad_norm):
            self._name_bad_gradient()
        clip = float(self.cfg.grad_clip)
        if clip > 0.0 and grad_norm > clip:
            flat.mul_(clip / (grad_norm + 1e-12))
        lr = learning_rate(self.cfg, self.steps_done)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps_done += 1
        return StepInfo(grad_norm=grad_norm, lr=lr)

    def gradients(self) -> dict[str, torch.Tensor]:
        """Copies of the gradient sums that this rank has accumulated since the last step, by name."""
        self._check_loaded("gradients")
        return {n: p.grad.detach().clone() for n, p in self.model.named_parameters() if p.grad is not None}

    def reduce(self, values: Mapping[str, float]) -> dict[str, float]:
        """Sum each value over ranks, in float64. Collective; the ranks may have different names."""
        if self.parallel.world_size == 1:
            return dict(values)
        import torch.distributed as dist

        everyone: list[dict[str, float]] = [{} for _ in range(self.parallel.world_size)]
        dist.all_gather_object(everyone, dict(values))
        total: dict[str, float] = {}
        for mine in everyone:  # in rank order, the same on every rank
            for name, value in mine.items():
                total[name] = total.get(name, 0.0) + value
        return total

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole parameters under Hugging Face names in ``model.dtype``, tied ones once.

        The tensors are the live ones where the format allows: use them before the next ``step`` or ``offload``.
        """
        from rlinf_engines.models import named_weights

        for name, tensor in named_weights(self.model):
            self._check_loaded("weights")
            yield name, tensor.to(self._dtype) if tensor.is_floating_point() else tensor

    def onload(self) -> None:
        """Bring weights, gradients and optimizer state back to the device, bit-equal (see ``DeviceStore``)."""
        if self._store is not None:
            self._store.onload()

    def offload(self) -> None:
        """Move weights, gradients and optimizer state to host memory; any time between two calls."""
        if self._store is not None:
            self._store.offload()

    def save(self, path: Path) -> None:
        """Write the exact state (weights, optimizer, schedule, RNG of every rank). Collective.

        Call between steps: accumulated gradients are not part of the state.
        """
        from rlinf_engines.trainers import checkpoint

        self._check_loaded("save")
        checkpoint.save(self, Path(path))

    def load(self, path: Path) -> None:
        """Restore what ``save`` wrote; half-written ones and other models' are refused by name."""
        from rlinf_engines.trainers import checkpoint

        self._check_loaded("load")
        checkpoint.load(self, Path(path))

    def export(self, path: Path) -> None:
        """Write a Hugging Face directory (config, safetensors, tokenizer); rank 0 writes. Collective."""
        from rlinf_engines.models import export_model

        self._check_loaded("export")
        if self.parallel.rank == 0:
            export_model(self.model, self.tokenizer, Path(path), self._dtype)
        self.barrier()

    def close(self) -> None:
        """Leave the process group, if this trainer opened one, and give host memory back."""
        if self._store is not None:
            self._store.close()
        if self.parallel.world_size > 1:
            import torch.distributed as dist

            if dist.is_initialized():
                dist.destroy_process_group()

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.parallel.world_size > 1:
            import torch.distributed as dist

            dist.barrier()

    def _join_group(self) -> None:
        import torch
        import torch.distributed as dist

        place = self.parallel
        if not place.init_method:
            raise ConfigError(f"trainer: {place.world_size} ranks need parallel.init_method (file:// or tcp://)")
        if dist.is_initialized():
            raise RLinfError(
                "trainer: this process is already in a torch.distributed group. Ranks of one trainer need a process "
                "each: with cluster.debug=true give the trainer one rank"
            )
        cuda = self._device.type == "cuda"
        if cuda and self._device.index is not None:
            torch.cuda.set_device(self._device)
        try:
            dist.init_process_group(
                "nccl" if cuda else "gloo",
                init_method=place.init_method,
                rank=place.rank,
                world_size=place.world_size,
                timeout=timedelta(seconds=place.timeout_s),
            )
            with torch.no_grad():
                for parameter in self.model.parameters():
                    dist.broadcast(parameter, src=0)
        except (RuntimeError, ValueError) as error:
            self.close()
            raise RLinfError(
                f"trainer rank {place.rank} of {place.world_size}: joining the other ranks through "
                f"{place.init_method} failed within {place.timeout_s:g} s: {error}"
            ) from error

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
        self.steps_done = 0

    def _summed_gradients(self) -> torch.Tensor:
        """All gradients in one buffer, summed over ranks; each ``p.grad`` becomes a view of it."""
        import torch

        parameters = list(self.model.parameters())
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in parameters])
        if self.parallel.world_size > 1:
            import torch.distributed as dist

            try:
                dist.all_reduce(flat)
            except RuntimeError as error:
                raise RLinfError(
                    f"trainer rank {self.parallel.rank} of {self.parallel.world_size}: adding gradients at "
                    f"optimizer step {self.steps_done} failed, a peer is gone or late: {error}"
                ) from error
        start = 0
        for parameter in parameters:
            parameter.grad = flat[start : start + parameter.numel()].view_as(parameter)
            start += parameter.numel()
        return flat

    def _name_bad_gradient(self) -> None:
        import torch

        bad = [n for n, p in self.model.named_parameters() if p.grad is not None and not torch.isfinite(p.grad).all()]
        where = f"in {len(bad)} parameters, first {bad[0]}" if bad else "in its norm"
        self.optimizer.zero_grad(set_to_none=True)
        raise NonFiniteError(f"gradient is not finite {where} at optimizer step {self.steps_done}")

    def _to_device(self, batch: Batch) -> Batch:
        if self._device.type == "cpu":
            return batch
        import torch

        return {k: v.to(self._device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}

    def _state(self) -> Iterator[torch.Tensor]:
        from rlinf_engines.offload import state_tensors

        return state_tensors(self.model, self.optimizer)

    def _check_loaded(self, what: str) -> None:
        if self._store is not None:
            self._store.check(what)


def _forward_in_bfloat16(model: Any, device_type: str) -> None:
    """Let the model compute in bfloat16 and give float32 logits, so that log-probs are not rounded to 8 bits."""
    import torch

    forward = model.forward

    @functools.wraps(forward)
    def autocast_forward(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device_type, dtype=torch.bfloat16):
            outputs = forward(*args, **kwargs)
        if outputs.logits is not None:
            outputs.logits = outputs.logits.float()
        return outputs

    model.forward = autocast_forward


def _ids_of(batch: Batch) -> str:
    """The ids of a micro-batch's samples for a message, when it carries them."""
    ids = batch.get("ids")
    return f" in the micro-batch of {', '.join(map(str, list(ids)[:8]))}" if ids else ""
