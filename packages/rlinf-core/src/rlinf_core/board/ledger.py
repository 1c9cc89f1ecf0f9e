"""The account of one step by sample id: who holds each id, and how it ended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from rlinf_core.board.events import StepAccount

EndKind = Literal["trained", "dropped", "carried"]


class Ledger:
    """Every id that entered the step ends trained on, dropped by name or carried on, or it is lost."""

    def __init__(self, step: str) -> None:
        self.step = step
        self._holder: dict[str, str] = {}
        self.order: list[str] = []
        """Ids in the order in which they entered."""
        self._group: dict[str, str] = {}
        self._ended: dict[str, tuple[EndKind, str, str]] = {}

    def enter(self, ids: Iterable[str], holder: str, group: str | None = None) -> None:
        """The ids are now with ``holder``; the first call makes them known."""
        for sample in ids:
            if sample not in self._holder:
                self.order.append(sample)
            self._holder[sample] = holder
            if group is not None:
                self._group[sample] = group

    def group_of(self, sample: str) -> str:
        """The group of an id: as it travelled, else by the form ``group/index`` of sample ids."""
        known = self._group.get(sample)
        return known if known is not None else sample.rpartition("/")[0]

    def holder(self, sample: str) -> str | None:
        return self._holder.get(sample)

    def is_ended(self, sample: str) -> bool:
        return sample in self._ended

    def end(self, kind: EndKind, ids: Iterable[str], text: str, member: str) -> str | None:
        """End ids; saying the same again changes nothing. Returns what is wrong when two ends contradict."""
        wrong: str | None = None
        for sample in ids:
            if sample not in self._holder:
                self.order.append(sample)
                self._holder[sample] = member
            before = self._ended.get(sample)
            if before is None:
                self._ended[sample] = (kind, text, member)
            elif before[0] != kind and wrong is None:
                wrong = (
                    f"sample {sample} was {_ended(before)} and then {_ended((kind, text, member))}; "
                    "a sample ends one way"
                )
        return wrong

    def account(self, waiting: Mapping[str, str], unread: Mapping[str, int]) -> StepAccount:
        """The account so far. ``waiting``: ids that some member still wants to put -> where."""
        lost = {sample: holder for sample, holder in self._holder.items() if sample not in self._ended}
        lost.update({sample: holder for sample, holder in waiting.items() if sample not in self._ended})
        return StepAccount(
            self.step,
            tuple(sample for sample, (kind, _, _) in self._ended.items() if kind == "trained"),
            {sample: text for sample, (kind, text, _) in self._ended.items() if kind == "dropped"},
            {sample: text for sample, (kind, text, _) in self._ended.items() if kind == "carried"},
            lost,
            dict(unread),
        )


def _ended(end: tuple[EndKind, str, str]) -> str:
    kind, text, member = end
    if kind == "trained":
        return f"trained on by {member}"
    return f"dropped by {member} ({text})" if kind == "dropped" else f"carried to {text} by {member}"
