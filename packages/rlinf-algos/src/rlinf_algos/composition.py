"""Algorithms by name: one signature for all losses, one for all advantages, and a table that entry points fill.

The functions of the other modules are the library; this one lets a configuration choose among them. A third party
adds its own with one entry point in the group ``rlinf.losses`` or ``rlinf.advantages``, whose value is a ``Loss`` /
``Advantage`` (or a plain function ``f(inputs, **options)``):

    [project.entry-points."rlinf.losses"]
    mine = "my_package.losses:MINE"
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from torch import Tensor

from rlinf_algos.aggregation import LossSum
from rlinf_algos.errors import AlgorithmError, nearest

LOSSES = "rlinf.losses"
ADVANTAGES = "rlinf.advantages"
_DISTRIBUTION = "rlinf-algos"


@dataclass(frozen=True, slots=True)
class LossInputs:
    """What a loss may read; each says what it needs. All are [B, T] unless told otherwise, and constants but for
    ``logprobs``, ``entropy`` and ``values``."""

    logprobs: Tensor | None = None
    mask: Tensor | None = None
    advantages: Tensor | None = None
    """[B] or [B, T]."""
    old_logprobs: Tensor | None = None
    """Of the policy before the update (the proximal policy, where the two are told apart)."""
    behaviour_logprobs: Tensor | None = None
    """Of the policy (engine) that drew the tokens."""
    ref_logprobs: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None
    old_values: Tensor | None = None
    returns: Tensor | None = None
    weights: Tensor | None = None
    segments: Tensor | None = None
    rejected_logprobs: Tensor | None = None
    rejected_ref_logprobs: Tensor | None = None
    rejected_mask: Tensor | None = None


@dataclass(frozen=True, slots=True)
class AdvantageInputs:
    """What an advantage may read; each says what it needs. [B] per sample, [B, T] per position."""

    rewards: Tensor | None = None
    """[B], or [B, T] for those over time."""
    groups: Sequence[Hashable] | Tensor | None = None
    mask: Tensor | None = None
    valid: Tensor | None = None
    values: Tensor | None = None
    greedy_rewards: Tensor | None = None
    kl: Tensor | None = None
    trajectories: Sequence[Hashable] | Tensor | None = None
    anchors: Sequence[Hashable] | Tensor | None = None
    returns: Tensor | None = None
    terminated: Tensor | None = None
    truncated: Tensor | None = None
    final_values: Tensor | None = None
    last_values: Tensor | None = None
    turns: Tensor | None = None
    ranks: Any = None


@dataclass(frozen=True, slots=True)
class Advantages:
    """``advantages`` [B] or [B, T]; ``returns`` [B, T] where the algorithm has a critic."""

    advantages: Tensor
    returns: Tensor | None = None


Inputs = TypeVar("Inputs", LossInputs, AdvantageInputs)
Result = TypeVar("Result", LossSum, Advantages)


@dataclass(frozen=True)
class Algorithm(Generic[Inputs, Result]):
    """One algorithm by name. Call it with its inputs and its options, as keywords or as one options object.

    ``options`` is a frozen dataclass that checks itself (or None: keywords go through as they are), ``needs`` the
    inputs that must be given, ``source`` the paper.
    """

    compute: Callable[[Inputs, Any], Result]
    options: type[Any] | None
    needs: tuple[str, ...] = ()
    source: str = ""

    def __call__(self, inputs: Inputs, options: Any = None, /, **keywords: Any) -> Result:
        missing = [name for name in self.needs if getattr(inputs, name) is None]
        if missing:
            raise AlgorithmError(f"this algorithm needs {', '.join(missing)} in {type(inputs).__name__}")
        if options is None:
            options = self.make_options(keywords)
        elif keywords:
            raise AlgorithmError("give options as one object or as keywords, not both")
        return self.compute(inputs, options)

    def make_options(self, values: Mapping[str, Any]) -> Any:
        """The options object of plain values; unknown names are refused with the nearest one."""
        if self.options is None:
            return dict(values)
        known = [f.name for f in fields(self.options)]
        for name in values:
            if name not in known:
                raise AlgorithmError(
                    f"{self.options.__name__} has no option {name!r}{nearest(name, known)}; it has {', '.join(known)}"
                )
        return self.options(**values)


Loss = Algorithm[LossInputs, LossSum]
Advantage = Algorithm[AdvantageInputs, Advantages]


def _plain(function: Callable[..., Any]) -> Algorithm[Any, Any]:
    """Wrap a plain function f(inputs, **options) of a third party."""
    return Algorithm(lambda inputs, options: function(inputs, **options), None)


@cache
def _entries(group: str) -> dict[str, EntryPoint]:
    """Third parties' entry points by name; ours are in the built-in table."""
    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=group):
        owner = entry.dist.name if entry.dist is not None else "?"
        if owner == _DISTRIBUTION:
            continue
        if entry.name in _builtin(group):
            raise AlgorithmError(f"{entry.name!r} in {group} is claimed by both {_DISTRIBUTION} and {owner}")
        other = found.get(entry.name)
        if other is not None and other.value != entry.value:
            first = other.dist.name if other.dist is not None else "?"
            raise AlgorithmError(f"{entry.name!r} in {group} is claimed by both {first} and {owner}")
        found[entry.name] = entry
    return found


def _builtin(group: str) -> Mapping[str, Algorithm[Any, Any]]:
    from rlinf_algos import catalogue  # it imports this module for the types

    return catalogue.LOSS_TABLE if group == LOSSES else catalogue.ADVANTAGE_TABLE


def _find(group: str, name: str) -> Algorithm[Any, Any]:
    builtin = _builtin(group)
    if name in builtin:
        return builtin[name]
    entries = _entries(group)
    if name not in entries:
        known = sorted({*builtin, *entries})
        raise AlgorithmError(f"no {group} entry {name!r}{nearest(name, known)}; there are {', '.join(known)}")
    loaded = entries[name].load()
    if isinstance(loaded, Algorithm):
        return loaded
    if callable(loaded):
        return _plain(loaded)
    raise AlgorithmError(f"{entries[name].value} is {type(loaded).__name__}: expected an Algorithm or a function")


def loss(name: str) -> Loss:
    """The loss of that name: ours, or one that an installed package adds."""
    return _find(LOSSES, name)


def advantage(name: str) -> Advantage:
    """The advantage of that name: ours, or one that an installed package adds."""
    return _find(ADVANTAGES, name)


def loss_names() -> list[str]:
    """All names that ``loss`` knows."""
    return sorted({*_builtin(LOSSES), *_entries(LOSSES)})


def advantage_names() -> list[str]:
    """All names that ``advantage`` knows."""
    return sorted({*_builtin(ADVANTAGES), *_entries(ADVANTAGES)})


def as_dict(options: Any) -> dict[str, Any]:
    """An options object as plain values."""
    if not is_dataclass(options):
        raise AlgorithmError(f"expected an options dataclass, got {type(options).__name__}")
    return {f.name: getattr(options, f.name) for f in fields(options)}
