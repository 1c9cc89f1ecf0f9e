"""Errors a user can meet, by whose doing they are.

Every error carries its facts as attributes as well as in the message. Nothing here imports more than
the standard library, so that configuration faults can be reported before anything heavy is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class RLinfError(Exception):
    """Base class of all errors raised by the project on purpose.

    ``elsewhere``: most likely another process has failed or died, and that, not this, is what the run fails of.
    ``bad_input``: what the user gave is wrong and the message says it all; a traceback would only bury it.
    """

    elsewhere: bool = False
    bad_input: bool = False


class ConfigError(RLinfError, ValueError):
    """A configuration key, value or combination is wrong; names the key and what would be right."""

    bad_input = True


class MissingKeys(ConfigError):
    """Keys without a default are not set."""


class PluginError(RLinfError):
    """A plugin is unknown, claimed twice or cannot be imported."""

    bad_input = True


class MissingExtraError(PluginError):
    """A plugin is known but what it needs is not installed; names the command that installs it."""


class PlacementError(ConfigError):
    """A placement names devices that do not exist, overlap, leave gaps or straddle nodes."""


class PlanError(ConfigError):
    """A plan does not fit the flow or the cluster."""


class TraceError(RLinfError):
    """The program did something a flow cannot follow: read a result while traced, call differently later."""


class ChannelError(RLinfError):
    """Base class of errors of channels."""


class PeerLost(ChannelError):
    """The process that holds an item is gone."""

    elsewhere = True


class ChannelClosed(ChannelError):
    """Put on an output that this writer has already closed (your doing)."""


class ChannelPoisoned(ChannelError):
    """A writer of the channel failed; the reader must not take the end for a clean one (their doing).

    ``by_hub``: the hub said so; the cause is then known and is another task's failure.
    """

    by_hub: bool = False


class EndOfChannel(ChannelError):
    """All writers have closed and the channel is drained (normal end)."""


class ChannelEmpty(ChannelError):
    """``get_nowait`` found nothing that could be taken now."""


class ChannelFull(ChannelError):
    """``put_nowait`` found no credit."""


class WaitTimeout(RLinfError, TimeoutError):
    """A wait ended at its deadline; says what was awaited and who holds it."""


class Cancelled(RLinfError):
    """The run is being stopped; raised inside waits of tasks so that they unwind."""


class AccountError(RLinfError):
    """Samples entered a step and were neither trained on, dropped by name, nor carried on."""


class WorkerError(RLinfError):
    """A rank raised, died or exited. ``member`` is ``group[rank]``; ``traceback_text`` is the remote one.

    ``bad_input``: whether what it raised was (a model that does not load, a prompt that is too long).
    """

    def __init__(self, message: str, *, member: str = "", traceback_text: str = "", bad_input: bool = False) -> None:
        super().__init__(message)
        self.member = member
        self.traceback_text = traceback_text
        self.bad_input = bad_input

    def __str__(self) -> str:
        head = super().__str__()
        return f"{head}\n{self.traceback_text.rstrip()}" if self.traceback_text else head

    def __reduce__(self) -> tuple[object, ...]:
        return (_worker_error, (self.args[0], self.member, self.traceback_text, self.bad_input))


def _worker_error(message: str, member: str, traceback_text: str, bad_input: bool) -> WorkerError:
    return WorkerError(message, member=member, traceback_text=traceback_text, bad_input=bad_input)


class NonFiniteError(RLinfError):
    """A loss, gradient norm or log-probability is NaN or infinite."""


class RunDirectoryError(RLinfError, OSError):
    """The run directory cannot be created or written (unwritable, disk full)."""


SYNONYMS = (
    ("lr", "learning_rate"),
    ("tp", "tensor_parallel_size"),
    ("pp", "pipeline_parallel_size"),
    ("batch_size", "prompts_per_step"),
    ("max_tokens", "max_new_tokens"),
)
"""Names of settings that mean the same and do not look alike."""


def synonyms(name: str, known: Iterable[str]) -> list[str]:
    """Those of ``known`` whose last part means what that of the dotted ``name`` does; those beside it come first."""
    parent, _, last = name.rpartition(".")
    words = {word for same in SYNONYMS if last in same for word in same}
    found = [key for key in known if key.rpartition(".")[2] in words]
    return sorted(found, key=lambda key: key.rpartition(".")[0] != parent)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `` (did you mean 'x'?)`` for the known name closest to ``name``, or an empty string."""
    names = list(known)
    found = synonyms(name, names) or get_close_matches(name, names, n=1, cutoff=0.5)
    return f" (did you mean {found[0]!r}?)" if found else ""


def describe(error: BaseException, limit: int = 4000) -> str:
    """``Type: text`` of an exception, also when its own ``__str__`` raises; cut to ``limit`` characters."""
    try:
        text = str(error)
    except BaseException as fault:
        text = f"(its __str__ raised {type(fault).__name__})"
    if len(text) > limit:
        text = f"{text[:limit]}… ({len(text)} characters)"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
