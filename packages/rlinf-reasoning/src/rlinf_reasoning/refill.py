"""Which prompts a step draws when groups without signal are replaced. Pure: a function of prompts and rewards."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence

from rlinf_core.types import Prompt, Sample
from rlinf_reasoning.tasks.base import PromptData

ALL_RIGHT, ALL_WRONG, EQUAL, NO_PEERS, SURPLUS = "all right", "all wrong", "equal rewards", "no peers", "surplus"


def candidates(data: PromptData, step: int, refills: int) -> list[Prompt]:
    """The prompts that step ``step`` may draw, in their order: those of ``data.batch(step)``, then further ones of the
    training problems for ``refills`` rounds of as many each.

    A function of (seed, step) alone; no problem comes twice. Fewer where the training problems run out.
    """
    batch = data.batch(step)
    here = {prompt.text for prompt in batch}
    others = [problem for problem in data.train if problem.prompt not in here]
    wanted = min(refills * len(batch), len(others))
    chosen = random.Random(f"{data.seed}/refill/{step}").sample(others, wanted)
    drawn = [data.prompt(problem, step, number) for number, problem in enumerate(chosen, start=len(batch))]
    return [*batch, *drawn]


class Refill:
    """The rounds of one step: ``draw`` prompts, have them answered, ``judge`` their groups, until ``draw`` is empty.

    A round after the first draws what is missing over the share of groups that had signal so far, at most ``target``.
    Groups are kept in the order in which they were drawn, so that a round's surplus is its last groups.

    Args:
        candidates: all prompts that may be drawn, in this order.
        target: groups to keep.
        max_refills: rounds after the first.
        filtered: a response that the limit cut is no peer (``algorithm.overlong_filter``).
    """

    def __init__(self, candidates: Sequence[Prompt], target: int, max_refills: int, *, filtered: bool = False) -> None:
        self.target = target
        self._left = list(candidates)
        self._rounds_left = max_refills + 1
        self._filtered = filtered
        self._round: list[Prompt] = []
        self._reasons: Counter[str] = Counter()
        self.kept = 0
        self.drawn = 0
        self.rounds = 0

    @property
    def missing(self) -> int:
        return self.target - self.kept

    def draw(self) -> list[Prompt]:
        """The prompts of the next round; empty when there is nothing to draw for, or with."""
        if not self.missing or not self._rounds_left or not self._left:
            return []
        with_signal = self.kept + self._reasons[SURPLUS]
        share = max(with_signal, 1) / self.drawn if self.drawn else 1.0
        number = min(math.ceil(self.missing / share), self.target)
        self._round, self._left = self._left[:number], self._left[number:]
        self._rounds_left -= 1
        self.rounds += 1
        self.drawn += len(self._round)
        return self._round

    def judge(self, groups: Mapping[str, Sequence[Sample]]) -> dict[str, str]:
        """Why each group of the round is dropped, in the order drawn; ``""`` for those that are kept.

        Raises:
            KeyError: a group of the round is not there.
        """
        found = {}
        for prompt in self._round:
            reason = self._why(groups[prompt.id])
            if not reason and not self.missing:
                reason = SURPLUS
            if reason:
                self._reasons[reason] += 1
            else:
                self.kept += 1
            found[prompt.id] = reason
        return found

    def _why(self, samples: Sequence[Sample]) -> str:
        """Why a group has no signal: the verifier's rewards do not differ. Over-long penalties do not count."""
        peers = [s.reward for s in samples if s.reward is not None and not self._cut(s)]
        if len(peers) < 2:
            return NO_PEERS
        # As rlinf_algos.groups_with_signal: rewards that are equal up to rounding have no signal.
        low, high = min(peers), max(peers)
        above = [reward - low for reward in peers]
        mean = math.fsum(above) / len(above)
        if math.fsum((a - mean) ** 2 for a in above) > (1e-6 * (abs(low) + mean)) ** 2 * len(above):
            return ""
        return ALL_RIGHT if low >= 1.0 else ALL_WRONG if high <= 0.0 else EQUAL

    def _cut(self, sample: Sample) -> bool:
        return self._filtered and sample.finish_reason == "length"

    def metrics(self) -> dict[str, float]:
        """The numbers of groups, see ``PromptSampler.sample``."""
        reasons = self._reasons
        return {
            "groups/drawn": float(self.drawn),
            "groups/kept": float(self.kept),
            "groups/missing": float(self.missing),
            "groups/refills": float(max(self.rounds - 1, 0)),
            "groups/all_right": float(reasons[ALL_RIGHT]),
            "groups/all_wrong": float(reasons[ALL_WRONG]),
            "groups/equal": float(reasons[EQUAL] + reasons[NO_PEERS]),
            "groups/surplus": float(reasons[SURPLUS]),
        }

    def explain(self) -> str:
        """What became of the groups so far, in words."""
        parts = [f"{count} {reason}" for reason, count in self._reasons.items()]
        return (
            f"{self.kept} of {self.target} groups have signal after {self.drawn} ({'; '.join(parts) or 'none drawn'})."
        )
