"""MuJoCo's pictures on machines with and without a display."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlinf_core.errors import describe
from rlinf_embodied.envs.checks import SimulatorError

NEEDS = "egl needs a driver (on Debian: libegl1 and libgl1-mesa-dri), osmesa the library libosmesa6, glfw a display"


def load_mujoco() -> None:
    """Import MuJoCo, set to draw without a display where there is none, unless the user says how (``MUJOCO_GL``).

    Raises ImportError when it is not installed, SimulatorError when it does not load with ``MUJOCO_GL``.
    """
    if not os.environ.get("DISPLAY") and not os.environ.get("WAYLAND_DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")
    try:
        import mujoco  # noqa: F401 - it reads MUJOCO_GL now
    except ImportError:
        raise
    except Exception as error:
        raise SimulatorError(f"MuJoCo does not load with {_chosen()}: {describe(error, 300)}; {NEEDS}") from error


def mujoco_picture(render: Callable[[], Any]) -> NDArray[np.uint8]:
    """What ``render`` draws; raises SimulatorError that says what drawing takes."""
    try:
        return np.asarray(render())
    except Exception as error:
        raise SimulatorError(f"MuJoCo cannot draw with {_chosen()}: {describe(error, 300)}; {NEEDS}") from error


def _chosen() -> str:
    return f"MUJOCO_GL={os.environ.get('MUJOCO_GL', '(not set)')}"
