"""New weights from two shards in other processes go into a live engine, which then computes with them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("weight_engines_session.py")
DEADLINE_S = 280.0
needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")


@pytest.mark.parametrize("kind", ["transformers", pytest.param("vllm", marks=needs_vllm)])
def test_the_engine_computes_with_what_the_shards_sent(kind: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), kind, str(tmp_path / "found.json")],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    differences = found["differences"]
    for version in range(3):
        assert differences[f"{version} of {version}"] < 1e-3, differences
    for version in (1, 2):
        assert differences[f"{version} of {version - 1}"] > 0.05, differences
    assert found["versions"] == [[1], [2]]
    assert found["exit codes"] == [0, 0]
