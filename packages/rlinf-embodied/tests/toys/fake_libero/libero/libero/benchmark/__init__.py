from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

NAMES = ("push_the_plate", "open_the_drawer", "without_states", "without_a_file")
STATES = np.arange(20, dtype=np.float64).reshape(5, 4) / 100.0


class Suite:
    def __init__(self) -> None:
        print("[info] as the package does")

    def get_task_names(self) -> list[str]:
        return list(NAMES)

    def get_task(self, number: int) -> Any:
        name = NAMES[number]
        return SimpleNamespace(
            name=name, language=name.replace("_", " "), problem_folder="suite", bddl_file=f"{name}.bddl"
        )

    def get_task_init_states(self, number: int) -> Any:
        if NAMES[number] == "without_states":
            raise FileNotFoundError("without_states.npz")
        return STATES + number


def get_benchmark_dict() -> dict[str, type[Suite]]:
    return {"libero_spatial": Suite, "libero_goal": Suite}
