"""A policy as the network of a trainer backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlinf_core.registry import Registry
from rlinf_core.types import Batch, NetworkSpec, ParallelInfo, Trainer
from rlinf_embodied.envs.base import Box, EnvSpec, Observation
from rlinf_embodied.policies import load_policy
from rlinf_embodied.policies.base import Policy

INPUT = "input/"
"""Before the name of a tensor that ``Policy.evaluate`` reads, in a micro-batch."""


class PolicyNetwork:
    """Builds the policy of ``cfg.model`` for a trainer, and knows it from then on."""

    def __init__(self, cfg: Any, spec: EnvSpec) -> None:
        self.cfg = cfg
        self.env = spec
        self.policy: Any = None
        self.spec = NetworkSpec(self._build, run, self._filler, self._export, str(cfg.model.dtype))

    def _build(self, seed: int) -> torch.nn.Module:
        policy: Any = load_policy(self.cfg, self.env, seed)
        self.policy = policy
        return policy

    def _filler(self) -> Batch:
        """One decision on zeros, taken as zeros."""
        policy = self.policy
        inputs = policy.prepare(blank(self.env))
        dtype = getattr(policy, "taken_dtype", torch.int64)
        taken = torch.zeros(1, policy.chunk, policy.tokens, dtype=dtype)
        return {"ids": ["filler"], "taken": taken, **{INPUT + name: value for name, value in inputs.items()}}

    def _export(self, module: torch.nn.Module, weights: dict[str, torch.Tensor], path: Path) -> None:
        self.policy.export(module, weights, path)


def run(network: torch.nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    """What ``Policy.evaluate`` says of a micro-batch."""
    inputs = {name[len(INPUT) :]: value for name, value in batch.items() if name.startswith(INPUT)}
    outputs: dict[str, torch.Tensor] = network(inputs, batch["taken"])
    return outputs


def blank(spec: EnvSpec) -> Observation:
    """The observation of one environment with nothing in it."""
    return {
        key: np.zeros((1, *space.shape), dtype=space.dtype) if isinstance(space, Box) else [""]
        for key, space in spec.observations.items()
    }


def network_spec(cfg: Any, spec: EnvSpec) -> NetworkSpec:
    """The policy that ``cfg.model`` describes, for environments of ``spec``, as a trainer wants its network."""
    return PolicyNetwork(cfg, spec).spec


def load_trainer(cfg: Any, spec: EnvSpec, parallel: ParallelInfo, seed: int) -> tuple[Trainer, Policy]:
    """The trainer backend that ``cfg.trainer.name`` names, set up with the policy that ``cfg.model`` describes.

    Returns it with the policy that it trains, to be asked for what it is made of and to prepare observations; its
    weights are the trainer's.
    """
    network = PolicyNetwork(cfg, spec)
    trainer: Trainer = Registry("rlinf.trainers").load(cfg.trainer.name)(cfg.trainer)
    trainer.setup(network.spec, None, parallel, seed=seed)
    return trainer, network.policy
