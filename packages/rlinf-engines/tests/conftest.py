"""Fixtures of the engine tests. ``trainer_cases`` beside this file has rows, losses and reference numbers."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# Test modules are not importable from each other otherwise; scripts that tests start have this folder by themselves.
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def make_model() -> Callable[..., Any]:
    """Build a ``model`` config node; keywords replace sizes of the tiny model."""
    import trainer_cases

    def make(dtype: str = "float64", path: str | None = None, **sizes: Any) -> Any:
        return trainer_cases.model_config(dtype=dtype, path=path, **{"heads": 2, "kv_heads": 1, **sizes})

    return make


@pytest.fixture
def make_trainer_cfg() -> Callable[..., Any]:
    """Build a ``trainer`` config node; keywords replace defaults."""
    import trainer_cases

    return trainer_cases.trainer_config


@pytest.fixture
def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
