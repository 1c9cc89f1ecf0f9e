"""Classes that travel by name: dataclasses, namedtuples, enumerations.

Looking a class up must not run anybody's code: the module has to be loaded already (importing runs it), and names are
read from dictionaries (``getattr`` would call a module's ``__getattr__`` or a descriptor).
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import sys
from typing import Any

from rlinf_comm._codec.format import CodecError, Unknown

ELSEWHERE = "define it in a module that both ends import"
"""What to do with a class of ``__main__``, which is another module in each process."""
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: made by a class statement, not a built-in


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """How the instances of one class travel."""

    name: str
    fields: tuple[str, ...]
    known: frozenset[str]
    open: bool
    """Whether instances have a ``__dict__``, so that there may be attributes beside the fields."""


_plans: dict[type, Plan] = {}


def is_namedtuple(cls: type) -> bool:
    return issubclass(cls, tuple) and isinstance(vars_of(cls, "_fields"), tuple)


def vars_of(cls: type, name: str) -> object:
    """A class attribute without running a descriptor."""
    return next((base.__dict__[name] for base in cls.__mro__ if name in base.__dict__), None)


def is_plain_dataclass(cls: type) -> bool:
    """A dataclass over ``object`` alone: one that extends a dict or an exception has contents beside its fields."""
    return isinstance(vars_of(cls, "__dataclass_fields__"), dict) and all(
        base is object or base.__flags__ & _HEAP_TYPE for base in cls.__mro__
    )


def plan_of(cls: type) -> Plan:
    """For a namedtuple or dataclass. Raises CodecError when the reader could not find the class."""
    plan = _plans.get(cls)
    if plan is None:
        name = name_of(cls)
        of: Any = cls
        names = tuple(of._fields) if issubclass(cls, tuple) else tuple(f.name for f in dataclasses.fields(of))
        is_open = any("__dict__" in vars(base) for base in cls.__mro__)
        plan = _plans[cls] = Plan(name, names, frozenset(names), is_open)
    return plan


def name_of(cls: type) -> str:
    name = f"{cls.__module__}:{cls.__qualname__}"
    if "<locals>" in name:
        raise Unknown(f"{name} is defined in a function, so that the reader could not find it")
    try:
        found = find(name, load=False)
    except CodecError as error:
        raise Unknown(error.message) from None
    if found is not cls:
        raise Unknown(f"{name} is another class than this object's, so that the reader could not find it")
    return name


def find(name: str, *, load: bool) -> type:
    """The class of a name. ``load``: import its module when it is not loaded (that runs the module)."""
    if type(name) is not str:
        raise CodecError("the skeleton names a class by something else than a text")
    module_name, _, qualname = name.partition(":")
    module = sys.modules.get(module_name)
    if module is None and load:
        try:
            module = importlib.import_module(module_name)
        except Exception as error:  # whatever the module does when it runs
            raise CodecError(f"the class {name} cannot be found here: {error}") from error
    if module is None:
        raise CodecError(f"the class {name} cannot be found here: import {module_name} in this process first")
    found: Any = module
    for part in qualname.split("."):
        names = getattr(found, "__dict__", None) if found is module else vars(found)
        if names is None or part not in names:
            hint = f"; {ELSEWHERE}" if module_name == "__main__" else ""
            raise CodecError(f"the class {name} cannot be found here: there is no {part!r}{hint}")
        found = names[part]
        if not isinstance(found, type):
            raise CodecError(f"{name} is not a class")
    return found  # type: ignore[no-any-return]


def enum_node(value: enum.Enum) -> tuple[str, str | int]:
    """Class and member name of ``value``; a combination of flags has no name of its own and goes by number."""
    cls = type(value)
    name = name_of(cls)
    if cls.__members__.get(value.name or "") is value:
        return name, value.name
    if isinstance(value, enum.Flag) and isinstance(value.value, int):
        return name, value.value
    raise Unknown(f"{value!r} is no member of {name}")


def enum_member(cls: type, member: object, name: str) -> object:
    if not issubclass(cls, enum.Enum):
        raise CodecError(f"{name} is not an enumeration")
    if isinstance(member, str) and member in cls.__members__:
        return cls.__members__[member]
    if type(member) is int and issubclass(cls, enum.Flag):
        return cls(member)
    raise CodecError(f"{name} has no member {member!r}")
