"""Real vLLM in processes of its own: killed, stopped, left by its parent; one model in two of them."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed"),
    pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's death signal"),
]
SCRIPT = Path(__file__).with_name("vllm_faults.py")
DEADLINE_S = 500.0


def environment(folder: Path) -> dict[str, str]:
    temporary = folder / "tmp"
    temporary.mkdir()
    return {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary)}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the session saw."""
    folder = tmp_path_factory.mktemp("faults")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder / "found.json")],
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return result


@pytest.mark.timeout(DEADLINE_S + 60)
def test_a_killed_engine_is_replaced_and_nothing_is_lost_or_drawn_otherwise(found: dict[str, Any]) -> None:
    assert found["killed_ids"] == found["asked"]
    assert found["killed_same"]
    assert found["killed_difference"] < 1e-3
    assert found["killed_versions"] == [7]
    assert found["killed_gone"]
    (line,) = found["killed_log"]
    assert "the engine died: its process was killed by SIGKILL while generating; restart 1 of 1 with weights" in line


def test_an_engine_that_shows_no_sign_of_life_is_replaced(found: dict[str, Any]) -> None:
    assert found["stopped_same"]
    (line,) = found["stopped_log"]
    assert "no sign of life for 3 s while generating (rollout.stall_timeout_s)" in line


def test_when_no_restart_is_left_the_cause_and_the_log_are_named(found: dict[str, Any]) -> None:
    assert "was killed by SIGKILL while generating; rollout.max_restarts=0 allows no further restart" in found["over"]
    assert "its log is " in found["over"]
    assert Path(found["over"].split("its log is ")[1].split(",")[0].split(" ")[0]).is_file()


@pytest.mark.timeout(DEADLINE_S)
def test_no_process_is_left_when_the_parent_is_killed(tmp_path: Path) -> None:
    out = tmp_path / "pid.json"
    parent = subprocess.Popen([sys.executable, str(SCRIPT), str(out), "hold"], env=environment(tmp_path))
    try:
        end = time.monotonic() + DEADLINE_S / 2
        while not out.exists():
            assert parent.poll() is None, "the parent ended by itself"
            assert time.monotonic() < end, "no engine"
            time.sleep(0.1)
        child = int(json.loads(out.read_text())["pid"])
        os.kill(child, 0)
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    end = time.monotonic() + 20.0
    while Path(f"/proc/{child}").exists():
        assert time.monotonic() < end, "the engine outlived its parent"
        time.sleep(0.05)


@pytest.mark.timeout(DEADLINE_S)
def test_two_processes_hold_one_model(tmp_path: Path) -> None:
    script, out = SCRIPT.with_name("vllm_tensor_parallel.py"), tmp_path / "found.json"
    done = subprocess.run(
        [sys.executable, str(script), str(out)],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S - 20,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert found["difference"] < 1e-3
    assert found["new_difference"] < 1e-3
    assert found["versions"] == [3]
    assert not found["left_behind"]
    # vLLM's kernels for older processors have no shared memory between processes.
    assert found["shared"] or "avx512f" not in Path("/proc/cpuinfo").read_text()
