"""A stage's parameters as they are trained: master weights, gradient sums, their reductions and norm.

megatron's own optimizer and DDP wrappers allocate on a GPU and divide losses; here gradients are plain sums until the
step, in one buffer that exists between the first backward and the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rlinf_engines.trainers.megatron.config import Shape
from rlinf_engines.trainers.megatron.convert import Piece
from rlinf_engines.trainers.megatron.layout import Layout
from rlinf_engines.trainers.norms import sum_of_squares


class Parameters:
    """The trained parameters of this rank's stage, each with its ``Piece``.

    Attributes:
        pieces: how each parameter comes from Hugging Face tensors.
        live: the tensors the model computes with, in the same order.
        masters: what the optimizer updates: ``live`` itself, or its float32 copy when the model computes in bfloat16.
    """

    def __init__(self, model: nn.Module, pieces: Sequence[Piece], shape: Shape, layout: Layout) -> None:
        named = dict(model.named_parameters())
        left = sorted(named.keys() - {piece.name for piece in pieces})
        assert not left, f"parameters without a Hugging Face source: {left}"
        self.pieces = list(pieces)
        self.live = [named[piece.name] for piece in pieces]
        self._shape, self._layout = shape, layout
        self._half = self.live[0].dtype == torch.bfloat16
        self.masters = [nn.Parameter(p.detach().float()) for p in self.live] if self._half else self.live
        self._sums: list[Tensor] = []
        self._flat: Tensor | None = None
        if self._half:
            for index, parameter in enumerate(self.live):
                parameter.register_post_accumulate_grad_hook(self._adder(index))

    def copy_to_live(self) -> None:
        """After the masters have changed: round them into what the model computes with."""
        if self._half:
            with torch.no_grad():
                for live, master in zip(self.live, self.masters, strict=True):
                    live.copy_(master)

    def copy_to_masters(self) -> None:
        """After the live weights have been set."""
        if self._half:
            with torch.no_grad():
                for live, master in zip(self.live, self.masters, strict=True):
                    master.copy_(live)

    # -- gradients ----------------------------------------------------------------------------------------------------

    def open_sums(self) -> None:
        """Before a backward: make the buffer that gradients add up in, if there is none since the last step."""
        if self._flat is not None:
            return
        first = self.masters[0]
        self._flat = torch.zeros(sum(p.numel() for p in self.masters), dtype=first.dtype, device=first.device)
        self._sums, start = [], 0
        for master in self.masters:
            self._sums.append(self._flat[start : start + master.numel()].view_as(master))
            start += master.numel()
        if not self._half:
            for master, total in zip(self.masters, self._sums, strict=True):
                master.grad = total

    def drop_sums(self) -> None:
        """Forget the gradients."""
        self._flat, self._sums = None, []
        for parameter in (*self.masters, *self.live):
            parameter.grad = None

    def gradients(self) -> list[Tensor]:
        """The sums of this rank's parts, in the order of ``pieces``."""
        self.open_sums()
        return self._sums

    def reduce(self) -> None:
        """Add what ranks hold parts of: ``reduce_replica``, then over replicas. Collective."""
        import torch.distributed as dist

        self.reduce_replica()
        if self._layout.dp > 1:
            assert self._flat is not None
            dist.all_reduce(self._flat, group=self._layout.data)

    def reduce_replica(self) -> None:
        """Add over tensor parallel ranks, and over the two copies of a tied embedding. Collective over a replica."""
        import torch.distributed as dist

        sums, layout = self.gradients(), self._layout
        if layout.tp > 1:
            parts = [total for piece, total in zip(self.pieces, sums, strict=True) if piece.partial]
            if parts:
                joined = torch.cat([part.reshape(-1) for part in parts])
                dist.all_reduce(joined, group=layout.tensor)
                for part, total in zip(parts, joined.split([part.numel() for part in parts]), strict=True):
                    part.copy_(total.view_as(part))
        if layout.pp > 1 and self._shape.tied:
            for piece, total in zip(self.pieces, sums, strict=True):
                if piece.copy or (layout.first and piece.name.startswith("embedding.")):
                    dist.all_reduce(total, group=layout.ends)

    def norm(self) -> float:
        """The 2-norm of the whole model's gradient, each element counted once, in float64. Collective."""
        import torch.distributed as dist

        once = [
            total
            for piece, total in zip(self.pieces, self.gradients(), strict=True)
            if not piece.copy and (piece.sharded or self._layout.part == 0)
        ]
        squares = sum_of_squares(once, self.masters[0].device)
        if self._layout.tp * self._layout.pp > 1:
            dist.all_reduce(squares, group=self._layout.replica)
        return float(squares.sqrt())

    def scale(self, factor: float) -> None:
        """Multiply all gradients."""
        self.open_sums()
        assert self._flat is not None
        self._flat.mul_(factor)

    def hand_over(self) -> None:
        """Give the sums to the optimizer as the masters' gradients."""
        for master, total in zip(self.masters, self.gradients(), strict=True):
            master.grad = total

    def named_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's parts under the Hugging Face names they come from."""
        for piece, total in zip(self.pieces, self.gradients(), strict=True):
            yield " + ".join(piece.sources), total

    def tensors(self, optimizer_state: Mapping[Any, Any]) -> Iterator[Tensor]:
        """Everything here that lies on the device, and the optimizer's state."""
        yield from self.live
        yield from self.masters
        if self._flat is not None:
            yield self._flat
        for state in optimizer_state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))

    def _adder(self, index: int) -> Any:
        def add(parameter: Tensor) -> None:
            assert parameter.grad is not None
            self._sums[index].add_(parameter.grad)
            parameter.grad = None

        return add


def new_optimizer(cfg: Any, masters: Sequence[Tensor]) -> torch.optim.AdamW:
    """AdamW over ``masters``; vectors (norms, biases) are not decayed."""
    return torch.optim.AdamW(
        [
            {"params": [p for p in masters if p.dim() > 1], "weight_decay": float(cfg.weight_decay)},
            {"params": [p for p in masters if p.dim() <= 1], "weight_decay": 0.0},
        ],
        lr=float(cfg.lr),
        betas=(float(cfg.betas[0]), float(cfg.betas[1])),
        eps=float(cfg.eps),
    )
