"""Networks that are no causal LM, for the trainers: ``rlinf_core.types.NetworkSpec`` checked and carried out.

Importing this module loads no torch.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlinf_core.errors import ConfigError
from rlinf_core.types import NetworkSpec

if TYPE_CHECKING:
    import torch


def build_network(spec: NetworkSpec, seed: int, master: torch.dtype) -> torch.nn.Module:
    """The network of ``spec`` on the CPU, in evaluation mode, its parameters in the format ``master``.

    What a trainer could not train is refused by name: no module, no parameters, frozen ones, ones that are no floating
    point numbers.
    """
    import torch

    network = spec.build(seed)
    kind = type(network).__name__
    if not isinstance(network, torch.nn.Module):
        raise ConfigError(f"trainer: NetworkSpec.build gave a {kind}; it must give a torch.nn.Module")
    named = dict(network.named_parameters())
    if not named:
        raise ConfigError(f"trainer: {kind} has no parameters, there is nothing to train")
    for name, parameter in named.items():
        if not parameter.is_floating_point():
            raise ConfigError(
                f"trainer: parameter {name} of {kind} is {parameter.dtype}; only floating point is trained"
            )
        if not parameter.requires_grad:
            raise ConfigError(
                f"trainer: parameter {name} of {kind} does not require gradients, and every parameter is trained; "
                "register it as a buffer"
            )
        parameter.data = parameter.data.to(master)
    return network.eval()


def export_network(spec: NetworkSpec, network: torch.nn.Module, weights: dict[str, torch.Tensor], path: Path) -> None:
    """Let ``spec`` write the directory ``path``: aside first, renamed when whole."""
    from rlinf_engines.models import replace_directory

    aside = path.with_name(f".{path.name}.part")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    spec.export(network, weights, aside)
    replace_directory(aside, path)


def change_buffers(network: torch.nn.Module, change: Callable[[Any], None]) -> None:
    """Run ``change`` on ``network``, which must leave buffers that are as large and of the same format as before."""
    import torch

    before = _formats(network)
    with torch.no_grad():
        change(network)
    after = _formats(network)
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            raise ConfigError(
                f"trainer.update_buffers: buffer {name} was {before.get(name, 'absent')} and became "
                f"{after.get(name, 'absent')}; write into it (copy_) and keep its size and format"
            )


def network_format(spec: NetworkSpec, head: Any, role: str) -> str:
    """The number format of ``spec``; refuses what ``setup`` must not be given with one."""
    if head is not None or role != "policy":
        raise ConfigError(f"trainer: a NetworkSpec is set up without a head and with role policy, not role {role}")
    return spec.dtype


def _formats(network: torch.nn.Module) -> Mapping[str, str]:
    return {name: f"{buffer.dtype}{list(buffer.shape)} on {buffer.device}" for name, buffer in network.named_buffers()}
