"""Config group ``model``: policies. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rlinf_core.registry import check_name

VALUE_LEVELS = ("action", "chunk", "none")


def _key(default: Any, text: str, **limits: Any) -> Any:
    """A dataclass field with its help text and limits."""
    return field(default=default, metadata={"help": text, **limits})


@dataclass
class Mlp:
    """Policy ``mlp``: multilayer perceptrons over a vector of numbers."""

    name: str = _key("mlp", "policy")
    observation: str = _key("state", "observation that it reads")
    hidden: list[int] = field(
        default_factory=lambda: [64, 64], metadata={"help": "units of each hidden layer", "min": 1}
    )
    shared: bool = _key(False, "one trunk of hidden layers for actor and critic, instead of one each")
    activation: str = _key("tanh", "what follows a hidden layer", choices=("tanh", "relu"))
    chunk: int = _key(1, "environment steps of one decision", min=1)
    value_level: str = _key(
        "action", "one value for each step of a decision, one for all of it, or no critic", choices=VALUE_LEVELS
    )
    log_std_init: float = _key(
        0.0, "logarithm of the first standard deviation of actions that are numbers", min=-20.0, max=5.0
    )
    squash: bool = _key(False, "actions that are numbers go through tanh to their bounds, instead of being clipped")
    normalise_observations: bool = _key(False, "divide observations by their running standard deviation, less the mean")
    dtype: str = _key("float32", "number format of weights and computation", choices=("float32", "float64"))

    def validate(self, root: Any) -> list[str]:
        return check_name("rlinf.policies", self.name, "model.name")


SCHEMAS: dict[str, type] = {"model/mlp": Mlp}
