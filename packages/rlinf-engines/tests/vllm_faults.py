"""What the fault test of vLLM in a process of its own looks at: ``vllm_faults.py OUT``. Kills real engines."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm_session import MODEL, ROLLOUT, TEMPERATURE, requests, worst_difference

from rlinf_core.errors import RLinfError
from rlinf_core.types import GenerateRequest, ParallelInfo, SamplingParams
from rlinf_engines.models import load_model, named_weights
from rlinf_engines.rollouts.vllm_rollout import VllmRollout

GONE_S = 20.0
SAMPLING = SamplingParams(max_new_tokens=40, temperature=TEMPERATURE, seed=3)


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def interrupted(rollout: VllmRollout, asked: list[GenerateRequest], sampling: SamplingParams, number: int) -> list[Any]:
    """Generate, and send the engine's process a signal after the first response."""
    responses = []
    for response in rollout.generate(asked, sampling):
        responses.append(response)
        if len(responses) == 1:
            os.kill(pid_of(rollout), number)
    return responses


def pid_of(rollout: VllmRollout) -> int:
    engine: Any = rollout.engine
    return int(engine.pid)


def gone(pid: int) -> bool:
    """Whether the process ends before a deadline."""
    end = time.monotonic() + GONE_S
    while time.monotonic() < end:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def main(out: Path) -> None:
    found: dict[str, Any] = {}
    lines = Lines()
    logging.getLogger("rlinf_engines").addHandler(lines)
    network = load_model(MODEL, 0)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(1)
        for parameter in network.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    asked = requests()
    found["asked"] = sorted(r.id for r in asked)
    keys = {**vars(ROLLOUT), "engine_process": True, "max_restarts": 1, "max_num_seqs": 4}
    rollout = VllmRollout(SimpleNamespace(**keys))
    rollout.setup(MODEL, ParallelInfo(), seed=0)
    rollout.load_weights(7, named_weights(network))
    whole = {r.id: r.token_ids for r in rollout.generate(asked, SAMPLING)}

    first = pid_of(rollout)
    killed = interrupted(rollout, asked, SAMPLING, signal.SIGKILL)
    found["killed_ids"] = sorted(r.id for r in killed)
    found["killed_same"] = {r.id: r.token_ids for r in killed} == whole
    found["killed_difference"] = worst_difference(killed, asked, network)
    found["killed_versions"] = sorted({v for r in killed for v in r.versions})
    found["killed_log"] = list(lines.lines)
    found["killed_gone"] = gone(first)

    lines.lines.clear()
    engine: Any = rollout.engine
    engine._stall_s = 3.0
    stopped = interrupted(rollout, asked, SAMPLING, signal.SIGSTOP)
    found["stopped_same"] = {r.id: r.token_ids for r in stopped} == whole
    found["stopped_log"] = list(lines.lines)

    rollout._max_restarts = 0
    try:
        interrupted(rollout, asked, SAMPLING, signal.SIGKILL)
    except RLinfError as error:
        found["over"] = str(error)
    out.write_text(json.dumps(found), encoding="utf-8")


def hold(out: Path) -> None:
    """Start an engine, say where it is, and generate until somebody ends us."""
    rollout = VllmRollout(SimpleNamespace(**{**vars(ROLLOUT), "engine_process": True}))
    rollout.setup(MODEL, ParallelInfo(), seed=0)
    aside = out.with_suffix(".part")
    aside.write_text(json.dumps({"pid": pid_of(rollout)}), encoding="utf-8")
    aside.rename(out)
    while True:
        list(rollout.generate(requests(), SAMPLING))


if __name__ == "__main__":
    (hold if sys.argv[2:] == ["hold"] else main)(Path(sys.argv[1]))
