"""What can go wrong when weights move."""

from __future__ import annotations

from rlinf_core.errors import RLinfError


class WeightsError(RLinfError):
    """Base class of errors of weight transfer."""


class LayoutError(WeightsError, ValueError):
    """A layout does not describe a model, or a rank's tensors are not what its layout says; names parameter, rank and
    range."""


class MismatchError(WeightsError, ValueError):
    """Two sides that cannot be transferred between: another shape, a conversion that would change values' meaning, a
    parameter that one of them lacks, another layout than the sender was told."""


class TransferInterrupted(WeightsError):
    """A version did not arrive whole; what was installed before is untouched. Says how far it came and why.

    ``elsewhere``: another process has failed or died, and that is the cause.
    """

    def __init__(self, message: str, *, elsewhere: bool = False) -> None:
        super().__init__(message)
        self.elsewhere = elsewhere


def is_elsewhere(cause: BaseException) -> bool:
    """Whether an error says that another process has failed or died."""
    return bool(getattr(cause, "elsewhere", False)) or isinstance(cause, (EOFError, ConnectionError))


class ChecksumError(TransferInterrupted):
    """The bytes that arrived are not those that were sent."""


class StaleVersion(WeightsError):
    """A version that is not newer than the one in use."""
