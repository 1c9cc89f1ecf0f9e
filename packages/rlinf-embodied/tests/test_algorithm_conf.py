"""Groups ``algorithm`` and ``model``: what does not go together is refused by key, with what would be right."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from rlinf_core.config import Config
from rlinf_core.config.schema import Schema
from rlinf_embodied.conf.algorithms import Algorithm, Grpo, Ppo
from rlinf_embodied.conf.models import Mlp
from rlinf_embodied.conf.vla import Vla


def problems(algorithm: Any, model: Any = None, **root: Any) -> list[str]:
    """Of the algorithm's node, beside a model's and a recipe's own keys."""
    chosen = model if model is not None else Mlp(value_level="none" if isinstance(algorithm, Grpo) else "action")
    cfg = Config({"algorithm": asdict(algorithm), "model": asdict(chosen), **root})
    return list(type(algorithm).validate(cfg.algorithm, cfg))


@pytest.mark.parametrize(
    ("algorithm", "model"),
    [
        (Ppo(), None),
        (Grpo(), None),
        (Ppo(reward_level="chunk", logprob_level="chunk"), Mlp(value_level="chunk", chunk=4)),
        (Ppo(reward_level="chunk", logprob_level="token"), Vla()),
        (Grpo(logprob_level="token"), Vla(value_level="none")),
        (Ppo(loss="cispo", loss_options={"clip_high": 2.0}), None),
        (Grpo(advantage="pass_at_k", advantage_options={"k": 2}), None),
    ],
)
def test_what_goes_together(algorithm, model):
    assert problems(algorithm, model, num_envs=8) == []


@pytest.mark.parametrize(
    ("algorithm", "model", "key", "text"),
    [
        (Ppo(loss="ppp"), None, "algorithm.loss", "did you mean 'ppo'"),
        (Ppo(loss="kl"), None, "algorithm.loss", "needs a reference policy"),
        (Ppo(advantage="gea"), None, "algorithm.advantage", "did you mean 'gae'"),
        (Ppo(advantage="gigpo"), None, "algorithm.advantage", "in several parts"),
        (Ppo(advantage="group"), None, "algorithm.advantage", "use algorithm=embodied_grpo"),
        (Grpo(advantage="gae"), None, "algorithm.advantage", "use algorithm=embodied_ppo"),
        (Ppo(dual_clip=1.1), None, "algorithm.dual_clip", "above 1 + algorithm.clip_high = 1.2"),
        (Ppo(loss="cispo", dual_clip=3.0), None, "algorithm.dual_clip", "not read by loss=cispo"),
        (Ppo(loss="gspo", clip_low=0.1), None, "algorithm.clip_low", "set algorithm.loss_options"),
        (Ppo(loss="gspo", length_normalised=True), None, "algorithm.length_normalised", "set it to false"),
        (Ppo(), Mlp(value_level="none"), "model.value_level", "use action, or algorithm=embodied_grpo"),
        (Ppo(), Mlp(value_level="chunk"), "algorithm.reward_level", "=chunk, or model.value_level=action"),
        (Ppo(), Vla(), "algorithm.reward_level", "set algorithm.reward_level=chunk"),
        (Ppo(reward_level="chunk"), Vla(value_level="none"), "model.value_level", "use chunk"),
        (Ppo(logprob_level="chunk"), None, "algorithm.logprob_level", "use action or token, or"),
        (Grpo(), Mlp(), "model.value_level", "use model.value_level=none"),
        (Grpo(), Vla(), "model.value_level", "use model.value_level=none"),
        (Grpo(advantage="pass_at_k"), None, "algorithm.advantage_options.k", "from 1 to algorithm.group_size"),
        (Grpo(advantage="rloo", normalise_std=False), None, "algorithm.normalise_std", "leave it at true"),
        (Grpo(group_size=3), None, "num_envs", "8 is not a multiple of algorithm.group_size=3; try 6"),
        (Grpo(group_size=9), None, "num_envs", "try 9"),
    ],
)
def test_what_does_not_go_together_is_said_once(algorithm, model, key, text):
    (found,) = problems(algorithm, model, num_envs=8)
    assert found.startswith(key)
    assert text in found


def test_limits_of_single_keys():
    schema = Schema([], {"algorithm": Ppo, "model": Mlp})
    wrong = Ppo(minibatch_size=0, epochs=0, gamma=1.5, logprob_level="word", target_kl=0.0)
    cfg = Config({"algorithm": asdict(wrong), "model": asdict(Mlp(hidden=[64, 0], chunk=0, activation="gelu"))})
    found = {text.partition("=")[0] for text in schema.problems(cfg)}
    keys = {"algorithm." + key for key in ("minibatch_size", "epochs", "gamma", "logprob_level", "target_kl")}
    assert found == keys | {"model.hidden.1", "model.chunk", "model.activation"}


def test_every_key_says_what_it_is():
    for schema in (Algorithm, Ppo, Grpo, Mlp):
        for field in schema.__dataclass_fields__.values():
            assert len(field.metadata["help"]) > 5, field.name
