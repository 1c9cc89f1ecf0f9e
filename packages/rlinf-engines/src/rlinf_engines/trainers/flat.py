"""Small networks with all weights in one tensor and all gradients in another, for the torch trainer.

An optimizer step of a small network takes the time of its calls, not of its numbers. Here dividing, adding over ranks,
clipping, the update and the zeroing are one call each, whatever the number of parameters; the parameters and their
gradients are views.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.optim.adamw import adamw

# More elements than this: the calls no longer matter, and gradients are better freed between steps.
LIMIT = 1 << 20
# Each parameter begins at a multiple of this many bytes, as if it were alone: libraries round products differently
# for other alignments.
ALIGNMENT = 64
AVERAGES = ("exp_avg", "exp_avg_sq")


def is_small(network: torch.nn.Module) -> bool:
    """Whether to lay out a network like this."""
    return sum(parameter.numel() for parameter in network.parameters()) <= LIMIT


class FlatState:
    """The weights and gradients of ``network``, on its device and of one number format, laid end to end.

    Matrices come first, then what is not decayed. Gaps between parameters are zeros and stay so. ``gradient`` is the
    sum since it was last zeroed; autograd adds to it in place.
    """

    def __init__(self, network: torch.nn.Module) -> None:
        named = list(network.named_parameters())
        ordered = [pair for pair in named if pair[1].dim() > 1]
        matrices = len(ordered)
        ordered += [pair for pair in named if pair[1].dim() <= 1]
        first = ordered[0][1]
        step = max(1, ALIGNMENT // first.element_size())
        self._places: dict[str, tuple[int, int]] = {}
        self._split = end = 0
        for number, (name, parameter) in enumerate(ordered, start=1):
            self._places[name] = (end, parameter.numel())
            end += -(-parameter.numel() // step) * step
            if number == matrices:
                self._split = end
        self._values = torch.zeros(end, dtype=first.dtype, device=first.device)
        self.gradient = torch.zeros_like(self._values)
        self._shapes = {name: parameter.shape for name, parameter in named}
        # What the optimizer updates: (first element, tensor).
        self._trained: list[tuple[int, torch.Tensor]] = []
        for name, parameter in named:
            own = self._part(self._values, name)
            own.copy_(parameter.detach())
            parameter.data = own
            parameter.grad = self._part(self.gradient, name)

    def groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """Parameter groups of an optimizer: one tensor each, the matrices decayed and the others not."""
        cuts = [(0, self._values.numel(), 0.0)]
        if weight_decay:
            cuts = [(0, self._split, weight_decay), (self._split, self._values.numel(), 0.0)]
        cuts = [cut for cut in cuts if cut[0] < cut[1]]
        self._trained = []
        for start, stop, _ in cuts:
            tensor = self._values[start:stop]
            tensor.grad = self.gradient[start:stop]
            self._trained.append((start, tensor))
        return [
            {"params": [tensor], "weight_decay": cut[2]} for (_, tensor), cut in zip(self._trained, cuts, strict=True)
        ]

    def norm(self) -> float:
        """The norm of the gradient, its squares added in float64."""
        return float(torch.linalg.vector_norm(self.gradient, dtype=torch.float64))

    def update(self, adam: torch.optim.AdamW) -> None:
        """A step of ``adam``, which was made of ``groups`` with ``fused=True``; then the gradient is zero.

        What ``adam.step`` does, without what that looks up each time.
        """
        if len(adam.state) < len(self._trained):
            adam.step()  # it makes its averages
        else:
            for (_, tensor), group in zip(self._trained, adam.param_groups, strict=True):
                state, gradient = adam.state[tensor], tensor.grad
                assert gradient is not None
                adamw(
                    params=[tensor],
                    grads=[gradient],
                    exp_avgs=[state["exp_avg"]],
                    exp_avg_sqs=[state["exp_avg_sq"]],
                    max_exp_avg_sqs=[],
                    state_steps=[state["step"]],
                    fused=True,
                    amsgrad=False,
                    beta1=group["betas"][0],
                    beta2=group["betas"][1],
                    lr=group["lr"],
                    weight_decay=group["weight_decay"],
                    eps=group["eps"],
                    maximize=False,
                )
        self.gradient.zero_()

    def averages(self, adam: torch.optim.Optimizer) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
        """The optimizer's state of each parameter by name, copied to the CPU; nothing before the first step."""
        for name, (start, state) in self._states(adam):
            yield (
                name,
                {
                    key: (self._part(value, name, start) if value.dim() else value).detach().to("cpu", copy=True)
                    for key, value in state.items()
                },
            )

    def install(self, adam: torch.optim.Optimizer, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Take the optimizer's state as ``averages`` gave it (empty: a fresh one), and drop the gradients."""
        self.gradient.zero_()
        adam.state.clear()
        if not state:
            return
        step = max(float(found["step"]) for found in state.values())
        for _, tensor in self._trained:
            adam.state[tensor] = {
                # In AdamW's own order of keys.
                "step": torch.tensor(step, dtype=torch.float32, device=tensor.device),
                **{key: torch.zeros_like(tensor) for key in AVERAGES},
            }
        for name, (start, own) in self._states(adam):
            for key in AVERAGES:
                self._part(own[key], name, start).copy_(state[name][key])

    def _states(self, adam: torch.optim.Optimizer) -> Iterator[tuple[str, tuple[int, dict[str, torch.Tensor]]]]:
        """(name of a parameter, (first element, state) of what it is trained in)."""
        for name in self._shapes:
            at = self._places[name][0]
            start, tensor = next(pair for pair in reversed(self._trained) if pair[0] <= at)
            if tensor in adam.state:
                yield name, (start, adam.state[tensor])

    def _part(self, flat: torch.Tensor, name: str, start: int = 0) -> torch.Tensor:
        """A parameter's part of a tensor that is laid out like the weights from the element ``start`` on."""
        begin, size = self._places[name]
        return flat[begin - start : begin - start + size].view(self._shapes[name])
