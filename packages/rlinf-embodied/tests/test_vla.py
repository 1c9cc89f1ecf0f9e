"""The vision-language-action policy: acting and evaluating, sampling by key, its directory."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_vla import DOUBLE, SINGLE, TINY, numbers, observation, spec

from rlinf_embodied.conf.vla import TinyVla
from rlinf_embodied.envs.base import Observation
from rlinf_embodied.policies.vla import VlaPolicy
from rlinf_embodied.policies.vla.vision import Projector, VisionBackbone, encoders

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="the extra vla is not installed")


def rows(obs: Observation, chosen: list[int]) -> Observation:
    return {"image": obs["image"][chosen], "instruction": [obs["instruction"][i] for i in chosen]}


@pytest.mark.parametrize("decoding", ["autoregressive", "parallel"])
@pytest.mark.parametrize("changes", [{}, {"vision": "dinosiglip"}, {"family": "qwen2"}])
@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_evaluate_agrees_with_act(decoding: str, changes: dict[str, str], temperature: float) -> None:
    cfg = replace(DOUBLE, tiny=replace(TINY, **changes), decoding=decoding, temperature=temperature)
    policy = VlaPolicy(cfg, spec(), 0)
    obs = observation(5)
    for greedy in (False, True):
        decision = policy.act(obs, numbers(5, policy), greedy=greedy)
        found = policy.evaluate(policy.prepare(obs), torch.from_numpy(decision.taken))
        logprobs = found["logprobs"].detach().numpy()
        np.testing.assert_allclose(decision.logprobs, logprobs, atol=1e-5)
        assert decision.values is not None
        np.testing.assert_allclose(decision.values, found["values"].detach().numpy(), atol=1e-5)
        np.testing.assert_allclose(decision.values, policy.value(obs), atol=1e-5)
        assert decision.actions.shape == (5, 2, 3) == decision.taken.shape == decision.logprobs.shape
        assert decision.values.shape == (5, 1)
        assert found["entropy"].shape == (5, 2, 3)
        assert ((found["entropy"] > 0) & (found["entropy"] <= np.log(256) + 1e-9)).all()


def test_evaluate_agrees_with_act_in_float32() -> None:
    policy = VlaPolicy(SINGLE, spec(), 0)
    obs = observation(6)
    decision = policy.act(obs, numbers(6, policy))
    found = policy.evaluate(policy.prepare(obs), torch.from_numpy(decision.taken))
    np.testing.assert_allclose(decision.logprobs, found["logprobs"].detach().numpy(), atol=1e-5)


@pytest.mark.parametrize("decoding", ["autoregressive", "parallel"])
def test_a_decision_does_not_depend_on_who_else_is_in_the_batch(decoding: str) -> None:
    policy = VlaPolicy(replace(DOUBLE, decoding=decoding), spec(), 0)
    obs, uniform = observation(7), numbers(7, policy)
    whole = policy.act(obs, uniform)
    for chosen in ([4], [6, 1, 2], [0, 3, 5]):
        part = policy.act(rows(obs, chosen), uniform[chosen])
        np.testing.assert_array_equal(part.taken, whole.taken[chosen])
        np.testing.assert_array_equal(part.actions, whole.actions[chosen])
        np.testing.assert_allclose(part.logprobs, whole.logprobs[chosen], atol=1e-6)


def test_tokens_follow_the_distribution_of_the_numbers() -> None:
    policy = VlaPolicy(replace(DOUBLE, chunk=1), spec(dims=1), 0)
    with torch.no_grad():
        policy.language_model.lm_head.weight.mul_(80.0)
    count = 1000
    one = observation(1)
    obs = {"image": np.repeat(one["image"], count, axis=0), "instruction": one["instruction"] * count}
    even = (np.arange(count) + 0.5) / count
    decision = policy.act(obs, even.reshape(count, 1, 1))
    every = torch.arange(policy.parts.actions.first, policy.parts.actions.first + 256).reshape(256, 1, 1)
    many = {"image": np.repeat(one["image"], 256, axis=0), "instruction": one["instruction"] * 256}
    expected = policy.evaluate(policy.prepare(many), every)["logprobs"].exp().detach().numpy().reshape(256)
    shares = np.bincount(decision.taken.reshape(-1) - policy.parts.actions.first, minlength=256) / count
    assert expected.max() > 0.02  # not the uniform one
    np.testing.assert_allclose(shares, expected, atol=1.0 / count + 1e-9)
    assert (np.diff(decision.actions.reshape(-1)) >= 0).all()


def test_later_tokens_depend_on_earlier_ones_unless_all_are_drawn_at_once() -> None:
    obs = observation(1)
    for decoding, depends in (("autoregressive", True), ("parallel", False)):
        policy = VlaPolicy(replace(DOUBLE, decoding=decoding), spec(), 0)
        first = policy.act(obs, np.full((1, 2, 3), 0.5)).taken
        other = first.copy()
        other[0, 0, 0] -= 40
        inputs = policy.prepare(obs)
        a, b = (policy.evaluate(inputs, torch.from_numpy(taken))["logprobs"][0] for taken in (first, other))
        assert bool((a[0, 1:] != b[0, 1:]).any() or (a[1] != b[1]).any()) == depends


def test_greedy_takes_the_likeliest_token_and_no_numbers() -> None:
    policy = VlaPolicy(DOUBLE, spec(), 0)
    obs = observation(3)
    decision = policy.act(obs, np.zeros((0,)), greedy=True)
    np.testing.assert_array_equal(decision.taken, policy.act(obs, np.zeros((0,)), greedy=True).taken)
    inputs = policy.prepare(obs)
    best = policy.evaluate(inputs, torch.from_numpy(decision.taken))["logprobs"]
    for change in (-1, 1, 30):
        other = torch.from_numpy(np.clip(decision.taken + change, policy.parts.actions.first, None))
        other = other.clamp(max=policy.parts.actions.first + 255)
        assert (policy.evaluate(inputs, other)["logprobs"][:, 0, 0] <= best[:, 0, 0] + 1e-12).all()


def test_gradients_reach_every_parameter() -> None:
    for vision in ("siglip", "dinosiglip"):
        policy = VlaPolicy(replace(DOUBLE, tiny=replace(TINY, vision=vision)), spec(), 0)
        obs = observation(4)
        taken = torch.from_numpy(policy.act(obs, numbers(4, policy)).taken)
        found = policy(policy.prepare(obs), taken)
        (found["logprobs"].sum() + found["values"].sum()).backward()
        for name, parameter in policy.named_parameters():
            assert parameter.grad is not None, name
            assert float(parameter.grad.abs().sum()) > 0.0, name


def test_a_filler_of_zeros_reaches_every_parameter() -> None:
    """What a trainer runs on a rank that has run out of batches."""
    policy = VlaPolicy(DOUBLE, spec(), 0)
    blank = {"image": np.zeros((1, 20, 20, 3), dtype=np.uint8), "instruction": [""]}
    found = policy(policy.prepare(blank), torch.zeros(1, 2, 3, dtype=torch.int64))
    sum(output.sum() for output in found.values()).backward()
    assert all(parameter.grad is not None for parameter in policy.parameters())
    assert torch.isfinite(found["logprobs"]).all()


def test_equal_seeds_give_equal_weights() -> None:
    first, again, other = (dict(VlaPolicy(SINGLE, spec(), seed).state_dict()) for seed in (3, 3, 4))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)
    names = set(VlaPolicy(replace(SINGLE, value_level="none"), spec(), 3).state_dict())
    assert set(first) - names == {
        "value_head.0.weight",
        "value_head.0.bias",
        "value_head.2.weight",
        "value_head.2.bias",
    }


@pytest.mark.parametrize("vision", ["siglip", "dinosiglip"])
@pytest.mark.parametrize("head", ["chunk", "none"])
def test_a_directory_is_written_and_loaded_bit_equal(tmp_path: Path, vision: str, head: str) -> None:
    cfg = replace(SINGLE, tiny=replace(TINY, vision=vision), value_level=head)
    made = VlaPolicy(cfg, spec(-2.0, 3.0), 7)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.1)
    VlaPolicy.export(made, dict(made.state_dict()), tmp_path)
    loaded = VlaPolicy(replace(cfg, path=str(tmp_path), tiny=TinyVla()), spec(-2.0, 3.0), 99)
    for name, tensor in made.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    obs, uniform = observation(3), numbers(3, made)
    np.testing.assert_array_equal(made.act(obs, uniform).actions, loaded.act(obs, uniform).actions)
    again = tmp_path / "again"
    again.mkdir()
    VlaPolicy.export(loaded, dict(loaded.state_dict()), again)
    files = {file for file in tmp_path.glob("*.*") if file.name != "tokenizer_config.json"}
    assert len(files) == (6 if head == "chunk" else 5)
    for file in files:
        assert file.read_bytes() == (again / file.name).read_bytes(), file.name


def test_a_directory_has_the_names_of_openvla(tmp_path: Path) -> None:
    from safetensors import safe_open

    made = VlaPolicy(replace(SINGLE, tiny=replace(TINY, vision="dinosiglip")), spec(), 7)
    VlaPolicy.export(made, dict(made.state_dict()), tmp_path)
    opened = safe_open(tmp_path / "model.safetensors", framework="pt")
    names = set(opened.keys())
    for name in (
        "vision_backbone.featurizer.patch_embed.proj.weight", "vision_backbone.featurizer.cls_token",
        "vision_backbone.featurizer.reg_token", "vision_backbone.featurizer.pos_embed",
        "vision_backbone.featurizer.blocks.1.ls2.scale_factor", "vision_backbone.featurizer.blocks.0.norm1.bias",
        "vision_backbone.fused_featurizer.blocks.0.attn.qkv.weight", "vision_backbone.fused_featurizer.pos_embed",
        "vision_backbone.fused_featurizer.blocks.0.attn.proj.bias", "vision_backbone.featurizer.blocks.0.norm2.bias",
        "vision_backbone.fused_featurizer.blocks.0.mlp.fc2.weight", "projector.fc3.weight",
        "language_model.model.embed_tokens.weight", "language_model.model.layers.1.self_attn.q_proj.weight",
        "language_model.model.norm.weight", "language_model.lm_head.weight",
    ):  # fmt: skip
        assert name in names
    assert not any("self_attn.q_proj" in name or "layer_norm" in name for name in names if "vision" in name)
    query = made.state_dict()["vision_backbone.fused_featurizer.blocks.0.self_attn.q_proj.weight"]
    whole = opened.get_tensor("vision_backbone.fused_featurizer.blocks.0.attn.qkv.weight")
    assert torch.equal(whole[: len(query)], query)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "openvla"
    assert config["n_action_bins"] == 256
    assert config["text_config"]["vocab_size"] == made.parts.actions.vocabulary + config["pad_to_multiple_of"]
    assert config["norm_stats"] == json.loads((tmp_path / "dataset_statistics.json").read_text())
    assert (tmp_path / "value_head.safetensors").is_file()
    assert (tmp_path / "tokenizer.json").is_file()


def test_the_real_models_sizes_have_the_real_names() -> None:
    """Names and shapes of a 7-billion-parameter config, without memory for it."""
    ids = ["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"]
    with torch.device("meta"):
        parts = encoders({"timm_model_ids": ids, "image_sizes": [224, 224]}, "here")
        backbone = VisionBackbone(parts)
        projector = Projector(backbone.width, 4096, True)
    shapes = {name: tuple(tensor.shape) for name, tensor in backbone.state_dict().items()}
    assert shapes["featurizer.pos_embed"] == (1, 256, 1024)
    assert shapes["featurizer.reg_token"] == (1, 4, 1024)
    assert shapes["fused_featurizer.pos_embed"] == (1, 256, 1152)
    assert shapes["fused_featurizer.blocks.25.mlp.fc1.weight"] == (4304, 1152)
    assert "featurizer.blocks.22.mlp.fc1.weight" in shapes
    assert "featurizer.blocks.23.mlp.fc1.weight" not in shapes  # OpenVLA never reads the last block
    assert projector.fc1.weight.shape == (8704, 2176)
    assert projector.fc2.weight.shape == (4096, 8704)
