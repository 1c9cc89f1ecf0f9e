"""Which groups of samples an optimizer step takes."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence

from rlinf_core.types import LossFn, StepInfo, Trainer
from rlinf_reasoning.batch import Row
from rlinf_reasoning.training.backend import accumulate, add_up


def group_of(sample_id: str) -> str:
    """The group (prompt id) in a sample id."""
    return sample_id.rpartition("/")[0]


def deal_groups(sample_ids: Iterable[str], minibatches: int, epochs: int, seed: int) -> Iterator[tuple[int, set[str]]]:
    """(epoch, groups) of every optimizer step on the groups of these samples.

    The first epoch takes them in the order of their ids, later ones shuffled by (seed, epoch, first group), so that it
    is a function of the batch alone. Fewer groups than minibatches make fewer steps.
    """
    groups = sorted(set(map(group_of, sample_ids)))
    count = min(minibatches, len(groups))
    for epoch in range(epochs):
        if epoch and groups:
            random.Random(f"{seed}/{epoch}/{min(groups)}").shuffle(groups)
        for number in range(count):
            yield epoch, {g for place, g in enumerate(groups) if place * count // len(groups) == number}


class Steps:
    """Gradients and optimizer steps of one update, and the sums of what they report.

    With one optimizer step in all, portions only accumulate and ``finish`` steps; otherwise every minibatch steps, and
    the batch must come whole.
    """

    def __init__(self, trainer: Trainer, minibatches: int, epochs: int, seed: int) -> None:
        self.trainer = trainer
        self.minibatches = minibatches
        self.epochs = epochs
        self.seed = seed
        self.start()

    @property
    def single(self) -> bool:
        """Whether a batch gets one optimizer step."""
        return self.minibatches == self.epochs == 1

    def start(self) -> None:
        self.sums: dict[str, float] = {}
        self.first: dict[str, float] = {}
        """Sums of the first epoch alone."""
        self.fresh: dict[str, float] = {}
        """Sums of what was computed before the first optimizer step."""
        self.info: StepInfo | None = None

    def run(self, rows: Sequence[Row], sample_ids: Iterable[str], loss_fn: LossFn) -> None:
        """Train this replica's ``rows``; ``sample_ids`` are those of all replicas. Collective."""
        for epoch, groups in deal_groups(sample_ids, self.minibatches, self.epochs, self.seed):
            totals = accumulate(self.trainer, [row for row in rows if group_of(row.id) in groups], loss_fn)
            add_up(self.sums, totals)
            if not epoch:
                add_up(self.first, totals)
            if self.info is None:
                add_up(self.fresh, totals)
            if not self.single and totals["count"] > 0.0:
                self.info = self.trainer.step(totals["count"])

    def finish(self) -> StepInfo | None:
        """The optimizer step over all portions. ``None`` where nothing was trained on. Collective."""
        if self.single and self.sums.get("count", 0.0) > 0.0:
            self.info = self.trainer.step(self.sums["count"])
        return self.info
