"""Configuration: ``compose`` a recipe into a read-only ``Config``. Imports neither ray nor torch."""

from __future__ import annotations

from rlinf_core.config.compose import Composed, compose, compose_full
from rlinf_core.config.node import Config
from rlinf_core.config.schema import KeyInfo
from rlinf_core.config.user_recipe import load_program, recipe

__all__ = ["Composed", "Config", "KeyInfo", "compose", "compose_full", "load_program", "recipe"]
