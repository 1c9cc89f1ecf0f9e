"""The actor and the critic, with channels that are lists and trainers of the test's own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lists import Items, worker
from small_trainer import ReferenceTrainer, SmallTrainer, recipe, samples

from rlinf_core.config import Config
from rlinf_core.errors import NonFiniteError, RLinfError, RunDirectoryError
from rlinf_core.types import Sample
from rlinf_reasoning import training
from rlinf_reasoning.conf import Algorithm, AsyncPpo, Dapo, Ppo
from rlinf_reasoning.training import reference as reference_module
from rlinf_reasoning.workers import Actor, Critic, updating


class Saving(SmallTrainer):
    path: str | None = None

    def save(self, path: Path) -> None:
        torch.save(self.model.state_dict(), path)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.model.named_parameters()

    def load(self, path: Path) -> None:
        self.model.load_state_dict(torch.load(path))


@pytest.fixture(autouse=True)
def backend(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(cfg: Any, parallel: Any, seed: int, *, role: str = "policy", settings: Any = None) -> SmallTrainer:
        made = Saving(role=role)
        made.path = cfg.model.path
        made.restart_optimizer(Config({**cfg.trainer.to_dict(), **(settings.to_dict() if settings else {})}))
        return made

    monkeypatch.setattr(training, "load_trainer", load)
    loaded = type("Registry", (), {"__init__": lambda self, group: None, "load": lambda self, name: ReferenceTrainer})
    monkeypatch.setattr(reference_module, "Registry", loaded)


def made(cls: type, cfg: Config, tmp_path: Path) -> Any:
    found = worker(cls, Config({**cfg.to_dict(), "critic": {"lr": 0.02}}), tmp_path, cls.__name__.lower())
    found.setup()
    return found


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_actor_accounts_for_and_writes_every_sample(tmp_path: Path) -> None:
    actor, batch = made(Actor, recipe(), tmp_path), samples()
    batch[1].response_text = "π"
    metrics = actor.train(Items(batch[:8][::-1], batch[8:]))
    assert metrics["samples"] == 24 and metrics["grad_norm"] > 0.0 and len(actor.trainer.steps) == 1
    written = lines(tmp_path / "samples.jsonl")
    assert [line["id"] for line in written] == [s.id for s in batch]
    assert written[1]["response"] == "π" and written[1]["advantage"] == batch[1].info["advantage"]
    assert written[0]["step"] == "train/0" and written[0]["info"] == {}
    assert [(kind, len(ids)) for kind, ids, _ in actor._ctx.accounted] == [("trained", 8), ("trained", 16)]
    assert actor.train(Items()) == {}


def test_a_run_that_gets_nothing_to_train_on_ends(tmp_path: Path) -> None:
    actor = made(Actor, recipe(), tmp_path)
    for batch in ([], [], samples(), [], []):
        actor.train(Items(batch) if batch else Items())
    with pytest.raises(RLinfError, match="nothing to train on in 3 steps in a row, last train/0: every sample"):
        actor.train(Items())
    short = made(Actor, Config({**recipe().to_dict(), "num_steps": 1}), tmp_path)
    with pytest.raises(RLinfError, match="nothing to train on in one step, last"):
        short.train(Items())


def test_dynamic_sampling_may_leave_steps_empty(tmp_path: Path) -> None:
    actor = made(Actor, recipe(Dapo), tmp_path)
    assert [actor.train(Items()) for _ in range(5)] == [{}] * 5


def always(value: float, group: int, i: int) -> float:
    return value


def test_steps_that_teach_nothing_are_told_of_once_and_when_they_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    actor = made(Actor, recipe(), tmp_path)
    said = {}
    for index, reward in enumerate([None, 0.0, 0.0, None, *[0.25] * 12]):
        actor._ctx.step, actor._ctx.step_index = f"train/{index}", index
        metrics = actor.train(Items(samples(reward=None if reward is None else partial(always, reward))))
        assert (metrics["groups/without_signal"] == 1.0) == (reward is not None)
        if caplog.messages:
            (said[index],) = caplog.messages
        caplog.clear()
    assert list(said) == [1, 8]
    assert said[1].startswith("in step train/1 all rewards of every group were equal (0 on average)")
    assert said[8].startswith("in 5 steps in a row, last train/8 all rewards of every group were equal (0.25 on av")
    assert all("samples.jsonl" in text for text in said.values())


def test_equal_rewards_with_a_critic_are_nothing_to_tell(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    actor, critic, valued = made(Actor, recipe(Ppo), tmp_path), made(Critic, recipe(Ppo), tmp_path), Items()
    critic.value(Items(samples(reward=partial(always, 1.0))), valued)
    actor.train(Items(valued))
    assert caplog.messages == []


def test_staleness_goes_by_the_version_that_was_published(tmp_path: Path) -> None:
    actor = made(Actor, recipe(), tmp_path)
    channel = SimpleNamespace(broadcast=lambda item, keys: None)
    actor.publish_weights(channel, 3, 1)
    assert actor.train(Items(samples()))["staleness/max"] == 3.0


def test_a_batch_that_breaks_the_numbers_is_kept(tmp_path: Path) -> None:
    actor = made(Actor, recipe(), tmp_path)
    torch.nn.init.constant_(actor.trainer.model.out, float("nan"))
    with pytest.raises(NonFiniteError, match=r"loss; its samples are in .*train-0-rank0\.jsonl"):
        actor.train(Items(samples()))
    kept = lines(tmp_path / "failed" / "train-0-rank0.jsonl")
    assert [k["id"] for k in kept] == [s.id for s in samples()]
    assert kept[1]["response_ids"] and kept[1]["logprobs"]
    assert actor._ctx.accounted == []


def test_a_run_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(RunDirectoryError, match=r"samples\.jsonl"):
        made(Actor, recipe(), file).train(Items(samples()))


def test_actor_waits_while_the_critic_warms_up(tmp_path: Path) -> None:
    actor, critic = made(Actor, recipe(Ppo, critic_warmup_steps=2), tmp_path), made(Critic, recipe(Ppo), tmp_path)
    for index, steps in ((0, 0), (1, 0), (2, 1)):
        valued = Items()
        critic.value(Items(samples()), valued)
        actor._ctx.step_index = index
        actor.train(Items(valued))
        assert len(actor.trainer.steps) == steps


def test_critic_values_and_learns(tmp_path: Path) -> None:
    critic, valued = made(Critic, recipe(Ppo), tmp_path), Items()
    batch = samples()
    critic.offload()
    critic.onload()  # before there is anything to move
    critic.value(Items(batch[:8], batch[8:]), valued)
    assert critic.trainer.optimizer.param_groups[0]["lr"] == 0.02
    assert [s.id for s in valued] == [s.id for s in batch] and valued.keys == [s.group for s in batch]
    assert all(len(s.info["values"]) == len(s.response_ids) for s in valued)
    metrics = critic.train(Items(valued))
    assert metrics["critic/loss"] > 0.0 and len(critic.trainer.steps) == 1
    assert [kind for kind, _, _ in critic._ctx.accounted] == ["trained"]
    assert critic.train(Items()) == {}
    torch.nn.init.constant_(critic.trainer.model.out, float("nan"))
    with pytest.raises(NonFiniteError, match=r"train-0-critic-rank0\.jsonl"):
        critic.train(Items(valued))


def test_what_is_for_the_next_stage_is_not_written(tmp_path: Path) -> None:
    actor, critic, valued = made(Actor, recipe(Ppo), tmp_path), made(Critic, recipe(Ppo), tmp_path), Items()
    batch = samples()
    batch[0].info["note"] = "kept"
    critic.value(Items(batch), valued)
    actor.train(Items(valued))
    assert [line["info"] for line in lines(tmp_path / "samples.jsonl")[:2]] == [{"note": "kept"}, {}]


def test_the_kl_in_the_reward_of_ppo_comes_before_the_critic(tmp_path: Path) -> None:
    cfg = recipe(Ppo, kl_coef=0.5, kl_kind="k1", kl_in="reward", whiten=False)
    actor, critic, compared, valued = made(Actor, cfg, tmp_path), made(Critic, cfg, tmp_path), Items(), Items()
    actor.reference(Items(samples()), compared)
    assert all(s.info["kl"] == pytest.approx([0.0] * len(s.response_ids)) for s in compared), "it is the policy itself"
    for sample in compared:
        sample.info["kl"] = [0.1 * (k + 1) for k in range(len(sample.response_ids))]
    critic.value(Items(compared), valued)
    actor.train(Items(valued))
    for sample in valued:  # gamma = lambda = 1: what is left of reward less KL, less the value
        kl, values = sample.info["kl"], sample.info["values"]
        left = [float(sample.reward or 0.0) - 0.5 * sum(kl[k:]) - values[k] for k in range(len(kl))]
        assert sample.info["advantage"] == pytest.approx(sum(left) / len(left))


def test_the_reference_is_the_policy_after_the_warm_start_and_travels_with_checkpoints(tmp_path: Path) -> None:
    cfg = recipe(kl_coef=0.5)
    (tmp_path / "one").mkdir()
    actor = made(Actor, cfg, tmp_path / "one")
    actor.train(Items(samples()))
    saved = tmp_path / "checkpoint"
    saved.mkdir()
    actor.save_checkpoint(str(saved))
    assert {p.name for p in saved.iterdir()} == {"actor", "reference"}
    expected = actor.train(Items(samples()))
    (tmp_path / "two").mkdir()
    again = made(Actor, cfg, tmp_path / "two")
    again.load_checkpoint(str(saved))
    found = again.train(Items(samples()))
    assert found["policy/reference_kl"] == expected["policy/reference_kl"] > 0.0
    assert found["grad_norm"] == expected["grad_norm"]


def test_critic_begins_as_the_policy(tmp_path: Path) -> None:
    critic = made(Critic, recipe(Ppo), tmp_path)
    critic.begin("/an/export")
    critic.value(Items(samples()), Items())
    assert critic.trainer.path == "/an/export"
    other = made(Critic, recipe(Ppo), tmp_path)
    other.value(Items(samples()), Items())
    assert other.trainer.path is None


def test_critic_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    critic, batch = made(Critic, recipe(Ppo), tmp_path), samples()
    critic.value(Items(batch), Items())
    critic.train(Items(batch))
    critic.save_checkpoint(str(tmp_path))
    again, one, two = made(Critic, recipe(Ppo), tmp_path), Items(), Items()
    again.load_checkpoint(str(tmp_path))
    critic.value(Items(samples()), one)
    again.value(Items(samples()), two)
    assert [s.info for s in one] == [s.info for s in two]


@pytest.mark.parametrize(
    ("cfg", "barrier"),
    [
        (recipe(), "group"),
        (recipe(minibatches=2), "batch"),
        (recipe(epochs=2), "batch"),
        (recipe(Ppo), "batch"),
        (recipe(Ppo, whiten=False), "group"),
        (recipe(AsyncPpo), "group"),
    ],
)
def test_the_barrier_is_the_least_that_the_update_needs(cfg: Config, barrier: str) -> None:
    assert Actor.barrier_of(cfg) == Critic.barrier_of(cfg) == barrier


def test_a_default_algorithm_takes_two_steps_per_batch(tmp_path: Path) -> None:
    actor = made(Actor, recipe(**{"minibatches": Algorithm().minibatches}), tmp_path)
    batch: list[Sample] = samples()
    actor.train(Items(batch))
    assert len(actor.trainer.steps) == 2


def test_the_backend_is_asked_whether_it_can_have_so_many_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(trainer: Any, ranks: int) -> str:
        return f"trainer.tp: {trainer.tp} for {ranks}" if ranks % trainer.tp else ""

    kind = type("Backend", (), {"ranks_problem": staticmethod(ask)})
    loaded = type("Registry", (), {"__init__": lambda self, group: None, "load": lambda self, name: kind})
    monkeypatch.setattr(updating, "Registry", loaded)
    cfg = Config({"trainer": {"name": "x", "tp": 2}, "critic": {}})
    assert Actor.check_ranks(cfg, 4) == "" and Critic.check_ranks(cfg, 4) == ""
    assert Actor.check_ranks(cfg, 3) == Critic.check_ranks(cfg, 3) == "trainer.tp: 2 for 3"
    other = Config({"trainer": {"name": "x", "tp": 1}, "critic": {"tp": 2}})
    assert Actor.check_ranks(other, 3) == "" and Critic.check_ranks(other, 3) == "critic.tp: 2 for 3"
