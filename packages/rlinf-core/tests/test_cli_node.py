"""``rlinf head`` and ``rlinf worker``: bad input, and two real nodes that come, work and go."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from rlinf_core.cli import node
from rlinf_core.cli.main import UsageError
from rlinf_core.errors import RLinfError

PATIENCE_S = 120.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_bad_input_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    for words in (["10.0.0.1"], ["10.0.0.1:x"], [":1"], ["10.0.0.1:70000"]):
        with pytest.raises(UsageError, match="is not HOST:PORT"):
            node.worker(words)
    monkeypatch.setattr(node, "CONNECT_S", 0.2)
    with pytest.raises(RLinfError, match="no head answers at 127.0.0.1:"):
        node.worker([f"127.0.0.1:{free_port()}"])
    with pytest.raises(UsageError, match="--port 0"):
        node.head(["--port", "0"])
    with pytest.raises(UsageError, match="--slots -1"):
        node.head(["--slots", "-1", "--host", "127.0.0.1", "--port", str(free_port())])
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(RLinfError, match="in use already"):
        node.head(["--host", "127.0.0.1", "--port", str(taken.getsockname()[1])])


def test_who_has_no_token_does_not_join(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(node, "TOKEN", tmp_path / ".ray" / "auth_token")
    with pytest.raises(RLinfError, match=r"no token at .*auth_token: copy the head's"):
        node._check_token(make=False)
    node._check_token(make=True)
    assert len((tmp_path / ".ray" / "auth_token").read_text()) == 64
    assert (tmp_path / ".ray" / "auth_token").stat().st_mode & 0o077 == 0
    node._check_token(make=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "elsewhere"))
    with pytest.raises(RLinfError, match="elsewhere"):
        node._check_token(make=True)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "x" * 64)
    node._check_token(make=False)


class Node:
    """``rlinf head`` or ``rlinf worker`` as a process, and what it says."""

    def __init__(self, *words: str) -> None:
        command = [sys.executable, "-m", "rlinf_core.cli.main", *words]
        environment = {**os.environ, "RAY_ADDRESS": "", "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        self.lines: list[str] = []
        self._up = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if "Ctrl-C ends this node" in line:
                self._up.set()
        self._up.set()

    def until_up(self) -> None:
        assert self._up.wait(PATIENCE_S) and self.process.poll() is None, self.lines

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        code = self.process.wait(60)
        self._reader.join(10)
        return code


RECIPE = """
from dataclasses import dataclass
from rlinf_core import Worker, recipe, task

@dataclass
class Keys:
    num_steps: int = 1

class Where(Worker):
    collective = True
    process_group = False
    @task
    def look(self):
        import ray
        return {"node": float(int(ray.get_runtime_context().get_node_id()[:8], 16)), "ranks": 1.0}

@recipe(schema=Keys)
def program(flow, cfg):
    where = flow.group("where", Where, cfg)
    for step in flow.steps(cfg.num_steps):
        step.report(where.look(), reduce="sum")
        step.join()
"""


@pytest.mark.ray
@pytest.mark.slow
def test_two_nodes_come_work_and_go(tmp_path: Path) -> None:
    port = free_port()
    address = f"127.0.0.1:{port}"
    head = Node("head", "--host", "127.0.0.1", "--port", str(port), "--slots", "1")
    worker: Node | None = None
    try:
        head.until_up()
        assert any(f"rlinf worker {address}" in line for line in head.lines)
        worker = Node("worker", address, "--host", "127.0.0.2", "--slots", "1")
        worker.until_up()
        (tmp_path / "where.py").write_text(RECIPE)
        keys = [f"cluster.address={address}", "loggers=[jsonl]", f"run_dir={tmp_path / 'runs'}"]
        command = [sys.executable, "-m", "rlinf_core.cli.main", "run", str(tmp_path / "where.py"), *keys]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.returncode == 0, done.stderr
        (place,) = (tmp_path / "runs" / "where").iterdir()
        assert '"ranks": 2.0' in (place / "metrics.jsonl").read_text()
        mine = psutil.Process(worker.process.pid).children(recursive=True)
        assert worker.end(signal.SIGINT) == 0
        deadline = time.monotonic() + PATIENCE_S
        while any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in mine):
            assert time.monotonic() < deadline, [p.name() for p in mine if p.is_running()]
            time.sleep(0.1)  # processes that are not our children: there is nothing to wait on
    finally:
        for each in (worker, head):
            if each is not None and each.process.poll() is None:
                each.end(signal.SIGTERM)
    assert head.process.returncode == 0
