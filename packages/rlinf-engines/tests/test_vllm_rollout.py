"""Real vLLM on a CPU: one engine in a process of its own, looked at from many sides."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlinf_core.errors import ConfigError
from rlinf_core.types import ParallelInfo
from rlinf_engines.rollouts.vllm_engine import _advice
from rlinf_engines.rollouts.vllm_rollout import VllmRollout, check_allocator

needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
SCRIPT = Path(__file__).with_name("vllm_session.py")
DEADLINE_S = 250.0


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the session saw."""
    folder = tmp_path_factory.mktemp("vllm")
    temporary = folder / "tmp"
    temporary.mkdir()
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder / "found.json")],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads((folder / "found.json").read_text())
    result["left_behind"] = sorted(p.name for p in temporary.iterdir() if p.name.startswith(("rlinf-", "vllm_dist")))
    return result


@needs_vllm
def test_every_request_is_answered_once_as_sampled(found: dict[str, Any]) -> None:
    assert found["is_rollout"]
    assert found["ids"] == found["asked"]
    assert found["shapes"] and found["ends"]
    assert found["reasons"] == ["length", "stop"]


@needs_vllm
def test_log_probs_agree_with_the_trainer_s_model(found: dict[str, Any]) -> None:
    assert found["difference"] < 1e-3


@needs_vllm
def test_random_numbers_are_keyed_by_request(found: dict[str, Any]) -> None:
    assert found["same_again"]
    assert not found["same_next_step"]


@needs_vllm
def test_new_weights_go_into_the_live_engine(found: dict[str, Any]) -> None:
    assert found["stale_difference"] > 0.05
    # Tied embedding and output head included: a stale head would be off by more than 0.1.
    assert found["new_difference"] < 1e-3
    assert found["versions"] == [4]


@needs_vllm
@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("missing", "RLinfError: weights of version 5: 1 are missing, first model.embed_tokens.weight"),
        ("unknown", "has no parameter 'model.extra'"),
        ("shape", "model.embed_tokens.weight has shape (2, 64), the model's has (17, 64)"),
        ("too_long", "the model takes 64"),
    ],
)
def test_what_cannot_be_is_refused_by_name(found: dict[str, Any], case: str, message: str) -> None:
    assert message in found[case]


@needs_vllm
def test_refusals_change_nothing(found: dict[str, Any]) -> None:
    assert found["after_refusals"]
    assert found["version"] == 4
    assert found["left_behind"] == []


@needs_vllm
def test_log_probs_under_top_p_are_those_of_the_whole_distribution(found: dict[str, Any]) -> None:
    assert found["top_p_difference"] < 1e-3


@needs_vllm
def test_weights_that_come_while_responses_run_are_recorded_token_by_token(found: dict[str, Any]) -> None:
    assert found["running_ids"] == found["asked"]
    assert [4, 6] in found["running_versions"]
    assert found["running_difference"] < 1e-3


@needs_vllm
def test_stop_texts_end_responses_after_the_token_that_completes_them(found: dict[str, Any]) -> None:
    assert found["stop_number"] > 0
    assert found["stop_same"] and found["stop_lengths"]
    assert found["stop_reasons"] == ["stop"]
    assert found["endless"] == [[40, "length"]]


@needs_vllm
def test_the_prompt_of_a_group_is_computed_once_as_far_as_its_blocks_are_whole(found: dict[str, Any]) -> None:
    asked, shared = found["prefix"]
    assert asked == 8 * 40
    assert shared == 7 * 32


@needs_vllm
def test_a_long_response_holds_up_no_short_one(found: dict[str, Any]) -> None:
    assert found["first_tokens"] < 5
    assert found["long_tokens"] > 40
    # More come before it than are decoded at once: places are refilled while it runs.
    assert found["before_long"] > 64


@needs_vllm
def test_switches_between_responses_lose_nothing_and_drop_the_cache(found: dict[str, Any]) -> None:
    assert found["switched_ids"] == found["asked"]
    assert found["switched_difference"] < 1e-3
    assert found["weights_kept"]
    assert found["cache_left"] == 0
    assert found["after_switches"]


@needs_vllm
@pytest.mark.parametrize(
    ("case", "what"),
    [
        ("generate_offloaded", "generate"),
        ("next_offloaded", "generate"),
        ("load_offloaded", "load_weights of version 9"),
    ],
)
def test_use_while_offloaded_is_refused(found: dict[str, Any], case: str, what: str) -> None:
    assert f"RLinfError: rollout: {what} while offloaded" in found[case]


SMALL_CACHE = """
from types import SimpleNamespace
from vllm_session import MODEL, ROLLOUT, TINY
from rlinf_core.errors import RLinfError
from rlinf_core.types import ParallelInfo
from rlinf_engines.rollouts.vllm_rollout import VllmRollout
tiny = SimpleNamespace(**{**vars(TINY), "layers": 8, "max_positions": 1_000_000})
try:
    VllmRollout(ROLLOUT).setup(SimpleNamespace(**{**vars(MODEL), "tiny": tiny}), ParallelInfo(), seed=0)
except RLinfError as error:
    print(error)
"""


@needs_vllm
@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_S)
def test_a_cache_too_small_for_one_request_names_the_keys(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SMALL_CACHE],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path), "PYTHONPATH": str(SCRIPT.parent)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr
    assert "larger than the available KV cache memory" in done.stdout
    assert "(in our config: rollout.kv_cache_gb, rollout.max_model_len)" in done.stdout


@pytest.mark.parametrize(("on_gpu", "key"), [(False, "kv_cache_gb"), (True, "gpu_memory_utilization")])
def test_the_engine_s_advice_on_memory_is_given_with_our_keys(on_gpu: bool, key: str) -> None:
    text = "KV cache is needed. Try increasing `gpu_memory_utilization` or decreasing `max_model_len`."
    assert _advice(text, on_gpu) == f"{text} (in our config: rollout.{key}, rollout.max_model_len)"


def test_switching_before_setup_is_harmless() -> None:
    rollout = VllmRollout(SimpleNamespace())
    rollout.offload()
    rollout.onload()


def test_float64_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigError, match="model.dtype: vllm does not compute in float64"):
        VllmRollout(SimpleNamespace()).setup(SimpleNamespace(dtype="float64"), ParallelInfo(), seed=0)


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_allocator_settings_that_break_sleep_and_sharing_are_refused_on_a_gpu(variable: str) -> None:
    environment = {variable: "max_split_size_mb:64, expandable_segments: True"}
    with pytest.raises(ConfigError, match=f"{variable}=.*expandable segments break"):
        check_allocator(environment, on_gpu=True)
    check_allocator(environment, on_gpu=False)
    check_allocator({variable: "expandable_segments:False"}, on_gpu=True)
