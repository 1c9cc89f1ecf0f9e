"""Every trainer with every rollout backend, model family and algorithm: what docs/support-matrix.md says."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rlinf_core import compose
from rlinf_core.errors import ConfigError
from rlinf_engines.conf.rollouts import VLLM_HEAD_SIZES

ROOT = Path(__file__).parents[1]
HERE = Path(__file__).parent
TRAINERS = ("torch", "deepspeed", "megatron")
PATIENCE_S = 540.0
YES, NO = "yes", "refused: "
# The largest difference between the log-probs of engine and trainer: one in float32, so it is rounding.
GAP = 1e-4

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def documented() -> dict[str, str]:
    """What the table says of each cell, by trainer/rollout/family/algorithm."""
    lines = (ROOT / "docs" / "support-matrix.md").read_text(encoding="utf-8").splitlines()
    rows = [[part.strip(" `") for part in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    (_, _, _, *algorithms), _, *rest = rows
    return {"/".join((*row[:3], name)): said for row in rest for name, said in zip(algorithms, row[3:], strict=True)}


def test_the_table_has_every_cell_once() -> None:
    cells = documented()
    assert {name.split("/")[0] for name in cells} == set(TRAINERS)
    assert len(cells) == 3 * 2 * 2 * 3
    assert all(said == YES or said.startswith(NO) for said in cells.values())


def run_cells(trainer: str, folder: Path) -> tuple[Path, subprocess.CompletedProcess[str]]:
    return folder / "cells.json", subprocess.run(
        [sys.executable, str(HERE / "support_cells.py"), trainer, str(folder)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


@pytest.fixture(scope="module")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Any]]]:
    """Of each trainer; two at once, as each has one thread. That with the fewest processes comes last."""
    with ThreadPoolExecutor(2) as pool:
        yield {name: pool.submit(run_cells, name, tmp_path_factory.mktemp(name)) for name in reversed(TRAINERS)}


@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_cells_are_as_documented(trainer: str, sessions: dict[str, Future[Any]]) -> None:
    file, done = sessions[trainer].result()
    assert done.returncode == 0, done.stderr[-5000:]
    cells: dict[str, dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
    expected = {name: said for name, said in documented().items() if name.startswith(f"{trainer}/")}
    assert cells.keys() == expected.keys()
    for name, said in expected.items():
        found = cells[name]
        if said != YES:
            assert said.removeprefix(NO) in found.get("refused", ""), (name, found)
            continue
        assert found.get("code") == 0, (name, found, done.stderr[-5000:])
        step = found["step"]
        assert found["versions"] == [2], (name, "weights after the warm start and after the step")
        assert step["groups/without_signal"] == 0.0 and step["staleness/max"] == 0.0, (name, step)
        assert all(math.isfinite(step[key]) for key in ("loss", "policy/ratio", "policy/entropy")), (name, step)
        assert math.isfinite(step["grad_norm"]) and step["grad_norm"] > 0.0, (name, step)
        assert step["policy/engine_gap_max"] < GAP, (name, step["policy/engine_gap_max"])
        if name.endswith("/ppo"):
            assert math.isfinite(step["critic/loss"]) and step["critic/loss"] > 0.0, (name, step)


def test_the_page_names_the_head_sizes_of_vllm_on_a_cpu() -> None:
    text = " ".join((ROOT / "docs" / "support-matrix.md").read_text(encoding="utf-8").split())
    *sizes, last = map(str, VLLM_HEAD_SIZES)
    assert f"heads of {', '.join(sizes)} or {last} numbers" in text


@pytest.mark.parametrize("trainer", ["deepspeed", "megatron"])
def test_one_process_for_vllm_and_a_trainer_with_a_group_is_refused(trainer: str) -> None:
    words = ["cluster.debug=true", f"trainer={trainer}", "rollout=vllm"]
    with pytest.raises(ConfigError, match=rf"vllm and {trainer} would be in one process.*rollout\.engine_process=true"):
        compose("reasoning/grpo_arithmetic", words)
    compose("reasoning/grpo_arithmetic", [*words, "rollout.engine_process=true"])
    compose("reasoning/grpo_arithmetic", words[1:])
