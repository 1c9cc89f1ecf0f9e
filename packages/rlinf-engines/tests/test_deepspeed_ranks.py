"""Two DeepSpeed ranks over gloo give what one process without DeepSpeed gives, in every ZeRO stage."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("needs deepspeed", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parent))

import deepspeed_rank as script  # noqa: E402
import trainer_cases as cases  # noqa: E402

from rlinf_core.errors import RLinfError  # noqa: E402
from rlinf_core.types import ParallelInfo  # noqa: E402
from rlinf_engines.trainers.deepspeed_trainer import DeepSpeedTrainer  # noqa: E402

DEADLINE_S = 240.0


def keyed(name: str, task: str = "train", **keys: Any) -> dict[str, Any]:
    return {"task": task, "name": name, "keys": keys}


FAMILIES = [
    {**keyed(f"{family}{stage}", zero_stage=stage), "family": family}
    for family in ("qwen2", "llama")
    for stage in range(4)
]
VARIANTS = [
    keyed("recomputed", zero_stage=3, persistence_elements=0, activation_checkpointing=True),
    keyed("buckets2", zero_stage=2, bucket_elements=10_000),
    keyed("buckets3", zero_stage=3, bucket_elements=10_000, persistence_elements=0),
    keyed("offload1", zero_stage=1, offload_optimizer=True),
    keyed("offload2", zero_stage=2, offload_optimizer=True),
    keyed("offload3", zero_stage=3, offload_optimizer=True, offload_parameters=True),
    {**keyed("critic1", zero_stage=1), "role": "critic"},
    {**keyed("critic3", zero_stage=3), "role": "critic"},
    *({**keyed(f"idle{stage}", zero_stage=stage), "parts": "idle"} for stage in range(4)),
]
RESUMED = [keyed(f"resumed{stage}", "resume", zero_stage=stage) for stage in range(4)]
FAILING = [keyed(f"failing{stage}", "failing", zero_stage=stage) for stage in range(4)]
LEAVING = keyed("leaving", "leave", zero_stage=2)


def start(rank: int, folder: Path, todo: list[dict[str, Any]], ranks: int = 2) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, script.__file__, str(rank), str(ranks), str(folder), json.dumps(todo)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(folder: Path, todo: list[dict[str, Any]]) -> None:
    """Let two processes go through the cases as ranks 0 and 1, one trainer after the other; what they print goes to
    ``out`` and ``err`` of each rank in ``folder``, beside the results."""
    processes = [start(rank, folder, todo) for rank in range(2)]
    try:
        for rank, process in enumerate(processes):
            out, err = process.communicate(timeout=DEADLINE_S)
            (folder / f"out{rank}").write_text(out)
            (folder / f"err{rank}").write_text(f"{err}\nexit {process.returncode}")
    finally:
        for process in processes:
            process.kill()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of all cases but the variants."""
    found = tmp_path_factory.mktemp("ranks")
    alone = found / "alone"
    alone.mkdir()
    # The checkpoints to go on from: of one rank, in another stage each.
    script.main(0, 1, alone, [{**case, "keys": {"zero_stage": 3 - case["keys"]["zero_stage"]}} for case in RESUMED])
    resumed = [{**case, "from": str(alone / f"{case['name']}_1")} for case in RESUMED]
    run(found, [*FAMILIES, *resumed, *FAILING, LEAVING])
    return found


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of the variants."""
    found = tmp_path_factory.mktemp("variants")
    run(found, VARIANTS)
    return found


def results(folder: Path, case: dict[str, Any]) -> list[Any]:
    files = [folder / f"{case['name']}_2_{rank}.pt" for rank in range(2)]
    if not all(file.is_file() for file in files):
        raise AssertionError("\n".join((folder / f"err{rank}").read_text() for rank in range(2)))
    return [torch.load(file) for file in files]


def check(found: list[Any], case: dict[str, Any]) -> None:
    """Both ranks have the reference's numbers, and the same weights."""
    role = case.get("role", "policy")
    expected = cases.reference(cases.model_config(case.get("family", "qwen2")), cases.trainer_config(), role=role)
    first, second = (cases.Numbers(**result["numbers"]) for result in found)
    cases.check_equal(first, expected)
    cases.check_equal(second, expected)
    assert set(first.first) | set(second.first) == set(expected.first)
    for name, tensor in first.weights.items():
        assert torch.equal(tensor, second.weights[name])


@pytest.mark.parametrize("case", FAMILIES, ids=lambda case: case["name"])
def test_two_ranks_equal_the_reference_in_every_stage(folder: Path, case: dict[str, Any]) -> None:
    check(results(folder, case), case)


@pytest.mark.slow
@pytest.mark.parametrize("case", VARIANTS, ids=lambda case: case["name"])
def test_variants_equal_the_reference(variants: Path, case: dict[str, Any]) -> None:
    check(results(variants, case), case)


def test_ranks_share_the_optimizer_state(folder: Path) -> None:
    whole = results(folder, FAMILIES[0])[0]["bytes"]
    for case in FAMILIES[1:4]:  # up to padding
        for result in results(folder, case):
            assert result["bytes"] == pytest.approx(whole / 2, rel=0.02)


@pytest.mark.parametrize("case", RESUMED, ids=lambda case: case["name"])
def test_a_checkpoint_goes_on_bit_equal_and_on_other_ranks_and_stages(folder: Path, case: dict[str, Any]) -> None:
    expected = torch.load(folder / "alone" / f"{case['name']}_1_0.pt")["straight"]
    found = results(folder, case)
    for result in found:
        straight, again, elsewhere = result["straight"], result["again"], result["elsewhere"]
        assert straight[0] == again[0]
        assert torch.equal(straight[1], again[1])
        for name, tensor in straight[2].items():
            assert torch.equal(tensor, again[2][name])
        assert elsewhere[0] == pytest.approx(expected[0], rel=1e-4)
        assert max(float((t - expected[2][name]).abs().max()) for name, t in elsewhere[2].items()) < 1e-5
        # Other random numbers than on the rank that saved.
        assert not torch.equal(elsewhere[1], expected[1])
    from transformers import AutoModelForCausalLM

    exported = AutoModelForCausalLM.from_pretrained(folder / f"{case['name']}_2_export").state_dict()
    for name, tensor in found[0]["elsewhere"][2].items():
        assert torch.equal(tensor, exported[name])


@pytest.mark.parametrize("case", FAILING, ids=lambda case: case["name"])
def test_a_bad_gradient_on_one_rank_is_named_on_both_and_changes_nothing(folder: Path, case: dict[str, Any]) -> None:
    found = results(folder, case)
    for result in found:
        assert result["told"] == found[0]["told"]
        assert result["told"].startswith("NonFiniteError: gradient is not finite in 26 parameters, first model.")
        assert result["told"].endswith("at optimizer step 0")
    check(found, case)


def test_a_peer_that_leaves_is_an_error(folder: Path) -> None:
    results(folder, FAILING[-1])  # both came as far as this
    assert (folder / "err1").read_text().endswith("exit 7")
    error = (folder / "err0").read_text()
    assert error.endswith("exit 1")
    assert "RLinfError: trainer rank 0 of 2: " in error
    assert "failed, a peer is gone or late" in error


def test_nothing_goes_to_stdout(folder: Path) -> None:
    results(folder, FAILING[-1])
    assert [(folder / f"out{rank}").read_text() for rank in range(2)] == ["", ""]


def test_a_peer_that_does_not_come_is_named(tmp_path: Path) -> None:
    trainer = DeepSpeedTrainer(cases.trainer_config("deepspeed", **script.KEYS))
    place = ParallelInfo(world_size=2, init_method=f"file://{tmp_path}/meet", timeout_s=1.0)
    with pytest.raises(RLinfError, match="trainer rank 0 of 2: .* within 1 s: rank 1 did not come"):
        trainer.setup(cases.model_config(), cases.head, place, seed=0)
    assert not torch.distributed.is_initialized()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_steps_are_the_references(tmp_path: Path) -> None:
    """In a process of its own: DeepSpeed is loaded for one kind of device."""
    offload = keyed("offload", zero_stage=3, offload_optimizer=True, offload_parameters=True)
    todo = [{**case, "device": "cuda"} for case in [*FAMILIES, offload]]
    out, err = start(0, tmp_path, todo, ranks=1).communicate(timeout=DEADLINE_S)
    assert out == ""
    for case in todo:
        file = tmp_path / f"{case['name']}_1_0.pt"
        assert file.is_file(), err
        expected = cases.reference(cases.model_config(case.get("family", "qwen2")), cases.trainer_config())
        cases.check_equal(cases.Numbers(**torch.load(file)["numbers"]), expected, relative=1e-3, absolute=1e-4)
