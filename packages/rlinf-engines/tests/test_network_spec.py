"""Trainers over networks that are no causal LM (``NetworkSpec``): the numbers of a bare loop, state, guards."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

sys.path.insert(0, str(Path(__file__).parent))

import network_cases as nets  # noqa: E402
import network_rank as script  # noqa: E402

from rlinf_core.errors import ConfigError, NonFiniteError, RLinfError  # noqa: E402
from rlinf_core.types import ParallelInfo  # noqa: E402
from rlinf_engines.trainers.torch_trainer import TorchTrainer  # noqa: E402

DEADLINE_S = 120.0
SPLIT = [[5, 0], [1], [2, 3, 7], [4, 6]]
needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs deepspeed")

Make = Callable[..., Any]


def backend(name: str, **keys: Any) -> Any:
    mark = [needs_deepspeed] if name == "deepspeed" else []
    return pytest.param(name, keys, id="-".join([name, *map(str, keys.values())]), marks=mark)


DEEPSPEED = [backend("deepspeed", zero_stage=stage) for stage in range(4)]
BACKENDS = [backend("torch"), *DEEPSPEED]


@pytest.fixture
def make() -> Iterator[Make]:
    """Set up a trainer of one rank; keywords are those of ``network_rank.make``."""
    made: list[Any] = []

    def build(name: str = "torch", **keys: Any) -> Any:
        made.append(script.make(name, ParallelInfo(), **keys))
        return made[-1]

    yield build
    for trainer in made:
        trainer.close()
    assert not torch.distributed.is_initialized()


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(tensor, b[name]) for name, tensor in a.items())


@pytest.mark.parametrize("kind", nets.KINDS)
@pytest.mark.parametrize(("name", "keys"), BACKENDS)
def test_steps_are_those_of_a_bare_loop(make: Make, name: str, keys: dict[str, Any], kind: str) -> None:
    expected = nets.reference(kind, script.config(name, **keys))
    trainer = make(name, kind=kind, **keys)
    assert trainer.tokenizer is None
    nets.check(nets.train(trainer, kind, SPLIT), expected, 1e-6)


@pytest.mark.parametrize("kind", nets.KINDS)
@pytest.mark.parametrize(("name", "keys"), [backend("torch"), backend("deepspeed", zero_stage=0)])
def test_steps_in_float64_are_exact(make: Make, name: str, keys: dict[str, Any], kind: str) -> None:
    expected = nets.reference(kind, script.config(name, **keys), "float64")
    found = nets.train(make(name, kind=kind, dtype="float64", **keys), kind, SPLIT, "float64")
    nets.check(found, expected, 1e-12)


@pytest.mark.parametrize("kind", nets.KINDS)
@pytest.mark.parametrize("clip", [0.0, 1e6])
def test_without_clipping(make: Make, kind: str, clip: float) -> None:
    expected = nets.reference(kind, script.config("torch", grad_clip=clip))
    nets.check(nets.train(make(kind=kind, grad_clip=clip), kind, SPLIT), expected, 1e-6)


@pytest.mark.parametrize(("name", "keys"), BACKENDS)
def test_bfloat16_keeps_exact_buffers(make: Make, name: str, keys: dict[str, Any]) -> None:
    trainer = make(name, dtype="bfloat16", **keys)
    before = nets.weights(trainer)
    masters = {n: t.clone() for n, t in trainer._whole_state()["weights"].items()}
    found = nets.train(trainer, "mlp", SPLIT)
    expected = nets.reference("mlp", script.config(name, **keys))
    assert found.losses == pytest.approx(expected.losses, rel=0.02)
    assert found.losses != expected.losses  # computed in bfloat16
    assert before["actor.weight"].dtype == torch.bfloat16
    assert masters["actor.weight"].dtype == torch.float32
    assert found.weights["mean"].dtype == torch.float64
    assert torch.equal(found.weights["mean"], expected.weights["mean"])


@pytest.mark.parametrize(("name", "keys"), BACKENDS)
def test_forward_has_no_gradients_and_changes_nothing(make: Make, name: str, keys: dict[str, Any]) -> None:
    trainer = make(name, **keys)
    before = nets.weights(trainer)
    batch = nets.make_batch("mlp", "float32", range(8))
    (outputs,) = trainer.forward([batch])
    expected = nets.spec().build(0)(batch["x"])
    assert outputs.keys() == {"out", "values"}
    assert all(not t.requires_grad and torch.allclose(t, expected[n], atol=1e-6) for n, t in outputs.items())
    assert equal(before, nets.weights(trainer))


@pytest.mark.parametrize("kind", nets.KINDS)
@pytest.mark.parametrize(("name", "keys"), BACKENDS)
def test_a_loaded_run_goes_on_bit_for_bit(
    make: Make, name: str, keys: dict[str, Any], kind: str, tmp_path: Path
) -> None:
    first, second = make(name, kind=kind, **keys), make(name, kind=kind, **keys)
    nets.train(first, kind, SPLIT)
    first.save(tmp_path / "saved")
    second.load(tmp_path / "saved")
    assert equal(nets.weights(first), nets.weights(second))
    one, two = nets.train(first, kind, SPLIT), nets.train(second, kind, SPLIT)
    assert (one.losses, one.norms) == (two.losses, two.norms)
    assert equal(one.weights, two.weights)


@pytest.mark.parametrize(("name", "keys"), DEEPSPEED)
def test_a_checkpoint_goes_from_backend_to_backend(make: Make, name: str, keys: dict[str, Any], tmp_path: Path) -> None:
    expected = nets.reference("mlp", script.config("torch"), steps=3)
    one, other = make(), make(name, **keys)
    nets.train(one, "mlp", SPLIT, steps=1)
    one.save(tmp_path / "saved")
    other.load(tmp_path / "saved")
    for step in (1, 2):
        total, count, _ = other.accumulate([nets.make_batch("mlp", "float32", range(8), step)], nets.loss)
        assert other.step(count).grad_norm == pytest.approx(expected.norms[step], rel=1e-6)
        assert total / count == pytest.approx(expected.losses[step], rel=1e-6)
    assert all(torch.allclose(t, expected.weights[n], rtol=0, atol=1e-6) for n, t in nets.weights(other).items())
    # And back.
    other.save(tmp_path / "again")
    one.load(tmp_path / "again")
    assert equal(nets.weights(one), nets.weights(other))


@pytest.mark.parametrize(("name", "keys"), BACKENDS)
def test_another_network_s_checkpoint_is_refused_by_name(
    make: Make, name: str, keys: dict[str, Any], tmp_path: Path
) -> None:
    make("torch", kind="conv").save(tmp_path / "conv")
    trainer = make(name, **keys)
    before = nets.weights(trainer)
    with pytest.raises(
        ConfigError, match=r"conv is of another model: actor\.bias is absent there and float32\[3\] here"
    ):
        trainer.load(tmp_path / "conv")
    assert equal(before, nets.weights(trainer))


@pytest.mark.parametrize(("name", "keys"), BACKENDS)
def test_a_bad_gradient_names_its_parameters_and_changes_nothing(make: Make, name: str, keys: dict[str, Any]) -> None:
    trainer = make(name, **keys)
    before = nets.weights(trainer)

    def bad(outputs: Any, batch: Any) -> Any:
        return (outputs["values"].sum() * 0.0).abs().sqrt(), 1.0, {}

    trainer.accumulate([nets.make_batch("mlp", "float32", [0, 1])], bad)
    # The body's and that head's.
    first = r"body\.0\.(bias|weight)"
    with pytest.raises(
        NonFiniteError, match=rf"gradient is not finite in 6 parameters, first {first} at optimizer step 0"
    ):
        trainer.step(1.0)
    assert equal(before, nets.weights(trainer))
    nets.check(nets.train(trainer, "mlp", SPLIT), nets.reference("mlp", script.config(name, **keys)), 1e-6)


@pytest.mark.parametrize(("name", "keys"), BACKENDS)
def test_a_bad_loss_names_the_rows(make: Make, name: str, keys: dict[str, Any]) -> None:
    trainer = make(name, **keys)
    batch = nets.make_batch("mlp", "float32", [3, 4])
    batch["y"][0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match="loss sum is nan at optimizer step 0 in the micro-batch of row3, row4"):
        trainer.accumulate([batch], nets.loss)


@pytest.mark.parametrize(("name", "keys"), BACKENDS)
def test_offload_and_onload_keep_every_bit(make: Make, name: str, keys: dict[str, Any]) -> None:
    straight, switched = make(name, **keys), make(name, **keys)
    for trainer in (straight, switched):
        nets.train(trainer, "mlp", SPLIT)
        trainer.accumulate([nets.make_batch("mlp", "float32", range(8))], nets.loss)
    before = nets.weights(straight)
    switched.offload()
    for call in (
        lambda: switched.update_buffers(nets.observe),
        lambda: switched.step(8.0),
        lambda: list(switched.weights()),
    ):
        with pytest.raises(RLinfError, match="while offloaded"):
            call()
    switched.onload()
    assert equal(before, nets.weights(switched))
    assert straight.step(8.0) == switched.step(8.0)
    assert equal(nets.weights(straight), nets.weights(switched))


@pytest.mark.parametrize(("name", "keys"), BACKENDS)
def test_changed_buffers_reach_the_weights_and_the_forward(make: Make, name: str, keys: dict[str, Any]) -> None:
    trainer = make(name, **keys)
    batch = nets.make_batch("mlp", "float32", range(8))
    (before,) = trainer.forward([batch])
    modes = []
    trainer.update_buffers(lambda network: (nets.observe(network), modes.append(network.training)))
    given = nets.weights(trainer)
    assert modes == [False]
    assert torch.equal(given["mean"], torch.arange(nets.FEATURES, dtype=torch.float64) / 7)
    assert int(given["seen"]) == 8
    assert "scale" not in given  # not persistent
    (after,) = trainer.forward([batch])
    assert not torch.allclose(before["out"], after["out"])


def test_buffers_keep_size_and_format(make: Make) -> None:
    trainer = make()

    def grow(network: Any) -> None:
        network.mean = torch.zeros(9)

    with pytest.raises(ConfigError, match=r"update_buffers: buffer mean was torch\.float64\[5\] on cpu and became"):
        trainer.update_buffers(grow)


@pytest.mark.parametrize(("name", "keys"), BACKENDS)
def test_an_export_is_what_the_network_writes(make: Make, name: str, keys: dict[str, Any], tmp_path: Path) -> None:
    trainer = make(name, **keys)
    nets.train(trainer, "mlp", SPLIT)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").touch()
    trainer.export(tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["config.json", "weights.safetensors"]
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"kind": "Mlp"}
    assert equal(nets.read_export(tmp_path / "out"), nets.weights(trainer))


@pytest.mark.parametrize(("name", "keys"), BACKENDS)
def test_a_new_phase_has_a_fresh_optimizer(make: Make, name: str, keys: dict[str, Any]) -> None:
    trainer = make(name, **keys)
    nets.train(trainer, "mlp", SPLIT)
    weights = nets.weights(trainer)
    trainer.restart_optimizer(script.config(name, **{**keys, "lr": 1e-4}))
    assert equal(weights, nets.weights(trainer))
    assert trainer.steps_done == 0
    trainer.accumulate([nets.make_batch("mlp", "float32", range(8))], nets.loss)
    assert trainer.step(8.0).lr == 1e-4
    # Adam's first step moves every element that has a gradient by the learning rate.
    moved = (nets.weights(trainer)["log_std"] - weights["log_std"]).abs()
    assert torch.allclose(moved, torch.full_like(moved, 1e-4), rtol=1e-2)


def test_a_step_without_a_micro_batch_has_zero_gradients(make: Make) -> None:
    trainer = make(weight_decay=0.0)
    before = nets.weights(trainer)
    assert trainer.step(1.0).grad_norm == 0.0
    assert equal(before, nets.weights(trainer))


class Frozen(nets.Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.log_std.requires_grad_(False)


class Whole(nets.Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.steps = torch.nn.Parameter(torch.zeros(1, dtype=torch.int64), requires_grad=False)


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (Frozen, r"parameter log_std of Frozen does not require gradients.*buffer"),
        (Whole, r"parameter steps of Whole is torch\.int64"),
        (torch.nn.Tanh, r"Tanh has no parameters"),
        (dict, r"NetworkSpec\.build gave a dict"),
    ],
)
def test_a_network_that_cannot_be_trained_is_refused(network: Callable[[], Any], message: str) -> None:
    trainer = TorchTrainer(script.config("torch"))
    with pytest.raises(ConfigError, match=message):
        trainer.setup(replace(nets.spec(), build=lambda seed: network()), None, ParallelInfo(), seed=0)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"head": lambda logits, batch, shard: {}}, "without a head and with role policy"),
        ({"role": "critic"}, "without a head and with role policy, not role critic"),
        ({"model": nets.spec(dtype="float16")}, "model.dtype: 'float16' is unknown"),
        ({"cfg": {"activation_checkpointing": True}}, "Mlp has no gradient_checkpointing_enable"),
    ],
)
def test_what_goes_with_causal_models_alone_is_refused(keys: dict[str, Any], message: str) -> None:
    trainer = TorchTrainer(script.config("torch", **keys.pop("cfg", {})))
    arguments = {"model": nets.spec(), "head": None, "parallel": ParallelInfo(), "seed": 0, **keys}
    with pytest.raises(ConfigError, match=message):
        trainer.setup(**arguments)


def test_megatron_refuses_by_name() -> None:
    from rlinf_engines.trainers.megatron.trainer import MegatronTrainer

    trainer = MegatronTrainer(SimpleNamespace(name="megatron", tp=1, pp=1))
    with pytest.raises(
        ConfigError, match="megatron trains causal language models only; use trainer=torch or trainer=de"
    ):
        trainer.setup(nets.spec(), None, ParallelInfo(), seed=0)


@needs_deepspeed
def test_float64_needs_stage_0_of_deepspeed() -> None:
    with pytest.raises(ConfigError, match="trainer.zero_stage=0 only"):
        script.make("deepspeed", ParallelInfo(), dtype="float64", zero_stage=1)


# -- two ranks --------------------------------------------------------------------------------------------------------


def ranked(trainer: str, kind: str, parts: str, dtype: str = "float32", **keys: Any) -> dict[str, Any]:
    name = "-".join([trainer, kind, parts, dtype, *map(str, keys.values())])
    return {"name": name, "trainer": trainer, "kind": kind, "parts": parts, "dtype": dtype, "keys": keys, "from": ""}


RANKED = [
    *(
        ranked("torch", kind, parts, sharding=sharding)
        for sharding in ("ddp", "fsdp2")
        for kind, parts in [("mlp", "uneven"), ("conv", "idle"), ("mlp", "idle"), ("partial", "idle")]
    ),
    ranked("torch", "mlp", "uneven", "float64", sharding="ddp"),
    ranked("torch", "mlp", "uneven", "float64", sharding="fsdp2"),
    *(
        ranked("deepspeed", kind, parts, zero_stage=stage)
        for stage in range(4)
        for kind, parts in [("mlp", "uneven"), ("conv", "idle"), ("partial", "idle")]
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of all cases on two ranks, which go on from a checkpoint of one rank too."""
    found = tmp_path_factory.mktemp("ranks")
    todo = []
    for case in RANKED:
        if case["trainer"] == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
            continue
        alone = script.make("torch", ParallelInfo(), case["kind"], case["dtype"])
        nets.train(alone, case["kind"], SPLIT, case["dtype"])
        alone.save(found / f"{case['name']}_alone")
        alone.close()
        todo.append({**case, "from": str(found / f"{case['name']}_alone")})
    processes = [
        subprocess.Popen(
            [sys.executable, script.__file__, str(rank), "2", str(found), json.dumps(todo)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for rank, process in enumerate(processes):
            (found / f"err{rank}").write_text(process.communicate(timeout=DEADLINE_S)[1])
    finally:
        for process in processes:
            process.kill()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("case", RANKED, ids=lambda case: case["name"])
def test_two_ranks_are_one(folder: Path, case: dict[str, Any]) -> None:
    if case["trainer"] == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("needs deepspeed")
    files = [folder / f"{case['name']}_{rank}.pt" for rank in range(2)]
    if not all(file.is_file() for file in files):
        raise AssertionError("\n".join((folder / f"err{rank}").read_text()[-3000:] for rank in range(2)))
    results = [torch.load(file, weights_only=False) for file in files]
    expected = nets.reference(case["kind"], script.config("torch"), case["dtype"])
    limit = 1e-12 if case["dtype"] == "float64" else 2e-6
    found = [nets.Found(**result["found"]) for result in results]
    nets.check(found[0], expected, limit)
    found[1].gradients = expected.gradients  # whole state is on rank 0 alone
    nets.check(found[1], expected, limit)
    assert equal(found[0].weights, found[1].weights)
    assert equal(nets.read_export(folder / f"{case['name']}_export"), found[0].weights)
    for result in results:
        assert result["gathered"] == [{"rank": 0}, {"rank": 1}]
        assert result["told"] == results[0]["told"]
        assert result["told"].startswith("NonFiniteError: gradient is not finite in ")
        (values, weights), (again, same), (others, moved) = (result[n] for n in ("straight", "again", "elsewhere"))
        assert again == values
        assert equal(same, weights)
        # One rank's checkpoint, on two.
        assert others[0]["loss"] == pytest.approx(values[0]["loss"], rel=10 * limit)
        assert others[1].grad_norm == pytest.approx(values[1].grad_norm, rel=10 * limit)
        assert all(torch.allclose(t, weights[n], rtol=0, atol=10 * limit) for n, t in moved.items())
        assert equal(moved, results[0]["elsewhere"][1])
