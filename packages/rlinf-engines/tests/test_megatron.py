"""The Megatron trainer on one rank, which is a group of its own."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
if importlib.util.find_spec("megatron") is None:
    pytest.skip("needs rlinf-engines[megatron]", allow_module_level=True)

import trainer_cases as cases  # noqa: E402

from rlinf_core.errors import ConfigError, NonFiniteError, RLinfError  # noqa: E402
from rlinf_core.types import ParallelInfo  # noqa: E402
from rlinf_engines import conf  # noqa: E402
from rlinf_engines.trainers.megatron.trainer import MegatronTrainer  # noqa: E402

PARTS = [[0, 1, 2], [3, 4], [5, 6, 7]]
Make = Callable[..., MegatronTrainer]


@pytest.fixture
def make() -> Iterator[Make]:
    """Trainers that are set up, and closed at the end."""
    made: list[MegatronTrainer] = []

    def setup(model: Any = None, role: str = "policy", head: Any = cases.head, **keys: Any) -> MegatronTrainer:
        cfg = cases.trainer_config("megatron", **{"tp": 1, "pp": 1, "sequence_parallel": False, **keys})
        trainer = MegatronTrainer(cfg)
        trainer.setup(
            model or cases.model_config(), head if role == "policy" else None, ParallelInfo(), seed=0, role=role
        )
        made.append(trainer)
        return trainer

    yield setup
    for trainer in made:
        trainer.close()
    assert not torch.distributed.is_initialized()


def batches(step: int = 0) -> list[dict[str, Any]]:
    return cases.split(cases.make_rows(step=step), [3, 3])


@pytest.mark.parametrize("role", ["policy", "critic"])
@pytest.mark.parametrize("family", ["qwen2", "llama"])
@pytest.mark.parametrize("parts", [PARTS, [[7, 0], [1, 6, 2, 5], [3], [4]]])
def test_steps_are_the_references(make: Make, family: str, role: str, parts: list[list[int]]) -> None:
    model = cases.model_config(family)
    found = cases.train(make(model, role), parts, role=role)
    cases.check_equal(found, cases.reference(model, cases.trainer_config("megatron"), role=role))


def test_float64_agrees_to_its_own_precision(make: Make) -> None:
    model = cases.model_config("llama", dtype="float64")
    expected = cases.reference(model, cases.trainer_config("megatron"))
    cases.check_equal(cases.train(make(model), PARTS), expected, relative=1e-8, absolute=1e-8)


def test_bfloat16_computes_near_and_keeps_float32_masters(make: Make, tmp_path: Path) -> None:
    model = cases.model_config(dtype="bfloat16")
    trainer = make(model)
    found = cases.train(trainer, PARTS)
    expected = cases.reference(cases.model_config(), cases.trainer_config("megatron"))
    apart = cases.differences(found, expected)
    assert apart["losses"] < 0.1 and apart["norms"] < 0.1
    assert {tensor.dtype for tensor in found.weights.values()} == {torch.bfloat16}
    trainer.save(tmp_path / "checkpoint")
    state = torch.load(tmp_path / "checkpoint" / "state.pt", weights_only=True)
    assert {tensor.dtype for tensor in state["weights"].values()} == {torch.float32}
    for name, tensor in found.weights.items():
        assert torch.equal(state["weights"][name].bfloat16(), tensor)
    # What is loaded is what the model computes with.
    other = make(model)
    other.load(tmp_path / "checkpoint")
    for name, tensor in other.weights():
        assert torch.equal(tensor, found.weights[name])


def qwen3(tmp_path: Path, **keys: Any) -> Any:
    """A tiny Qwen3 in a directory, with norms that are not all ones."""
    from rlinf_engines.models import export_model, load_tokenizer

    plain = cases.model_config()
    config = transformers.Qwen3Config(
        vocab_size=cases.VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        max_position_embeddings=64,
        **keys,
    )
    torch.manual_seed(0)
    network = transformers.Qwen3ForCausalLM(config)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    export_model(network, load_tokenizer(plain), tmp_path / "qwen3")
    return cases.model_config(path=str(tmp_path / "qwen3"))


def test_qwen3_with_its_norms_of_queries_and_keys(make: Make, tmp_path: Path) -> None:
    # Token 5 comes in the rows: as padding, its input embedding gets no gradient.
    model = qwen3(tmp_path, pad_token_id=5)
    found = cases.train(make(model), PARTS)
    cases.check_equal(found, cases.reference(model, cases.trainer_config("megatron")), absolute=1e-4)


def test_activation_checkpointing_changes_nothing(make: Make) -> None:
    plain, recomputed = (cases.train(make(activation_checkpointing=keep), PARTS) for keep in (False, True))
    cases.check_equal(recomputed, plain, relative=1e-6, absolute=1e-6)


def test_a_checkpoint_goes_on_bit_equal(make: Make, tmp_path: Path) -> None:
    trainer = make()
    cases.train(trainer, PARTS, steps=1)
    trainer.save(tmp_path / "checkpoint")
    ahead = cases.train(trainer, PARTS, steps=1)
    trainer.load(tmp_path / "checkpoint")
    again = cases.train(trainer, PARTS, steps=1)
    assert trainer.steps_done == 2
    assert (again.losses, again.norms) == (ahead.losses, ahead.norms)
    assert all(torch.equal(again.weights[name], tensor) for name, tensor in ahead.weights.items())
    with pytest.raises(ConfigError, match="is of another model"):
        make(cases.model_config("llama")).load(tmp_path / "checkpoint")


def test_the_torch_backend_goes_on_from_its_checkpoint(make: Make, tmp_path: Path) -> None:
    from rlinf_engines.trainers.torch_trainer import TorchTrainer

    trainer = make()
    cases.train(trainer, PARTS, steps=1)
    trainer.save(tmp_path / "checkpoint")
    ahead = cases.train(trainer, PARTS, steps=1)
    other = TorchTrainer(cases.trainer_config("torch"))
    other.setup(cases.model_config(), cases.head, ParallelInfo(), seed=1)
    other.load(tmp_path / "checkpoint")
    cases.check_equal(cases.train(other, PARTS, steps=1), ahead)
    other.close()


def test_an_export_is_the_model(make: Make, tmp_path: Path) -> None:
    trainer = make(cases.model_config("llama"))
    weights = cases.train(trainer, PARTS).weights
    trainer.export(tmp_path / "export")
    network = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    theirs = network.state_dict()
    assert theirs.keys() == weights.keys()
    assert all(torch.equal(theirs[name], tensor) for name, tensor in weights.items())


def test_a_model_whose_files_lack_weights_is_refused(make: Make, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    make().export(tmp_path / "export")
    weights = load_file(tmp_path / "export" / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "export" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="lacks 1 of the model's weights, first model.norm.weight"):
        make(cases.model_config(path=str(tmp_path / "export")))


def test_a_critic_starts_from_an_export(make: Make, tmp_path: Path) -> None:
    make().export(tmp_path / "export")
    critic = make(cases.model_config(path=str(tmp_path / "export")), "critic")
    found = cases.train(critic, PARTS, role="critic")
    assert found.losses[1] != found.losses[0]
    assert {"score.weight", "score.bias"} < found.weights.keys()


def test_offloaded_nothing_works_and_then_all_is_as_before(make: Make) -> None:
    expected = cases.train(make(), PARTS)
    trainer = make()
    for step in range(2):
        trainer.accumulate(batches(step)[:1], cases.policy_loss)
        trainer.offload()  # with gradients
        with pytest.raises(RLinfError, match="accumulate while offloaded"):
            trainer.accumulate(batches(), cases.policy_loss)
        trainer.onload()
        trainer.accumulate(batches(step)[1:], cases.policy_loss)
        trainer.step(sum(float(batch["mask"].sum()) for batch in batches(step)))
    for name, tensor in trainer.weights():
        torch.testing.assert_close(tensor, expected.weights[name], rtol=0.0, atol=1e-5)


def test_a_policy_and_a_critic_share_a_process(make: Make) -> None:
    policy, critic = make(), make(role="critic")
    expected = cases.train(make(), PARTS)
    cases.train(critic, PARTS, role="critic")
    cases.check_equal(cases.train(policy, PARTS), expected, relative=1e-6, absolute=1e-6)
    critic.close()
    policy.forward(batches())  # the groups are there while one needs them


def test_another_layout_in_the_same_process_is_refused(make: Make) -> None:
    from rlinf_engines.trainers.megatron.layout import enter

    make()
    place = ParallelInfo(rank=1, world_size=2)
    with pytest.raises(ConfigError, match="trainer.tp: 2 with trainer.pp 1 over 2 ranks, but .* has tp 1, pp 1 over 1"):
        enter(place, torch.device("cpu"), 2, 1)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"tp": 2}, "trainer.tp: 2 times trainer.pp 1 needs a multiple of 2 ranks, and the trainer has 1"),
        ({"pp": 3}, "needs a multiple of 3 ranks"),
    ],
)
def test_ranks_that_the_layout_does_not_divide_are_refused(make: Make, keys: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**keys)


def test_numbers_that_are_none_are_refused_by_name(make: Make) -> None:
    trainer = make()

    def spoiled(outputs: dict[str, Any], batch: Any) -> Any:
        loss, count, metrics = cases.policy_loss(outputs, batch)
        return loss * (float("nan") if "p4/0" in batch["ids"] else 1.0), count, metrics

    with pytest.raises(NonFiniteError, match="loss sum is nan at optimizer step 0 in the micro-batch of p3/0, p4/0"):
        trainer.accumulate(batches(), spoiled)
    trainer.accumulate(batches(), cases.policy_loss)
    trainer._parameters.gradients()[3].view(-1)[0] = float("inf")
    name = " + ".join(trainer._parameters.pieces[3].sources)
    with pytest.raises(NonFiniteError) as caught:
        trainer.step(1.0)
    assert f"gradient is not finite in 1 parameters, first {name}" in str(caught.value)
    with pytest.raises(RLinfError, match="count is 0"):
        trainer.step(0.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-3), ("bfloat16", 0.1)])
def test_on_a_gpu_steps_are_the_references(dtype: str, limit: float) -> None:
    trainer = MegatronTrainer(cases.trainer_config("megatron", tp=1, pp=1, sequence_parallel=False))
    trainer.setup(cases.model_config(dtype=dtype), cases.head, ParallelInfo(device="cuda:0"), seed=0)
    trainer.offload()
    trainer.onload()
    apart = cases.differences(
        cases.train(trainer, PARTS), cases.reference(cases.model_config(), cases.trainer_config("megatron"))
    )
    trainer.close()
    assert apart["losses"] < limit and apart["norms"] < limit, apart


def test_what_is_masked_gives_no_gradient(make: Make) -> None:
    trainer = make()
    batch = batches()[0]
    masked = {**batch, "mask": torch.zeros_like(batch["mask"])}
    total, count, _ = trainer.accumulate([masked], cases.policy_loss)
    assert (total, count) == (0.0, 0.0)
    assert all(float(total.abs().max()) == 0.0 for total in trainer._parameters.gradients())
    assert trainer.accumulate([], cases.policy_loss) == (0.0, 0.0, {})
    assert trainer.forward([]) == []


def test_a_new_phase_starts_a_fresh_optimizer(make: Make) -> None:
    trainer = make()
    weights = cases.train(trainer, PARTS).weights
    trainer.restart_optimizer(SimpleNamespace(**{**vars(trainer.cfg), "lr": 0.0, "weight_decay": 0.0}))
    assert trainer.steps_done == 0
    again = cases.train(trainer, PARTS, steps=1).weights
    assert all(torch.equal(again[name], tensor) for name, tensor in weights.items())


def schema(**keys: Any) -> conf.MegatronTrainer:
    return replace(conf.MegatronTrainer(), **keys)


def test_splits_are_checked_when_a_config_is_composed(tmp_path: Path) -> None:
    root = SimpleNamespace(model=conf.Model())
    assert schema(tp=2, pp=3, sequence_parallel=True).validate(root) == []
    (problem,) = schema(tp=4).validate(root)
    assert problem.startswith("trainer.tp: 4 does not divide the model's key-value heads 2")
    (problem,) = schema(sequence_parallel=True).validate(root)
    assert problem.startswith("trainer.sequence_parallel: needs trainer.tp of 2 or more")
    root.model.path = str(tmp_path)
    assert schema(tp=4).validate(root) == []  # model.path's own check says what is missing
    config = tmp_path / "config.json"
    config.write_text('{"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}', encoding="utf-8")
    (problem,) = schema().validate(root)
    assert "does not support GPT2LMHeadModel; it supports LlamaForCausalLM" in problem
    sizes = '"num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536, "num_hidden_layers": 30'
    config.write_text(f'{{"architectures": ["LlamaForCausalLM"], {sizes}}}', encoding="utf-8")
    assert schema(pp=2).validate(root) == []
    (problem,) = schema(tp=2).validate(root)
    assert "attention heads 9" in problem and "choose from 1, 3" in problem
