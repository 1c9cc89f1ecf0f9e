"""Policies by name: what acts in an environment, and says how likely what it did was. See ``policies.base``."""

from __future__ import annotations

import threading
from typing import Any

from rlinf_core.registry import Registry
from rlinf_embodied.envs.base import EnvSpec
from rlinf_embodied.policies.base import Decision, Policy

__all__ = ["Decision", "Policy", "load_policy"]

_BUILDING = threading.Lock()
"""Where workers are threads of one process: two that import transformers at once see a module that is not whole yet."""


def load_policy(cfg: Any, spec: EnvSpec, seed: int) -> Policy:
    """The policy that ``cfg.model.name`` names, made for environments of ``spec``; ``cfg`` is the whole configuration.

    Equal arguments give equal weights.

    Raises:
        PluginError: there is no policy of that name.
        ConfigError: the policy cannot act in such an environment; says what is missing.
    """
    with _BUILDING:
        policy: Policy = Registry("rlinf.policies").load(cfg.model.name)(cfg.model, spec, seed)
    return policy
