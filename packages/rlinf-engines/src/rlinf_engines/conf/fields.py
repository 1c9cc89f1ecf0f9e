"""What every schema of the engines is written with. Standard library only."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def key(default: Any, text: str, **limits: Any) -> Any:
    """A dataclass field with its help text and limits."""
    return field(default=default, metadata={"help": text, **limits})


def plugin(group: str, name: str, where: str) -> list[str]:
    """What is wrong with the name of a plugin that the config key ``where`` gives."""
    from rlinf_core.registry import check_name

    return check_name(group, name, where)
