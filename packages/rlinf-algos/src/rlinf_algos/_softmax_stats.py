"""The autograd functions behind ``logprobs``: reductions over the vocabulary, a block at a time.

Kept from the forward pass per row: the log of the normaliser and the entropy. Both gradients follow from them in one
more pass over the blocks (l_i = x_i - lse, p_i = exp(l_i)):

    d logp(id) / d x_i = [i = id] - p_i          d H / d x_i = -p_i (l_i + H)

Shape legend: N rows, V vocabulary, D hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlinf_algos._check import wide
from rlinf_algos._dist import Group, max_over_ranks, sum_over_ranks
from rlinf_algos.errors import AlgorithmError

# exp(-1e4) is 0 in every dtype: logits of -inf can be moved here, so that 0 * -inf never appears.
FLOOR = -1e4


class Stats:
    """Running max, sum of exponentials, their weighted sum, and the chosen logit, for N rows."""

    def __init__(self, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        self.peak = torch.full((rows,), -torch.inf, dtype=dtype, device=device)
        self.total = torch.zeros(rows, dtype=dtype, device=device)
        self.weighted = torch.zeros(rows, dtype=dtype, device=device)  # sum of exp(x - peak) (x - peak)
        self.chosen = torch.zeros(rows, dtype=dtype, device=device)
        self.held = torch.zeros(rows, dtype=dtype, device=device)  # 1 where this rank holds the chosen id

    def take(
        self, rows: slice, x: Tensor, out: Tensor, ids: Tensor, offset: int, *, first: bool, entropy: bool
    ) -> None:
        """Add logits ``x`` [n, v] of the vocabulary from ``offset`` on. ``out`` [n, v] is overwritten; may be ``x``."""
        peak = x.amax(-1)
        held, local = _local(ids, offset, x.shape[1])
        self.chosen[rows] += torch.where(held, x.gather(1, local[:, None]).squeeze(1), 0.0)
        self.held[rows] += held
        # A row of -inf alone (a shard may hold one) has no peak to subtract.
        torch.sub(x, torch.where(peak == -torch.inf, 0.0, peak)[:, None], out=out)
        exps = out.exp() if entropy else out.exp_()
        total = exps.sum(-1)
        weighted = _weighted(exps, out) if entropy else None
        if first:
            self.peak[rows], self.total[rows] = peak, total
            if weighted is not None:
                self.weighted[rows] = weighted
            return
        before = self.peak[rows]
        now = torch.maximum(before, peak)
        scale_old, shift_old = _shift(before, now)
        scale_new, shift_new = _shift(peak, now)
        if weighted is not None:
            old = scale_old * (self.weighted[rows] + self.total[rows] * shift_old)
            self.weighted[rows] = old + scale_new * (weighted + total * shift_new)
        self.total[rows] = scale_old * self.total[rows] + scale_new * total
        self.peak[rows] = now

    def finish(self, group: Group, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(log-probs of the chosen ``ids``, log of the normaliser, entropy), over the shards of ``group``."""
        peak = self.peak
        if group is not None:
            now = max_over_ranks(peak, group)
            scale, shift = _shift(peak, now)
            self.weighted = scale * (self.weighted + self.total * shift)
            self.total = scale * self.total
            summed = sum_over_ranks(torch.stack((self.total, self.weighted, self.chosen, self.held)), group)
            self.total, self.weighted, self.chosen, held = summed.unbind()
            _held_once(held, ids)
            peak = now
        log_total = self.total.log()
        entropy = log_total - self.weighted / self.total
        return (self.chosen - peak) - log_total, peak + log_total, entropy


def _held_once(held: Tensor, ids: Tensor) -> None:
    """Refuse ids that no rank, or several, hold: every rank sees the same sum, so all of them raise."""
    wrong = held != 1
    if bool(wrong.any()):
        place = int(wrong.nonzero()[0])
        raise AlgorithmError(
            f"ids holds {int(ids[place])}, which {int(held[place])} ranks of group hold and not one: ids are global"
            " (the same on all ranks), and vocab_start is the first id of a rank's shard"
        )


def _shift(peak: Tensor, now: Tensor) -> tuple[Tensor, Tensor]:
    """Factor and offset that move sums taken about ``peak`` to ``now``; nothing moves where ``peak`` is -inf."""
    empty = peak == -torch.inf
    offset = torch.where(empty, 0.0, peak - now)
    return torch.where(empty, 0.0, offset.exp()), offset


def _weighted(exps: Tensor, y: Tensor) -> Tensor:
    """sum of exps * y per row, with 0 * -inf = 0."""
    value: Tensor = torch.linalg.vecdot(exps, y)
    if y.device.type != "cpu" or bool(value.isnan().any()):
        value = torch.linalg.vecdot(exps, y.clamp(min=FLOOR))
    return value


def _local(ids: Tensor, offset: int, width: int) -> tuple[Tensor, Tensor]:
    """(which ids lie in this block, ids inside it)."""
    local = ids - offset
    held = (local >= 0) & (local < width)
    return held, local.clamp(0, width - 1)


def _gradient(
    x: Tensor, out: Tensor, lse: Tensor, entropy: Tensor, grad_logp: Tensor, grad_entropy: Tensor | None
) -> None:
    """Write into ``out`` [n, v] the gradient without the chosen id's own term; ``x`` may be ``out``."""
    torch.sub(x, lse[:, None], out=out)
    if grad_entropy is None:
        out.exp_().mul_(-grad_logp[:, None])
        return
    out.clamp_(min=FLOOR)
    p = out.exp()
    out.add_(entropy[:, None]).mul_(grad_entropy[:, None]).add_(grad_logp[:, None])
    out.mul_(p).neg_()


def _add_chosen(out: Tensor, ids: Tensor, offset: int, grad_logp: Tensor) -> None:
    held, local = _local(ids, offset, out.shape[1])
    out.scatter_add_(1, local[:, None], torch.where(held, grad_logp, 0.0)[:, None])


class LogitsStats(torch.autograd.Function):
    """Logits [N, V] -> (log-probs [M], entropy [M]) of the M chosen rows (all when ``rows`` is None)."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        ids: Tensor,
        rows: Tensor | None,
        inverse_temperature: float,
        chunk: int,
        want_entropy: bool,
        reuse: bool,
        group: Group,
        offset: int,
    ) -> tuple[Tensor, Tensor]:
        dtype = wide(logits.dtype)
        count = logits.shape[0] if rows is None else rows.shape[0]
        stats = Stats(count, dtype, logits.device)
        buffer = torch.empty(min(chunk, count), logits.shape[1], dtype=dtype, device=logits.device)
        for i in range(0, count, chunk):
            part = slice(i, min(i + chunk, count))
            x = logits[part] if rows is None else logits[rows[part]]
            out = buffer[: part.stop - i]
            if x.dtype != dtype:
                x = out.copy_(x)
            if inverse_temperature != 1.0:
                x = torch.mul(x, inverse_temperature, out=out)
            stats.take(part, x, out, ids[part], offset, first=True, entropy=want_entropy)
        logp, lse, entropy = stats.finish(group, ids)
        ctx.save_for_backward(logits, ids, rows, lse, entropy)
        ctx.options = (inverse_temperature, chunk, want_entropy, reuse, offset)
        if not want_entropy:
            ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logp: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        logits, ids, rows, lse, entropy = ctx.saved_tensors
        inverse_temperature, chunk, want_entropy, reuse, offset = ctx.options
        width = logits.shape[1]
        if reuse:
            grad = logits
        else:
            grad = torch.empty_like(logits) if rows is None else torch.zeros_like(logits)
        direct = rows is None and grad.dtype == lse.dtype
        buffer = None
        if not direct:
            buffer = torch.empty(min(chunk, len(lse)), width, dtype=lse.dtype, device=logits.device)
        if reuse and rows is not None:
            keep = torch.zeros(logits.shape[0], dtype=torch.bool, device=logits.device)
            keep[rows] = True
            grad[~keep] = 0
        for i in range(0, len(lse), chunk):
            part = slice(i, min(i + chunk, len(lse)))
            x = logits[part] if rows is None else logits[rows[part]]
            out = grad[part] if buffer is None else buffer[: part.stop - i]
            if x.dtype != out.dtype:  # before the product, as in the forward pass: a narrow one is not the same number
                x = out.copy_(x)
            if inverse_temperature != 1.0:
                x = torch.mul(x, inverse_temperature, out=out)
            g_logp, g_entropy = grad_logp[part], grad_entropy[part] if want_entropy else None
            _gradient(x, out, lse[part], entropy[part], g_logp, g_entropy)
            _add_chosen(out, ids[part], offset, g_logp)
            if inverse_temperature != 1.0:
                out.mul_(inverse_temperature)
            if buffer is not None:
                if rows is None:
                    grad[part] = out
                else:
                    grad[rows[part]] = out.to(grad.dtype)
        return (grad, *([None] * 8))


class LinearStats(torch.autograd.Function):
    """Hidden states [N, D] and an output matrix [V, D] -> (log-probs [N], entropy [N]).

    The logits exist for ``chunk_rows`` x ``chunk_vocab`` at a time, forward and backward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        ids: Tensor,
        inverse_temperature: float,
        chunk_rows: int,
        chunk_vocab: int,
        want_entropy: bool,
        group: Group,
        offset: int,
    ) -> tuple[Tensor, Tensor]:
        rows, vocab = hidden.shape[0], weight.shape[0]
        stats = Stats(rows, wide(hidden.dtype), hidden.device)
        for v in range(0, vocab, chunk_vocab):
            w = weight[v : v + chunk_vocab].to(hidden.dtype)
            for i in range(0, rows, chunk_rows):
                part = slice(i, min(i + chunk_rows, rows))
                x = _logits(hidden[part], w, bias, v, inverse_temperature)
                stats.take(part, x, x, ids[part], offset + v, first=v == 0, entropy=want_entropy)
        logp, lse, entropy = stats.finish(group, ids)
        ctx.save_for_backward(hidden, weight, bias, ids, lse, entropy)
        ctx.options = (inverse_temperature, chunk_rows, chunk_vocab, want_entropy, group, offset)
        if not want_entropy:
            ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logp: Tensor, grad_entropy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, ids, lse, entropy = ctx.saved_tensors
        inverse_temperature, chunk_rows, chunk_vocab, want_entropy, group, offset = ctx.options
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        device, dtype = hidden.device, lse.dtype
        d_hidden = torch.zeros(hidden.shape, dtype=dtype, device=device) if need_hidden else None
        d_weight = torch.empty_like(weight) if need_weight else None
        d_bias = torch.zeros_like(bias) if need_bias else None
        for v in range(0, weight.shape[0], chunk_vocab):
            w = weight[v : v + chunk_vocab].to(hidden.dtype)
            d_w = torch.zeros(w.shape, dtype=dtype, device=device) if need_weight else None
            for i in range(0, hidden.shape[0], chunk_rows):
                part = slice(i, min(i + chunk_rows, hidden.shape[0]))
                g = _logits(hidden[part], w, bias, v, inverse_temperature)
                g_logp, g_entropy = grad_logp[part], grad_entropy[part] if want_entropy else None
                _gradient(g, g, lse[part], entropy[part], g_logp, g_entropy)
                _add_chosen(g, ids[part], offset + v, g_logp)
                if inverse_temperature != 1.0:
                    g.mul_(inverse_temperature)
                if d_bias is not None:
                    d_bias[v : v + chunk_vocab] += g.sum(0).to(d_bias.dtype)
                low = g.to(hidden.dtype)
                if d_hidden is not None:
                    _accumulate(d_hidden[part], low, w)
                if d_w is not None:
                    _accumulate(d_w, low.t(), hidden[part])
            if d_weight is not None and d_w is not None:
                d_weight[v : v + chunk_vocab] = d_w.to(d_weight.dtype)
        if d_hidden is not None:
            # Each shard holds its part of the sum over the vocabulary.
            d_hidden = sum_over_ranks(d_hidden, group).to(hidden.dtype)
        return (d_hidden, d_weight, d_bias, *([None] * 7))


def _logits(hidden: Tensor, w: Tensor, bias: Tensor | None, v: int, inverse_temperature: float) -> Tensor:
    x = (hidden @ w.t()).to(wide(hidden.dtype))
    if bias is not None:
        x += bias[v : v + w.shape[0]]
    if inverse_temperature != 1.0:
        x.mul_(inverse_temperature)
    return x


def _accumulate(into: Tensor, a: Tensor, b: Tensor) -> None:
    if into.dtype == a.dtype:
        into.addmm_(a, b)
    else:
        into += a @ b
