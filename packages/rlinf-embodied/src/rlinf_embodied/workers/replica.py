"""A policy where decisions are made: what answers blocks of observations, and takes the trainer's weights."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlinf_core.errors import NonFiniteError, RLinfError
from rlinf_embodied.data import Answered, Asked
from rlinf_embodied.specfile import read_spec

if TYPE_CHECKING:
    import torch

SHOWN = 10
"""At most so many environments are named in a message."""


class Replica:
    """The policy that ``cfg.model.name`` names, for the environments that ``Simulator.describe`` has described.

    What a block is answered depends on it and on the weights alone: random numbers are keyed by ``Asked.keys``, and a
    policy decides alike whoever else is in the block. So it does not matter in which process a replica is.

    Attributes: ``policy``; ``version`` of the weights.
    """

    def __init__(self, cfg: Any, run_dir: Path, seed: int, device: str) -> None:
        """Raises RLinfError when no simulator has described its environments yet, ConfigError when the policy cannot do
        with them."""
        import torch

        from rlinf_embodied import noise
        from rlinf_embodied.policies import load_policy

        self._torch = torch
        self._uniforms = noise.uniforms
        self._name = cfg.model.name
        self._seed = seed
        policy: Any = load_policy(cfg, read_spec(run_dir), seed)
        self.policy = policy.eval()
        self._device = "cpu" if getattr(policy, "acts_on_cpu", False) else device
        self.policy.to(self._device)
        self.version = 0

    def onload(self) -> None:
        self.policy.to(self._device)

    def offload(self) -> None:
        if self._device != "cpu":
            self.policy.to("cpu")

    def install(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take all parameters and buffers by name. Raises RLinfError for one that does not fit or is missing."""
        there = self.policy.state_dict(keep_vars=True)
        written: set[int] = set()
        with self._torch.no_grad():
            for name, tensor in weights:
                target = there.get(name)
                if target is None or target.shape != tensor.shape:
                    what = "has no such weight" if target is None else f"has it as {list(target.shape)}"
                    raise RLinfError(
                        f"weight {name!r} {list(tensor.shape)} cannot be installed: policy {self._name!r} {what}"
                    )
                target.copy_(tensor)
                written.add(target.data_ptr())
        left = [name for name, target in there.items() if target.numel() and target.data_ptr() not in written]
        if left:
            raise RLinfError(f"version {version} of the policy came without {', '.join(left[:SHOWN])}")
        self.version = version

    def answer(self, asked: Asked, step: str) -> Answered:
        """Decide for a block, or only value it. ``step`` is named in errors.

        Raises NonFiniteError for decisions or values that are not finite, naming the environments.
        """
        policy = self.policy
        answer = Answered(asked.place, None, None, None, None, version=self.version)
        with self._torch.inference_mode():
            if asked.act:
                n = len(asked.keys)
                shape = (n, policy.chunk, policy.tokens)
                uniform = np.full(shape, 0.5) if asked.greedy else self._uniforms(self._seed, asked.keys, *shape[1:])
                try:
                    decision = policy.act(asked.obs, uniform, greedy=asked.greedy)
                except NonFiniteError as error:
                    envs = _named(asked.keys[:, 1])
                    raise NonFiniteError(f"{error}; the block: environment(s) {envs} in step {step}") from error
                self._check("actions", decision.actions, asked, step)
                self._check("log-probs", decision.logprobs, asked, step)
                answer.actions, answer.taken = decision.actions, decision.taken
                answer.logprobs, answer.values = decision.logprobs, decision.values
            elif policy.value_level != "none":
                answer.values = policy.value(asked.obs)
            if answer.values is not None:
                self._check("values", answer.values, asked, step)
            if asked.final is not None:
                answer.final_values = policy.value(asked.final)
                if not np.isfinite(answer.final_values).all():
                    raise NonFiniteError(f"values of the last observations of episodes are not finite in step {step}")
        return answer

    def _check(self, what: str, values: NDArray[Any], asked: Asked, step: str) -> None:
        """Refuse numbers that are not finite, naming the environments."""
        if values.dtype.kind != "f" or np.isfinite(values).all():
            return
        bad = ~np.isfinite(values.reshape(len(values), -1)).all(axis=1)
        raise NonFiniteError(
            f"policy {self._name!r} decides with {what} that are not finite in environment(s) "
            f"{_named(asked.keys[bad, 1])}, decision {int(asked.keys[bad, 2][0])} of step {step}: "
            "its weights may have diverged (a lower trainer.lr or trainer.grad_clip), or an observation is far out of "
            "what it has seen"
        )


def _named(envs: NDArray[np.int64]) -> str:
    more = f" and {len(envs) - SHOWN} more" if len(envs) > SHOWN else ""
    return ", ".join(map(str, envs[:SHOWN].tolist())) + more
