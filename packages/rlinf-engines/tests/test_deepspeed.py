"""The DeepSpeed trainer with one rank: ZeRO stages against the reference, state, guards, several in one process."""

from __future__ import annotations

import gc
import importlib.util
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("needs deepspeed", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parent))

import trainer_cases as cases  # noqa: E402

from rlinf_core.errors import ConfigError, NonFiniteError, RLinfError  # noqa: E402
from rlinf_core.types import ParallelInfo  # noqa: E402
from rlinf_engines.offload import distinct_storages  # noqa: E402
from rlinf_engines.trainers.deepspeed_trainer import DeepSpeedTrainer  # noqa: E402
from rlinf_engines.trainers.torch_trainer import TorchTrainer  # noqa: E402

STAGES = [0, 1, 2, 3]
KEYS = {
    "offload_optimizer": False,
    "offload_parameters": False,
    "bucket_elements": 50_000_000,
    "persistence_elements": 1000,
}
WHOLE, SPLIT = [[0, 1, 2, 3, 4, 5, 6, 7]], [[5, 0], [1], [2, 3, 7], [4, 6]]

Make = Callable[..., DeepSpeedTrainer]
slow = pytest.mark.slow


def stages(*quick: int) -> list[Any]:
    """All stages; those but ``quick`` marked slow, and long where 1 stands for 2 or 2 for 1: both share the optimizer's
    state out, and of gradients the other tests tell them apart."""
    marks = {stage: [slow, pytest.mark.long] if stage in (1, 2) and {1, 2} & {*quick} else [slow] for stage in STAGES}
    return [stage if stage in quick else pytest.param(stage, marks=marks[stage]) for stage in STAGES]


@pytest.fixture
def make() -> Iterator[Make]:
    """Set up a trainer of one rank; keywords are config keys."""
    made: list[DeepSpeedTrainer] = []

    def build(
        zero_stage: int, *, model: Any = None, role: str = "policy", seed: int = 0, **keys: Any
    ) -> DeepSpeedTrainer:
        trainer = DeepSpeedTrainer(cases.trainer_config("deepspeed", zero_stage=zero_stage, **{**KEYS, **keys}))
        made.append(trainer)
        head = cases.head if role == "policy" else None
        trainer.setup(model or cases.model_config(), head, ParallelInfo(), seed=seed, role=role)
        return trainer

    yield build
    for trainer in made:
        trainer.close()
    assert not torch.distributed.is_initialized()


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.weights()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def go_on(trainer: Any, steps: tuple[int, ...] = (1, 2), switch: bool = False) -> list[Any]:
    """What optimizer steps give; ``switch``: with an offload and onload between any two calls."""

    def between() -> None:
        if switch:
            trainer.offload()
            trainer.onload()

    found: list[Any] = []
    for step in steps:
        rows = cases.make_rows(step=step)
        count = 0.0
        for part in SPLIT:
            between()
            total, counted, _ = trainer.accumulate([cases.collate([rows[i] for i in part])], cases.policy_loss)
            found.append(total)
            count += counted
        between()
        found.append(trainer.step(count))
        between()
        found.append(trainer.forward([cases.collate(rows)])[0]["logprobs"].tolist())
        between()
    return found


@pytest.mark.parametrize(
    ("family", "role"),
    [
        ("qwen2", "policy"),
        pytest.param("qwen2", "critic", marks=slow),
        pytest.param("llama", "policy", marks=slow),
        pytest.param("llama", "critic", marks=slow),
    ],
)
def test_every_stage_and_split_equals_the_reference(make: Make, family: str, role: str) -> None:
    model = cases.model_config(family)
    expected = cases.reference(model, cases.trainer_config(), role=role)
    for stage in STAGES:
        # Cuts are the trainer's matter, so one family and role shows that they change nothing.
        for parts in (WHOLE, SPLIT) if (family, role) == ("qwen2", "policy") else (SPLIT,):
            trainer = make(stage, model=model, role=role)
            cases.check_equal(cases.train(trainer, parts, role=role), expected)
            trainer.close()


@pytest.mark.parametrize(
    "keys",
    [
        {"zero_stage": 1, "offload_optimizer": True},
        {"zero_stage": 2, "offload_optimizer": True},
        pytest.param({"zero_stage": 3, "offload_optimizer": True}, marks=slow),
        {"zero_stage": 3, "offload_optimizer": True, "offload_parameters": True},
        pytest.param({"zero_stage": 2, "activation_checkpointing": True}, marks=slow),
        pytest.param({"zero_stage": 3, "activation_checkpointing": True, "persistence_elements": 0}, marks=slow),
        {"zero_stage": 1, "bucket_elements": 1000},
        {"zero_stage": 2, "bucket_elements": 1001},
        {"zero_stage": 2, "grad_clip": 0.0},
        pytest.param({"zero_stage": 0, "grad_clip": 0.0}, marks=slow),
    ],
)
def test_variants_equal_the_reference(make: Make, keys: dict[str, Any]) -> None:
    expected = cases.reference(cases.model_config(), cases.trainer_config(grad_clip=keys.get("grad_clip", 0.1)))
    cases.check_equal(cases.train(make(**keys), SPLIT), expected)


@pytest.mark.parametrize("stage", stages(2))
def test_bfloat16_keeps_float32_masters(make: Make, stage: int) -> None:
    trainer = make(stage, model=cases.model_config(dtype="bfloat16"), lr=1e-6)
    exact = {name: tensor.clone() for name, tensor in trainer._zero_state().weights()}
    assert {tensor.dtype for tensor in exact.values()} == {torch.float32}
    outputs = trainer.forward([cases.collate(cases.make_rows())])[0]
    assert outputs["logprobs"].dtype == torch.float32
    numbers = cases.train(trainer, SPLIT, steps=1)
    torchs = TorchTrainer(cases.trainer_config(lr=1e-6))
    torchs.setup(cases.model_config(dtype="bfloat16"), cases.head, ParallelInfo(), seed=0)
    apart = cases.differences(numbers, cases.train(torchs, SPLIT, steps=1))
    assert max(apart["norms"], apart["losses"], apart["first"]) < 0.01, apart
    assert {tensor.dtype for tensor in numbers.weights.values()} == {torch.bfloat16}
    # An update this small is below bfloat16's resolution and must not be lost.
    for name, tensor in trainer._zero_state().weights():
        assert not torch.equal(tensor, exact[name]), name


@pytest.mark.parametrize("stage", stages(1))
def test_a_loss_that_is_no_number_is_refused_and_changes_nothing(make: Make, stage: int) -> None:
    def bad(outputs: Any, batch: Any) -> Any:
        return outputs["logprobs"].sum() * float("nan"), 1.0, {}

    trainer = make(stage)
    before = weights(trainer)
    with pytest.raises(NonFiniteError, match=r"loss sum is nan at optimizer step 0 in the micro-batch of p0/0, p1/0"):
        trainer.accumulate([cases.collate(cases.make_rows())], bad)
    assert same(before, weights(trainer))
    expected = cases.reference(cases.model_config(), cases.trainer_config())
    cases.check_equal(cases.train(trainer, SPLIT), expected)


@pytest.mark.parametrize(
    "keys",
    [{"zero_stage": 1}, {"zero_stage": 3}]
    + [pytest.param({"zero_stage": s}, marks=slow) for s in (0, 2)]
    + [pytest.param({"zero_stage": 2, "offload_optimizer": True}, marks=slow)],
)
def test_a_bad_gradient_is_named_and_changes_nothing(make: Make, keys: dict[str, Any]) -> None:
    class Spoil(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad * float("inf")

    trainer = make(**keys)
    before = weights(trainer)
    norm = trainer.model.model.norm
    hook = norm.register_forward_pre_hook(lambda module, inputs: (Spoil.apply(inputs[0]),))
    trainer.accumulate([cases.collate(cases.make_rows())], cases.policy_loss)
    with pytest.raises(NonFiniteError, match=r"gradient is not finite in 25 parameters, first model\..* step 0"):
        trainer.step(8.0)
    hook.remove()
    assert same(before, weights(trainer))
    assert trainer.steps_done == 0
    expected = cases.reference(cases.model_config(), cases.trainer_config())
    cases.check_equal(cases.train(trainer, SPLIT), expected)


@pytest.mark.parametrize("count", [0.0, -1.0, float("nan"), float("inf")])
def test_counts_that_cannot_divide_are_refused(make: Make, count: float) -> None:
    with pytest.raises(RLinfError, match="needs at least one counted token"):
        make(1).step(count)


@pytest.mark.parametrize("stage", stages(0, 1))
def test_masked_rows_train_nothing(make: Make, stage: int) -> None:
    """A step of masked rows only has gradient zero; Adam decays the weights all the same."""
    trainer = make(stage, weight_decay=0.0)
    before = weights(trainer)
    batch = cases.collate(cases.make_rows()[:2])
    batch["mask"] = torch.zeros_like(batch["mask"])
    assert trainer.accumulate([batch], cases.policy_loss)[:2] == (0.0, 0.0)
    assert trainer.step(1.0).grad_norm == 0.0
    assert same(before, weights(trainer))
    assert trainer.step(1.0).grad_norm == 0.0  # nothing accumulated at all


def test_the_schedule_sets_the_learning_rate(make: Make) -> None:
    trainer = make(2, lr=1e-2, warmup_steps=2, schedule="linear", schedule_steps=4)
    rates = [info.lr for info in go_on(trainer, (0, 1, 2)) if hasattr(info, "lr")]
    assert rates == pytest.approx([5e-3, 1e-2, 1e-2])


@pytest.mark.parametrize("stage", stages(1))
def test_a_checkpoint_goes_on_bit_equal_in_its_stage_and_equal_in_others(
    make: Make, tmp_path: Path, stage: int
) -> None:
    trainer = make(stage)
    go_on(trainer, (0,))
    trainer.save(tmp_path / "c")
    straight = go_on(trainer)
    after = weights(trainer)
    again = make(stage, seed=7)
    go_on(again, (3,))
    again.accumulate([cases.collate(cases.make_rows())], cases.policy_loss)  # is forgotten
    again.load(tmp_path / "c")
    assert again.steps_done == 1
    assert go_on(again) == straight
    assert same(weights(again), after)
    other = make((stage + 1) % 4, seed=7)
    other.load(tmp_path / "c")
    found = go_on(other)
    for a, b in zip(found, straight, strict=True):
        if hasattr(a, "grad_norm"):
            assert (a.grad_norm, a.lr) == pytest.approx((b.grad_norm, b.lr), rel=1e-4)
        else:
            assert a == pytest.approx(b, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("stage", stages(1))
def test_checkpoints_pass_between_backends(make: Make, tmp_path: Path, stage: int) -> None:
    ours = make(stage)
    go_on(ours, (0,))
    ours.save(tmp_path / "ours")
    expected = go_on(ours, (1,))
    torchs = TorchTrainer(cases.trainer_config())
    torchs.setup(cases.model_config(), cases.head, ParallelInfo(), seed=3)
    torchs.load(tmp_path / "ours")
    torchs.save(tmp_path / "torchs")
    found = go_on(torchs, (1,))
    assert found[-2].grad_norm == pytest.approx(expected[-2].grad_norm, rel=1e-5)
    assert found[-1] == pytest.approx(expected[-1], abs=1e-5)
    ours.load(tmp_path / "torchs")
    assert go_on(ours, (1,)) == expected


def test_a_checkpoint_before_the_first_step(make: Make, tmp_path: Path) -> None:
    trainer = make(2)
    trainer.save(tmp_path / "c")
    expected = go_on(trainer)
    trainer.load(tmp_path / "c")
    assert not trainer.optimizer.state
    assert go_on(trainer) == expected


def test_checkpoints_that_do_not_fit_are_refused_by_name(make: Make, tmp_path: Path) -> None:
    trainer = make(1)
    trainer.save(tmp_path / "c")
    with pytest.raises(ConfigError, match=r"is of another model: model\..* is .* there and .* here"):
        make(1, model=cases.model_config(layers=3)).load(tmp_path / "c")
    with pytest.raises(ConfigError, match="is one of a policy; this trainer's role is critic"):
        make(1, role="critic").load(tmp_path / "c")
    state = tmp_path / "c" / "state.pt"
    state.write_bytes(state.read_bytes()[:-10])
    before = weights(trainer)
    with pytest.raises(ConfigError, match="is not whole"):
        trainer.load(tmp_path / "c")
    assert same(before, weights(trainer))


@pytest.mark.parametrize(
    ("stage", "dtype"),
    [(1, "float32"), (3, "bfloat16")]
    + [pytest.param(s, "float32", marks=slow) for s in (0, 2, 3)]
    + [pytest.param(s, "bfloat16", marks=slow) for s in (0, 1, 2)],
)
def test_weights_and_exports_have_hugging_face_names(make: Make, tmp_path: Path, stage: int, dtype: str) -> None:
    from transformers import AutoModelForCausalLM

    trainer = make(stage, model=cases.model_config(dtype=dtype))
    go_on(trainer, (0,))
    found = weights(trainer)
    assert "model.embed_tokens.weight" in found
    assert "lm_head.weight" not in found  # tied
    assert not any(tensor.requires_grad for _, tensor in trainer.weights())
    trainer.export(tmp_path / "hf")
    network = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert network.dtype == getattr(torch, dtype)
    for name, tensor in found.items():
        assert torch.equal(network.state_dict()[name], tensor)


@pytest.mark.parametrize(
    "keys",
    [{"zero_stage": 1}]
    + [pytest.param({"zero_stage": s}, marks=slow) for s in (0, 2, 3)]
    + [pytest.param({"zero_stage": 3, "offload_optimizer": True}, marks=slow)],
)
def test_switches_between_any_two_calls_change_no_bit(make: Make, keys: dict[str, Any]) -> None:
    plain, switched = make(**keys), make(**keys)
    assert go_on(switched, switch=True) == go_on(plain)
    assert same(weights(switched), weights(plain))


@pytest.mark.parametrize("stage", stages(2))
def test_offload_moves_all_of_the_state(make: Make, stage: int) -> None:
    trainer = make(stage, persistence_elements=0)
    elements = sum(tensor.numel() for _, tensor in trainer.weights())
    go_on(trainer, (0,))
    trainer.accumulate([cases.collate(cases.make_rows())], cases.policy_loss)
    moved = sum(s.nbytes() for s in distinct_storages(trainer._device_tensors(), torch.device("cpu"))) / 4
    # Weights, gradients and two averages; stages 1 and 2 have masters beside the weights.
    assert moved >= elements * (5 if stage in (1, 2) else 4)


@pytest.mark.parametrize("stage", stages(1))
def test_use_while_offloaded_is_refused(make: Make, tmp_path: Path, stage: int) -> None:
    trainer = make(stage)
    trainer.offload()
    batch = cases.collate(cases.make_rows())
    calls: dict[str, Callable[[], Any]] = {
        "accumulate": lambda: trainer.accumulate([batch], cases.policy_loss),
        "forward": lambda: trainer.forward([batch]),
        "step": lambda: trainer.step(1.0),
        "weights": lambda: next(trainer.weights()),
        "save": lambda: trainer.save(tmp_path / "c"),
        "load": lambda: trainer.load(tmp_path / "c"),
        "export": lambda: trainer.export(tmp_path / "hf"),
        "restart_optimizer": lambda: trainer.restart_optimizer(trainer.cfg),
    }
    for name, call in calls.items():
        with pytest.raises(RLinfError, match=f"trainer: {name} while offloaded"):
            call()
    assert trainer.reduce({"a": 1.0}) == {"a": 1.0}
    trainer.onload()
    cases.check_equal(cases.train(trainer, SPLIT), cases.reference(cases.model_config(), cases.trainer_config()))


@pytest.mark.parametrize("stage", stages(2))
def test_restart_optimizer_begins_a_phase_with_the_same_weights(make: Make, tmp_path: Path, stage: int) -> None:
    trainer = make(stage)
    go_on(trainer, (0,))
    trainer.export(tmp_path / "hf")
    before = weights(trainer)
    keys = {"lr": 3e-4, "weight_decay": 0.1, "betas": [0.8, 0.9], "grad_clip": 0.05}
    cfg = cases.trainer_config("deepspeed", zero_stage=stage, **KEYS, **keys)
    trainer.restart_optimizer(cfg)
    assert same(before, weights(trainer))
    assert trainer.steps_done == 0
    fresh = make(stage, model=cases.model_config(path=str(tmp_path / "hf")), **keys)
    assert go_on(trainer) == go_on(fresh)
    assert same(weights(trainer), weights(fresh))


def test_a_phase_keeps_the_engine(make: Make) -> None:
    trainer = make(1)
    cfg = cases.trainer_config("deepspeed", zero_stage=2, **KEYS)
    with pytest.raises(ConfigError, match="trainer.zero_stage: 2 differs from the phase before, which had 1"):
        trainer.restart_optimizer(cfg)


def test_two_engines_live_in_one_process(make: Make) -> None:
    """A policy with a frozen reference and a critic beside it, in different stages and number formats."""
    first = make(3)
    alone = go_on(first)
    first.close()
    policy, frozen, critic = make(3), make(2), make(1, role="critic", model=cases.model_config(dtype="bfloat16"))
    batch = cases.collate(cases.make_rows(step=1))
    reference = frozen.forward([batch])[0]["logprobs"].clone()
    assert torch.allclose(policy.forward([batch])[0]["logprobs"], reference, atol=1e-6)
    found: list[Any] = []
    for step in (1, 2):
        values = [cases.collate(cases.make_rows(step=step))]
        _, count, _ = critic.accumulate(values, cases.value_loss)
        found += go_on(policy, (step,))
        critic.step(count)
    assert found == alone
    assert torch.equal(frozen.forward([batch])[0]["logprobs"], reference)
    critic.close()  # the others go on
    assert torch.equal(frozen.forward([batch])[0]["logprobs"], reference)
    policy.close()
    frozen.close()
    assert not torch.distributed.is_initialized()
    assert go_on(make(3)) == alone


@pytest.mark.parametrize("stage", stages(3))
def test_a_closed_engine_keeps_no_memory(make: Make, stage: int) -> None:
    trainer = make(stage)
    go_on(trainer, (0,))
    engine = weakref.ref(trainer._engine)
    storages = distinct_storages(trainer._device_tensors(), torch.device("cpu"))
    before = sum(storage.nbytes() for storage in storages)
    trainer.close()
    gc.collect()
    # DeepSpeed's stage 3 keeps its objects; they are emptied.
    assert engine() is None or stage == 3
    assert engine() is None or sum(storage.nbytes() for storage in storages) < before / 100


def test_a_process_in_another_group_is_refused(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/other", rank=0, world_size=1)
    try:
        trainer = DeepSpeedTrainer(cases.trainer_config("deepspeed", zero_stage=1, **KEYS))
        with pytest.raises(RLinfError, match="already in a torch.distributed group"):
            trainer.setup(cases.model_config(), cases.head, ParallelInfo(), seed=0)
        assert torch.distributed.is_initialized()
    finally:
        torch.distributed.destroy_process_group()


def test_float64_goes_without_zero_only(make: Make) -> None:
    model = cases.model_config(dtype="float64")
    expected = cases.reference(model, cases.trainer_config())
    cases.check_equal(cases.train(make(0, model=model), SPLIT), expected, relative=1e-9, absolute=1e-9)
    with pytest.raises(ConfigError, match="model.dtype: DeepSpeed keeps float32 masters"):
        make(1, model=model)
