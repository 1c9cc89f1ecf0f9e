"""What an MLP's outputs say of the action: which one to take for given uniform numbers, and how likely one was.

Acting is done in numpy, which on a CPU needs a third of torch's time for a few environments; learning in torch.

Shape legend: B decisions, C steps per decision, D numbers per step, n actions to choose from.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rlinf_core.errors import ConfigError, NonFiniteError
from rlinf_embodied.envs.base import Box, Discrete

_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)
_LOG_2 = math.log(2.0)

Drawn = tuple[NDArray[Any], NDArray[Any], NDArray[Any]]
"""(actions [B, C, *A], taken [B, C, D], log-probs [B, C, D])."""


class Categorical(nn.Module):
    """One of n actions: a softmax over as many outputs. ``taken`` is the action itself, D = 1."""

    tokens = 1

    def __init__(self, space: Discrete) -> None:
        super().__init__()
        self.width = space.n

    def act(self, outputs: NDArray[Any], uniform: NDArray[np.float64] | None) -> Drawn:
        """Draw by the inverse of the cumulative distribution, or take the most likely (``uniform`` is None).

        Args:
            outputs: [B, C, n].
            uniform: [B, C, 1] in (0, 1).
        """
        logits = outputs - outputs.max(-1, keepdims=True)
        cumulated = np.exp(logits).cumsum(-1)
        total = cumulated[..., -1:]
        _check_finite(total)
        if uniform is None:
            chosen = logits.argmax(-1)
        else:
            # Strictly below: an action without probability has the same sum as the one before it and is never taken.
            chosen = (cumulated < uniform * total).sum(-1)
        flat = logits.reshape(-1, self.width)
        logs = flat[np.arange(len(flat)), chosen.reshape(-1)].reshape(total.shape)
        return chosen, chosen[..., None], logs - np.log(total)

    def evaluate(self, outputs: Tensor, taken: Tensor) -> tuple[Tensor, Tensor]:
        """(log-probs of ``taken``, entropy), both [B, C, 1]."""
        logs = torch.log_softmax(outputs, -1)
        entropy = -(logs.exp() * logs).sum(-1, keepdim=True)
        return logs.gather(-1, taken), entropy


class Gaussian(nn.Module):
    """D independent numbers with the outputs as means and a standard deviation that does not depend on the state.

    ``taken`` is what was drawn. With ``squash`` the action is tanh of it, stretched to the bounds of the space
    (Haarnoja et al., arXiv 1801.01290, appendix C), and log-probs are those of the action; the entropy is that of the
    numbers before the squashing, since the action's has no closed form.
    """

    def __init__(self, space: Box, chunk: int, log_std: float, squash: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape = space.shape
        self.tokens = self.width = math.prod(space.shape)
        self.squash = squash
        self.log_std = nn.Parameter(torch.full((chunk * self.tokens,), log_std, dtype=dtype))
        if squash:
            self._bounds(space)

    def _bounds(self, space: Box) -> None:
        """Middle and half width of each number's range."""
        if not (np.isfinite(space.low).all() and np.isfinite(space.high).all()):
            raise ConfigError("model.squash: the environment's actions have no bounds to squash to; set it to false")
        if not (space.low < space.high).all():
            raise ConfigError("model.squash: an action's lower bound is not below its upper one; set it to false")
        self.middle = (0.5 * (space.low + space.high)).reshape(-1)
        self.reach = (0.5 * (space.high - space.low)).reshape(-1)

    def act(self, outputs: NDArray[Any], uniform: NDArray[np.float64] | None) -> Drawn:
        """Draw by the inverse of the normal distribution, or take the mean (``uniform`` is None).

        Args:
            outputs: [B, C, D].
            uniform: [B, C, D] in (0, 1).
        """
        log_std = self.log_std.detach().cpu().numpy().reshape(outputs.shape[1:])
        if uniform is None:
            taken = outputs.copy()
            logs = np.broadcast_to(-log_std - _HALF_LOG_2PI, outputs.shape).astype(outputs.dtype)
        else:
            normal = torch.special.ndtri(torch.from_numpy(uniform)).numpy()
            scale = np.exp(log_std)
            taken = outputs + scale * normal.astype(outputs.dtype)
            # Of the number as it was rounded, so that learning finds the same.
            gap = (taken - outputs) / scale
            logs = -0.5 * gap * gap - log_std - _float(_HALF_LOG_2PI, outputs)
        _check_finite(taken)
        actions = taken
        if self.squash:
            actions = (self.middle + self.reach * np.tanh(taken)).astype(outputs.dtype)
            logs -= (2.0 * (_LOG_2 - taken - np.logaddexp(0.0, -2.0 * taken)) + np.log(self.reach)).astype(
                outputs.dtype
            )
        return actions.reshape(*outputs.shape[:2], *self.shape), taken, logs

    def evaluate(self, outputs: Tensor, taken: Tensor) -> tuple[Tensor, Tensor]:
        """(log-probs of ``taken``, entropy), both [B, C, D]."""
        log_std = self.log_std.view(outputs.shape[1:])
        gap = (taken - outputs) * torch.exp(-log_std)
        logs = -0.5 * gap.square() - (log_std + _HALF_LOG_2PI)
        if self.squash:
            half = torch.from_numpy(np.log(self.reach)).to(taken)
            logs = logs - (2.0 * (_LOG_2 - taken - nn.functional.softplus(-2.0 * taken)) + half)
        return logs, (log_std + (0.5 + _HALF_LOG_2PI)).expand(outputs.shape)


def _float(value: float, like: NDArray[Any]) -> Any:
    return like.dtype.type(value)


def _check_finite(values: NDArray[Any]) -> None:
    """Refuse what is no number, by row of the block that was asked for."""
    if math.isfinite(float(values.sum())):
        return
    rows = np.flatnonzero(~np.isfinite(values).reshape(len(values), -1).all(1)).tolist()
    if rows:
        raise NonFiniteError(
            f"policy: what it makes of the observations in rows {', '.join(map(str, rows[:8]))} of the block is not "
            "finite: an observation is not, or the weights are not"
        )
