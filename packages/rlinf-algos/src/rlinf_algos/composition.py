"""Algorithms by name: one signature for all losses, one for all advantages, and a table that entry points fill.

The functions of the other modules are the library; this one lets a configuration choose among them. A third party
adds its own with one entry point in the group ``rlinf.losses`` or ``rlinf.advantages``, whose value is a ``Loss`` /
``Advantage`` (or a plain function ``f(inputs, **options)``):

    [project.entry-points."rlinf.losses"]
    mine = "my_package.losses:MINE"
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
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
        if not isinstance(inputs, LossInputs | AdvantageInputs):
            raise AlgorithmError(f"inputs must be LossInputs or AdvantageInputs, got {type(inputs).__name__}")
        missing = [name for name in self.needs if getattr(inputs, name, None) is None]
        if missing:
            raise AlgorithmError(f"this algorithm needs {', '.join(missing)} in {type(inputs).__name__}")
        if options is None:
            options = self.make_options(keywords)
        elif keywords:
            raise AlgorithmError("give options as one object or as keywords, not both")
        else:
            self._check_options(options)
        return self.compute(inputs, options)

    def _check_options(self, options: Any) -> None:
        """Refuse another algorithm's options: their numbers mean something else, or are not read."""
        if self.options is None:
            if not isinstance(options, Mapping):
                raise AlgorithmError(f"this algorithm takes a mapping of options, got {type(options).__name__}")
        elif not isinstance(options, self.options) or _names(options) != _names(self.options):
            raise AlgorithmError(
                f"options must be {self.options.__name__}, got {type(options).__name__}; plain values go in as keywords"
            )

    def make_options(self, values: Mapping[str, Any]) -> Any:
        """The options object of plain values; unknown names are refused with the nearest one."""
        if self.options is None:
            return dict(values)
        known = _names(self.options)
        for name in values:
            if name not in known:
                raise AlgorithmError(
                    f"{self.options.__name__} has no option {name!r}{nearest(name, known)}; it has {', '.join(known)}"
                )
        needed = [f.name for f in fields(self.options) if f.init and f.default is f.default_factory is MISSING]
        absent = [name for name in needed if name not in values]
        if absent:
            raise AlgorithmError(f"{self.options.__name__} needs the option {absent[0]!r}")
        return self.options(**values)


def _names(options: Any) -> list[str]:
    """The names of an options dataclass (or object)."""
    return [f.name for f in fields(options)]


Loss = Algorithm[LossInputs, LossSum]
Advantage = Algorithm[AdvantageInputs, Advantages]


def _plain(function: Callable[..., Any]) -> Algorithm[Any, Any]:
    """Wrap a plain function f(inputs, **options) of a third party."""
    return Algorithm(lambda inputs, options: function(inputs, **options), None)


@cache
def _entries(group: str) -> dict[str, tuple[EntryPoint, ...]]:
    """Third parties' entry points by name, one for each value that is claimed; ours are in the built-in table."""
    found: dict[str, tuple[EntryPoint, ...]] = {}
    for entry in entry_points(group=group):
        claims = found.get(entry.name, ())
        if _owner(entry) != _DISTRIBUTION and entry.value not in [other.value for other in claims]:
            found[entry.name] = (*claims, entry)
    return found


def _owner(entry: EntryPoint) -> str:
    return entry.dist.name.replace("_", "-").lower() if entry.dist is not None else "?"


def _builtin(group: str) -> Mapping[str, Algorithm[Any, Any]]:
    from rlinf_algos import catalogue  # it imports this module for the types

    return catalogue.LOSS_TABLE if group == LOSSES else catalogue.ADVANTAGE_TABLE


def _find(group: str, name: str) -> Algorithm[Any, Any]:
    builtin, entries = _builtin(group), _entries(group)
    # Found out when the name is asked for: one package's mistake does not take the other names away.
    owners = [_DISTRIBUTION] * (name in builtin) + [_owner(entry) for entry in entries.get(name, ())]
    if len(owners) > 1:
        raise AlgorithmError(f"{name!r} in {group} is claimed by both {owners[0]} and {owners[1]}")
    if name in builtin:
        return builtin[name]
    if name not in entries:
        known = sorted({*builtin, *entries})
        hint = _preset_hint(group, name) or nearest(name, known)
        raise AlgorithmError(f"no {group} entry {name!r}{hint}; there are {', '.join(known)}")
    (entry,) = entries[name]
    loaded = entry.load()
    if isinstance(loaded, Algorithm):
        return loaded
    if callable(loaded):
        return _plain(loaded)
    raise AlgorithmError(f"{entry.value} is {type(loaded).__name__}: expected an Algorithm or a function")


def _preset_hint(group: str, name: str) -> str:
    """What to ask for where ``name`` is a preset's: papers name the whole after one of its parts."""
    from rlinf_algos.presets import PRESETS  # it imports this module

    found = PRESETS.get(name)
    if found is None:
        return ""
    kind, part = ("loss", found.loss) if group == LOSSES else ("advantage", found.advantage)
    return f": {name!r} is a preset, whose {kind} is {part!r} (preset({name!r}), or {kind}({part!r}))"


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
