"""Weights from the shards of a trainer to the shards of a rollout engine, whatever the two splits are.

``Layout`` says who holds what, ``plan`` what each rank sends to which, ``Sender`` and ``Receiver`` do it over a
``Mover``, and ``ShardedWeights`` is all of it for a worker of a flow. Layouts and plans need neither torch nor a
process.
"""

from __future__ import annotations

from typing import Any

from rlinf_comm.weights.builders import flat, fsdp, fused, grid, replicated, split
from rlinf_comm.weights.errors import (
    ChecksumError,
    LayoutError,
    MismatchError,
    StaleVersion,
    TransferInterrupted,
    WeightsError,
)
from rlinf_comm.weights.layout import Layout, Part, RankLayout, Spec
from rlinf_comm.weights.plan import Bucket, Landing, Move, TransferPlan, plan

_LATER = {
    "Sender": "sender",
    "Receiver": "receiver",
    "Sent": "sender",
    "Mover": "movers",
    "ControlMover": "movers",
    "ChannelMover": "movers",
    "CommunicatorControl": "movers",
    "ShardedWeights": "worker",
    "from_dtensors": "dtensor",
    "spec_of": "dtensor",
}

__all__ = [
    "Layout",
    "RankLayout",
    "Part",
    "Spec",
    "replicated",
    "split",
    "fsdp",
    "grid",
    "flat",
    "fused",
    "plan",
    "TransferPlan",
    "Bucket",
    "Move",
    "Landing",
    "WeightsError",
    "LayoutError",
    "MismatchError",
    "TransferInterrupted",
    "ChecksumError",
    "StaleVersion",
    *_LATER,
]


def __getattr__(name: str) -> Any:
    """What needs torch is loaded when it is first used."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
