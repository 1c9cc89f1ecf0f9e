"""What actor and critic have in common. Importing it loads neither torch nor transformers."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlinf_core import Sample
from rlinf_core.registry import Registry
from rlinf_core.rundir import guard, to_json


def barrier_of(cfg: Any) -> str:
    """What must be complete before training: a group for its advantages; the batch, where it gets several optimizer
    steps or its advantages are whitened."""
    algorithm = cfg.algorithm
    whitened = algorithm.advantage == "gae" and algorithm.whiten
    return "group" if algorithm.minibatches == 1 and algorithm.epochs == 1 and not whitened else "batch"


def ranks_problem(trainer: Any, ranks: int) -> str:
    """Why the backend of the config node ``trainer`` cannot have so many ranks; empty when it can, or does not say."""
    ask = getattr(Registry("rlinf.trainers").load(trainer.name), "ranks_problem", None)
    return str(ask(trainer, ranks)) if callable(ask) else ""


def save_failed(run_dir: Path, step: str, member: str, samples: Sequence[Sample]) -> str:
    """Keep a batch that broke the numbers, with token ids and log-probs, for a look afterwards; returns its path."""
    path = run_dir / "failed" / f"{step.replace('/', '-')}-{member}.jsonl"
    with guard(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            for sample in samples:
                file.write(json.dumps(to_json(asdict(sample))[0], ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
    return str(path)
