"""How good a model is: pass@1 and pass@k on problems of a file, with every answer kept.

rlinf eval model.path=DIR task.path=problems.jsonl eval.samples=8 eval.k=[1,4,8]
rlinf eval reasoning/grpo_math model.path=DIR task.path=problems.jsonl
rlinf eval runs/reasoning/grpo_math/2026-01-31_12-00-00
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlinf_core import Flow
from rlinf_reasoning.evaluation import answers_file, table
from rlinf_reasoning.recipes import phases
from rlinf_reasoning.tasks.base import load_data
from rlinf_reasoning.workers import Generator, Reward

NAME = "evaluation"


def evaluate(flow: Flow, cfg: Any) -> None:
    data = load_data(cfg)
    generator = flow.group("generator", Generator, cfg)
    reward = flow.group("reward", Reward, cfg)
    report = phases.evaluate(flow, cfg, data, generator, reward, NAME)
    if isinstance(report, Mapping):  # not while the flow is traced
        print(table(report))
        print(f"answers: {answers_file(flow.run_dir, NAME)}")
