"""Simulators whose every number can be computed by hand, and plugins of them that fail in every way there is."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlinf_embodied.envs import Box, Discrete, EnvSpec, PerEnv, Text

BOX = Box(np.full(2, -1.0), np.full(2, 1.0))
ANY = Box(np.full(3, -np.inf), np.full(3, np.inf))


class Counter:
    """State: (seed modulo 1000, steps so far, sum of the actions' first numbers). Ends at ``length``; each step is
    worth what it added, and is a success at every third step."""

    def __init__(self, cfg: Any, index: int) -> None:
        self.cfg, self.index = cfg, index
        self.length = cfg.get("length")
        self.closed = False

    def observe(self) -> dict[str, Any]:
        state = np.array([self.seed % 1000, self.steps, self.total], dtype=np.float32)
        return {"state": state, "instruction": f"go to {self.seed % 7}"}

    def reset(self, seed: int) -> dict[str, Any]:
        self.seed, self.steps, self.total = seed, 0, 0.0
        return self.observe()

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool]:
        self.steps += 1
        gain = float(np.asarray(action).reshape(-1)[0])
        self.total += gain
        if self.cfg.get("when") != "render":
            self.misbehave()
        over = self.length is not None and self.steps >= self.length
        return self.observe(), gain, over, self.steps % 3 == 0

    def render(self) -> np.ndarray:
        if self.cfg.get("when") == "render":
            self.misbehave()
        picture = np.zeros((8, 8, 3), dtype=np.uint8)
        picture[0] = 200  # the upper edge
        return picture

    def close(self) -> None:
        self.closed = True

    def misbehave(self) -> None:
        """``cfg.fault`` at step ``cfg.at`` of environment ``cfg.bad``; with ``cfg.once``, a file, only once in all.
        With ``cfg.when`` "render" not until it is drawn after that step."""
        fault = self.cfg.get("fault")
        if not fault or self.steps != self.cfg.get("at", 3) or self.index != self.cfg.get("bad", 1):
            return
        if once := self.cfg.get("once"):
            if Path(once).exists():
                return
            Path(once).write_text("")
        if fault == "raise":
            raise ValueError("the arm came off")
        if fault == "hang":
            print("about to hang", file=sys.stderr, flush=True)
            while True:
                time.sleep(60)
        if fault == "exit":
            print("bye", file=sys.stderr, flush=True)
            os._exit(7)
        if fault == "sysexit":
            raise SystemExit(3)
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "nan":
            self.total = float("nan")
        if fault == "chatter":
            for _ in range(5000):
                print("x" * 100, file=sys.stderr)


class Toys(PerEnv):
    """``Counter`` environments. Config keys, all optional: ``max_episode_steps``, ``max_restarts``, ``discrete`` and
    those of ``Counter``."""

    def __init__(self, cfg: Any, indices: Sequence[int], seed: int) -> None:
        self.plain = dict(cfg.items())
        if message := self.plain.get("refuse"):
            from rlinf_core.errors import ConfigError

            raise ConfigError(message)
        if self.plain.get("fault") == "start":
            raise OSError("no such arm")
        if self.plain.get("fault") == "start hang":
            print("starting", file=sys.stderr, flush=True)
            time.sleep(600)
        super().__init__(cfg, indices, seed)

    def make(self, index: int) -> Counter:
        return Counter(self.plain, index)

    def describe(self, env: Any) -> EnvSpec:
        action: Box | Discrete = Discrete(5) if self.plain.get("discrete") else BOX
        return EnvSpec({"state": ANY, "instruction": Text()}, action, self.plain.get("max_episode_steps", 10))


class RaisingVector(Toys):
    """A vector that is not made of single environments, so that it raises as a whole."""

    def step(self, actions: Any, active: Any = None) -> Any:
        result = super().step(actions, active)
        if self.plain.get("once") and not Path(self.plain["once"]).exists():
            Path(self.plain["once"]).write_text("")
            raise KeyError("everything came off")
        return result
