"""Checkpoints: a run that goes on from one equals one that never stopped; what is not whole or not ours is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import trainer_cases as cases  # noqa: E402

from rlinf_core.errors import ConfigError  # noqa: E402
from rlinf_core.types import ParallelInfo  # noqa: E402
from rlinf_engines.trainers.torch_trainer import TorchTrainer  # noqa: E402


def make_trainer(model: Any = None, seed: int = 0, role: str = "policy", **keys: Any) -> TorchTrainer:
    trainer = TorchTrainer(cases.trainer_config(**keys))
    head = cases.head if role == "policy" else None
    trainer.setup(model or cases.model_config(), head, ParallelInfo(), seed=seed, role=role)
    return trainer


def run(trainer: TorchTrainer, steps: range, role: str = "policy") -> list[Any]:
    """What some steps give, with dropout, so that random numbers count."""
    done: list[Any] = []
    for layer in trainer.model.model.layers:
        layer.self_attn.attention_dropout = 0.2
    for step in steps:
        total, count, _ = trainer.accumulate([cases.collate(cases.make_rows(step=step))], cases.LOSSES[role])
        done += [total, trainer.step(count)]
    return done


def state_of(trainer: TorchTrainer) -> dict[str, Any]:
    weights = {name: tensor.clone() for name, tensor in trainer.weights()}
    named = trainer.model.named_parameters()
    state = trainer.optimizer.state
    optimizer = {name: {k: v.clone() for k, v in state[p].items()} for name, p in named if p in state}
    return {"weights": weights, "optimizer": optimizer, "steps": trainer.steps_done, "rng": torch.get_rng_state()}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


@pytest.mark.parametrize("role", ["policy", "critic"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_save_and_load_continue_bit_for_bit(role: str, dtype: str, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"warmup_steps": 2, "schedule": "cosine", "schedule_steps": 8, "role": role}
    model = cases.model_config("llama", dtype)
    straight = make_trainer(model, **keys)
    whole = run(straight, range(6), role)
    end = state_of(straight)
    first = make_trainer(model, **keys)
    begun = run(first, range(3), role)
    first.save(tmp_path / "step3")
    run(first, range(3, 4), role)  # what comes after does not change what is saved
    second = make_trainer(model, seed=9, **keys)
    run(second, range(10, 12), role)
    second.accumulate([cases.collate(cases.make_rows())], cases.LOSSES[role])  # given up with the load
    second.load(tmp_path / "step3")
    assert second.steps_done == 3 and not second.gradients()
    assert begun + run(second, range(3, 6), role) == whole
    assert same(state_of(second), end)


def test_a_checkpoint_before_the_first_step(tmp_path: Path) -> None:
    trainer = make_trainer()
    trainer.save(tmp_path / "c")
    expected = run(trainer, range(2))
    trainer.load(tmp_path / "c")
    assert trainer.steps_done == 0 and not trainer.optimizer.state
    assert run(trainer, range(2)) == expected


def test_what_was_loaded_does_not_hang_on_the_file(tmp_path: Path) -> None:
    trainer = make_trainer()
    run(trainer, range(1))
    trainer.save(tmp_path / "c")
    trainer.load(tmp_path / "c")
    before = state_of(trainer)
    file = tmp_path / "c" / "state.pt"
    file.write_bytes(bytes(file.stat().st_size))
    assert same(before, state_of(trainer))
    run(trainer, range(1, 2))
    assert not file.read_bytes().strip(b"\0")


def test_save_replaces_and_leaves_nothing_aside(tmp_path: Path) -> None:
    trainer = make_trainer()
    (tmp_path / ".c.part").mkdir()
    (tmp_path / ".c.part" / "left over").write_text("by a process that was killed")
    trainer.save(tmp_path / "c")
    run(trainer, range(1))
    trainer.save(tmp_path / "c")
    assert [p.name for p in tmp_path.iterdir()] == ["c"]
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == ["meta.json", "state.pt"]
    assert json.loads((tmp_path / "c" / "meta.json").read_text())["steps_done"] == 1


def test_a_checkpoint_that_cannot_be_written_leaves_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer()
    trainer.save(tmp_path / "c")
    expected = state_of(trainer)
    run(trainer, range(1))

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        with pytest.raises(OSError, match="No space left"):
            trainer.save(tmp_path / "c")
    trainer.load(tmp_path / "c")
    assert same(state_of(trainer)["weights"], expected["weights"])


def change(path: Path, **fields: Any) -> None:
    meta = json.loads((path / "meta.json").read_text())
    (path / "meta.json").write_text(json.dumps({**meta, **fields}))


def damage(path: Path, how: str) -> None:
    state = path / "state.pt"
    if how == "cut":
        state.write_bytes(state.read_bytes()[: state.stat().st_size // 2])
    elif how == "no meta":
        (path / "meta.json").unlink()
    elif how == "no state":
        state.unlink()
    elif how == "half a meta":
        (path / "meta.json").write_text('{"format": 2')
    elif how == "another meta":
        (path / "meta.json").write_text("[]")
    elif how == "garbage":
        state.write_bytes(b"x" * state.stat().st_size)
    elif how == "gone":
        path.rename(path.with_name("elsewhere"))
    elif how == "older format":
        change(path, format=1)
    elif how == "other content":
        torch.save({"weights": {}}, state)
        change(path, bytes=state.stat().st_size)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("cut", "is not whole: state.pt has"),
        ("no meta", "is not whole"),
        ("no state", "is not whole"),
        ("half a meta", "is not whole"),
        ("another meta", "is not whole"),
        ("garbage", "cannot be read"),
        ("gone", "does not exist"),
        ("older format", "has format 1, this trainer reads 2"),
        ("other content", "lacks optimizer, rngs, steps_done"),
    ],
)
def test_half_written_checkpoints_are_refused_and_change_nothing(tmp_path: Path, how: str, message: str) -> None:
    trainer = make_trainer()
    trainer.save(tmp_path / "c")
    run(trainer, range(1))
    before = state_of(trainer)
    damage(tmp_path / "c", how)
    with pytest.raises(ConfigError, match=f"checkpoint {tmp_path}/c .*{message}"):
        trainer.load(tmp_path / "c")
    assert same(before, state_of(trainer))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"layers": 3}, r"model\.layers\.2\.[a-z_.]+ is absent there and float32\[.*\] here"),
        ({"intermediate_size": 32}, r"mlp\.down_proj\.weight is float32\[64, 96\] there and float32\[64, 32\] here"),
        ({"dtype": "float64"}, r"is float32\[.*\] there and float64\[.*\] here"),
        ({"family": "llama"}, "lm_head.weight is absent there"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_by_name(other: dict[str, Any], message: str, tmp_path: Path) -> None:
    make_trainer().save(tmp_path / "c")
    trainer = make_trainer(cases.model_config(**other))
    before = state_of(trainer)
    with pytest.raises(ConfigError, match=f"is of another model: .*{message}"):
        trainer.load(tmp_path / "c")
    assert same(before, state_of(trainer))


def test_a_checkpoint_of_another_role_is_refused(tmp_path: Path) -> None:
    make_trainer().save(tmp_path / "c")
    with pytest.raises(ConfigError, match="is one of a policy; this trainer's role is critic"):
        make_trainer(role="critic").load(tmp_path / "c")
