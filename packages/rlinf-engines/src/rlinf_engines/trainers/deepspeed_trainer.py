"""Trainer backend ``deepspeed``: data parallel with DeepSpeed's ZeRO, stages 0 to 3, over any Hugging Face causal LM or
torch module.

Gradients of loss *sums* accumulate; DeepSpeed averages them over ranks, and at the step its gradient scale is set to
the global count over the number of ranks, so that what AdamW sees is divided once by the count. ZeRO: Rajbhandari et
al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", arXiv 1910.02054.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rlinf_core.errors import ConfigError, NonFiniteError
from rlinf_core.types import Batch, NetworkSpec, StepInfo
from rlinf_engines.trainers.base import TrainerBase, zero_loss

if TYPE_CHECKING:
    import torch

    from rlinf_engines.trainers.deepspeed_state import ZeroState

# Keys that an engine is built with; a new phase keeps them.
FIXED = ("zero_stage", "offload_optimizer", "offload_parameters", "bucket_elements", "persistence_elements")


class DeepSpeedTrainer(TrainerBase):
    """One rank of the ``deepspeed`` backend (see ``rlinf_core.types.Trainer``).

    ``model.dtype: bfloat16`` keeps float32 weights and computes in bfloat16 (DeepSpeed's ``torch_autocast``): weights
    are gathered and gradients of linear layers reduced in bfloat16. float32 computes in float32; float64 goes with
    ``zero_stage: 0`` only.
    """

    requires = ("deepspeed", "transformers", "tokenizers", "safetensors")
    memory_knobs = (
        "lower trainer.micro_batch_tokens, set trainer.activation_checkpointing=true, raise trainer.zero_stage, or set "
        "trainer.offload_optimizer=true"
    )

    def __init__(self, cfg: Any) -> None:
        super().__init__(cfg)
        self._stage = int(cfg.zero_stage)
        # From stage 2 on, gradients are reduced in each backward, in stage 3 weights are gathered in each forward.
        self.lockstep = self._stage >= 2
        self._engine: Any = None
        self._state: ZeroState | None = None
        self._entered = False
        self._backwards = 0
        self._bad: list[str] | None = None

    def step(self, count: float) -> StepInfo:
        """Reduce over ranks, divide by ``count`` (the global one), clip, update, zero the gradients. Collective.

        A gradient that is NaN or infinite raises ``NonFiniteError`` on every rank, naming parameters; weights and
        optimizer are as they were then, and the gradients are dropped.
        """
        self._check_loaded("step")
        self.check_count(count)
        lr = self.learning_rate()
        with self.memory_guard("step"):
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            if self._stage and not self._backwards:  # ZeRO reduces in, or prepares for it in, a backward
                self._backward(zero_loss(self._outputs(self._to_device(self.filler()))))
            grad_norm = self._zero_step(count) if self._stage else self._plain_step(count)
            self._backwards = 0
        self.steps_done += 1
        return StepInfo(grad_norm=grad_norm, lr=lr)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole parameters under Hugging Face names in ``model.dtype``, tied ones once, on every rank. Collective.

        The tensors are the live ones where the format and the stage allow: use them before the next ``step`` or
        ``offload``.
        """
        for name, tensor in self._zero_state().weights():
            self._check_loaded("weights")
            yield name, self._in_format(name, tensor)

    def close(self) -> None:
        """Take the engine apart, leave the process group if this trainer was its last user, free host memory."""
        if self._entered:
            from rlinf_engines.trainers import deepspeed_runtime

            self._entered = False
            if self._engine is not None:
                if self._state is not None:
                    self._state.release()
                deepspeed_runtime.take_apart(self._engine, self.model)
                self._engine = self._state = self.optimizer = self.model = None
            deepspeed_runtime.leave()
        super().close()

    def _build(self, model: Any, role: str) -> None:
        import torch

        from rlinf_engines.models import load_model
        from rlinf_engines.trainers import deepspeed_runtime
        from rlinf_engines.trainers.attention import check_packing, use_packed_attention
        from rlinf_engines.trainers.network import build_network
        from rlinf_engines.trainers.sharing import can_share
        from rlinf_engines.trainers.torch_trainer import checkpoint_activations

        if self._stage and self.dtype == torch.float64:
            raise ConfigError(
                "model.dtype: DeepSpeed keeps float32 masters, float64 is trained with trainer.zero_stage=0 only"
            )
        master = torch.float32 if self.dtype == torch.bfloat16 else self.dtype
        network: Any
        if self.spec is None:
            network = load_model(model, self._seed, master, role=role)
            use_packed_attention(network)
            check_packing(network)
            self.shares_prompts = bool(self.cfg.share_prompts) and can_share(network)
            network.requires_grad_(True)
        else:
            network = build_network(self.spec, self._seed, master)
        if self.cfg.activation_checkpointing:
            checkpoint_activations(network)
        deepspeed_runtime.enter(self.parallel, self.device)
        self._entered = True
        self.model = network

    def _new_optimizer(self) -> None:
        options = {
            "lr": float(self.cfg.lr),
            "betas": (float(self.cfg.betas[0]), float(self.cfg.betas[1])),
            "eps": float(self.cfg.eps),
        }
        decay = float(self.cfg.weight_decay)
        if self._engine is None:
            self._make_engine(options, decay)
            return
        changed = [name for name in FIXED if getattr(self.cfg, name) != self._fixed[name]]
        if changed:
            raise ConfigError(
                f"trainer.{changed[0]}: {getattr(self.cfg, changed[0])} differs from the phase before, which had "
                f"{self._fixed[changed[0]]}; an engine keeps it for the whole run"
            )
        for group in self.optimizer.param_groups:
            group.update(options, weight_decay=decay if group["decays"] else 0.0)
        if self._stage:
            self._engine.optimizer.clip_grad = float(self.cfg.grad_clip)
        self._backwards = 0
        self._zero_state().forget_averages()

    def _make_engine(self, options: dict[str, Any], decay: float) -> None:
        import torch

        from rlinf_engines.trainers import deepspeed_runtime
        from rlinf_engines.trainers.deepspeed_state import ZeroState

        config = self._deepspeed_config(sum(p.numel() for p in self.model.parameters()))
        # Norms and biases are not decayed: only their scale would shrink (usual practice).
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        vectors = [p for p in self.model.parameters() if p.dim() <= 1]
        with deepspeed_runtime.quietly():
            import deepspeed

            if self._stage == 3:  # one parameter after the other, so that no rank's device ever has the whole model
                for buffer in self.model.buffers():
                    buffer.data = buffer.data.to(self.device)
                deepspeed.zero.Init(module=self.model, config_dict_or_path=config, mem_efficient_linear=False)
            else:
                self.model.to(self.device)
            groups = [
                {"params": matrices, "weight_decay": decay, "decays": True},
                {"params": vectors, "weight_decay": 0.0, "decays": False},
            ]
            groups = [group for group in groups if group["params"]]
            self.optimizer = torch.optim.AdamW(groups, **options, fused=True)
            self._engine = deepspeed.initialize(
                model=self.model, optimizer=self.optimizer, config=config, dist_init_required=False
            )[0]
        self._fixed = {name: getattr(self.cfg, name) for name in FIXED}
        self._state = ZeroState(self._engine, self.model, self.optimizer, self._stage)
        self._watch_norm()

    def _deepspeed_config(self, elements: int) -> dict[str, Any]:
        cfg = self.cfg
        cuda = self.device.type == "cuda"
        # DeepSpeed allocates whole buckets, however small the model, and wants an even size.
        bucket = (min(int(cfg.bucket_elements), elements) + 1) // 2 * 2
        zero: dict[str, Any] = {"stage": self._stage}
        if self._stage:
            zero |= {
                "reduce_bucket_size": bucket,
                "allgather_bucket_size": bucket,
                "overlap_comm": cuda and self._stage >= 2,
            }
        if self._stage == 3:
            zero |= {
                "stage3_prefetch_bucket_size": bucket,
                "stage3_param_persistence_threshold": int(cfg.persistence_elements),
            }
        if cfg.offload_optimizer:
            zero["offload_optimizer"] = {"device": "cpu", "pin_memory": cuda}
        if cfg.offload_parameters:
            zero["offload_param"] = {"device": "cpu", "pin_memory": cuda}
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            # This trainer says when gradients are complete, by calling step.
            "managed_gradient_accumulation": False,
            "gradient_clipping": float(cfg.grad_clip) if self._stage else 0.0,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            # torch's AdamW also where the state is in host memory: nothing is compiled, the same numbers.
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 1 << 62,
        }
        if self.dtype.itemsize == 2:
            config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
        return config

    def _watch_norm(self) -> None:
        """Note the parameters with bad gradients when ZeRO finds that their norm is none; it then updates nothing and
        drops the gradients."""
        if not self._stage:
            self._engine.enable_backward_allreduce = False  # ``_plain_step`` reduces
            return
        import torch
        from deepspeed.runtime.utils import is_invalid_grad_norm

        zero = self._engine.optimizer
        name = "_get_norm_groups" if self._stage == 3 else "scaled_global_norm"
        compute = getattr(zero, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            found = compute(*args, **kwargs)
            norms = found if isinstance(found, list) else [found]
            if any(bool(torch.as_tensor(is_invalid_grad_norm(norm))) for norm in norms):
                self._bad = [n for n, part in self._zero_state().gradients() if not bool(torch.isfinite(part).all())]
            return found

        setattr(zero, name, watched)

    def _zero_step(self, count: float) -> float:
        zero = self._engine.optimizer
        if self._stage == 1:
            self._zero_state().fill_gradients()
        self._bad = None
        zero.override_loss_scale(count / self.parallel.world_size)
        try:
            self._engine.step()
        finally:
            zero.override_loss_scale(1.0)
        if zero.overflow:
            self._zero_state().drop_gradients()
            self._refuse_gradients(self._bad or [])
        return float(self._engine.get_global_grad_norm())

    def _plain_step(self, count: float) -> float:
        import torch

        from rlinf_engines.trainers.norms import sum_of_squares

        self._zero_state().fill_gradients()
        if self.parallel.world_size > 1:
            self._engine.buffered_allreduce_fallback()  # averages
        grads = [p.grad for p in self.model.parameters()]
        torch._foreach_mul_(grads, self.parallel.world_size / count)
        grad_norm = math.sqrt(float(sum_of_squares(grads, self.device)))
        if not math.isfinite(grad_norm):
            named = self.model.named_parameters()
            bad = [n for n, p in named if not bool(torch.isfinite(p.grad).all())]
            self._zero_state().drop_gradients()
            self._refuse_gradients(bad)
        clip = float(self.cfg.grad_clip)
        if clip > 0.0 and grad_norm > clip:
            torch._foreach_mul_(grads, clip / (grad_norm + 1e-12))
        self._engine.step()
        return grad_norm

    def _refuse_gradients(self, bad: list[str]) -> None:
        """Raise for the parameters that any rank found bad."""
        self._backwards = 0
        found = sorted({name for names in self._ranks().everyone(bad, "naming bad gradients") for name in names})
        where = f"in {len(found)} parameters, first {found[0]}" if found else "in its norm"
        raise NonFiniteError(f"gradient is not finite {where} at optimizer step {self.steps_done}")

    def _call(self, **inputs: Any) -> Any:
        return self._engine(**inputs)

    def _call_network(self, spec: NetworkSpec, batch: Batch) -> dict[str, torch.Tensor]:
        return spec.forward(self._engine, batch)

    def _backward(self, loss: torch.Tensor) -> None:
        self._engine.backward(loss, scale_wrt_gas=False)
        self._backwards += 1

    def _whole_state(self) -> dict[str, Any] | None:
        return self._zero_state().whole(keep=self.parallel.rank == 0)

    def _install_state(self, state: Mapping[str, Any]) -> None:
        self._backwards = 0
        self._zero_state().install(state)

    def _fingerprint(self) -> dict[str, str]:
        shapes = self._zero_state().shapes()
        return {name: f"{str(dtype).removeprefix('torch.')}{list(shape)}" for name, (dtype, shape) in shapes.items()}

    def _device_tensors(self) -> Iterator[torch.Tensor]:
        return self._zero_state().tensors()

    def _zero_state(self) -> ZeroState:
        assert self._state is not None, "no engine: setup() has not been called, or close() has"
        return self._state
