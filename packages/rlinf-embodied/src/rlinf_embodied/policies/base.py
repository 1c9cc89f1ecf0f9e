"""What a policy is: a torch module that acts, and that says how likely what it did was.

Shape legend: B decisions, C environment steps per decision (the action chunk), D tokens or numbers per step that each
have a log-prob (1 for a discrete action, else the action's numbers), A the shape of one action.

A plugin (entry-point group ``rlinf.policies``) is a class that is called as ``Plugin(cfg, spec, seed)``, with the
config node ``model`` and the environment's ``EnvSpec``; equal arguments give equal weights. It checks in its
constructor that the environment has the observations and the kind of action that it needs, and names what is missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rlinf_embodied.envs.base import Observation

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class Decision:
    """What a policy decided for B environments.

    ``actions`` [B, C, *A] for the environment; ``taken`` [B, C, D] what log-probs are of, before any squashing,
    clipping or decoding (token ids, or numbers: what ``evaluate`` is given again); ``logprobs`` [B, C, D]; ``values``
    [B, C] or [B, 1] (one of the whole chunk), or ``None`` for a policy without a value head. Log-probs and values are
    float32, or float64 of a model in float64.
    """

    actions: NDArray[Any]
    taken: NDArray[Any]
    logprobs: NDArray[Any]
    values: NDArray[Any] | None


class Policy(Protocol):
    """A ``torch.nn.Module`` with these methods beside. Buffers hold what is not learnt by gradients (running means).

    ``forward(inputs, taken)`` is ``evaluate``: a trainer calls the module. It may say more of itself:
    ``tokens_per_decision`` (what a decision counts against ``trainer.micro_batch_tokens``; else C D), ``running``
    (whether ``observe`` does anything; else it is not called), ``taken_dtype`` (a torch format; else int64),
    ``acts_on_cpu`` (``act`` and ``value`` compute on the CPU: a replica that only acts stays there; else it does not).
    """

    chunk: int
    """C, steps per decision."""
    tokens: int
    """D, log-probs per step."""
    value_level: str
    """"action" (values [B, C]), "chunk" ([B, 1]) or "none"."""

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """What is learnt, as every module has it."""

    def act(self, obs: Observation, uniform: NDArray[np.float64], *, greedy: bool = False) -> Decision:
        """Decide for B environments, without gradients. ``uniform`` [B, C, D] in (0, 1) is all the randomness there is
        (``rlinf_embodied.noise``); ``greedy`` takes the mode instead and does not read it."""

    def value(self, obs: Observation) -> NDArray[Any]:
        """Values [B, C] or [B, 1] of observations, without acting."""

    def prepare(self, obs: Observation) -> dict[str, torch.Tensor]:
        """Observations as the tensors [B, ...] that ``evaluate`` reads (normalised by nothing that is learnt: that is
        done in ``evaluate``). The text is tokenised and images are processed here."""

    def evaluate(self, inputs: dict[str, torch.Tensor], taken: torch.Tensor) -> dict[str, torch.Tensor]:
        """With gradients: ``logprobs`` [B, C, D] of ``taken``, ``entropy`` [B, C, D], ``values`` as ``value_level``
        (absent for "none"). Log-probs equal those of ``act`` with the same weights up to rounding."""

    def observe(self, inputs: dict[str, torch.Tensor]) -> None:
        """Take a batch of observations into the running statistics (buffers), if the policy keeps any."""

    @staticmethod
    def export(module: Any, weights: dict[str, torch.Tensor], path: Path) -> None:
        """Write ``weights`` (parameters and buffers) with all that a load needs as a directory."""
