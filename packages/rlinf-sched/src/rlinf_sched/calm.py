"""Samples without what only a disturbed machine explains.

A busy machine makes single steps several times as long, and a profile has few steps. What a setting took is cut to what
its calmer steps and the same stage's other settings allow; what the scatter of the items explains is left alone.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from rlinf_sched.graph import Stage
from rlinf_sched.profile import ProfileSample

_ALLOWED, _DEVIATIONS = 0.25, 4.0
"""A step may take so much longer than its setting's calm ones, or so many standard deviations of its items' mean."""
_Setting = tuple[int, int]


def calm(samples: Sequence[ProfileSample], stage: Stage, noise: float) -> list[ProfileSample]:
    """The samples of one stage with the times of disturbed steps cut. ``noise``: relative deviation of one item.

    A setting's bound is its lower median, or what others show to be enough if that is less: more items at once never
    take longer than the same ones in portions, nor n ranks' work longer than n times on one. It is never below the
    setting's fastest step. Each with an allowance."""
    settings: defaultdict[_Setting, list[ProfileSample]] = defaultdict(list)
    for sample in samples:
        settings[max(sample.devices if stage.device else stage.ranks or 1, 1), sample.portion].append(sample)
    middle = {key: lower_median([s.seconds for s in some]) for key, some in settings.items()}
    bounds = {key: _bound(key, some, middle, noise) for key, some in settings.items()}
    found = []
    for key, some in settings.items():
        for sample in some:
            part = min(1.0, bounds[key] / sample.seconds) if sample.seconds > 0 else 1.0
            cut = replace(sample, seconds=sample.seconds * part, ranks=tuple(t * part for t in sample.ranks))
            found.append(cut if part < 1 else sample)
    return found


def _bound(key: _Setting, some: Sequence[ProfileSample], middle: dict[_Setting, float], noise: float) -> float:
    n, c = key
    enough = [s * m / n for (m, k), s in middle.items() if m >= n and k <= c]
    items = min((sum(s.taken) / max(len(s.taken), 1) for s in some if s.taken), default=1.0)
    allowed = 1 + max(_ALLOWED, _DEVIATIONS * noise / math.sqrt(max(items, 1.0)))
    return allowed * max(min(enough), min(s.seconds for s in some))


def lower_median(values: Sequence[float]) -> float:
    """The middle one, of an even number the lower of the two: what disturbs only makes longer."""
    return sorted(values)[(len(values) - 1) // 2]
