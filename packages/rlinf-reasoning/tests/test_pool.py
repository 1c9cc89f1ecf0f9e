"""The pool of killable processes, with hostile functions written to a file of the test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from rlinf_core.errors import ConfigError, RLinfError
from rlinf_reasoning.rewards.pool import RewardItem, RewardPool

FUNCTIONS = """
import os, sys, time, subprocess

class HostileFloat:
    def __init__(self, error=None): self.error = error or RuntimeError("no float")
    def __float__(self): raise self.error
    def __repr__(self): raise RuntimeError("no repr")

class HostileText(Exception):
    def __str__(self): raise RuntimeError("no text")

def score(text, answer, fields):
    if text == "hang":
        while True: pass
    if text == "hold":            # holds the interpreter lock for ever
        return 9 ** (9 ** (9 ** 9))
    if text == "exit": os._exit(7)
    if text == "kill": os.kill(os.getpid(), 9)
    if text == "sysexit": raise SystemExit(3)
    if text == "interrupt": raise KeyboardInterrupt
    if text == "raise": raise KeyError("boom")
    if text == "none": return None
    if text == "enormous": return -1e308
    if text == "hostile float": return HostileFloat()
    if text == "hostile exit": return HostileFloat(SystemExit(4))
    if text == "hostile text": raise HostileText
    if text == "fork":            # both sides return
        pid = os.fork()
        return float(pid == 0) + 1
    if text.startswith("leave"):  # a child that holds the connection stays behind
        kind, _, path = text.partition(" ")
        if os.fork() == 0:
            if "session" in kind: os.setsid()
            with open(path + ".new", "w") as file: print(os.getpid(), file=file)
            os.rename(path + ".new", path)
            while True: time.sleep(60)
        while not os.path.exists(path): pass
        if "hang" in kind:
            while True: pass
        if "exit" in kind: os._exit(5)
        return 1
    if text == "deaf":            # closes its connection and goes on
        os.closerange(3, 100)
        while True: pass
    if text == "text": return "1.0"
    if text == "bytes": return b"1.0"
    if text == "nan": return float("nan")
    if text == "print": print("1.0" * 1000); sys.stdout.flush()
    if text == "memory": return float(len(bytearray(8 << 30)))
    return float(text == answer) + fields.get("bonus", 0)
"""


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "hostile_rewards.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "hostile_rewards:score"


def items(*texts: str) -> list[RewardItem]:
    return [RewardItem(t, "a", {}) for t in texts]


def gone(pid: int, within_s: float = 10.0) -> bool:
    """Whether a process is gone (or only waits to be reaped by somebody else) before the deadline."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        threading.Event().wait(0.02)
    return False


def test_failing_items_are_named_and_the_others_scored(functions: str) -> None:
    texts = ["a", "hang", "b", "exit", "a", "kill", "sysexit", "raise", "a", "none", "nan", "print", "a"]
    with RewardPool(functions, processes=2, timeout_s=0.5) as pool:
        pool.start()
        scores = dict(zip(enumerate(texts), pool.score(items(*texts)), strict=True))
        pids = pool.pids()
    by_text = {text: score for (_, text), score in scores.items()}
    assert [s.value for (_, t), s in scores.items() if t == "a"] == [1.0] * 4
    assert by_text["b"].value == 0.0
    assert by_text["hang"].value is None and "longer than 0.5 s" in by_text["hang"].error
    assert "exited with code 7" in by_text["exit"].error
    assert "SIGKILL" in by_text["kill"].error
    assert "KeyError" in by_text["raise"].error and "boom" in by_text["raise"].error
    assert "hostile_rewards.py" in by_text["raise"].error
    assert "SystemExit: 3" in by_text["sysexit"].error
    assert "NoneType" in by_text["none"].error
    assert "nan" in by_text["nan"].error
    assert by_text["print"].value == 0.0
    assert pool.replaced == 3
    assert all(gone(pid) for pid in pids)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("interrupt", "raised KeyboardInterrupt (hostile_rewards.py:"),
        ("hostile float", "returned a HostileFloat whose conversion to a number raised RuntimeError: no float"),
        ("hostile exit", "returned a HostileFloat whose conversion to a number raised SystemExit: 4"),
        ("text", "returned a str, not a number: '1.0'"),
        ("bytes", "returned a bytes, not a number: b'1.0'"),
        ("enormous", "returned -1e+308, beyond the largest number that float32 has"),
        ("hostile text", "raised HostileText: (its text cannot be made: RuntimeError)"),
    ],
)
def test_what_raises_out_of_the_way_fails_its_item_only(functions: str, text: str, said: str) -> None:
    with RewardPool(functions, timeout_s=30) as pool:
        bad, good = pool.score(items(text, "a"))
    assert bad.value is None and said in bad.error
    assert good.value == 1.0 and pool.replaced == 0


def test_a_fault_within_a_bundle_is_its_item_s_alone(functions: str) -> None:
    texts = ["a", "b"] * 40
    for place, text in ((11, "kill"), (30, "hang"), (31, "exit"), (79, "kill"), (50, "raise")):
        texts[place] = text
    with RewardPool(functions, timeout_s=0.5, processes=2) as pool:
        assert all(s.value is not None for s in pool.score(items("a", "b")))  # both are up
        pool._item_s = 1e-4  # as after many quick ones, so that many are sent together
        found = pool.score(items(*texts))
    bad = {place: score.error for place, score in enumerate(found) if score.value is None}
    assert sorted(bad) == [11, 30, 31, 50, 79]
    assert "SIGKILL" in bad[11] and "SIGKILL" in bad[79] and "code 7" in bad[31] and "KeyError" in bad[50]
    assert "longer than 0.5 s" in bad[30]
    assert [s.value for k, s in enumerate(found) if k not in bad] == [
        float(t == "a") for k, t in enumerate(texts) if k not in bad
    ]
    assert pool.replaced == 4


def test_a_fork_that_returns_does_not_answer(functions: str) -> None:
    with RewardPool(functions, timeout_s=30) as pool:
        assert [s.value for s in pool.score(items("fork", "a", "fork", "b"))] == [1.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize("kind", ["exit", "hang", "return", "session-exit", "session-hang", "session-return"])
def test_what_a_function_leaves_behind_is_ended(functions: str, tmp_path: Path, kind: str) -> None:
    with RewardPool(functions, timeout_s=30 if "hang" not in kind else 1) as pool:
        found, good = pool.score(items(f"leave-{kind} {tmp_path / 'pid'}", "a"))
        if "exit" in kind:  # the fork still holds the connection
            assert found.error == "its process exited with code 5"
        elif "hang" in kind:
            assert "longer than 1 s" in found.error
        assert good.value == 1.0
    assert gone(int((tmp_path / "pid").read_text()))


def test_a_process_that_closes_its_connection_is_waited_for_no_longer_than_others(functions: str) -> None:
    with RewardPool(functions, timeout_s=0.5) as pool:
        deaf, good = pool.score(items("deaf", "a"))
    assert "longer than 0.5 s" in deaf.error and good.value == 1.0


def test_memory_limit_fails_the_item_only(functions: str) -> None:
    with RewardPool(functions, timeout_s=30, memory_mb=1024) as pool:
        memory, good = pool.score(items("memory", "a"))
    assert memory.value is None and "MemoryError" in memory.error
    assert good.value == 1.0


def test_fields_reach_the_function(functions: str) -> None:
    with RewardPool(functions) as pool:
        assert pool.score([RewardItem("a", "a", {"bonus": 2})])[0].value == 3.0


def test_scores_from_another_thread(functions: str) -> None:
    found: list[object] = []
    with RewardPool(functions, timeout_s=5) as pool:
        thread = threading.Thread(target=lambda: found.extend(pool.score(items("a", "b"))))
        thread.start()
        thread.join(60)
        # the thread that started the processes is gone, they must not be
        assert [s.value for s in pool.score(items("a", "b"))] == [1.0, 0.0]
    assert [s.value for s in found] == [1.0, 0.0]  # type: ignore[attr-defined]


def test_a_process_killed_while_idle_is_replaced_without_blame(functions: str) -> None:
    with RewardPool(functions, processes=1) as pool:
        pool.start()
        (pid,) = pool.pids()
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert pool.score(items("a"))[0].value == 1.0
        assert pool.pids() != [pid]


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("no_such_module_here:f", "no_such_module_here"),
        ("hostile_rewards:missing", "missing"),
        ("hostile_rewards:os", "not a function"),
        ("hostile_rewards", "module:function"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_named(functions: str, target: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        RewardPool(target).start()


def test_a_closed_pool_says_so(functions: str) -> None:
    pool = RewardPool(functions)
    pool.close()
    pool.close()
    with pytest.raises(RLinfError, match="closed"):
        pool.score(items("a"))


def test_a_fork_dies_with_a_killed_parent(functions: str, tmp_path: Path) -> None:
    program = f"""
        import sys
        sys.path.insert(0, {str(tmp_path)!r})
        from rlinf_reasoning.rewards.pool import RewardItem, RewardPool
        RewardPool({functions!r}, timeout_s=600).score([RewardItem("leave-hang {tmp_path}/pid", "", {{}})])
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)])
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and not (tmp_path / "pid").exists():
        threading.Event().wait(0.02)
    parent.kill()
    parent.wait()
    assert gone(int((tmp_path / "pid").read_text()))


@pytest.mark.parametrize("text", ["hang", "hold"])
def test_no_process_outlives_a_killed_parent(functions: str, tmp_path: Path, text: str) -> None:
    program = f"""
        import sys, threading
        sys.path.insert(0, {str(tmp_path)!r})
        from rlinf_reasoning.rewards.pool import RewardItem, RewardPool
        pool = RewardPool({functions!r}, processes=2, timeout_s=600)
        pool.start()
        print(*pool.pids(), flush=True)
        pool.score([RewardItem({text!r}, "", {{}})] * 2)
    """
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(p) for p in parent.stdout.readline().split()]
    assert len(pids) == 2
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and not all(_busy(pid) for pid in pids):
        threading.Event().wait(0.02)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert all(gone(pid) for pid in pids)


def _busy(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(stat[11]) + int(stat[12]) > 30 and stat[0] == "R"  # clock ticks of CPU used, and running
