"""The cells of one trainer in the support matrix, one after another in this process; see test_support_matrix.py.

    python support_cells.py TRAINER FOLDER [OVERRIDE ...]

Each is a run of one step, in one process, into a folder of its own below FOLDER. What came of each goes into
FOLDER/cells.json, anew after each, so that a crash loses nothing.
"""

from __future__ import annotations

import json
import sys
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlinf_core import compose
from rlinf_core.errors import RLinfError
from rlinf_core.runner import run
from rlinf_reasoning.rewards.exact import ExactReward
from rlinf_reasoning.workers import Generator

FAMILIES = ("qwen2", "llama")
ROLLOUTS = ("transformers", "vllm")
ALGORITHMS = ("grpo", "dapo", "ppo")
SMALL = (
    "cluster.debug=true",
    "cluster.virtual_devices=1",
    "loggers=[jsonl]",
    "num_steps=1",
    "prompts_per_step=2",
    "algorithm.group_size=2",
    "algorithm.kl_coef=0.05",
    # One step, of which the weights can be seen: what was published differs from what the engine began with.
    "warm_start.max_steps=1",
    "warm_start.problems=12",
    "warm_start.held_out=4",
    "warm_start.batch_size=8",
    "warm_start.lr=0.01",
    "warm_start.lr_warmup_steps=0",
    "eval.problems=2",
    "task.pool=500",
    "model.tiny.hidden_size=64",
    "model.tiny.heads=2",
    "model.tiny.kv_heads=2",
    "model.tiny.intermediate_size=64",
    "model.tiny.layers=2",
)
OWN = {
    "ppo": ("algorithm.critic_warmup_steps=0",),
    "vllm": ("rollout.max_num_seqs=8",),
    "deepspeed/vllm": ("rollout.engine_process=true",),
    "megatron/vllm": ("rollout.engine_process=true",),
}
versions: list[int] = []
"""Versions of the weights that the engines had at the end of a run."""


def any_number(self: ExactReward, text: str, answer: str, fields: Mapping[str, Any]) -> float:
    """A reward that differs between any two responses, so that every group teaches something."""
    return zlib.crc32(text.encode()) / 2**32


def teardown(self: Generator) -> None:
    versions.append(self.engine.version)
    self.engine.close()


def cell(trainer: str, family: str, rollout: str, algorithm: str, folder: Path, overrides: list[str]) -> dict[str, Any]:
    """The training step's metrics and the engine's version, or why the run is refused."""
    recipe = f"reasoning/{algorithm}_arithmetic"
    chosen = [f"trainer={trainer}", f"rollout={rollout}", f"model.tiny.family={family}", f"run_dir={folder}"]
    own = [word for name in (algorithm, rollout, f"{trainer}/{rollout}") for word in OWN.get(name, ())]
    words = [*SMALL, *chosen, *own, *overrides]
    versions.clear()
    try:
        cfg = compose(recipe, words)
    except RLinfError as error:
        return {"refused": str(error)}
    code = run(cfg, recipe)
    (metrics,) = (folder / recipe).glob("*/metrics.jsonl")
    lines = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    (step,) = [line for line in lines if line["phase"] == "train"][:1]
    return {"code": code, "versions": list(versions), "step": step}


def main(trainer: str, folder: Path, overrides: list[str]) -> None:
    ExactReward.__call__ = any_number  # type: ignore[method-assign]
    Generator.teardown = teardown  # type: ignore[method-assign]
    cells: dict[str, dict[str, Any]] = {}
    for family in FAMILIES:
        for rollout in ROLLOUTS:
            for algorithm in ALGORITHMS:
                name, begin = f"{trainer}/{rollout}/{family}/{algorithm}", time.monotonic()
                print(f"== {name}", file=sys.stderr, flush=True)
                cells[name] = cell(trainer, family, rollout, algorithm, folder / name, overrides)
                cells[name]["seconds"] = time.monotonic() - begin
                (folder / "cells.json").write_text(json.dumps(cells), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
