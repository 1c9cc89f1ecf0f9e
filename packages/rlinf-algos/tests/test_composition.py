"""Algorithms and presets by name, third parties' entry points, what an import loads."""

import dataclasses
import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest
import torch

from rlinf_algos import (
    PRESETS,
    AdvantageInputs,
    AlgorithmError,
    LossInputs,
    LossSum,
    advantage,
    advantage_names,
    composition,
    gae,
    group_advantage,
    kl_loss,
    kl_penalty,
    loss,
    loss_names,
    ppo_clip_loss,
    preset,
    reward_with_kl,
)
from rlinf_algos.catalogue import ADVANTAGE_TABLE, LOSS_TABLE

torch.manual_seed(0)
X, OLD, REF, A = (torch.randn(4, 5) for _ in range(4))
MASK = torch.rand(4, 5) < 0.8
EVERYTHING = LossInputs(
    logprobs=X,
    mask=MASK,
    advantages=A,
    old_logprobs=OLD,
    behaviour_logprobs=OLD,
    ref_logprobs=REF,
    entropy=X.abs(),
    values=X,
    old_values=OLD,
    returns=A,
    rejected_logprobs=OLD,
    rejected_ref_logprobs=REF,
    rejected_mask=MASK,
)
SCORED = AdvantageInputs(
    rewards=torch.tensor([1.0, 0.0, 0.0, 1.0]),
    groups=["a", "a", "b", "b"],
    mask=MASK,
    greedy_rewards=torch.zeros(4),
    kl=X,
    trajectories=range(4),
    anchors=[0, 0, 1, 1],
    returns=torch.ones(4),
)
TIMED = dataclasses.replace(SCORED, rewards=A, values=X, turns=torch.zeros(4, 5, dtype=torch.long))


@pytest.mark.parametrize("name", sorted(LOSS_TABLE))
def test_every_loss_by_name(name):
    result = loss(name)(EVERYTHING)
    assert isinstance(result, LossSum)
    assert torch.isfinite(result.sum)
    assert result.count > 0
    assert loss(name).source


@pytest.mark.parametrize("name", sorted(ADVANTAGE_TABLE))
def test_every_advantage_by_name(name):
    options = {"k": 2} if name == "pass_at_k" else {}
    inputs = TIMED if name in ("gae", "turn_gae") else SCORED
    result = advantage(name)(inputs, **options)
    assert torch.isfinite(result.advantages).all()
    assert (result.returns is None) == (name not in ("gae", "turn_gae"))
    assert advantage(name).source


@pytest.mark.parametrize("name", sorted({**LOSS_TABLE, **ADVANTAGE_TABLE}))
def test_what_is_missing_is_named(name):
    table, empty = (LOSS_TABLE, LossInputs()) if name in LOSS_TABLE else (ADVANTAGE_TABLE, AdvantageInputs())
    options = {"k": 2} if name == "pass_at_k" else {}
    with pytest.raises(AlgorithmError, match="needs .* in"):
        table[name](empty, **options)


@pytest.mark.parametrize("name", ["gae", "turn_gae", "reinforce_pp"])
def test_samples_that_are_left_out_by_name(name):
    inputs = SCORED if name == "reinforce_pp" else TIMED
    left_out = dataclasses.replace(inputs, mask=2 * MASK.long(), valid=torch.tensor([1, 0, 1, 1]))
    got = advantage(name)(left_out).advantages
    assert (got[1] == 0).all()
    kept = MASK.clone()
    kept[1] = False
    torch.testing.assert_close(got, advantage(name)(dataclasses.replace(inputs, mask=kept)).advantages)


def test_by_name_is_the_function():
    torch.testing.assert_close(loss("ppo")(EVERYTHING).sum, ppo_clip_loss(X, OLD, A, MASK).sum)
    torch.testing.assert_close(
        advantage("group")(SCORED, normalise_std=False).advantages,
        group_advantage(SCORED.rewards, SCORED.groups, normalise_std=False),
    )
    torch.testing.assert_close(advantage("gae")(TIMED).advantages, gae(A, X, MASK)[0])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: loss("ppoo"), "did you mean 'ppo'"),
        (lambda: advantage("grop"), "did you mean 'group'"),
        (lambda: preset("gropo"), "did you mean 'grpo'"),
        (lambda: loss("ppo")(EVERYTHING, clip_hi=0.3), "did you mean 'clip_high'"),
        (lambda: loss("ppo")(EVERYTHING, clip_low=-1.0), "clip_low must be"),
        (lambda: loss("kl")(EVERYTHING, kind="k1"), "zero in expectation"),
        (lambda: loss("kl")(dataclasses.replace(EVERYTHING, weights=X)), "takes no weights"),
        (lambda: loss("value")(dataclasses.replace(EVERYTHING, old_values=None), clip=0.2), "needs old_values"),
        (lambda: advantage("group")(SCORED, group_size=1), "group_size is 1"),
        (lambda: advantage("pass_at_k")(SCORED, k=9, group_size=4), "k must lie"),
        (lambda: loss("dpo")(EVERYTHING, label_smoothing=0.9), "label_smoothing"),
    ],
)
def test_refused_by_name(call, message):
    with pytest.raises(AlgorithmError, match=message):
        call()


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_computes(name):
    chosen = preset(name)
    chosen.check()
    assert chosen.source
    assert chosen.note
    inputs = TIMED if chosen.advantage == "gae" else SCORED
    advantages = chosen.compute_advantages(inputs).advantages
    leaf = X.clone().requires_grad_()
    result = chosen.compute_loss(dataclasses.replace(EVERYTHING, logprobs=leaf, advantages=advantages))
    result.sum.backward()
    assert torch.isfinite(leaf.grad).all()


def test_the_grpo_preset_is_the_papers_equation():
    mode = "sequence_mean_of_token_means"
    policy = ppo_clip_loss(X, OLD, A, MASK, aggregation=mode)
    kl = kl_loss(X, REF, MASK, kind="k3", aggregation=mode)
    torch.testing.assert_close(preset("grpo").compute_loss(EVERYTHING).sum, policy.sum + 0.04 * kl.sum)
    assert "forward" in preset("grpo").note


def test_presets_can_be_changed_and_are_checked():
    changed = preset("dr_grpo").with_options(loss_options={"divisor": 64.0}, entropy_coefficient=0.1)
    assert changed.loss_options == {"aggregation": "constant", "divisor": 64.0}
    assert changed.compute_loss(EVERYTHING).count == preset("dr_grpo").compute_loss(EVERYTHING).count
    with pytest.raises(AlgorithmError, match="did you mean 'divisor'"):
        preset("dr_grpo").with_options(loss_options={"divsor": 64.0})


def test_kl_in_the_reward():
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0])
    kl = kl_penalty(X, REF, mask=MASK)
    got = reward_with_kl(rewards, kl, MASK, 0.1)
    torch.testing.assert_close(got, rewards - 0.1 * torch.where(MASK, X - REF, 0.0).sum(1))


class Distribution:
    def __init__(self, name):
        self.name = name


def fake(name, value, owner):
    entry = EntryPoint(name=name, value=value, group="rlinf.losses")
    vars(entry)["dist"] = Distribution(owner)
    return entry


@pytest.fixture
def plugins(monkeypatch):
    def install(*entries):
        composition._entries.cache_clear()
        monkeypatch.setattr(composition, "entry_points", lambda group: [e for e in entries if e.group == group])

    yield install
    composition._entries.cache_clear()


class TestThirdParties:
    def test_one_entry_point_adds_a_loss(self, plugins, monkeypatch):
        module = type(sys)("their_losses")
        module.negative = lambda inputs, scale=1.0: LossSum(-scale * inputs.logprobs.sum(), 1.0)
        monkeypatch.setitem(sys.modules, "their_losses", module)
        plugins(fake("negative", "their_losses:negative", "theirs"))
        assert "negative" in loss_names()
        assert "negative" not in advantage_names()
        torch.testing.assert_close(loss("negative")(EVERYTHING, scale=2.0).sum, -2 * X.sum())

    def test_ours_are_not_listed_twice(self, plugins):
        plugins(fake("ppo", "rlinf_algos.catalogue:PPO", "rlinf-algos"))
        assert loss("ppo") is LOSS_TABLE["ppo"]

    def test_one_name_of_two_distributions_is_refused_naming_both(self, plugins):
        plugins(fake("mine", "a:b", "first"), fake("mine", "c:d", "second"))
        with pytest.raises(AlgorithmError, match="both first and second"):
            loss("mine")

    def test_our_names_cannot_be_taken(self, plugins):
        plugins(fake("ppo", "a:b", "theirs"))
        with pytest.raises(AlgorithmError, match="both rlinf-algos and theirs"):
            loss("something")

    def test_an_entry_that_is_no_algorithm_is_refused(self, plugins):
        plugins(fake("odd", "math:pi", "theirs"))
        with pytest.raises(AlgorithmError, match=r"math:pi is float"):
            loss("odd")


def test_an_import_takes_torch_and_nothing_else_heavy():
    code = (
        "import sys, torch; before = set(sys.modules); import rlinf_algos;"
        "new = {m.split('.')[0] for m in set(sys.modules) - before} - set(sys.stdlib_module_names);"
        "print(sorted(new - {'torch', 'rlinf_algos'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"
