"""Trainer backend ``megatron``: megatron-core models split by tensor, pipeline and sequence parallelism.

A replica is ``trainer.tp * trainer.pp`` neighbouring ranks; the others are data parallel. Weights come from and go to
Hugging Face names, so everything else (rollouts, exports, checkpoints) does not see the split.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlinf_core.errors import ConfigError, NonFiniteError, RLinfError
from rlinf_core.types import Batch, LossFn, StepInfo, VocabShard
from rlinf_engines.trainers.base import TrainerBase, ids_of
from rlinf_engines.trainers.megatron.supported import world_problem

if TYPE_CHECKING:
    import torch

    from rlinf_engines.trainers.megatron.config import Shape
    from rlinf_engines.trainers.megatron.convert import Piece
    from rlinf_engines.trainers.megatron.layout import Layout
    from rlinf_engines.trainers.megatron.parameters import Parameters
    from rlinf_engines.trainers.megatron.pipeline import Pipeline


class MegatronTrainer(TrainerBase):
    """One rank of the ``megatron`` backend (see ``rlinf_core.types.Trainer`` and ``TrainerBase``).

    Takes dense models of the Llama, Qwen2 and Qwen3 families (``config.ARCHITECTURES``). ``model.dtype: bfloat16``
    computes in bfloat16 throughout, with float32 master weights and gradient sums; log-probs are float32.

    Several trainers of one process (a policy and its critic, on one rank) share megatron's groups and must have the
    same ``tp`` and ``pp``.
    """

    memory_knobs = (
        "lower trainer.micro_batch_tokens, set trainer.activation_checkpointing=true, or raise trainer.tp or trainer.pp"
    )

    requires = ("megatron.core", "transformers", "tokenizers", "safetensors")
    any_network = False

    def __init__(self, cfg: Any) -> None:
        super().__init__(cfg)
        self._layout: Layout | None = None
        self._shape: Shape
        self._stages: list[list[Piece]] = []
        self._parameters: Parameters
        self._pipeline: Pipeline
        self._configs: tuple[Any, Any] = (None, None)

    @classmethod
    def ranks_problem(cls, cfg: Any, ranks: int) -> str:
        """Why a trainer with the config node ``cfg`` cannot have ``ranks`` ranks; empty when it can."""
        return world_problem(ranks, int(cfg.tp), int(cfg.pp))

    # -- life ---------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give the process groups back, if this trainer has any, and host memory."""
        if self._layout is not None:
            from rlinf_engines.trainers.megatron.layout import leave

            self._layout = None
            leave()
        super().close()

    def _build(self, model: Any, role: str) -> None:
        import torch

        from rlinf_engines.trainers.megatron.compat import import_megatron, quiet
        from rlinf_engines.trainers.megatron.config import check_parallel, read_shape
        from rlinf_engines.trainers.megatron.layout import check_world, enter

        tp, pp = int(self.cfg.tp), int(self.cfg.pp)
        check_world(self.parallel.world_size, tp, pp)
        import_megatron()
        if self.device.type == "cpu" and torch.cuda.is_available():
            raise ConfigError("trainer: megatron on a machine with GPUs runs on them; give the trainer's group devices")
        if self.device.type == "cuda" and self.device.index is not None:
            torch.cuda.set_device(self.device)  # where megatron allocates
        config, whole = self._source(model, role)
        shape = read_shape(config)
        if role == "critic":  # which has no output layer that could be tied to the embedding
            shape = replace(shape, tied=False)
        self._shape = shape
        check_parallel(shape, tp, pp)
        layout = self._layout = enter(self.parallel, self.device, tp, pp)
        self.replica, self.replicas, self.replica_group = layout.replica_index, layout.dp, layout.replica
        with quiet():
            self._assemble(bool(self.cfg.sequence_parallel) and tp > 1)
        self._take_weights(model, whole)

    def _source(self, model: Any, role: str) -> tuple[Any, Any]:
        """(Hugging Face config, its network, or ``None`` where weights are read from the files of ``model.path``)."""
        from rlinf_engines.models import load_config, load_model

        if model.path is not None and role == "policy" and any(Path(model.path).expanduser().glob("*.safetensors")):
            config = load_config(str(Path(model.path).expanduser()))
            self._configs = (config, _generation_config(model.path))
            return config, None
        network = load_model(model, self._seed, self._master_dtype(), role)
        self._configs = (network.config, getattr(network, "generation_config", None))
        return network.config, network

    def _assemble(self, sequence_parallel: bool) -> None:
        """Make this rank's stage of the model, its weights not set."""
        from rlinf_engines.trainers.megatron import model as models
        from rlinf_engines.trainers.megatron.config import stage_layers, transformer_config
        from rlinf_engines.trainers.megatron.convert import stage_pieces
        from rlinf_engines.trainers.megatron.parameters import Parameters
        from rlinf_engines.trainers.megatron.pipeline import Pipeline

        layout, shape, critic = self._place(), self._shape, self.role == "critic"
        fused = models.uses_transformer_engine(self.device)
        # Transformer Engine's attention wants each sequence's tokens as they lie.
        self.shares_prompts = bool(self.cfg.share_prompts) and not fused
        config = transformer_config(
            shape,
            tp=layout.tp,
            pp=layout.pp,
            sequence_parallel=sequence_parallel,
            dtype=self.dtype,
            recompute=bool(self.cfg.activation_checkpointing),
            fused=fused,
        )
        self._random_states()
        self.model = models.build_model(shape, config, layout, self.device, critic=critic)
        self._stages = [
            stage_pieces(
                shape,
                layers,
                first=stage == 0,
                last=stage == layout.pp - 1,
                pp=layout.pp,
                sequence_parallel=sequence_parallel,
                critic=critic,
                fused_norms=fused,
            )
            for stage, layers in enumerate(stage_layers(shape.layers, layout.pp))
        ]
        self._parameters = Parameters(self.model, self._own_pieces(), shape, layout)
        self._pipeline = Pipeline(
            self.model,
            layout,
            lambda batch: models.packed_forward(self.model, batch, layout, sequence_parallel=sequence_parallel),
            self._last_outputs,
        )

    def _take_weights(self, model: Any, network: Any) -> None:
        """Give this rank its part of the weights of ``network``, or of the files of ``model.path``."""
        from rlinf_engines.models import load_model
        from rlinf_engines.trainers.megatron.source import FileWeights
        from rlinf_engines.trainers.megatron.whole import place_whole

        def place(whole: Mapping[str, torch.Tensor]) -> None:
            place_whole(self._own_pieces(), self._shape, self._place(), whole, self._parameters.masters.__getitem__)

        wanted = {name for piece in self._own_pieces() for name in piece.sources}
        if network is None:
            files = FileWeights(Path(model.path).expanduser(), self._master_dtype())
            try:
                if wanted <= files.keys():
                    place(files)
                else:  # older names, which transformers knows how to read, or a file is missing, which it says
                    network = load_model(model, self._seed, self._master_dtype())
            finally:
                files.close()
        if network is not None:
            place(network.state_dict())
        self._parameters.copy_to_live()

    def _new_optimizer(self) -> None:
        from rlinf_engines.trainers.megatron.parameters import new_optimizer

        self.optimizer = new_optimizer(self.cfg, self._parameters.masters)

    # -- forward and backward -----------------------------------------------------------------------------------------

    def forward(self, batches: Sequence[Batch]) -> list[dict[str, torch.Tensor]]:
        """The head's outputs of each micro-batch, [M] each, on every rank of the replica. Collective there."""
        self._check_loaded("forward")
        self._set_mode(train=False)
        with self.memory_guard("forward"):
            return self._pipeline.forward([self._prepared(batch) for batch in batches])

    def accumulate(self, batches: Sequence[Batch], loss_fn: LossFn) -> tuple[float, float, dict[str, float]]:
        """Forward and backward of micro-batches through the pipeline; returns this replica's (loss sum, count, sums).

        Collective over the replica, whose ranks give the same micro-batches. A loss that is NaN or infinite raises
        ``NonFiniteError`` on all of them; the gradients since the last step are then dropped.
        """
        self._check_loaded("accumulate")
        self._set_mode(train=True)
        self._parameters.open_sums()
        with self.memory_guard("accumulate"):
            sums = self._pipeline.backward([self._prepared(batch) for batch in batches], loss_fn)
        if sums.bad is not None:
            self._parameters.drop_sums()
            value, place = sums.bad
            raise NonFiniteError(f"loss sum is {value} at optimizer step {self.steps_done}{ids_of(batches[place])}")
        return sums.loss, sums.count, sums.metrics

    def step(self, count: float) -> StepInfo:
        """Add gradients over ranks, divide by ``count``, clip by the norm of the whole model, update. Collective."""
        self._check_loaded("step")
        self.check_count(count)
        parameters = self._parameters
        with self.memory_guard("step"):
            parameters.reduce()
            parameters.scale(1.0 / count)
            grad_norm = parameters.norm()
        if not math.isfinite(grad_norm):
            self._refuse_gradient()
        clip = float(self.cfg.grad_clip)
        if clip > 0.0 and grad_norm > clip:
            parameters.scale(clip / (grad_norm + 1e-12))
        lr = self.learning_rate()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        parameters.hand_over()
        self.optimizer.step()
        parameters.drop_sums()
        parameters.copy_to_live()
        self.steps_done += 1
        return StepInfo(grad_norm=grad_norm, lr=lr)

    def gradients(self) -> dict[str, torch.Tensor]:
        """The gradient sums of this rank's replica since the last step, whole, under Hugging Face names; given to rank
        0 alone. Collective. Adds what ranks of the replica hold parts of, so call it once and no step after it."""
        self._check_loaded("gradients")
        self._parameters.reduce_replica()
        return dict(self._gather(self._parameters.gradients()))

    def _last_outputs(self, result: torch.Tensor, batch: Batch) -> dict[str, torch.Tensor]:
        """What the loss reads, of the last stage's logits [M, V / tp] or values [M, 1]."""
        if self.role == "critic":
            return {"values": self._exact(result[:, 0])}
        if self.head is None:
            raise RLinfError("trainer: forward before setup")
        layout = self._place()
        start = layout.part * result.shape[1]
        # The rows that pad the vocabulary are behind its end, on the last rank.
        logits = self._exact(result[:, : self._shape.vocab - start])
        return self.head(logits, batch, VocabShard(layout.tensor, start) if layout.tp > 1 else VocabShard())

    def _refuse_gradient(self) -> None:
        """Raise the same ``NonFiniteError`` on every rank; the parameter may be another rank's."""
        own = self.bad_gradient(self._parameters.named_gradients())
        self._parameters.drop_sums()
        texts = self._ranks().everyone(str(own), "naming a gradient that is not finite")
        raise NonFiniteError(next((text for text in texts if "first" in text), texts[0]))

    # -- state --------------------------------------------------------------------------------------------------------

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole parameters under Hugging Face names in ``model.dtype``, tied ones once; on rank 0, others get nothing.

        Collective over the first replica; a layer is gathered at a time.
        """
        self._check_loaded("weights")
        live = [parameter.detach() for parameter in self._parameters.live]
        yield from self._gather(live)

    def _whole_state(self) -> dict[str, Any] | None:
        masters = [master.detach() for master in self._parameters.masters]
        weights = self._to_host(masters)
        states = [self.optimizer.state.get(master, {}) for master in self._parameters.masters]
        optimizer: dict[str, dict[str, torch.Tensor]] = {}
        if states and states[0]:
            for key in ("exp_avg", "exp_avg_sq"):
                for name, tensor in self._to_host([state[key] for state in states]).items():
                    optimizer.setdefault(name, {})[key] = tensor
            for found in optimizer.values():
                found["step"] = states[0]["step"].cpu().clone()
        return {"weights": weights, "optimizer": optimizer} if self.parallel.rank == 0 else None

    def _install_state(self, state: Mapping[str, Any]) -> None:
        import torch

        from rlinf_engines.trainers.megatron.whole import place_whole

        parameters, pieces, layout = self._parameters, self._own_pieces(), self._place()
        place_whole(pieces, self._shape, layout, state["weights"], lambda i: parameters.masters[i].detach())
        parameters.copy_to_live()
        parameters.drop_sums()
        self._new_optimizer()
        whole = state["optimizer"]
        if not whole:
            return
        step = next(iter(whole.values()))["step"]
        averages: dict[str, list[torch.Tensor]] = {}
        for key in ("exp_avg", "exp_avg_sq"):
            averages[key] = [torch.empty_like(master) for master in parameters.masters]
            part = {name: values[key] for name, values in whole.items()}
            place_whole(pieces, self._shape, layout, part, averages[key].__getitem__)
        for index, master in enumerate(parameters.masters):
            state_of = {key: tensors[index] for key, tensors in averages.items()}
            self.optimizer.state[master] = {"step": torch.as_tensor(step).clone(), **state_of}

    def _fingerprint(self) -> dict[str, str]:
        kind = str(self._parameters.masters[0].dtype).removeprefix("torch.")
        found: dict[str, str] = {}
        for piece in (piece for stage in self._stages for piece in stage if not piece.copy):
            for name, size in zip(piece.sources, piece.shapes, strict=True):
                found[name] = f"{kind}{list(size)}"
        return found

    def _hf_configs(self) -> tuple[Any, Any]:
        return self._configs

    def _device_tensors(self) -> Iterator[torch.Tensor]:
        yield from self._parameters.tensors(self.optimizer.state)
        yield from self.model.buffers()

    # -- own ----------------------------------------------------------------------------------------------------------

    def _gather(self, own: Sequence[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        from rlinf_engines.trainers.megatron.whole import gather_whole

        yield from gather_whole(self._stages, self._shape, self._place(), lambda i: own[i], own[0])

    def _to_host(self, own: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """``_gather`` into memory of their own on the CPU."""
        return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in self._gather(own)}

    def _own_pieces(self) -> list[Piece]:
        return self._stages[self._place().stage]

    def _master_dtype(self) -> torch.dtype:
        import torch

        return torch.float32 if self.dtype == torch.bfloat16 else self.dtype

    def _place(self) -> Layout:
        if self._layout is None:
            raise RLinfError("trainer: not set up yet, or closed; call setup() first")
        return self._layout

    def _random_states(self) -> None:
        """megatron's random states on a GPU, which activation checkpointing saves and restores."""
        if self.device.type == "cuda":
            from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

            model_parallel_cuda_manual_seed(self._seed % 2**31, force_reset_rng=True)


def _generation_config(path: str) -> Any:
    """The generation config of a model directory, or ``None``."""
    from transformers import GenerationConfig

    directory = Path(path).expanduser()
    if not (directory / "generation_config.json").is_file():
        return None
    return GenerationConfig.from_pretrained(str(directory), local_files_only=True)
