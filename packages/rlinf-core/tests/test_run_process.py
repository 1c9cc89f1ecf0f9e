"""``rlinf run`` as a process: exit codes, last words, signals in every phase, and nothing left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray
from driving import our_workers

from rlinf_core.cluster import SLOT

pytestmark = pytest.mark.ray

RECIPE = '''
from __future__ import annotations
import os, signal, sys, threading
from dataclasses import dataclass
from pathlib import Path
from rlinf_core import In, Out, Prompt, Worker, recipe, task
from rlinf_core.errors import ConfigError

@dataclass
class Keys:
    num_steps: int = 2
    fault: str = ""
    place: str = ""

def pause(cfg, where):
    """Say that we are there, then wait to be interrupted."""
    if cfg.fault == where:
        print("AT", where, flush=True)
        Path(cfg.place, "here").write_text(where)
        threading.Event().wait(120)

class Maker(Worker):
    def setup(self):
        pause(self.cfg, "setup")
        if self.cfg.fault == "refuse":
            threading.Event().wait(120)  # in the middle of something when the run ends
    @task
    def make(self, prompts: In[Prompt], out: Out[int]):
        for portion in prompts.batches():
            with self.on_device():
                pause(self.cfg, "task")
                if self.cfg.fault == "loud":
                    for i in range(2000):
                        print("line", i)
                if self.cfg.fault == "raise":
                    raise ValueError("the reason")
                if self.cfg.fault == "fill":
                    with open(self.run_dir / "filler", "wb", buffering=0) as file:
                        try:
                            while True:
                                file.write(b"x" * 4096)
                        except OSError:
                            pass
                if self.cfg.fault == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                for p in portion:
                    out.put(int(p.text))
                    self.trained(p)

class Summer(Worker):
    device = False
    def setup(self):
        if self.cfg.fault == "refuse":
            raise ConfigError("model.path: no such model")
    @task
    def total(self, numbers: In[int]):
        return {"sum": sum(numbers)}

@recipe(schema=Keys)
def program(flow, cfg):
    maker = flow.group("maker", Maker, cfg)
    summer = flow.group("summer", Summer, cfg)
    for step in flow.steps(cfg.num_steps):
        prompts, numbers = step.channels("prompts", "numbers")
        step.feed(prompts, [Prompt(f"p{i}", str(i)) for i in range(10)])
        maker.make(prompts, numbers)
        step.report(summer.total(numbers))
        flow.record("total", step.join())
    if flow.groups and type(flow).__name__ == "LiveFlow":
        pause(cfg, "program")
'''


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    context = ray.init(
        address="local",
        num_cpus=4,
        resources={SLOT + str(i): 1.0 for i in range(2)},
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=80 << 20,
    )
    yield context.address_info["gcs_address"]
    ray.shutdown()


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "toy_recipe.py"
    path.write_text(RECIPE)
    return path


def start(recipe: Path, address: str, *overrides: str) -> subprocess.Popen[str]:
    folder = recipe.parent
    command = [sys.executable, "-m", "rlinf_core.cli.main", "run", str(recipe), f"run_dir={folder / 'runs'}"]
    environment = {**os.environ, "RAY_ADDRESS": address}
    return subprocess.Popen(
        [*command, f"place={folder}", *overrides],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=folder,
        start_new_session=True,
        preexec_fn=_heed_interrupts,
    )


def _heed_interrupts() -> None:
    """A process started in the background of a script inherits an ignored SIGINT."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def finish(process: subprocess.Popen[str], timeout: float = 90) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        pytest.fail(f"the run did not end within {timeout} s:\n{err}")
    return process.returncode, out, err


def wait_for(path: Path, process: subprocess.Popen[str], timeout: float = 60) -> None:
    tick = threading.Event()
    for _ in range(int(timeout / 0.1)):
        if path.exists():
            return
        assert process.poll() is None, process.communicate()
        tick.wait(0.1)
    raise AssertionError(f"{path} did not appear")


def test_a_good_run_exits_with_0_and_leaves_its_directory(recipe: Path, address: str) -> None:
    code, _, err = finish(start(recipe, address))
    assert code == 0, err
    assert err.count("items between workers of one machine: ") == 1
    (folder,) = (recipe.parent / "runs").rglob("metrics.jsonl")
    names = {p.name for p in folder.parent.iterdir()}
    assert {"config.yaml", "plan.yaml", "metrics.jsonl", "summary.json", "trace.json", "run.png"} <= names
    assert '"sum": 45' in folder.read_text()
    assert not psutil.wait_procs(our_workers(recipe.parent), timeout=10)[1]


@pytest.mark.parametrize(
    ("fault", "last"),
    [
        ("raise", r"rlinf: error: .*maker\[\d\] failed in make of train/0: ValueError: the reason"),
        ("kill", r"rlinf: error: .*maker\[\d\] died while working in make of train/0"),
    ],
)
def test_the_cause_is_the_last_thing_printed(recipe: Path, address: str, fault: str, last: str) -> None:
    code, _, err = finish(start(recipe, address, f"fault={fault}"))
    assert code == 1
    assert re.search(last, err), err
    tail = err[err.rindex("rlinf: error:") :]
    assert "raylet" not in tail
    assert not psutil.wait_procs(our_workers(recipe.parent), timeout=10)[1]


def test_what_a_worker_refuses_is_said_in_one_line(recipe: Path, address: str) -> None:
    """Ray has a page to say about each worker that is ended in the middle of its set-up."""
    code, out, err = finish(start(recipe, address, "fault=refuse"))
    assert code == 2
    last = "summer[0] failed in setup: ConfigError: model.path: no such model"
    assert err.splitlines()[-1] == f"rlinf: error: {last}" and err.splitlines()[-2] == "setting up workers", err
    assert "raylet" not in out + err and "SYSTEM_ERROR" not in out + err
    assert not psutil.wait_procs(our_workers(recipe.parent), timeout=10)[1]


@pytest.mark.parametrize(
    ("where", "number"),
    [("setup", signal.SIGINT), ("task", signal.SIGINT), ("program", signal.SIGINT), ("task", signal.SIGTERM)],
)
def test_a_signal_in_any_phase_ends_the_run_cleanly(recipe: Path, address: str, where: str, number: int) -> None:
    process = start(recipe, address, f"fault={where}")
    wait_for(recipe.parent / "here", process)
    process.send_signal(number)
    code, _, err = finish(process, timeout=40)
    assert code == 130, err
    assert "Traceback" not in err and "interrupted" in err.splitlines()[-1]
    assert not psutil.wait_procs(our_workers(recipe.parent), timeout=10)[1]


def test_workers_die_with_their_driver(recipe: Path, address: str) -> None:
    process = start(recipe, address, "fault=task")
    wait_for(recipe.parent / "here", process)
    workers = our_workers(recipe.parent)
    assert len(workers) >= 2
    process.kill()
    process.communicate()
    assert not psutil.wait_procs(workers, timeout=15)[1]


def test_two_runs_at_once_do_not_share_a_device(recipe: Path, address: str) -> None:
    first = start(recipe, address, "fault=task")
    wait_for(recipe.parent / "here", first)
    code, _, err = finish(start(recipe, address))
    assert code == 2
    assert re.search(r"rlinf: error: cannot reserve 2 device\(s\).*held by run '.*toy_recipe/.*'", err), err
    first.send_signal(signal.SIGINT)
    finish(first)
    code, _, err = finish(start(recipe, address))
    assert code == 0, err


def test_interrupting_while_ray_starts(recipe: Path) -> None:
    """No cluster to join: the run starts its own Ray and is interrupted during it."""
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    command = [sys.executable, "-m", "rlinf_core.cli.main", "run", str(recipe), f"run_dir={recipe.parent / 'runs'}"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
        preexec_fn=_heed_interrupts,
    )
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if "starting Ray" in line:
            break
    children: list[psutil.Process] = []
    tick = threading.Event()
    for _ in range(100):  # until Ray's own processes are being started
        children = psutil.Process(process.pid).children(recursive=True)
        if children:
            break
        tick.wait(0.1)
    process.send_signal(signal.SIGINT)
    code, _, err = finish(process, timeout=60)
    assert code == 130, "".join(lines) + err
    assert not psutil.wait_procs(children, timeout=20)[1]


def test_a_run_directory_below_a_file_is_refused_before_ray_starts(recipe: Path) -> None:
    (recipe.parent / "runs").write_text("a file")
    code, _, err = finish(start(recipe, "127.0.0.1:1"))
    assert code == 1
    assert re.search(r"rlinf: error: cannot create the run directory below .*runs.*: Not a directory", err), err
    assert "Ray" not in err


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(place)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("mounting a small tmpfs needs root")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_disk_that_fills_up_during_the_run_is_named(recipe: Path, address: str, small_disk: Path) -> None:
    code, _, err = finish(start(recipe, address, "fault=fill", f"run_dir={small_disk}"))
    assert code == 1
    last = err[err.rindex("rlinf: error:") :]
    assert "No space left on device" in last and str(small_disk) in last
    assert not psutil.wait_procs(our_workers(small_disk), timeout=10)[1]


def test_more_devices_than_there_are(recipe: Path, address: str) -> None:
    code, _, err = finish(start(recipe, address, "placement.maker=0-7"))
    assert code == 2
    assert "placement.maker" in err.splitlines()[-1] and "7" in err.splitlines()[-1]


def test_a_cluster_that_is_not_there_is_named(recipe: Path) -> None:
    code, _, err = finish(start(recipe, "127.0.0.1:1", "cluster.address=127.0.0.1:1"), timeout=120)
    assert code == 1
    assert "cannot reach the Ray cluster at '127.0.0.1:1'" in err[err.rindex("rlinf: error:") :]


def test_a_reader_of_our_output_that_goes_away_does_not_hang_the_run(recipe: Path, address: str) -> None:
    process = start(recipe, address, "fault=loud")
    assert process.stderr is not None
    process.stderr.readline()
    process.stderr.close()
    assert process.wait(60) in (0, 1)
    assert not psutil.wait_procs(our_workers(recipe.parent), timeout=10)[1]
    assert process.stdout is not None
    process.stdout.close()


def test_sigterm_while_workers_are_set_up(recipe: Path, address: str) -> None:
    process = start(recipe, address, "fault=setup")
    wait_for(recipe.parent / "here", process)
    process.send_signal(signal.SIGTERM)
    code, _, err = finish(process, timeout=40)
    assert code == 130 and "Traceback" not in err, err
