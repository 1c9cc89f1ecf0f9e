"""The training state of a DeepSpeed engine, whole under Hugging Face names, whatever the ZeRO stage.

ZeRO keeps float32 masters, gradients and Adam's averages of several parameters in flat tensors, of which a rank has a
part. ``ZeroState`` knows where each parameter lies and is the only place that does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

AVERAGES = ("exp_avg", "exp_avg_sq")


class ZeroState:
    """Parameters and optimizer state of ``engine``, which trains ``model`` with torch's AdamW ``adam``."""

    def __init__(self, engine: Any, model: Any, adam: torch.optim.AdamW, stage: int) -> None:
        self._engine = engine
        self._zero = engine.optimizer
        self._adam = adam
        self._model = model
        self._stage = stage
        self._names = {id(p): name for name, p in model.named_parameters()}

    # -- whole tensors ------------------------------------------------------------------------------------------------

    def shapes(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Number format and whole shape of each weight and persistent buffer."""
        return {name: (t.dtype, tuple(getattr(t, "ds_shape", t.shape))) for name, t in self._named()}

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole weights and persistent buffers, tied ones once, exact, one at a time. Collective in stage 3.

        The tensors are the live ones where a rank has them whole.
        """
        for name, tensor in self._named():
            if hasattr(tensor, "ds_id"):
                yield name, self._zero.get_full_hp_param(tensor)
            else:
                yield name, tensor.detach()

    def whole(self, keep: bool) -> dict[str, Any] | None:
        """Weights and optimizer state as ``TrainerBase._whole_state`` describes, on ranks that ``keep``. Collective."""
        weights, averages = {}, {}
        for name, tensor in self.weights():
            if keep:
                weights[name] = tensor.to("cpu", copy=True)
        step = self._steps()
        if step is not None:
            for name, parameter in self._model.named_parameters():
                found = {key: self._average(parameter, key) for key in AVERAGES}
                if keep:
                    averages[name] = {key: tensor.to("cpu", copy=True) for key, tensor in found.items()}
                    averages[name]["step"] = step.to("cpu", copy=True)
        return {"weights": weights, "optimizer": averages} if keep else None

    def install(self, state: Mapping[str, Any]) -> None:
        """Take this rank's part of what ``whole`` gave. Collective in stage 3."""
        self.drop_gradients()
        self._clear_averages()
        averages = state["optimizer"]
        step = max((float(found["step"]) for found in averages.values()), default=None)
        with torch.no_grad():
            if self._stage == 3:
                self._zero._partition_all_parameters()
            for name, tensor in self._named():
                self._set_weight(tensor, state["weights"][name])
            if self._stage == 3 and self._zero.persistent_parameters:
                self._zero.persistent_parameters[0].all_gather(self._zero.persistent_parameters)
            if step is not None:
                for flat in self._trained():
                    self._adam.state[flat] = {
                        # In AdamW's own order of keys.
                        "step": torch.tensor(step, dtype=torch.float32, device=flat.device),
                        **{key: torch.zeros_like(flat, requires_grad=False) for key in AVERAGES},
                    }
                for name, parameter in self._model.named_parameters():
                    for flat, own, part in self._places(parameter):
                        for key in AVERAGES:
                            value = _padded(averages[name][key], part)
                            self._adam.state[flat][key].view(-1)[own].copy_(value)

    def forget_averages(self) -> None:
        """Begin with a fresh optimizer."""
        self.drop_gradients()
        self._clear_averages()

    # -- gradients ----------------------------------------------------------------------------------------------------

    def fill_gradients(self) -> None:
        """Give every parameter a gradient (stages 0 and 1, where ranks may have had none)."""
        for parameter in self._model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def drop_gradients(self) -> None:
        """Forget accumulated gradients."""
        if self._stage == 0:
            self._engine.zero_grad()
            return
        zero = self._zero
        zero.zero_grad(set_to_none=True)
        zero._epilogue_ran_this_backward = False
        if self._stage == 3:
            zero.micro_step_id = 0
            zero.averaged_gradients = {}
        else:
            zero.micro_step_id = -1
            for group in list(zero.averaged_gradients):
                zero.averaged_gradients[group] = None
            for group in list(zero.all_grad_tensors):
                zero.all_grad_tensors[group] = None
        if zero_offloads(zero):
            zero.reset_cpu_buffers()

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """This rank's parts of the reduced gradients, while ZeRO takes their norm."""
        zero = self._zero
        if self._stage == 3:
            for group in zero.fp16_groups:
                for parameter in group:
                    yield self._names[id(parameter)], zero.get_local_fp32_grad_for_param(parameter)
        elif zero_offloads(zero):
            for name, parameter in self._model.named_parameters():
                for flat, own, _ in self._places(parameter):
                    if flat.grad is not None:
                        yield name, flat.grad.view(-1)[own]
        else:
            for group, parameters in enumerate(zero.params_in_partition):
                # Padding between parameters is marked; what follows the last one is cut off by zip.
                parts = [g for g in zero.averaged_gradients[group] if not getattr(g, "_zero_padding", False)]
                for parameter, part in zip(parameters, parts, strict=False):
                    yield self._names[id(parameter)], part

    # -- memory -------------------------------------------------------------------------------------------------------

    def tensors(self) -> Iterator[torch.Tensor]:
        """Every tensor that the engine keeps between two calls, as often as it likes."""
        for parameter in self._model.parameters():
            yield parameter
            for other in (
                parameter.grad,
                getattr(parameter, "ds_tensor", None),
                getattr(parameter, "grad_accum", None),
            ):
                if other is not None:
                    yield other
        yield from self._model.buffers()
        yield from _inside(list(self._adam.state.values()))
        if self._stage:
            yield from _inside(vars(self._zero))
            for flat in self._trained():
                if flat.grad is not None:
                    yield flat.grad

    def release(self) -> None:
        """Give the memory of a stage 3 engine back. Its objects hang together through autograd in cycles that Python
        does not see, so they stay, without contents."""
        if self._stage != 3:
            return
        kept = {buffer.untyped_storage().data_ptr() for buffer in self._model.buffers()}
        for tensor in list(self.tensors()):
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.resizable() and storage.data_ptr() not in kept:
                storage.resize_(0)

    # -- where things lie ---------------------------------------------------------------------------------------------

    def _named(self) -> Iterator[tuple[str, torch.Tensor]]:
        seen: set[int] = set()
        for name, tensor in self._model.state_dict(keep_vars=True).items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield name, tensor

    def _trained(self) -> list[torch.Tensor]:
        """The tensors that AdamW updates."""
        if self._stage == 0:
            return list(self._model.parameters())
        return list(
            self._zero.fp32_partitioned_groups_flat if self._stage == 3 else self._zero.single_partition_of_fp32_groups
        )

    def _places(self, parameter: torch.Tensor) -> list[tuple[torch.Tensor, slice, slice]]:
        """Where this rank's part of a parameter lies: (trained tensor, elements of it, elements of the parameter);
        the latter go beyond the parameter's end where its last part is padded."""
        if self._stage == 0:
            return [(parameter, slice(0, parameter.numel()), slice(0, parameter.numel()))]
        if self._stage == 3:
            group, start, size = self._zero.grad_position[self._zero.get_param_id(parameter)]
            first = size * self._zero._get_param_partition_rank(parameter)
            flat = self._zero.fp32_partitioned_groups_flat[group]
            return [(flat, slice(start, start + size), slice(first, first + size))]
        found = parameter._hp_mapping  # type: ignore[attr-defined]
        if found is None:
            return []
        flat = self._zero.single_partition_of_fp32_groups[found.param_group_index]
        own, part = found.hp_fragment_address, found.lp_fragment_address
        return [(flat, slice(own.start, own.start + own.numel), slice(part.start, part.start + part.numel))]

    def _set_weight(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        trained = id(tensor) in self._names
        if not (trained and self._stage == 3):
            tensor.copy_(value)
        if not trained or self._stage == 0:
            return
        for flat, own, part in self._places(tensor):
            values = _padded(value, part)
            flat.data[own].copy_(values)
            if self._stage == 3:
                tensor.ds_tensor.data.copy_(values)  # type: ignore[attr-defined]

    def _average(self, parameter: torch.Tensor, key: str) -> torch.Tensor:
        """One of AdamW's averages of a whole parameter. Collective."""
        if self._stage == 0:
            return self._adam.state[parameter][key]
        if self._stage == 3:
            return self._zero.get_full_hp_param(parameter, key)
        whole = torch.zeros_like(parameter)
        for flat, own, part in self._places(parameter):
            whole.view(-1)[part].copy_(self._adam.state[flat][key][own])
        dist.all_reduce(whole)
        return whole

    def _steps(self) -> torch.Tensor | None:
        """AdamW's own count of steps, the same for all parameters; ``None`` before the first."""
        for flat in self._trained():
            if flat in self._adam.state:
                return self._adam.state[flat]["step"]
        return None

    def _clear_averages(self) -> None:
        self._adam.state.clear()
        if self._stage in (1, 2):  # ZeRO's views of them
            self._zero._hp_optimizer_states_linked = False
            for parameter in self._model.parameters():
                if parameter._hp_mapping is not None:
                    parameter._hp_mapping.optim_fragment = None


def zero_offloads(zero: Any) -> bool:
    """Whether a ZeRO optimizer keeps its state in host memory."""
    return bool(getattr(zero, "offload_optimizer", False) or getattr(zero, "cpu_offload", False))


def _padded(value: torch.Tensor, part: slice) -> torch.Tensor:
    """Elements ``part`` of a whole tensor, with zeros behind its end."""
    flat = value.reshape(-1)
    found = flat[part.start : part.stop]
    missing = part.stop - part.start - found.numel()
    return torch.cat([found, found.new_zeros(missing)]) if missing else found


def _inside(value: Any, depth: int = 4) -> Iterator[torch.Tensor]:
    """The tensors in nested containers and in DeepSpeed's own records of buffers."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth:
        if isinstance(value, dict):
            parts: Any = value.values()
        elif isinstance(value, (list, tuple, set)):
            parts = value
        elif type(value).__module__.startswith("deepspeed.runtime.zero.stage") and hasattr(value, "buffer"):
            parts = vars(value).values()
        else:
            return
        for part in list(parts):
            yield from _inside(part, depth - 1)
