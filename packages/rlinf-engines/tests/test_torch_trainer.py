"""The torch trainer: sums and counts, clipping, exact checkpoints, number formats, faults."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from rlinf_core.errors import ConfigError, NonFiniteError, RLinfError  # noqa: E402
from rlinf_core.types import ParallelInfo, Trainer  # noqa: E402
from rlinf_engines.trainers.torch_trainer import TorchTrainer  # noqa: E402


@pytest.fixture
def make_trainer(make_model: Any, make_trainer_cfg: Any, forward: Any) -> Any:
    def make(dtype: str = "float64", seed: int = 0, model: Any = None, **keys: Any) -> TorchTrainer:
        trainer = TorchTrainer(make_trainer_cfg(**keys))
        trainer.setup(model or make_model(dtype), forward, ParallelInfo(), seed=seed)
        return trainer

    return make


def grads(trainer: TorchTrainer) -> dict[str, torch.Tensor]:
    return trainer.gradients()


def weights(trainer: TorchTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.weights()}


def far(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def test_it_is_a_trainer(make_trainer: Any) -> None:
    assert isinstance(make_trainer(), Trainer)


@pytest.mark.parametrize("split", [[[0, 1, 2, 3, 4, 5]], [[0], [1, 2], [3, 4, 5]], [[5, 1], [4, 0, 2, 3]]])
def test_gradients_do_not_depend_on_micro_batches(
    make_trainer: Any, make_batch: Any, loss: Any, split: list[list[int]]
) -> None:
    whole, parts = make_trainer(), make_trainer()
    total, count, metrics = whole.accumulate(make_batch(), loss)
    sums = [parts.accumulate(make_batch(rows=rows), loss) for rows in split]
    assert sum(s[0] for s in sums) == pytest.approx(total, abs=1e-9)
    assert sum(s[1] for s in sums) == count == metrics["tokens"]
    assert far(grads(whole), grads(parts)) < 1e-9
    assert whole.step(count).grad_norm == pytest.approx(parts.step(count).grad_norm, abs=1e-9)
    assert far(weights(whole), weights(parts)) < 1e-9


def test_step_divides_once_by_the_count(make_trainer: Any, make_batch: Any, loss: Any) -> None:
    trainer = make_trainer(grad_clip=0.0)
    _, count, _ = trainer.accumulate(make_batch(), loss)
    norm = math.sqrt(sum(float(g.pow(2).sum()) for g in grads(trainer).values()))
    info = trainer.step(count)
    assert info.grad_norm == pytest.approx(norm / count, rel=1e-12)
    assert info.lr == 1e-3
    assert not grads(trainer)


def test_clipping_bounds_the_gradient_and_reports_it_unclipped(make_trainer: Any, make_batch: Any, loss: Any) -> None:
    trainer, seen = make_trainer(grad_clip=0.01), {}
    update = trainer.optimizer.step

    def spy() -> None:
        seen.update(grads(trainer))
        update()

    trainer.optimizer.step = spy
    _, count, _ = trainer.accumulate(make_batch(), loss)
    info = trainer.step(count)
    assert info.grad_norm > 0.01
    assert math.sqrt(sum(float(g.pow(2).sum()) for g in seen.values())) == pytest.approx(0.01, rel=1e-6)


def test_loss_falls(make_trainer: Any, make_batch: Any, loss: Any) -> None:
    trainer, values = make_trainer("float32"), []
    for _ in range(20):
        total, count, _ = trainer.accumulate(make_batch(), loss)
        values.append(total / count)
        trainer.step(count)
    assert values[-1] < values[0] - 0.5


def test_logprobs_have_no_gradient_and_switch_dropout_off(make_trainer: Any, make_batch: Any, loss: Any) -> None:
    trainer = make_trainer()
    for layer in trainer.model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    first = trainer.logprobs(make_batch())
    assert not first.requires_grad
    assert torch.equal(first, trainer.logprobs(make_batch()))
    quiet = -float(first.where(make_batch()["mask_BT"][:, 1:].bool(), 0.0).sum())
    assert trainer.accumulate(make_batch(), loss)[0] != pytest.approx(quiet)


def test_a_loss_without_gradient_adds_nothing(make_trainer: Any, make_batch: Any) -> None:
    trainer = make_trainer()
    result = trainer.accumulate(make_batch(), lambda outputs, batch: (torch.zeros(()), 0.0, {}))
    assert result == (0.0, 0.0, {})
    assert not grads(trainer)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_loss_is_named(make_trainer: Any, make_batch: Any, bad: float) -> None:
    trainer = make_trainer()
    with pytest.raises(NonFiniteError, match="loss sum is .*step 0 in the micro-batch of p0/0, p1/0"):
        trainer.accumulate(make_batch(), lambda outputs, batch: (outputs.sum() * bad, 1.0, {}))
    assert not grads(trainer)


def test_non_finite_gradient_is_named_and_changes_nothing(make_trainer: Any, make_batch: Any) -> None:
    trainer = make_trainer()
    before = weights(trainer)
    # The root's slope at zero is infinite while its value is not.
    trainer.accumulate(make_batch(), lambda outputs, batch: ((outputs.sum() * 0.0).abs().sqrt(), 1.0, {}))
    with pytest.raises(NonFiniteError, match=r"gradient is not finite in \d+ parameters, first model\."):
        trainer.step(1.0)
    assert far(before, weights(trainer)) == 0.0
    assert trainer.steps_done == 0


@pytest.mark.parametrize("count", [0.0, -1.0, math.nan])
def test_a_count_that_is_not_positive_is_refused(make_trainer: Any, count: float) -> None:
    with pytest.raises(RLinfError, match="count is"):
        make_trainer().step(count)


def test_save_and_load_continue_bit_for_bit(make_trainer: Any, make_batch: Any, loss: Any, tmp_path: Path) -> None:
    def run(trainer: TorchTrainer, steps: range) -> list[tuple[float, float]]:
        done = []
        for k in steps:
            total, count, _ = trainer.accumulate(make_batch(seed=k), loss)
            done.append((total, trainer.step(count).lr, float(torch.rand(()))))
        return done

    keys = {"warmup_steps": 2, "schedule": "cosine", "schedule_steps": 8}
    straight = make_trainer("float32", **keys)
    whole = run(straight, range(6))
    first = make_trainer("float32", **keys)
    begun = run(first, range(3))
    first.save(tmp_path / "step3")
    second = make_trainer("float32", seed=9, **keys)
    second.load(tmp_path / "step3")
    assert second.steps_done == 3
    assert begun + run(second, range(3, 6)) == whole
    assert far(weights(straight), weights(second)) == 0.0


def test_save_replaces_and_leaves_nothing_aside(make_trainer: Any, tmp_path: Path) -> None:
    trainer = make_trainer()
    trainer.save(tmp_path / "c")
    trainer.save(tmp_path / "c")
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


def damage(path: Path, how: str) -> None:
    if how == "cut":
        data = (path / "state.pt").read_bytes()
        (path / "state.pt").write_bytes(data[: len(data) // 2])
    elif how == "no meta":
        (path / "meta.json").unlink()
    elif how == "garbage":
        (path / "state.pt").write_bytes(b"x" * json.loads((path / "meta.json").read_text())["bytes"])
    elif how == "gone":
        path.rename(path.with_name("elsewhere"))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("cut", "is not whole: state.pt has"),
        ("no meta", "is not whole"),
        ("garbage", "cannot be read"),
        ("gone", "does not exist"),
    ],
)
def test_half_written_checkpoints_are_refused(make_trainer: Any, tmp_path: Path, how: str, message: str) -> None:
    trainer = make_trainer()
    trainer.save(tmp_path / "c")
    damage(tmp_path / "c", how)
    with pytest.raises(ConfigError, match=message):
        trainer.load(tmp_path / "c")


def test_a_checkpoint_of_another_model_is_refused_by_name(make_trainer: Any, make_model: Any, tmp_path: Path) -> None:
    make_trainer().save(tmp_path / "c")
    for other in (make_model(layers=3), make_model(intermediate_size=32), make_model("float32")):
        with pytest.raises(ConfigError, match=r"is of another model: model\.[a-z_.0-9]+ is .* there and .* here"):
            make_trainer(model=other).load(tmp_path / "c")


def test_weights_are_named_as_hugging_face_does_and_tied_ones_come_once(make_trainer: Any) -> None:
    trainer = make_trainer()
    names = [name for name, _ in trainer.weights()]
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names
    assert "model.layers.1.mlp.gate_proj.weight" in names
    assert len(names) == len(set(names)) == len(list(trainer.model.parameters()))
    assert not any(tensor.requires_grad for _, tensor in trainer.weights())


def test_bfloat16_keeps_float32_masters(make_trainer: Any, make_batch: Any, loss: Any, tmp_path: Path) -> None:
    trainer = make_trainer("bfloat16", lr=1e-6)
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    assert trainer.logprobs(make_batch()).dtype == torch.float32
    _, count, _ = trainer.accumulate(make_batch(), loss)
    trainer.step(count)
    assert all(p.dtype == torch.float32 for p in trainer.model.parameters())
    assert all(t.dtype == torch.bfloat16 for _, t in trainer.weights())
    # An update this small is below bfloat16's resolution and must not be lost.
    assert all(not torch.equal(before[n], p) for n, p in trainer.model.named_parameters())
    trainer.export(tmp_path / "hf")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "bfloat16"


def test_export_loads_as_a_model_path(
    make_trainer: Any, make_model: Any, make_batch: Any, loss: Any, tmp_path: Path
) -> None:
    trainer = make_trainer("float32")
    _, count, _ = trainer.accumulate(make_batch(), loss)
    trainer.step(count)
    trainer.export(tmp_path / "hf")
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]
    again = make_trainer(model=make_model("float32", path=str(tmp_path / "hf")))
    assert far(weights(trainer), weights(again)) == 0.0
    assert torch.equal(trainer.logprobs(make_batch()), again.logprobs(make_batch()))
    assert again.tokenizer("1+2=").input_ids == trainer.tokenizer("1+2=").input_ids


def test_restart_optimizer_begins_a_phase_with_the_same_weights(
    make_trainer: Any, make_trainer_cfg: Any, make_batch: Any, loss: Any
) -> None:
    trainer = make_trainer(warmup_steps=4)
    _, count, _ = trainer.accumulate(make_batch(), loss)
    trainer.step(count)
    before = weights(trainer)
    trainer.restart_optimizer(make_trainer_cfg(lr=5e-4))
    assert far(before, weights(trainer)) == 0.0
    assert trainer.steps_done == 0 and not trainer.optimizer.state
    _, count, _ = trainer.accumulate(make_batch(), loss)
    assert trainer.step(count).lr == 5e-4


def test_decay_spares_norms_and_biases(make_trainer: Any) -> None:
    for group in make_trainer(weight_decay=0.1).optimizer.param_groups:
        assert {p.dim() > 1 for p in group["params"]} == {group["weight_decay"] > 0}


def history(trainer: TorchTrainer, make_batch: Any, loss: Any, switch: Any, folder: Path) -> list[Any]:
    """All that two optimizer steps of two micro-batches give, with ``switch`` called between any two calls."""
    seen: list[Any] = []
    for step in range(2):
        for part in range(2):
            switch()
            seen.append(trainer.accumulate(make_batch(seed=10 * step + part), loss)[0])
            switch()
            seen.append(trainer.gradients())
        switch()
        seen.append(trainer.step(40.0))
        switch()
        seen.append(trainer.logprobs(make_batch(seed=99)))
        switch()
        seen.append(weights(trainer))
        switch()
        trainer.save(folder / f"step{step}")
    switch()
    trainer.load(folder / "step0")
    switch()
    trainer.export(folder / "hf")
    switch()
    trainer.accumulate(make_batch(seed=7), loss)
    switch()
    seen += [trainer.step(20.0), weights(trainer)]
    return seen


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)
    return bool(a == b)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_switches_between_any_two_calls_change_no_bit(
    make_trainer: Any, make_batch: Any, loss: Any, dtype: str, tmp_path: Path
) -> None:
    def there_and_back() -> None:
        switched.offload()
        switched.onload()

    plain, switched = make_trainer(dtype), make_trainer(dtype)
    expected = history(plain, make_batch, loss, lambda: None, tmp_path / "plain")
    found = history(switched, make_batch, loss, there_and_back, tmp_path / "switched")
    assert len(found) == len(expected)
    for number, (a, b) in enumerate(zip(expected, found, strict=True)):
        assert same(a, b), number


def test_weights_mapped_from_a_checkpoint_are_switched(
    make_trainer: Any, make_model: Any, make_batch: Any, tmp_path: Path
) -> None:
    make_trainer("float32").export(tmp_path / "hf")
    trainer = make_trainer(model=make_model("float32", path=str(tmp_path / "hf")))
    first = trainer.logprobs(make_batch())
    for _ in range(2):
        trainer.offload()
        trainer.onload()
    assert torch.equal(first, trainer.logprobs(make_batch()))


@pytest.mark.parametrize(
    "what",
    ["accumulate", "logprobs", "step", "gradients", "weights", "save", "load", "export", "restart_optimizer"],
)
def test_use_while_offloaded_is_refused_and_changes_nothing(
    make_trainer: Any, make_batch: Any, loss: Any, what: str, tmp_path: Path
) -> None:
    trainer = make_trainer()
    trainer.save(tmp_path / "c")
    trainer.accumulate(make_batch(), loss)
    before = grads(trainer), weights(trainer)
    trainer.offload()
    calls = {
        "accumulate": lambda: trainer.accumulate(make_batch(), loss),
        "logprobs": lambda: trainer.logprobs(make_batch()),
        "step": lambda: trainer.step(1.0),
        "gradients": trainer.gradients,
        "weights": lambda: next(trainer.weights()),
        "save": lambda: trainer.save(tmp_path / "c"),
        "load": lambda: trainer.load(tmp_path / "c"),
        "export": lambda: trainer.export(tmp_path / "hf"),
        "restart_optimizer": lambda: trainer.restart_optimizer(trainer.cfg),
    }
    with pytest.raises(RLinfError, match=f"trainer: {what} while offloaded"):
        calls[what]()
    assert trainer.reduce({"a": 1.0}) == {"a": 1.0}  # numbers of the host
    trainer.onload()
    assert same(before[0], grads(trainer)) and same(before[1], weights(trainer))
    assert not (tmp_path / "hf").exists()


def test_weights_being_read_end_with_an_offload(make_trainer: Any) -> None:
    trainer = make_trainer()
    reader = trainer.weights()
    next(reader)
    trainer.offload()
    with pytest.raises(RLinfError, match="weights while offloaded"):
        next(reader)


def test_switching_before_setup_and_closing_are_harmless(make_trainer: Any, make_trainer_cfg: Any) -> None:
    TorchTrainer(make_trainer_cfg()).offload()
    trainer = make_trainer()
    trainer.offload()
    trainer.close()


def test_reduce_of_one_rank_is_the_identity(make_trainer: Any) -> None:
    assert make_trainer().reduce({"a": 1.5}) == {"a": 1.5}


def test_ranks_without_a_meeting_point_are_refused(make_model: Any, make_trainer_cfg: Any, forward: Any) -> None:
    trainer = TorchTrainer(make_trainer_cfg())
    with pytest.raises(ConfigError, match="init_method"):
        trainer.setup(make_model(), forward, ParallelInfo(world_size=2), seed=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_offload_frees_the_gpu_and_onload_brings_everything_back(
    make_model: Any, make_trainer_cfg: Any, forward: Any, make_batch: Any, loss: Any
) -> None:
    def run(swap: bool) -> dict[str, torch.Tensor]:
        trainer = TorchTrainer(make_trainer_cfg())
        trainer.setup(make_model("float32"), forward, ParallelInfo(device="cuda"), seed=0)
        for k in range(3):
            _, count, _ = trainer.accumulate(make_batch(seed=k), loss)
            if swap:
                loaded = torch.cuda.memory_allocated()
                moved = sum(p.nbytes + p.grad.nbytes for p in trainer.model.parameters())
                trainer.offload()
                assert loaded - torch.cuda.memory_allocated() >= moved
                trainer.onload()
                assert torch.cuda.memory_allocated() == loaded
            trainer.step(count)
        return weights(trainer)

    assert far(run(swap=True), run(swap=False)) == 0.0
