"""A policy of multilayer perceptrons over a vector of numbers.

Shape legend: B decisions, K numbers of an observation, C steps per decision, D numbers per step.
"""

from __future__ import annotations

import itertools
import json
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rlinf_core.errors import ConfigError, nearest
from rlinf_embodied.envs.base import Box, Discrete, EnvSpec, Observation
from rlinf_embodied.policies.base import Decision
from rlinf_embodied.policies.distributions import Categorical, Gaussian
from rlinf_embodied.policies.statistics import RunningNorm

# Observations are run through the networks in blocks of so many rows, the last one filled up: a matrix product rounds
# differently for another number of rows, and what is decided must not depend on who else is asked for.
ROWS = 8
DTYPES = {"float32": torch.float32, "float64": torch.float64}
Layers = list[tuple[NDArray[Any], NDArray[Any]]]


class MlpPolicy(nn.Module):
    """Actor and critic over the observation ``model.observation``, of their own or with a common trunk.

    Reads of the config node ``model``: ``observation``, ``hidden``, ``shared``, ``activation``, ``chunk``,
    ``value_level``, ``log_std_init``, ``squash``, ``normalise_observations``, ``dtype``. Weights are orthogonal (Saxe
    et al., arXiv 1312.6120), the last layer of the actor small, so that it begins close to uniform or standard normal
    (Andrychowicz et al., arXiv 2006.05990).

    What it decides for an observation is the same, bit for bit, whatever other observations are in the block.
    """

    acts_on_cpu = True

    def __init__(self, cfg: Any, spec: EnvSpec, seed: int) -> None:
        super().__init__()
        self.key: str = cfg.observation
        self.chunk: int = cfg.chunk
        self.value_level: str = cfg.value_level
        self.dtype = DTYPES[cfg.dtype]
        self.made_of = (dict(cfg.to_dict()) if hasattr(cfg, "to_dict") else dict(vars(cfg)), spec)
        self.size = size = _size(spec, self.key)
        self.head = _head(cfg, spec, self.dtype)
        self.tokens: int = self.head.tokens
        self.taken_dtype = torch.int64 if isinstance(self.head, Categorical) else self.dtype
        self.norm = RunningNorm(size, self.dtype) if cfg.normalise_observations else None
        self.running = self.norm is not None
        self.relu = cfg.activation == "relu"
        generator = torch.Generator().manual_seed(seed & (2**63 - 1))
        widths = [size, *cfg.hidden]
        last = widths[-1]

        def linear(inputs: int, outputs: int, gain: float) -> nn.Linear:
            return _linear(inputs, outputs, gain, self.dtype, generator)

        def hidden() -> list[nn.Module]:
            gain = math.sqrt(2.0)
            return [linear(a, b, gain) for a, b in itertools.pairwise(widths)]

        values = {"action": self.chunk, "chunk": 1, "none": 0}[self.value_level]
        self.trunk = nn.ModuleList(hidden() if cfg.shared else [])
        self.actor = nn.ModuleList([] if cfg.shared else hidden())
        self.actor.append(linear(last, self.chunk * self.head.width, 0.01))
        self.critic = nn.ModuleList([] if cfg.shared or not values else hidden())
        if values:
            self.critic.append(linear(last, values, 1.0))
        self._views: dict[str, tuple[list[int], Layers]] = {}

    # -- acting -----------------------------------------------------------------------------------------------------

    def act(self, obs: Observation, uniform: NDArray[np.float64], *, greedy: bool = False) -> Decision:
        """See ``Policy.act``. Log-probs and values have the format ``model.dtype``."""
        head, critic = self.head, self.value_level != "none"
        features, rows = self._features(obs)
        outputs = self._run("actor", features, rows).reshape(rows, self.chunk, head.width)
        actions, taken, logprobs = head.act(outputs, None if greedy else uniform)
        return Decision(actions, taken, logprobs, self._run("critic", features, rows) if critic else None)

    def value(self, obs: Observation) -> NDArray[Any]:
        """See ``Policy.value``."""
        if not self.critic:
            raise ConfigError("model.value_level: the policy has no value head (none); use action or chunk")
        features, rows = self._features(obs)
        return self._run("critic", features, rows)

    def _features(self, obs: Observation) -> tuple[NDArray[Any], int]:
        """Observations, normalised and through the trunk, as blocks [blocks, ROWS, ...], and how many they are."""
        given = np.asarray(obs[self.key])
        rows = len(given)
        blocks = -(-rows // ROWS)
        x = np.zeros((blocks * ROWS, self.size), dtype=_NUMPY[self.dtype])
        x[:rows] = given.reshape(rows, self.size)
        norm = self.norm
        if norm is not None:
            norm.apply_to(x)
        x = x.reshape(blocks, ROWS, self.size)
        layers = self._layers("trunk")
        return (_forward(layers, x, self.relu, end=True) if layers else x), rows

    def _run(self, name: str, features: NDArray[Any], rows: int) -> NDArray[Any]:
        """The last layer's outputs [rows, ...] of ``actor`` or ``critic``."""
        found = _forward(self._layers(name), features, self.relu)
        return found.reshape(-1, found.shape[-1])[:rows]

    def _layers(self, name: str) -> Layers:
        """(weight [in, out], bias) of each layer as numpy views of the parameters' memory, so that they follow every
        change in place; made again when the memory is another."""
        # From the modules' own tables: an attribute that is a module or a parameter is looked for in several places.
        found: Any = self._modules[name]
        places = [module._parameters["weight"].data_ptr() for module in found._modules.values()]
        known = self._views.get(name)
        if known is None or known[0] != places:
            modules: list[Any] = list(found)
            # On another device these are copies, which do not follow.
            layers = [(m.weight.detach().cpu().numpy().T, m.bias.detach().cpu().numpy()) for m in modules]
            if any(not m.weight.is_cpu for m in modules):
                return layers
            known = self._views[name] = (places, layers)
        return known[1]

    # -- learning ---------------------------------------------------------------------------------------------------

    def prepare(self, obs: Observation) -> dict[str, Tensor]:
        """See ``Policy.prepare``: {observation key: [B, K]}."""
        given = np.asarray(obs[self.key])
        return {self.key: torch.as_tensor(given.reshape(len(given), self.size)).to(self.dtype)}

    def evaluate(self, inputs: dict[str, Tensor], taken: Tensor) -> dict[str, Tensor]:
        """See ``Policy.evaluate``."""
        x = inputs[self.key]
        if self.norm is not None:
            x = self.norm(x)
        x = self._through(self.trunk, x, end=True)
        outputs = self._through(self.actor, x).view(len(x), self.chunk, self.head.width)
        logprobs, entropy = self.head.evaluate(outputs, taken)
        found = {"logprobs": logprobs, "entropy": entropy}
        if self.critic:
            found["values"] = self._through(self.critic, x)
        return found

    forward = evaluate

    def _through(self, layers: nn.ModuleList, x: Tensor, *, end: bool = False) -> Tensor:
        last = len(layers) if end else len(layers) - 1
        for i, layer in enumerate(layers):
            x = layer(x)
            if i < last:
                x = torch.relu(x) if self.relu else torch.tanh(x)
        return x

    def observe(self, inputs: dict[str, Tensor]) -> None:
        """Take observations into the running mean and variance, if ``model.normalise_observations``."""
        if self.norm is not None:
            self.norm.update(inputs[self.key])

    @staticmethod
    def export(module: Any, weights: dict[str, Tensor], path: Path) -> None:
        """Write ``policy.json`` (the config node ``model`` and the environment's spaces) and ``weights.pt``."""
        from rlinf_embodied.specfile import to_data

        model, spec = module.made_of
        data = {"policy": "mlp", "model": model, "environment": to_data(spec)}
        (path / "policy.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        torch.save({name: tensor.detach().cpu().clone() for name, tensor in weights.items()}, path / "weights.pt")

    @classmethod
    def load(cls, path: Path) -> MlpPolicy:
        """The policy that ``export`` wrote to the directory ``path``.

        Raises:
            ConfigError: the directory has no policy of this kind.
        """
        from rlinf_core.config import Config
        from rlinf_embodied.specfile import from_data

        try:
            data = json.loads((path / "policy.json").read_text(encoding="utf-8"))
            made = cls(Config(data["model"]), from_data(data["environment"]), 0)
            made.load_state_dict(torch.load(path / "weights.pt", map_location="cpu", weights_only=True))
        except (OSError, EOFError, ValueError, KeyError, RuntimeError, pickle.UnpicklingError) as error:
            raise ConfigError(f"{path} has no exported policy mlp: {type(error).__name__}: {error}") from error
        return made.eval()


_NUMPY: dict[torch.dtype, Any] = {torch.float32: np.float32, torch.float64: np.float64}


def _forward(layers: Layers, x: NDArray[Any], relu: bool, *, end: bool = False) -> NDArray[Any]:
    """Run blocks [blocks, ROWS, in] through layers with an activation between them (and after the last: ``end``)."""
    last = len(layers) if end else len(layers) - 1
    for i, (weight, bias) in enumerate(layers):
        x = np.matmul(x, weight)
        x += bias
        if i < last:
            if relu:
                np.maximum(x, 0.0, out=x)
            else:
                np.tanh(x, out=x)
    return x


def _size(spec: EnvSpec, key: str) -> int:
    space = spec.observations.get(key)
    if space is None:
        known = ", ".join(spec.observations)
        raise ConfigError(
            f"model.observation: the environment has no observation {key!r}{nearest(key, spec.observations)}; it has "
            f"{known}"
        )
    if not isinstance(space, Box):
        raise ConfigError(f"model.observation: {key!r} is text, and an MLP takes numbers; use model=vla")
    return math.prod(space.shape)


def _head(cfg: Any, spec: EnvSpec, dtype: torch.dtype) -> Categorical | Gaussian:
    if isinstance(spec.action, Discrete):
        if cfg.squash:
            raise ConfigError("model.squash: the environment's actions are no numbers to squash; set it to false")
        return Categorical(spec.action)
    return Gaussian(spec.action, cfg.chunk, cfg.log_std_init, cfg.squash, dtype)


def _linear(inputs: int, outputs: int, gain: float, dtype: torch.dtype, generator: torch.Generator) -> nn.Linear:
    layer = nn.utils.skip_init(nn.Linear, inputs, outputs, dtype=dtype)
    with torch.no_grad():
        weight = torch.empty(outputs, inputs, dtype=torch.float64)
        layer.weight.copy_(nn.init.orthogonal_(weight, gain, generator=generator))
        layer.bias.zero_()
    return layer
