"""What a rollout does about an engine that dies, with engines that die on request; no vLLM is loaded."""

from __future__ import annotations

import logging
import re
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from rlinf_core.errors import ConfigError, RLinfError  # noqa: E402
from rlinf_core.types import Generated, GenerateRequest, ParallelInfo, SamplingParams  # noqa: E402
from rlinf_engines.models import load_model, named_weights  # noqa: E402
from rlinf_engines.rollouts import vllm_process  # noqa: E402
from rlinf_engines.rollouts.held_weights import HeldWeights, read_weights  # noqa: E402
from rlinf_engines.rollouts.stall_watch import StallWatch  # noqa: E402
from rlinf_engines.rollouts.vllm_engine import EngineDied, EngineRaised, EngineSpec  # noqa: E402
from rlinf_engines.rollouts.vllm_rollout import VllmRollout  # noqa: E402

SAMPLING = SamplingParams(max_new_tokens=4)
ASKED = [GenerateRequest(f"p{i}/0", (2, 3), (0, f"p{i}", 0)) for i in range(6)]


class FakeEngine:
    """Finishes one response in each step; dies at the steps and calls that it is told to."""

    def __init__(self, version: int, dies_at: int | str | None) -> None:
        self.version, self.dies_at = version, dies_at
        self.steps = 0
        self.asked: list[GenerateRequest] = []
        self.submitted: list[str] = []
        self.weights: dict[str, torch.Tensor] = {}
        self.asleep = self.closed = False

    def _call(self, name: str) -> None:
        if self.dies_at == name:
            raise EngineDied(f"it was told to die of {name}")

    def submit(self, requests: Sequence[GenerateRequest], sampling: SamplingParams) -> None:
        self._call("submit")
        self.asked += requests
        self.submitted += [r.id for r in requests]

    def step(self) -> list[Generated]:
        if self.dies_at == f"raise {self.steps}":
            raise EngineRaised("a step failed: RuntimeError: no such kernel")
        if self.steps == self.dies_at:
            raise EngineDied(f"it was told to die in step {self.steps}")
        self.steps += 1
        request = self.asked.pop(0)
        return [Generated(request.id, [2], [-1.0], [self.version], "length")]

    def abort(self) -> None:
        self._call("abort")
        self.asked = []

    def install(self, version: int, given: Any, held: HeldWeights) -> None:
        self._call("install")
        self.version = version
        self.weights = {name: tensor.clone() for name, tensor in held.tensors()}

    def offload(self) -> None:
        self._call("offload")
        self.asleep = True

    def onload(self) -> None:
        self._call("onload")
        self.asleep = False

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def make_rollout(make_model: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A rollout whose engines die as told, the first one first."""

    def make(*dies_at: int | str | None, max_restarts: int = 2, **keys: Any) -> tuple[VllmRollout, list[FakeEngine]]:
        engines: list[FakeEngine] = []

        def new_engine(rollout: VllmRollout, directory: str) -> FakeEngine:
            told = dies_at[len(engines)] if len(engines) < len(dies_at) else None
            if told == "start":
                engines.append(FakeEngine(0, None))
                raise EngineDied("it was told not to start")
            engines.append(FakeEngine(rollout.version, told))
            return engines[-1]

        monkeypatch.setattr(VllmRollout, "_new_engine", new_engine)
        defaults = {
            "max_num_seqs": 4,
            "max_num_batched_tokens": 64,
            "max_model_len": None,
            "enforce_eager": True,
            "enable_prefix_caching": True,
            "kv_cache_gb": 1,
            "gpu_memory_utilization": 0.5,
            "gpu_sleep": True,
            "tensor_parallel_size": 1,
            "engine_process": True,
            "stall_timeout_s": 5.0,
            "max_restarts": max_restarts,
        }
        rollout = VllmRollout(SimpleNamespace(**{**defaults, **keys}))
        rollout.setup(make_model("float32"), ParallelInfo(), seed=0)
        return rollout, engines

    return make


def weights(make_model: Any) -> list[tuple[str, torch.Tensor]]:
    return list(named_weights(load_model(make_model("float32"), 5)))


def test_only_what_was_owed_is_drawn_again(make_rollout: Any, caplog: pytest.LogCaptureFixture) -> None:
    rollout, engines = make_rollout(2)
    with caplog.at_level(logging.WARNING):
        got = [r.id for r in rollout.generate(ASKED, SAMPLING)]
    assert got == [r.id for r in ASKED]
    assert engines[1].submitted == got[2:]
    assert engines[0].closed
    (line,) = [r.getMessage() for r in caplog.records if r.name.startswith("rlinf_engines")]
    assert line == (
        "rollout vllm: the engine died: it was told to die in step 2; restart 1 of 2 with weights of version 0, "
        "drawing again the 4 responses that it owed"
    )


def test_a_new_engine_has_the_last_weights_and_their_version(make_rollout: Any, make_model: Any) -> None:
    rollout, engines = make_rollout(3)
    given = weights(make_model)
    rollout.load_weights(4, given)
    first = engines[0].weights
    responses = list(rollout.generate(ASKED, SAMPLING))
    assert {v for r in responses for v in r.versions} == {4}
    assert engines[1].weights.keys() == first.keys() == dict(given).keys()
    assert all(torch.equal(engines[1].weights[name], tensor) for name, tensor in given)


def test_weights_that_kill_the_engine_are_installed_into_the_next_one(make_rollout: Any, make_model: Any) -> None:
    rollout, engines = make_rollout("install")
    rollout.load_weights(9, weights(make_model))
    assert (rollout.version, engines[1].version, len(engines)) == (9, 9, 2)
    assert len(list(rollout.generate(ASKED, SAMPLING))) == len(ASKED)


@pytest.mark.parametrize("call", ["offload", "onload"])
def test_an_engine_that_dies_of_a_switch_is_replaced(make_rollout: Any, call: str) -> None:
    rollout, engines = make_rollout(call)
    rollout.offload()
    rollout.onload()
    assert len(engines) == 2
    assert not engines[1].asleep
    assert len(list(rollout.generate(ASKED, SAMPLING))) == len(ASKED)


def test_restarts_are_bounded_and_the_last_cause_is_named(make_rollout: Any) -> None:
    rollout, engines = make_rollout(1, "start", 0)
    stream = rollout.generate(ASKED, SAMPLING)
    next(stream)
    with pytest.raises(RLinfError, match=r"the engine died: it was told to die in step 0; rollout.max_restarts=2"):
        list(stream)
    assert len(engines) == 3
    with pytest.raises(RLinfError, match="the engine is closed"):
        list(rollout.generate(ASKED, SAMPLING))


@pytest.mark.parametrize(
    ("told", "engines_made"),
    [
        (["raise 0", "raise 0"], 2),  # the same again, and nothing in between
        (["raise 1", "raise 0"], 2),
        ([0, "raise 0", "raise 0"], 3),
    ],
)
def test_an_engine_that_raises_the_same_again_is_not_restarted(
    make_rollout: Any, told: list[int | str], engines_made: int
) -> None:
    rollout, engines = make_rollout(*told, max_restarts=9)
    message = r"a step failed: RuntimeError: no such kernel; so did the one before it.*no restart helps$"
    with pytest.raises(RLinfError, match=message):
        list(rollout.generate(ASKED, SAMPLING))
    assert len(engines) == engines_made and all(engine.closed for engine in engines)


def test_an_engine_that_raises_the_same_after_responses_is_restarted(make_rollout: Any, make_model: Any) -> None:
    rollout, engines = make_rollout("raise 1", "raise 1", "raise 0", max_restarts=9)
    with pytest.raises(RLinfError, match="no restart helps"):
        list(rollout.generate(ASKED, SAMPLING))
    assert len(engines) == 3
    rollout, engines = make_rollout("raise 0", "raise 1", max_restarts=9)
    assert len(list(rollout.generate(ASKED[:1], SAMPLING))) == 1
    rollout.load_weights(1, weights(make_model))
    assert len(list(rollout.generate(ASKED, SAMPLING))) == len(ASKED) and len(engines) == 3


def test_restarts_are_counted_anew_once_a_call_has_got_everything(make_rollout: Any) -> None:
    rollout, engines = make_rollout(2, 6, 6, max_restarts=1)
    for _ in range(3):
        assert len(list(rollout.generate(ASKED, SAMPLING))) == len(ASKED)
    assert len(engines) == 4


def test_an_engine_that_dies_after_the_consumer_left_owes_nothing(make_rollout: Any) -> None:
    rollout, engines = make_rollout("abort")
    stream = rollout.generate(ASKED, SAMPLING)
    next(stream)
    stream.close()
    assert engines[1].submitted == []
    assert len(list(rollout.generate(ASKED, SAMPLING))) == len(ASKED)


def test_one_generate_at_a_time(make_rollout: Any) -> None:
    rollout, _ = make_rollout()
    stream = rollout.generate(ASKED, SAMPLING)
    next(stream)
    with pytest.raises(RLinfError, match="one generate at a time"):
        list(rollout.generate(ASKED, SAMPLING))
    assert len(list(stream)) == len(ASKED) - 1


def test_lengths_beyond_the_model_are_refused_by_key(make_rollout: Any) -> None:
    with pytest.raises(ConfigError, match="rollout.max_model_len: 65 is more than the 64 tokens that the model takes"):
        make_rollout(max_model_len=65)


def test_tensor_parallel_sizes_that_do_not_divide_the_heads(make_rollout: Any) -> None:
    message = "rollout.tensor_parallel_size: 4 does not divide the model's 2 attention heads and 1 key-value heads"
    with pytest.raises(ConfigError, match=message):
        make_rollout(tensor_parallel_size=4)


def test_a_step_that_does_not_end_is_in_the_log() -> None:
    said = threading.Event()
    messages: list[str] = []

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())
            said.set()

    logger = logging.getLogger("rlinf_engines.rollouts.stall_watch")
    handler = Heard()
    logger.addHandler(handler)
    try:
        with StallWatch(0.05, "a step", "do this") as watch:
            watch.begin()
            assert said.wait(20.0)
            watch.end()
    finally:
        logger.removeHandler(handler)
    assert messages == ["a step has not ended for 0.05 s (rollout.stall_timeout_s); do this"]


def test_held_weights_are_read_by_path_in_the_engine_s_format() -> None:
    held = HeldWeights(torch.bfloat16)
    given = [("a", torch.randn(3, 5)), ("b", torch.arange(4)), ("c", torch.randn(()))]
    for version in (1, 2):
        held.take(version, given)
        found = dict(read_weights(held.path, held.entries))
        assert held.version == version
        assert torch.equal(found["a"], given[0][1].to(torch.bfloat16))
        assert torch.equal(found["b"], given[1][1])
        assert found["c"].shape == ()
        given = [(name, tensor + 1) for name, tensor in given]
    held.close()


def test_what_an_engine_wrote_that_died_while_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "an_engine_that_dies.py").write_text(
        "import sys\nsys.stderr.write('illegal instruction, it says')\nsys.exit(3)\n"
    )
    monkeypatch.setattr(vllm_process, "MODULE", "an_engine_that_dies")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    spec = EngineSpec("", "float32", "cpu", 1, {}, {"PYTHONPATH": str(tmp_path)}, ())
    with pytest.raises(EngineDied, match="its process ended with exit code 3 while start") as died:
        vllm_process.EngineProcess(spec)
    assert re.match(rf"; its log is {tmp_path}/\S+, which ends with:\nillegal instruction, it says$", died.value.log)


def test_an_engine_that_never_starts_is_named_with_its_log(
    make_rollout: Any, make_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(self: VllmRollout, directory: str) -> Any:
        error = EngineDied("its process was killed by SIGKILL while start")
        error.log = "; its log is HERE"
        raise error

    rollout, _ = make_rollout(0)
    monkeypatch.setattr(VllmRollout, "_new_engine", dies)
    with pytest.raises(RLinfError, match=r"SIGKILL while start; rollout.max_restarts=2 allows no .*; its log is HERE"):
        list(rollout.generate(ASKED, SAMPLING))
    fresh = VllmRollout(rollout.cfg)
    with pytest.raises(RLinfError, match="the engine did not start: its process was .* while start; its log is HERE"):
        fresh.setup(make_model("float32"), ParallelInfo(), seed=0)
