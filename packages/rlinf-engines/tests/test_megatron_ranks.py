"""Megatron's tensor, pipeline, sequence and data parallelism give what plain Hugging Face code gives."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
if importlib.util.find_spec("megatron") is None:
    pytest.skip("needs rlinf-engines[megatron]", allow_module_level=True)

import trainer_cases as cases  # noqa: E402

SCRIPT = Path(__file__).with_name("megatron_rank.py")
DEADLINE_S = 240.0
pytestmark = pytest.mark.timeout(300)


def start(rank: int, world: int, folder: Path, *tasks: str) -> subprocess.Popen[str]:
    path = os.pathsep.join(filter(None, [str(SCRIPT.parent), os.environ.get("PYTHONPATH")]))
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), str(rank), str(world), str(folder), *tasks],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """(exit code, what it printed as errors) of each."""
    done = []
    try:
        for process in processes:
            _, err = process.communicate(timeout=DEADLINE_S)
            done.append((process.returncode, err))
    finally:
        for process in processes:
            process.kill()
    return done


@dataclass(frozen=True)
class Run:
    """Ranks that have run: where their results are, and how they ended."""

    folder: Path
    ends: list[tuple[int, str]]

    def saw(self, task: str) -> list[Any]:
        """What each rank saw in a task."""
        files = [self.folder / f"{task}_{rank}.pt" for rank in range(len(self.ends))]
        assert all(file.is_file() for file in files), "\n".join(err for _, err in self.ends)
        return [torch.load(file, weights_only=False) for file in files]


def every(*layouts: str) -> list[str]:
    """Each family and role in each of the layouts."""
    return [" ".join(case) for case in itertools.product(layouts, ("qwen2", "llama"), ("policy", "critic"))]


# Arguments of each task: a case of each kind, and all of them.
QUICK = {
    "steps": ["1x1 qwen2 critic", "2x1s qwen2 policy", "1x2 llama critic"],
    "logits": ["2x1s qwen2"],
    "state": ["2x1s", "1x2"],
    "shared": ["2x1"],
}
FULL = {
    "steps": every("1x1", "2x1", "2x1s", "1x2"),
    "logits": [" ".join(case) for case in itertools.product(("2x1", "2x1s", "1x2"), ("qwen2", "llama"))],
    "state": ["2x1s", "1x2", "1x1"],
    "shared": ["2x1", "1x2", "1x1"],
}


@pytest.fixture(scope="module", params=["quick", pytest.param("full", marks=pytest.mark.slow)])
def two(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two ranks that go through all tasks, trainer after trainer in the same processes; in the last, rank 1 leaves."""
    folder = tmp_path_factory.mktemp("two")
    wanted = QUICK if request.param == "quick" else FULL
    tasks = [f"{task}:{','.join(arguments)}" for task, arguments in wanted.items()]
    run = Run(folder, finish([start(rank, 2, folder, *tasks, "leave:1x2") for rank in range(2)]))
    for task in ("steps", "logits", "shared"):
        assert all(list(found) == wanted[task] for found in run.saw(task))
    return run


@functools.cache
def expected(family: str, role: str) -> cases.Numbers:
    return cases.reference(cases.model_config(family, layers=3), cases.trainer_config("megatron"), role=role)


def check_steps(results: list[Any]) -> None:
    for rank, found in enumerate(results):
        for case, numbers in found.items():
            _, family, role = case.split()
            assert bool(numbers.weights) == (rank == 0), case
            cases.check_equal(numbers, expected(family, role))


def test_loss_norm_and_weights_are_the_references(two: Run) -> None:
    check_steps(two.saw("steps"))


@pytest.mark.slow
def test_tensor_with_pipeline_and_with_data_parallel(tmp_path: Path) -> None:
    ends = finish([start(rank, 4, tmp_path, "steps:" + ",".join(every("2x2", "2x2s", "2x1"))) for rank in range(4)])
    check_steps(Run(tmp_path, ends).saw("steps"))


def test_logits_and_gradients_are_hugging_faces(two: Run) -> None:
    found = two.saw("logits")
    for case in found[0]:
        logits, gradients = hugging_face(case.split()[1])
        for rank in range(2):
            assert float((found[rank][case][0] - logits).abs().max()) < 1e-4, case
        theirs = found[0][case][1]
        assert theirs.keys() == gradients.keys()
        for name, gradient in gradients.items():
            assert float((theirs[name] - gradient).abs().max()) < 1e-4, f"{case} {name}"


@functools.cache
def hugging_face(family: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits [M, V] and gradients of the loss sum of all rows, a row at a time and without packing."""
    from rlinf_engines.models import load_model, named_weights

    network = load_model(cases.model_config(family, layers=3), 0).requires_grad_(True)
    logits = []
    for row in cases.make_rows():
        batch = cases.collate([row])
        found = network(input_ids=batch["input_ids"].unsqueeze(0)).logits[0, batch["predict"]]
        loss, _, _ = cases.policy_loss(cases.head(found, batch, cases.VocabShard()), batch)
        loss.backward()
        logits.append(found.detach())
    names = [name for name, _ in named_weights(network)]
    return torch.cat(logits), {name: network.get_parameter(name).grad for name in names}


def test_a_checkpoint_goes_on_exactly_and_in_another_split(two: Run) -> None:
    results = two.saw("state")
    layouts = [key.removesuffix(" steps") for key in results[0] if key.endswith(" steps")]
    assert layouts in (QUICK["state"], FULL["state"])
    for rank in range(2):
        assert results[rank]["noise"]
        assert [results[rank][f"{layout} steps"] for layout in layouts] == [2] * len(layouts)
    for layout in layouts[1:]:
        cases.check_equal(results[0][layout], results[0][layouts[0]])
    # After one step both the file and the export were written.
    from safetensors.torch import load_file

    whole = cases.reference(cases.model_config("qwen2", layers=3), cases.trainer_config("megatron"), steps=1)
    state = torch.load(two.folder / "checkpoint" / "state.pt", weights_only=True)
    export = load_file(two.folder / "export" / "model.safetensors")
    for name, tensor in whole.weights.items():
        assert float((state["weights"][name] - tensor).abs().max()) < 1e-5
        assert torch.equal(export[name], state["weights"][name])


def test_ranks_of_a_replica_share_and_refuse_together(two: Run) -> None:
    for rank, found in enumerate(two.saw("shared")):
        for layout, saw in found.items():
            alone = layout == "1x1"
            assert saw["replica"] == ((rank, 2) if alone else (0, 1))
            assert saw["share"] == ([f"row{rank}"] if alone else ["row0", "row1"])
            assert saw["most"] == 2
            assert saw["reduce"] == {"a": 3.0 if alone else 1.0}
            assert saw["loss"].startswith("loss sum is ") and "p3/0, p4/0, p5/0" in saw["loss"]
            assert "first model.layers.2.mlp.down_proj.weight at optimizer step 0" in saw["gradient"]
            cases.check_equal(saw["after"], expected("llama", "policy"))


def test_a_peer_that_leaves_is_an_error(two: Run) -> None:
    (code, err), (leaver, _) = two.ends
    assert leaver == 7
    assert code not in (0, 7)
    assert "RLinfError: trainer rank 0 of 2: accumulate at optimizer step 0 failed, a peer is gone or late" in err
