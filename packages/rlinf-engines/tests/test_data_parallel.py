"""Two ranks over gloo, whole and sharded, give what one rank gives; a missing or failing peer is named."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import trainer_cases as cases  # noqa: E402

from rlinf_core.errors import RLinfError  # noqa: E402
from rlinf_core.types import ParallelInfo  # noqa: E402
from rlinf_engines.trainers.torch_trainer import TorchTrainer  # noqa: E402

SCRIPT = Path(__file__).with_name("data_parallel_rank.py")
DEADLINE_S = 200.0
SHARDINGS = ("ddp", "fsdp2")

# What two ranks do, all in one pair of processes, since these take long to start.
TRAIN = {
    "ddp": {"keys": {"sharding": "ddp"}},
    "ddp-llama": {"family": "llama", "keys": {"sharding": "ddp", "activation_checkpointing": True}},
    "ddp-critic": {"role": "critic", "keys": {"sharding": "ddp"}},
    "fsdp2": {"keys": {"sharding": "fsdp2"}},
    "fsdp2-llama": {"family": "llama", "keys": {"sharding": "fsdp2", "activation_checkpointing": True}},
    "fsdp2-critic": {"role": "critic", "family": "llama", "keys": {"sharding": "fsdp2"}},
    "fsdp2-exact": {"dtype": "float64", "keys": {"sharding": "fsdp2", "grad_clip": 0.0}},
    "ddp-exact": {"dtype": "float64", "keys": {"sharding": "ddp", "grad_clip": 0.0}},
    "fsdp2-bfloat16": {"dtype": "bfloat16", "keys": {"sharding": "fsdp2"}},
}
# A sharded checkpoint for whole ranks to go on from, and the other way round.
RESUME: dict[str, dict[str, Any]] = {
    "resume-fsdp2": {"family": "llama", "keys": {"sharding": "fsdp2"}},
    "resume-ddp": {"family": "llama", "keys": {"sharding": "ddp"}, "from": "resume-fsdp2_2"},
    "again-fsdp2": {"family": "llama", "keys": {"sharding": "fsdp2"}, "from": "resume-ddp_2"},
    "critic-fsdp2": {"role": "critic", "keys": {"sharding": "fsdp2"}},
}
FAILING = {
    f"failing-{kind}": {"family": "llama", "keys": {"sharding": kind}, "from": "resume-fsdp2_2"} for kind in SHARDINGS
}
SIZES = {"hidden_size": 64, "intermediate_size": 12000, "layers": 2}
LARGE = {f"large-{kind}": {"sizes": SIZES, "keys": {"sharding": kind, "grad_clip": 0.0}} for kind in SHARDINGS}


def start(rank: int, world: int, folder: Path, todo: list[dict[str, Any]]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), str(rank), str(world), str(folder), json.dumps(todo)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        _, err = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
    return process.returncode, err


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("data_parallel_rank", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where two ranks have left what each case gave."""
    path = tmp_path_factory.mktemp("ranks")

    def case(name: str, task: str, fields: dict[str, Any]) -> dict[str, Any]:
        before = {"from": str(path / fields["from"])} if "from" in fields else {}
        return {**fields, **before, "name": name, "task": task}

    todo = [case(name, "train", fields) for name, fields in TRAIN.items()]
    todo += [case(name, "resume", fields) for name, fields in RESUME.items()]
    todo += [case(name, "failing", fields) for name, fields in FAILING.items()]
    todo += [case(name, "large", fields) for name, fields in LARGE.items()]
    todo.append(case("leave-fsdp2", "leave", {"keys": {"sharding": "fsdp2"}}))
    last = [case("leave-ddp", "leave", {"keys": {"sharding": "ddp"}})]
    processes = [start(rank, 2, path, cases) for cases in (todo, last) for rank in range(2)]
    ends = [finish(process) for process in processes]
    for (code, err), expected in zip(ends, (0, 7, 0, 7), strict=True):
        assert code == expected, err
    return path


@pytest.fixture(scope="module")
def results(folder: Path) -> Callable[[str], list[Any]]:
    """What both ranks give in the case of a name."""
    return lambda name: [torch.load(folder / f"{name}_2_{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.parametrize("name", TRAIN)
def test_two_ranks_give_the_reference_s_numbers(name: str, results: Callable[[str], list[Any]]) -> None:
    case = TRAIN[name]
    dtype = case.get("dtype", "float32")
    model = cases.model_config(case.get("family", "qwen2"), "float32" if dtype == "bfloat16" else dtype)
    cfg = cases.trainer_config(**case["keys"])
    expected = cases.reference(model, cfg, role=case.get("role", "policy"))
    limits = {"float32": (1e-4, 1e-5), "float64": (1e-11, 1e-11), "bfloat16": (5e-2, 1e-2)}[dtype]
    found = [cases.Numbers(**result["numbers"]) for result in results(name)]
    for numbers in found:
        cases.check_equal(numbers, expected, relative=limits[0], absolute=limits[1])
        assert numbers.weights
    assert found[0].first.keys() | found[1].first.keys() == expected.first.keys()
    assert all(torch.equal(t, found[1].weights[n]) for n, t in found[0].weights.items())


def test_a_sharded_rank_holds_half(results: Callable[[str], list[Any]]) -> None:
    whole, parts = results("ddp")[0]["bytes"], [result["bytes"] for result in results("fsdp2")]
    # Parts of an odd number of rows differ by one.
    assert all(abs(part - whole / 2) < 0.01 * whole for part in parts)


@pytest.mark.parametrize("name", SHARDINGS)
def test_ranks_agree(name: str, results: Callable[[str], list[Any]]) -> None:
    for rank, result in enumerate(results(name)):
        assert result["reduced"] == {"a": 0.1 + 0.2, "only0": 1.0, "only1": 1.0}
        assert result["most"] == 4
        assert result["shared"] == [rank]


@pytest.mark.parametrize("name", RESUME)
def test_a_loaded_run_goes_on_bit_for_bit(name: str, results: Callable[[str], list[Any]]) -> None:
    noises = []
    for result in results(name):
        (values, noise), weights = result["straight"]
        (again, noise_again), weights_again = result["again"]
        assert again == values
        assert torch.equal(noise, noise_again)
        assert all(torch.equal(tensor, weights_again[key]) for key, tensor in weights.items())
        noises.append(noise)
    assert not torch.equal(*noises)  # each rank goes on with its own random numbers


@pytest.mark.parametrize("name", [name for name, case in RESUME.items() if "from" in case])
def test_a_checkpoint_of_another_sharding_is_resharded(name: str, results: Callable[[str], list[Any]]) -> None:
    for here, there in zip(results(name), results(RESUME[name]["from"].removesuffix("_2")), strict=True):
        (values, noise), weights = here["elsewhere"]
        (expected, expected_noise), expected_weights = there["straight"]
        assert values[0] == pytest.approx(expected[0], rel=1e-5)
        assert values[2] == pytest.approx(expected[2], rel=1e-5)
        assert values[1].grad_norm == pytest.approx(expected[1].grad_norm, rel=1e-5)
        assert torch.equal(noise, expected_noise)
        assert all(float((t - expected_weights[key]).abs().max()) < 1e-5 for key, t in weights.items())


@pytest.mark.parametrize("name", ["resume-fsdp2", "critic-fsdp2"])
def test_a_checkpoint_of_two_ranks_is_loaded_by_one(
    name: str, folder: Path, script: ModuleType, results: Callable[[str], list[Any]]
) -> None:
    case = {**RESUME[name], "name": name, "from": str(folder / f"{name}_2")}
    one = script.resume(case, ParallelInfo(), folder)
    (values, _), weights = one["elsewhere"]
    (expected, _), expected_weights = results(name)[0]["straight"]
    assert values[0] == pytest.approx(expected[0], rel=1e-4)
    assert values[1].grad_norm == pytest.approx(expected[1].grad_norm, rel=1e-4)
    assert all(float((t - expected_weights[key]).abs().max()) < 1e-5 for key, t in weights.items())
    # And whole files come out of parts: the exports are equal.
    for path in (folder / f"{name}_1_export").iterdir():
        if path.suffix == ".json":
            assert path.read_text() == (folder / f"{name}_2_export" / path.name).read_text()


def test_a_sharded_export_is_a_model(folder: Path, results: Callable[[str], list[Any]]) -> None:
    from rlinf_engines.models import load_model, named_weights

    path = folder / "resume-fsdp2_2_export"
    network = load_model(cases.model_config(path=str(path)), 0)
    assert type(network).__name__ == "LlamaForCausalLM"
    weights = results("resume-fsdp2")[0]["again"][1]
    assert all(torch.equal(tensor, weights[name]) for name, tensor in named_weights(network))


@pytest.mark.parametrize("name", FAILING)
def test_one_rank_s_fault_is_told_on_every_rank(name: str, results: Callable[[str], list[Any]]) -> None:
    expected = cases.reference(cases.model_config("llama"), cases.trainer_config())
    for rank, result in enumerate(results(name)):
        told = result["told"]
        assert told["gradient"].startswith("NonFiniteError: gradient is not finite in "), told
        assert "first model." in told["gradient"]
        missing = "does not exist" if rank == 0 else "failed on rank 0: ConfigError: checkpoint"
        assert missing in told["checkpoint"]
        assert ("NotADirectoryError" if rank == 0 else "saving the checkpoint") in told["save"]
        # Nothing was changed by all this, and the ranks still are in step.
        cases.check_equal(cases.Numbers(**result["numbers"]), expected)


@pytest.mark.parametrize("name", LARGE)
def test_the_norm_of_millions_of_elements_is_exact(name: str, results: Callable[[str], list[Any]]) -> None:
    for result in results(name):
        assert result["elements"] > 4_000_000  # float32 sums of squares are off in the third digit here
        assert result["norm"] == pytest.approx(result["exact"], rel=1e-7)


@pytest.mark.parametrize(("kind", "what"), [("ddp", "adding gradients"), ("fsdp2", "agreeing on a number")])
def test_a_peer_that_leaves_is_an_error(kind: str, what: str, folder: Path) -> None:
    result = torch.load(folder / f"leave-{kind}_2_0.pt", weights_only=False)
    assert result["told"].startswith(f"trainer rank 0 of 2: {what}")
    assert "failed, a peer is gone or late" in result["told"]
    assert result["elsewhere"]


@pytest.mark.parametrize("meet", ["file", "tcp"])
def test_a_peer_that_does_not_come_is_named(meet: str, tmp_path: Path, free_port: int) -> None:
    trainer = TorchTrainer(cases.trainer_config())
    where = f"file://{tmp_path}/meet" if meet == "file" else f"tcp://127.0.0.1:{free_port}"
    place = ParallelInfo(world_size=3, init_method=where, timeout_s=1.0)
    message = r"trainer rank 0 of 3: joining the other ranks through .* failed within 1 s: rank 1, 2 did not come"
    with pytest.raises(RLinfError, match=message) as caught:
        trainer.setup(cases.model_config(), cases.head, place, seed=0)
    assert caught.value.elsewhere
    assert not torch.distributed.is_initialized()
