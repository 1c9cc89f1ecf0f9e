"""Lets ManiSkill simulate states where there is no Vulkan device; it does nothing where there is one.

ManiSkill makes materials for pictures while it builds a scene, also when nothing is ever drawn, and SAPIEN raises
"failed to find a rendering device" at the first of them. Here a class that takes everything stands in for it.
"""

from __future__ import annotations

import warnings
from typing import Any


class NoMaterial:
    """A material that is never looked at: any argument, attribute and method."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None

    def __setattr__(self, name: str, value: Any) -> None:
        pass


def has_vulkan() -> bool:
    """Whether SAPIEN finds a device to draw with."""
    with warnings.catch_warnings():
        # That it brings a Vulkan loader of its own where the system has none.
        warnings.filterwarnings("ignore", "Failed to find system libvulkan", UserWarning)
        import sapien

    if sapien.render.RenderMaterial is NoMaterial:
        return False
    try:
        sapien.render.RenderMaterial()
    except RuntimeError:
        return False
    return True


def apply() -> bool:
    """Put the stand-in where ManiSkill looks for the class, if it is needed; whether it was. Call it before
    ``mani_skill.envs`` is imported."""
    if has_vulkan():
        return False
    import sapien
    import sapien.pysapien
    import sapien.wrapper.urdf_loader

    for module in (sapien.render, sapien.pysapien.render, sapien.wrapper.urdf_loader):
        module.RenderMaterial = NoMaterial
    return True
