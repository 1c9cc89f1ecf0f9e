"""How DeepSpeed comes into a process: late, quietly, without compiling; and its config keys."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlinf_engines import conf

HERE = Path(__file__).parent
needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")

SET_UP = """
import sys
sys.path.insert(0, sys.argv[1])
import trainer_cases as cases
from rlinf_core.types import ParallelInfo
from rlinf_engines.trainers.deepspeed_trainer import DeepSpeedTrainer

assert "deepspeed" not in sys.modules
keys = dict(zero_stage=int(sys.argv[2]), offload_optimizer=False, offload_parameters=False)
cfg = cases.trainer_config("deepspeed", **keys, bucket_elements=1000, persistence_elements=0)
trainer = DeepSpeedTrainer(cfg)
assert "deepspeed" not in sys.modules
trainer.setup(cases.model_config(), cases.head, ParallelInfo(), seed=0)
cases.train(trainer, [[0, 1, 2, 3], [4, 5, 6, 7]])
trainer.close()
"""

# What DeepSpeed does when it is left alone: it compiles its shared-memory operation.
BUILD = """
import deepspeed
deepspeed.init_distributed("gloo", auto_mpi_discovery=False, init_method="file://" + __import__("sys").argv[1], rank=0,
                           world_size=1)
"""


def set_up(extensions: Path, stage: int, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SET_UP, str(HERE), str(stage)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_EXTENSIONS_DIR": str(extensions), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_importing_the_backend_loads_nothing_heavy() -> None:
    code = (
        "import sys, rlinf_engines.conf.deepspeed\n"
        "from rlinf_engines.trainers.deepspeed_trainer import DeepSpeedTrainer\n"
        "import rlinf_engines.trainers.deepspeed_runtime\n"
        "assert 'deepspeed' in DeepSpeedTrainer.requires\n"
        "print([m for m in ('torch', 'transformers', 'deepspeed') if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@needs_deepspeed
@pytest.mark.parametrize("stage", [1, 3])
def test_nothing_is_compiled_nor_printed_and_a_stale_lock_harms_nobody(tmp_path: Path, stage: int) -> None:
    lock = tmp_path / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir()
    lock.touch()
    # No compiler is on the path either.
    done = set_up(tmp_path, stage, PATH=str(Path(sys.executable).parent))
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == [lock]


def until(there: Any, process: subprocess.Popen[Any], seconds: float) -> None:
    """Wait until ``there()``, while the process lives."""
    deadline, pause = time.monotonic() + seconds, threading.Event()
    while not there():
        assert process.poll() is None, "the builder ended first"
        assert time.monotonic() < deadline, f"not there after {seconds} s"
        pause.wait(0.02)


def kill_session(session: int) -> None:
    """Kill what is left of a session that this test started."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.getsid(int(entry.name)) == session:
                    os.kill(int(entry.name), signal.SIGKILL)
            except ProcessLookupError:  # it has ended by now
                continue


@needs_deepspeed
@pytest.mark.slow
def test_a_builder_that_was_killed_leaves_a_lock_that_harms_nobody(tmp_path: Path) -> None:
    extensions = tmp_path / "extensions"
    extensions.mkdir()
    builder = subprocess.Popen(
        [sys.executable, "-c", BUILD, str(tmp_path / "meet")],
        env={**os.environ, "DS_ACCELERATOR": "cpu", "TORCH_EXTENSIONS_DIR": str(extensions)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        until(lambda: list(extensions.rglob("lock")) and list(extensions.rglob("build.ninja")), builder, 120)
    finally:
        builder.kill()
        builder.wait()
        kill_session(builder.pid)  # its compilers have process groups of their own
    assert list(extensions.rglob("lock"))
    done = set_up(extensions, 2)
    assert done.returncode == 0, done.stderr
    assert not list(extensions.rglob("*.so"))


@pytest.mark.parametrize(
    ("keys", "dtype", "message"),
    [
        ({}, "float64", "model.dtype: DeepSpeed keeps float32 masters at trainer.zero_stage 2"),
        ({"zero_stage": 0, "offload_optimizer": True}, "float32", "trainer.offload_optimizer: needs"),
        ({"zero_stage": 3, "offload_parameters": True}, "float32", "trainer.offload_parameters: needs"),
        ({"zero_stage": 2, "offload_optimizer": True, "offload_parameters": True}, "float32", "trainer.offload_param"),
        ({"betas": [0.9]}, "float32", "trainer.betas: "),
    ],
)
def test_values_that_cannot_be_are_refused(keys: dict[str, Any], dtype: str, message: str) -> None:
    (problem,) = conf.DeepSpeedTrainer(**keys).validate(SimpleNamespace(model=conf.Model(dtype=dtype)))
    assert problem.startswith(message)


@pytest.mark.parametrize(
    "keys", [{}, {"zero_stage": 3, "offload_optimizer": True, "offload_parameters": True}, {"zero_stage": 0}]
)
def test_values_that_can_be(keys: dict[str, Any]) -> None:
    assert conf.DeepSpeedTrainer(**keys).validate(SimpleNamespace(model=conf.Model())) == []
