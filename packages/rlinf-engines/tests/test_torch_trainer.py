"""The torch trainer in one process: the reference's numbers, sums and counts, clipping, number formats, faults."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import trainer_cases as cases  # noqa: E402

from rlinf_core.errors import ConfigError, NonFiniteError, RLinfError  # noqa: E402
from rlinf_core.types import ParallelInfo, Trainer  # noqa: E402
from rlinf_engines.trainers.torch_trainer import TorchTrainer  # noqa: E402


def make_trainer(
    dtype: str = "float64", seed: int = 0, model: Any = None, role: str = "policy", device: str = "cpu", **keys: Any
) -> TorchTrainer:
    trainer = TorchTrainer(cases.trainer_config(**keys))
    head = cases.head if role == "policy" else None
    node = model or cases.model_config(dtype=dtype)
    trainer.setup(node, head, ParallelInfo(device=device), seed=seed, role=role)
    return trainer


def batch_of(rows: list[int] | None = None, step: int = 0) -> dict[str, Any]:
    every = cases.make_rows(step=step)
    return cases.collate(every if rows is None else [every[i] for i in rows])


def nll(outputs: Any, batch: Any) -> Any:
    count = float(batch["mask"].sum())
    return -outputs["logprobs"].sum(), count, {"tokens": count}


def weights(trainer: TorchTrainer) -> dict[str, Any]:
    return {name: tensor.clone() for name, tensor in trainer.weights()}


def far(a: dict[str, Any], b: dict[str, Any]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def test_it_is_a_trainer() -> None:
    assert isinstance(make_trainer(), Trainer)


SPLITS = [[range(8)], [[0], [1, 2], [3, 4, 5, 6, 7]], [[5, 1, 7], [4, 0], [2, 3, 6]]]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("role", ["policy", "critic"])
@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_it_gives_the_reference_s_numbers(family: str, role: str, checkpointing: bool) -> None:
    for dtype, relative, absolute in (("float32", 1e-4, 1e-5), ("float64", 1e-11, 1e-11)):
        model = cases.model_config(family, dtype)
        expected = cases.reference(model, cases.trainer_config(), role=role)
        for parts in SPLITS:
            trainer = make_trainer(model=model, role=role, activation_checkpointing=checkpointing)
            found = cases.train(trainer, parts, role=role)
            assert found.first.keys() == expected.first.keys()
            assert found.weights.keys() == expected.weights.keys()
            cases.check_equal(found, expected, relative=relative, absolute=absolute)


def test_sharding_of_one_rank_is_no_sharding() -> None:
    a, b = make_trainer(sharding="fsdp2"), make_trainer()
    assert not a.sharded
    assert far(cases.train(a, [range(8)]).weights, cases.train(b, [range(8)]).weights) == 0.0


def test_an_unknown_sharding_is_refused() -> None:
    with pytest.raises(ConfigError, match="trainer.sharding: 'fsdp'"):
        make_trainer(sharding="fsdp")


@pytest.mark.parametrize("split", SPLITS)
def test_gradients_do_not_depend_on_micro_batches(split: Any) -> None:
    whole, parts = make_trainer(), make_trainer()
    total, count, metrics = whole.accumulate([batch_of()], cases.policy_loss)
    sums = parts.accumulate([batch_of(list(rows)) for rows in split], cases.policy_loss)
    assert sums[0] == pytest.approx(total, abs=1e-9)
    assert sums[1] == count == metrics["tokens"] == sums[2]["tokens"]
    assert sums[2]["entropy"] == pytest.approx(metrics["entropy"], abs=1e-9)
    assert far(whole.gradients(), parts.gradients()) < 1e-9


def test_step_divides_once_by_the_count() -> None:
    trainer = make_trainer(grad_clip=0.0)
    _, count, _ = trainer.accumulate([batch_of()], nll)
    norm = math.sqrt(sum(float(g.pow(2).sum()) for g in trainer.gradients().values()))
    info = trainer.step(count)
    assert info.grad_norm == pytest.approx(norm / count, rel=1e-12)
    assert info.lr == 1e-3
    assert not trainer.gradients()


def test_clipping_bounds_the_gradient_and_reports_it_unclipped(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, seen = make_trainer(grad_clip=0.01), {}
    update = trainer.optimizer.step

    def spy() -> None:
        seen.update(trainer.gradients())
        update()

    monkeypatch.setattr(trainer.optimizer, "step", spy)
    _, count, _ = trainer.accumulate([batch_of()], nll)
    info = trainer.step(count)
    assert info.grad_norm > 0.01
    assert math.sqrt(sum(float(g.pow(2).sum()) for g in seen.values())) == pytest.approx(0.01, rel=1e-6)


def test_loss_falls() -> None:
    trainer, values = make_trainer("float32", grad_clip=1.0), []
    for _ in range(20):
        total, count, _ = trainer.accumulate([batch_of()], nll)
        values.append(total / count)
        trainer.step(count)
    assert values[-1] < values[0] - 0.5


def test_forward_has_no_gradient_and_switches_dropout_off() -> None:
    trainer = make_trainer()
    for layer in trainer.model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    first, second = trainer.forward([batch_of(), batch_of([2, 3])]), trainer.forward([batch_of()])
    assert not first[0]["logprobs"].requires_grad
    assert torch.equal(first[0]["logprobs"], second[0]["logprobs"])
    assert len(first[1]["logprobs"]) == len(batch_of([2, 3])["targets"])
    quiet = -float(first[0]["logprobs"].sum())
    assert trainer.accumulate([batch_of()], nll)[0] != pytest.approx(quiet)


def test_a_loss_without_gradient_adds_nothing() -> None:
    trainer = make_trainer()
    result = trainer.accumulate([batch_of()], lambda outputs, batch: (torch.zeros(()), 0.0, {}))
    assert result == (0.0, 0.0, {})
    assert not trainer.gradients()


def test_no_micro_batches_are_nothing() -> None:
    trainer = make_trainer()
    assert trainer.accumulate([], nll) == (0.0, 0.0, {})
    assert trainer.forward([]) == []
    assert trainer.most(3) == 3 and trainer.share(["a", "b"]) == ["a", "b"]
    trainer.barrier()


def test_a_filler_changes_nothing() -> None:
    a, b = make_trainer(), make_trainer()
    b.lockstep, b.most = True, lambda number: number + 2  # as if another rank had two more
    seen: list[list[str]] = []

    def loss(outputs: Any, batch: Any) -> Any:
        seen.append(batch["ids"])
        return nll(outputs, batch)

    assert a.accumulate([batch_of([0, 1])], loss) == b.accumulate([batch_of([0, 1])], loss)
    assert seen == [["p0/0", "p1/0"]] * 2
    assert far(a.gradients(), b.gradients()) == 0.0
    assert len(b.forward([batch_of([0])])) == 1
    # Where a loss has no gradient, a backward runs all the same.
    b.accumulate([batch_of([0])], lambda outputs, batch: (torch.zeros(()), 0.0, {}))
    assert far(a.gradients(), b.gradients()) == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_loss_is_named(bad: float) -> None:
    trainer = make_trainer()
    with pytest.raises(NonFiniteError, match="loss sum is .*step 0 in the micro-batch of p0/0, p1/0"):
        trainer.accumulate([batch_of()], lambda outputs, batch: (outputs["logprobs"].sum() * bad, 1.0, {}))
    assert not trainer.gradients()


def test_non_finite_gradient_is_named_and_changes_nothing() -> None:
    trainer = make_trainer()
    before = weights(trainer)
    # The root's slope at zero is infinite while its value is not.
    trainer.accumulate([batch_of()], lambda outputs, batch: ((outputs["logprobs"].sum() * 0.0).abs().sqrt(), 1.0, {}))
    with pytest.raises(NonFiniteError, match=r"gradient is not finite in \d+ parameters, first model\."):
        trainer.step(1.0)
    assert far(before, weights(trainer)) == 0.0
    assert trainer.steps_done == 0


@pytest.mark.parametrize("count", [0.0, -1.0, math.nan])
def test_a_count_that_is_not_positive_is_refused(count: float) -> None:
    with pytest.raises(RLinfError, match="count is"):
        make_trainer().step(count)


@pytest.mark.parametrize(
    ("role", "head", "message"), [("actor", cases.head, "role 'actor'"), ("critic", cases.head, "without a head")]
)
def test_roles_that_cannot_be_are_refused(role: str, head: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TorchTrainer(cases.trainer_config()).setup(cases.model_config(), head, ParallelInfo(), seed=0, role=role)


def test_weights_are_named_as_hugging_face_does_and_tied_ones_come_once() -> None:
    trainer = make_trainer()
    names = [name for name, _ in trainer.weights()]
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names
    assert "model.layers.1.mlp.gate_proj.weight" in names
    assert len(names) == len(set(names)) == len(list(trainer.model.parameters()))
    assert not any(tensor.requires_grad for _, tensor in trainer.weights())
    untied = make_trainer(model=cases.model_config("llama"))
    assert "lm_head.weight" in dict(untied.weights())


def test_bfloat16_keeps_float32_masters(tmp_path: Path) -> None:
    trainer = make_trainer("bfloat16", lr=1e-6)
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    assert trainer.forward([batch_of()])[0]["logprobs"].dtype == torch.float32
    assert make_trainer("bfloat16", role="critic").forward([batch_of()])[0]["values"].dtype == torch.float32
    _, count, _ = trainer.accumulate([batch_of()], nll)
    trainer.step(count)
    assert all(p.dtype == torch.float32 for p in trainer.model.parameters())
    assert all(t.dtype == torch.bfloat16 for _, t in trainer.weights())
    # An update this small is below bfloat16's resolution and must not be lost.
    assert all(not torch.equal(before[n], p) for n, p in trainer.model.named_parameters())
    trainer.export(tmp_path / "hf")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_export_loads_as_a_model_path(family: str, tmp_path: Path) -> None:
    trainer = make_trainer(model=cases.model_config(family, "float64"))
    trainer.model.generation_config.eos_token_id = [1, 9]
    _, count, _ = trainer.accumulate([batch_of()], nll)
    trainer.step(count)
    trainer.export(tmp_path / "hf")
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]
    assert "rlinf_packed" not in "".join(p.read_text() for p in (tmp_path / "hf").glob("*.json"))
    again = make_trainer(model=cases.model_config(dtype="float64", path=str(tmp_path / "hf")))
    assert type(again.model) is type(trainer.model)
    assert again.model.generation_config.eos_token_id == [1, 9]
    assert far(weights(trainer), weights(again)) == 0.0
    assert torch.equal(trainer.forward([batch_of()])[0]["logprobs"], again.forward([batch_of()])[0]["logprobs"])
    assert again.tokenizer("1+2=").input_ids == trainer.tokenizer("1+2=").input_ids


def test_an_export_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises((OSError, RLinfError)):
        make_trainer().export(tmp_path / "file" / "hf")


def test_restart_optimizer_begins_a_phase_with_the_same_weights() -> None:
    trainer = make_trainer(warmup_steps=4)
    _, count, _ = trainer.accumulate([batch_of()], nll)
    trainer.step(count)
    before = weights(trainer)
    trainer.restart_optimizer(cases.trainer_config(lr=5e-4))
    assert far(before, weights(trainer)) == 0.0
    assert trainer.steps_done == 0 and not trainer.optimizer.state
    _, count, _ = trainer.accumulate([batch_of()], nll)
    assert trainer.step(count).lr == 5e-4


def test_decay_spares_norms_and_biases() -> None:
    for group in make_trainer(weight_decay=0.1).optimizer.param_groups:
        assert {p.dim() > 1 for p in group["params"]} == {group["weight_decay"] > 0}


def test_reduce_of_one_rank_is_the_identity() -> None:
    assert make_trainer().reduce({"a": 1.5}) == {"a": 1.5}


def test_ranks_without_a_meeting_point_are_refused() -> None:
    for meet in ("", "elsewhere://x"):
        trainer = TorchTrainer(cases.trainer_config())
        place = ParallelInfo(world_size=2, init_method=meet)
        with pytest.raises((ConfigError, RLinfError), match="init_method"):
            trainer.setup(cases.model_config(), cases.head, place, seed=0)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
    ],
)
def test_out_of_memory_names_the_keys_that_help(error: RuntimeError, told: bool) -> None:
    trainer = make_trainer(micro_batch_tokens=77)

    def loss(outputs: Any, batch: Any) -> Any:
        raise error

    with pytest.raises(RLinfError if told else RuntimeError) as caught:
        trainer.accumulate([batch_of()], loss)
    if told:
        for text in (
            "out of memory on cpu in accumulate (trainer.micro_batch_tokens is 77)",
            "activation_check",
            "fsdp2",
        ):
            assert text in str(caught.value)
    else:
        assert caught.value is error


def test_memory_that_really_is_short_is_told() -> None:
    trainer = make_trainer()

    def loss(outputs: Any, batch: Any) -> Any:
        return outputs["logprobs"].sum() + torch.empty(1 << 60, dtype=torch.uint8).sum(), 1.0, {}

    with pytest.raises(RLinfError, match="out of memory on cpu in accumulate"):
        trainer.accumulate([batch_of()], loss)


def history(trainer: TorchTrainer, switch: Callable[[], None], folder: Path) -> list[Any]:
    """All that two optimizer steps of two micro-batches give, with ``switch`` called between any two calls."""
    seen: list[Any] = []
    for step in range(2):
        for part in range(2):
            switch()
            seen.append(trainer.accumulate([batch_of(step=10 * step + part)], nll)[0])
            switch()
            seen.append(trainer.gradients())
        switch()
        seen.append(trainer.step(40.0))
        switch()
        seen.append(trainer.forward([batch_of(step=99)])[0])
        switch()
        seen.append(weights(trainer))
        switch()
        trainer.save(folder / f"step{step}")
    switch()
    trainer.load(folder / "step0")
    switch()
    trainer.export(folder / "hf")
    switch()
    trainer.accumulate([batch_of(step=7)], nll)
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
def test_switches_between_any_two_calls_change_no_bit(dtype: str, tmp_path: Path) -> None:
    def there_and_back() -> None:
        switched.offload()
        switched.onload()

    plain, switched = make_trainer(dtype), make_trainer(dtype)
    expected = history(plain, lambda: None, tmp_path / "plain")
    found = history(switched, there_and_back, tmp_path / "switched")
    assert len(found) == len(expected)
    for number, (a, b) in enumerate(zip(expected, found, strict=True)):
        assert same(a, b), number


def test_weights_mapped_from_a_checkpoint_are_switched(tmp_path: Path) -> None:
    make_trainer("float32").export(tmp_path / "hf")
    trainer = make_trainer(model=cases.model_config(path=str(tmp_path / "hf")))
    first = trainer.forward([batch_of()])[0]
    for _ in range(2):
        trainer.offload()
        trainer.onload()
    assert same(first, trainer.forward([batch_of()])[0])


@pytest.mark.parametrize(
    "what",
    ["accumulate", "forward", "step", "gradients", "weights", "save", "load", "export", "restart_optimizer"],
)
def test_use_while_offloaded_is_refused_and_changes_nothing(what: str, tmp_path: Path) -> None:
    trainer = make_trainer()
    trainer.save(tmp_path / "c")
    trainer.accumulate([batch_of()], nll)
    before = trainer.gradients(), weights(trainer)
    trainer.offload()
    calls = {
        "accumulate": lambda: trainer.accumulate([batch_of()], nll),
        "forward": lambda: trainer.forward([batch_of()]),
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
    assert same(before[0], trainer.gradients()) and same(before[1], weights(trainer))
    assert not (tmp_path / "hf").exists()


def test_weights_being_read_end_with_an_offload() -> None:
    trainer = make_trainer()
    reader = trainer.weights()
    next(reader)
    trainer.offload()
    with pytest.raises(RLinfError, match="weights while offloaded"):
        next(reader)


def test_switching_before_setup_and_closing_are_harmless() -> None:
    early = TorchTrainer(cases.trainer_config())
    early.offload()
    early.close()
    with pytest.raises(RLinfError, match="not set up yet"):
        early.most(1)
    trainer = make_trainer()
    trainer.offload()
    trainer.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_offload_frees_the_gpu_and_onload_brings_everything_back() -> None:
    def run(swap: bool) -> dict[str, Any]:
        trainer = make_trainer("float32", device="cuda")
        for k in range(3):
            _, count, _ = trainer.accumulate([batch_of(step=k)], nll)
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
