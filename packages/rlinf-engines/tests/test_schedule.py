"""Learning rate by step."""

from __future__ import annotations

from typing import Any

import pytest

from rlinf_core.errors import ConfigError
from rlinf_engines.trainers.schedule import learning_rate


def rates(make_trainer_cfg: Any, steps: int, **keys: Any) -> list[float]:
    return [learning_rate(make_trainer_cfg(lr=1.0, **keys), step) for step in range(steps)]


def test_warm_up_is_linear_and_never_zero(make_trainer_cfg: Any) -> None:
    assert rates(make_trainer_cfg, 6, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_constant_is_constant(make_trainer_cfg: Any) -> None:
    assert rates(make_trainer_cfg, 3) == [1.0, 1.0, 1.0]


def test_linear_ends_at_its_floor_and_stays(make_trainer_cfg: Any) -> None:
    keys = {"schedule": "linear", "schedule_steps": 4, "min_lr_ratio": 0.2}
    assert rates(make_trainer_cfg, 7, **keys) == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2])


def test_cosine_after_warm_up(make_trainer_cfg: Any) -> None:
    keys = {"schedule": "cosine", "warmup_steps": 2, "schedule_steps": 6}
    got = rates(make_trainer_cfg, 8, **keys)
    assert got == pytest.approx([0.5, 1.0, 1.0, 0.5 + 0.5 * 2**-0.5, 0.5, 0.5 - 0.5 * 2**-0.5, 0.0, 0.0])


def test_an_unknown_schedule_is_refused(make_trainer_cfg: Any) -> None:
    with pytest.raises(ConfigError, match="trainer.schedule: 'step'"):
        rates(make_trainer_cfg, 1, schedule="step")
