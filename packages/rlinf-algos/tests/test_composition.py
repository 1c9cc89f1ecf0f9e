"""Algorithms and presets by name, third parties' entry points, what an import loads."""

import copy
import dataclasses
import pickle
import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest
import torch

from rlinf_algos import (
    PRESETS,
    AdvantageInputs,
    Algorithm,
    AlgorithmError,
    LossInputs,
    LossSum,
    Preset,
    advantage,
    advantage_names,
    composition,
    gae,
    group_advantage,
    kl_loss,
    kl_penalty,
    loss,
    loss_names,
    options,
    ppo_clip_loss,
    preset,
    reinforce_pp_advantage,
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
        (lambda: loss("cispo")(EVERYTHING, options.GSPO()), "options must be CISPO, got GSPO"),
        (lambda: loss("ppo")(EVERYTHING, options.DecoupledPPO()), "options must be PPO, got DecoupledPPO"),
        (lambda: loss("ppo")(EVERYTHING, {"clip_high": 0.3}), "options must be PPO, got dict"),
        (lambda: loss("ppo")({"logprobs": X}), "inputs must be LossInputs"),
        (lambda: loss("ppo")(SCORED), "needs logprobs, old_logprobs, advantages in AdvantageInputs"),
        (lambda: loss("gspo")(EVERYTHING, clip_high="5e-4"), "clip_high must be a number, got '5e-4'"),
        (lambda: loss("gspo")(EVERYTHING, clip_high=None), "clip_high must be a number, got None"),
        (lambda: loss("ppo")(EVERYTHING, dual_clip="3"), "dual_clip must be a number"),
        (lambda: loss("ppo")(EVERYTHING, aggregation="constant", divisor="3"), "divisor must be a number"),
        (lambda: loss("value")(EVERYTHING, clip="0.2"), "clip must be a number"),
        (lambda: loss("kl")(EVERYTHING, straight_through="no"), "straight_through must be true or false"),
        (lambda: advantage("group")(SCORED, group_size="8"), "group_size must be an integer, got '8'"),
        (lambda: advantage("group")(SCORED, group_size=4.5), "group_size must be an integer, got 4.5"),
        (lambda: advantage("group")(SCORED, normalise_std="false"), "normalise_std must be true or false"),
        (lambda: advantage("pass_at_k")(SCORED, k=1.5), "k must be an integer, got 1.5"),
        (lambda: advantage("pass_at_k")(SCORED), "PassAtK needs the option 'k'"),
        (lambda: advantage("gae")(TIMED, gamma=None), "gamma must be a number, got None"),
        (lambda: advantage("gae")(TIMED, lam=True), "lam must be a number, got True"),
        (lambda: preset("grpo").with_options(kl_coefficient="0.1"), "kl_coefficient must be a number"),
        (lambda: preset("grpo").with_options(kl_coef=0.1), "did you mean 'kl_coefficient'"),
        (lambda: preset("grpo").with_options(clip_high=0.1), "go into advantage_options and loss_options"),
        (lambda: preset("gpro"), "did you mean 'grpo'"),
        (lambda: advantage("grpo"), "'grpo' is a preset, whose advantage is 'group'"),
        (lambda: loss("grpo"), "'grpo' is a preset, whose loss is 'ppo'"),
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


@dataclasses.dataclass(frozen=True)
class Scale:
    scale: float = 1.0


R = torch.tensor([1.0, 0.0, 0.0, 1.0])
KL4 = torch.tensor([[5.0], [0.0], [0.0], [2.0]])
SHORT = AdvantageInputs(rewards=R, groups=["a", "a", "b", "b"], mask=torch.ones(4, 1, dtype=torch.long), kl=KL4)


class TestKLInTheReward:
    def test_rloo_subtracts_it(self):
        # 1 - 0.03 * 5 = 0.85 against 0, 0 against 1 - 0.03 * 2 = 0.94
        got = preset("rloo").compute_advantages(SHORT).advantages
        torch.testing.assert_close(got, torch.tensor([0.85, -0.85, -0.94, 0.94]))

    @pytest.mark.parametrize("name", ["rloo", "reinforce_pp"])
    def test_a_missing_kl_is_refused(self, name):
        without = dataclasses.replace(SHORT, kl=None)
        with pytest.raises(AlgorithmError, match="KL in the reward: give kl"):
            preset(name).compute_advantages(without)
        zero = preset(name).with_options(kl_coefficient=0.0).compute_advantages(without).advantages
        assert torch.isfinite(zero).all()

    def test_reinforce_pp_has_one_coefficient(self):
        for coefficient in (0.0, 0.01, 0.5):
            chosen = preset("reinforce_pp").with_options(kl_coefficient=coefficient)
            got = chosen.compute_advantages(SHORT).advantages
            expected = reinforce_pp_advantage(R, SHORT.mask, kl=KL4, kl_coefficient=coefficient)
            torch.testing.assert_close(got, expected)
        torch.testing.assert_close(
            preset("reinforce_pp").compute_advantages(SHORT).advantages,
            reinforce_pp_advantage(R, SHORT.mask, kl=KL4, kl_coefficient=0.01),
        )
        with pytest.raises(AlgorithmError, match="belongs to the preset itself"):
            preset("reinforce_pp").with_options(advantage_options={"kl_coefficient": 0.5})

    def test_rewards_over_time_lose_each_its_own(self):
        timed = AdvantageInputs(rewards=R[:, None], values=torch.zeros(4, 1), mask=SHORT.mask, kl=KL4)
        changed = preset("ppo_llm").with_options(
            kl_coefficient=0.1, kl_kind="k1", kl_in="reward", advantage_options={"whiten": False}
        )
        torch.testing.assert_close(changed.compute_advantages(timed).advantages, R[:, None] - 0.1 * KL4)

    @pytest.mark.parametrize("name", ["rloo", "grpo", "dapo"])
    def test_the_kind_is_always_checked(self, name):
        with pytest.raises(AlgorithmError, match="kl_kind must be one of"):
            preset(name).with_options(kl_kind="k9")


def test_what_the_mask_leaves_nothing_of_is_no_peer_by_name():
    """Rewards 1 (all masked), 1, 0 of one group: the mean is that of the last two."""
    mask = torch.tensor([[0, 0], [1, 0], [1, 1]])
    given = AdvantageInputs(rewards=torch.tensor([1.0, 1.0, 0.0]), groups=["a"] * 3, mask=mask)
    assert advantage("dr_grpo")(given).advantages.tolist() == [0.0, 0.5, -0.5]
    assert advantage("rloo")(given).advantages.tolist() == [0.0, 1.0, -1.0]
    whole = dataclasses.replace(given, trajectories=[0, 1, 2])
    assert advantage("trajectory_group")(whole, normalise_std=False).advantages.tolist() == [0.0, 0.5, -0.5]
    with pytest.raises(AlgorithmError, match="mask has 2 rows for 3 rewards"):
        advantage("group")(dataclasses.replace(given, mask=mask[:2]))


def test_presets_cannot_be_changed_in_place_but_copied():
    chosen = preset("grpo")
    with pytest.raises(TypeError, match="does not support item assignment"):
        chosen.loss_options["clip_high"] = 9.0
    with pytest.raises(TypeError, match="does not support item assignment"):
        PRESETS["grpo"] = preset("dapo")
    own = {"clip_high": 0.3}
    made = chosen.with_options(loss_options=own)
    own["clip_high"] = 9.0
    assert made.loss_options["clip_high"] == 0.3
    assert pickle.loads(pickle.dumps(made)) == copy.deepcopy(made) == made


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
        with pytest.raises(AlgorithmError, match="'ppo' in rlinf.losses is claimed by both rlinf-algos and theirs"):
            loss("ppo")
        assert loss("gspo") is LOSS_TABLE["gspo"]  # the others keep working
        assert "ppo" in loss_names()

    def test_a_preset_takes_a_loss_without_aggregation(self, plugins, monkeypatch):
        module = type(sys)("their_losses")
        module.plain = lambda inputs, scale=1.0: LossSum(scale * inputs.logprobs.sum(), float(MASK.sum()))
        module.SIZED = Algorithm(lambda inputs, options: module.plain(inputs, options.scale), Scale)
        monkeypatch.setitem(sys.modules, "their_losses", module)
        plugins(fake("plain", "their_losses:plain", "theirs"), fake("sized", "their_losses:SIZED", "theirs"))
        for name in ("plain", "sized"):
            made = Preset(name="m", source="s", note="n", advantage="group", loss=name, loss_options={"scale": 3.0})
            torch.testing.assert_close(made.compute_loss(EVERYTHING).sum, 3 * X.sum())
            # The KL is a token mean where the loss says nothing.
            kl = made.with_options(kl_coefficient=0.5).compute_loss(EVERYTHING)
            torch.testing.assert_close(kl.sum, 3 * X.sum() + 0.5 * kl_loss(X, REF, MASK).sum)
        dpo = Preset(name="m", source="s", note="n", advantage="group", loss="dpo")
        torch.testing.assert_close(dpo.compute_loss(EVERYTHING).sum, loss("dpo")(EVERYTHING).sum)

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
