"""The stage that decides what is done in the environments."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlinf_core import In, Out, Worker, task
from rlinf_core.errors import NonFiniteError, RLinfError
from rlinf_embodied.data import Answered, Asked
from rlinf_embodied.specfile import read_spec

if TYPE_CHECKING:
    import torch

SHOWN = 10
"""At most so many environments are named in a message."""


class PolicyWorker(Worker):
    """Answers blocks of observations with the policy that ``cfg.model.name`` names, block by block.

    Blocks are never merged: what a block is answered depends on it alone, so that neither timing nor the number of
    ranks changes a number. Reads ``cfg.model``. ``begin`` builds the policy, once the environment has been described.
    """

    def setup(self) -> None:
        import torch

        from rlinf_embodied import noise

        self._torch = torch
        self._uniforms = noise.uniforms
        self.policy: Any = None
        self.version = 0

    def onload(self) -> None:
        if self.policy is not None:
            self.policy.to(self.parallel.device)

    def offload(self) -> None:
        if self.policy is not None and self.parallel.device != "cpu":
            self.policy.to("cpu")

    @task
    def begin(self) -> None:
        """Build the policy for the environments that the simulators have described; see ``Simulator.describe``."""
        from rlinf_embodied.policies import load_policy

        with self.on_device():
            self.policy = load_policy(self.cfg, read_spec(self.run_dir), self.seed)
            self.policy.eval()
            self.policy.to(self.parallel.device)

    @task
    def act(self, observations: In[Asked], actions: Out[Answered]) -> dict[str, float]:
        """Answer until nothing more is asked. Returns ``rollout/inference_s``, seconds of an average rank (report it
        with ``reduce="sum"``)."""
        spent = 0.0
        for asked in observations:  # one by one: what waits is for other ranks too
            with self.on_device():
                began = time.perf_counter()
                answer = self._answer(asked)
                spent += time.perf_counter() - began
                actions.put(answer, key=asked.place, weight=len(asked.keys))
        return {"rollout/inference_s": spent / self.world_size}

    def install_weights(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        there = self.policy.state_dict(keep_vars=True)
        written: set[int] = set()
        with self._torch.no_grad():
            for name, tensor in weights:
                target = there.get(name)
                if target is None or target.shape != tensor.shape:
                    what = "has no such weight" if target is None else f"has it as {list(target.shape)}"
                    raise RLinfError(
                        f"weight {name!r} {list(tensor.shape)} cannot be installed: policy {self.cfg.model.name!r} "
                        f"{what}"
                    )
                target.copy_(tensor)
                written.add(target.data_ptr())
        left = [name for name, target in there.items() if target.numel() and target.data_ptr() not in written]
        if left:
            raise RLinfError(f"version {version} of the policy came without {', '.join(left[:SHOWN])}")
        self.version = version

    def _answer(self, asked: Asked) -> Answered:
        policy = self.policy
        answer = Answered(asked.place, None, None, None, None, version=self.version)
        with self._torch.inference_mode():
            if asked.act:
                n = len(asked.keys)
                shape = (n, policy.chunk, policy.tokens)
                uniform = np.full(shape, 0.5) if asked.greedy else self._uniforms(self.seed, asked.keys, *shape[1:])
                decision = policy.act(asked.obs, uniform, greedy=asked.greedy)
                self._check("actions", decision.actions, asked)
                self._check("log-probs", decision.logprobs, asked)
                answer.actions, answer.taken = decision.actions, decision.taken
                answer.logprobs, answer.values = decision.logprobs, decision.values
            elif policy.value_level != "none":
                answer.values = policy.value(asked.obs)
            if answer.values is not None:
                self._check("values", answer.values, asked)
            if asked.final is not None:
                answer.final_values = policy.value(asked.final)
                if not np.isfinite(answer.final_values).all():
                    raise NonFiniteError(
                        f"values of the last observations of episodes are not finite in step {self.step}"
                    )
        return answer

    def _check(self, what: str, values: NDArray[Any], asked: Asked) -> None:
        """Refuse numbers that are not finite, naming the environments."""
        if values.dtype.kind != "f" or np.isfinite(values).all():
            return
        bad = ~np.isfinite(values.reshape(len(values), -1)).all(axis=1)
        named = [int(env) for env in asked.keys[bad, 1]]
        more = f" and {len(named) - SHOWN} more" if len(named) > SHOWN else ""
        raise NonFiniteError(
            f"policy {self.cfg.model.name!r} decides with {what} that are not finite in environment(s) "
            f"{', '.join(map(str, named[:SHOWN]))}{more}, decision {int(asked.keys[bad, 2][0])} of step {self.step}: "
            "its weights may have diverged (a lower trainer.lr or trainer.grad_clip), or an observation is far out of "
            "what it has seen"
        )
