"""What goes into the vision-language-action policy, what comes out, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_vla import DOUBLE, SINGLE, TINY, numbers, observation, spec

from rlinf_core.errors import ConfigError, NonFiniteError, RLinfError
from rlinf_embodied.conf.vla import TinyVla, Vla, check_path, check_tiny
from rlinf_embodied.envs.base import Box, Discrete, EnvSpec, Text
from rlinf_embodied.policies.vla import VlaPolicy
from rlinf_embodied.policies.vla.actions import ActionTokens
from rlinf_embodied.policies.vla.pixels import HALF, IMAGENET, Pixels

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="the extra vla is not installed")
UNBOUNDED = Box(np.full(2, -np.inf), np.full(2, np.inf))


def test_actions_go_to_tokens_and_back() -> None:
    low, high = np.array([-2.0, 0.0, -1.0]), np.array([3.0, 0.5, 1.0])
    tokens = ActionTokens(700, 256, {"q01": low, "q99": high, "mask": [True, True, False]})
    every = np.arange(700 - 256, 700)
    actions = tokens.decode(np.repeat(every[:, None], 3, axis=1))
    assert (np.diff(actions, axis=0) <= 0).all()  # low actions have high ids
    np.testing.assert_array_equal(tokens.encode(actions)[1:], np.repeat(every[1:, None], 3, axis=1))
    np.testing.assert_array_equal(actions[0], actions[1])  # 256 tokens, 255 centres
    wide = np.random.default_rng(0).uniform([-2.0, 0.0, -1.0], [3.0, 0.5, 1.0], (1000, 3))
    again = tokens.decode(tokens.encode(wide))
    assert (np.abs(again - wide) <= (high - low) / 255 / 2 + 1e-12).all()
    np.testing.assert_allclose(tokens.decode(tokens.encode(np.array([9.0, 9.0, 9.0]))), high, atol=0.01)


def test_bins_are_those_of_openvla() -> None:
    """Edges linspace(-1, 1, 256), token V - digitize(action, edges), centres between edges."""
    tokens = ActionTokens(32000, 256, {"q01": [-1.0], "q99": [1.0]})
    assert tokens.encode(np.array([-1.0])) == [31999]
    assert tokens.encode(np.array([1.0])) == [31744]
    assert tokens.encode(np.array([0.0])) == [32000 - 128]
    np.testing.assert_allclose(tokens.decode(np.array([31999])), -1.0 + 1.0 / 255)
    np.testing.assert_allclose(tokens.decode(np.array([31744])), 1.0 - 1.0 / 255)


def test_actions_are_within_the_environments_bounds() -> None:
    policy = VlaPolicy(SINGLE, spec(-2.0, 5.0), 0)
    actions = policy.act(observation(8), numbers(8, policy)).actions
    assert actions.min() >= -2.0
    assert actions.max() <= 5.0
    assert actions.max() - actions.min() > 3.0


def test_pictures_are_normalised_for_each_encoder() -> None:
    grey = np.full((2, 8, 8, 3), 255, dtype=np.uint8)
    grey[1] = 0
    found = Pixels((8, 8), (IMAGENET[0], HALF[0]), (IMAGENET[1], HALF[1]))(grey)
    assert found.shape == (2, 6, 8, 8)
    assert found.dtype == torch.float32
    assert found[0, 3:].eq(1.0).all()
    assert found[1, 3:].eq(-1.0).all()
    np.testing.assert_allclose(found[0, 0].numpy(), (1.0 - 0.484375) / 0.228515625, rtol=1e-6)


def test_pictures_are_resized_as_pil_does() -> None:
    image = pytest.importorskip("PIL.Image")
    noise = np.random.default_rng(0).integers(0, 256, (1, 40, 30, 3), dtype=np.uint8)
    wanted = np.asarray(image.fromarray(noise[0]).resize((16, 16), image.Resampling.BICUBIC), dtype=np.float32)
    found = (Pixels((16,), (HALF[0],), (HALF[1],))(noise)[0].permute(1, 2, 0).numpy() * 0.5 + 0.5) * 255.0
    assert np.abs(found - wanted).max() <= 1.01  # one level of 256


def test_instructions_are_padded_between_the_begin_token_and_the_text() -> None:
    policy = VlaPolicy(SINGLE, spec(), 0)
    inputs = policy.prepare(observation(2))
    ids, real = inputs["input_ids"], inputs["prompt_mask"]
    assert ids.shape == real.shape == (2, 48)
    assert (ids[:, 0] == policy.parts.tokenizer.bos_token_id).all()
    assert real[:, 0].all()
    assert real[:, -1].all()
    assert (ids[~real] == policy.parts.tokenizer.pad_token_id).all()
    long, short = real.sum(dim=1)
    assert long > short
    assert policy.parts.tokenizer.unk_token_id not in ids
    words = policy.parts.tokenizer.convert_ids_to_tokens(ids[0][real[0]].tolist())
    assert words[:3] == ["<s>", "in", ":"]
    assert words[-2:] == ["out", ":"]
    assert "bowl" in words


def test_an_instruction_that_does_not_fit_is_named() -> None:
    policy = VlaPolicy(replace(SINGLE, prompt_tokens=16), spec(), 0)
    obs = {**observation(1), "instruction": ["pick up the black bowl and place it on the plate"]}
    with pytest.raises(RLinfError, match=r"model.prompt_tokens=16: the instruction 'pick up the black.*takes 2\d "):
        policy.act(obs, numbers(1, policy))


def test_an_observation_that_is_not_there_is_named() -> None:
    policy = VlaPolicy(SINGLE, spec(), 0)
    obs = observation(1)
    del obs["instruction"]
    with pytest.raises(RLinfError, match="needs the observation 'instruction'; there are image"):
        policy.act(obs, numbers(1, policy))
    state = EnvSpec({"state": Box(np.zeros(3), np.ones(3))}, spec().action, 10)
    with pytest.raises(ConfigError, match="model.image=image: the environment has no picture of that name.*state"):
        VlaPolicy(SINGLE, state, 0)
    bright = EnvSpec({"image": Box(np.zeros((8, 8, 3)), np.ones((8, 8, 3))), "instruction": Text()}, spec().action, 10)
    with pytest.raises(ConfigError, match="its pictures: none, its observations: image"):
        VlaPolicy(SINGLE, bright, 0)
    wrist = EnvSpec({"wrist_image": spec().observations["image"], "instruction": Text()}, spec().action, 10)
    with pytest.raises(ConfigError, match="did you mean 'wrist_image'"):
        VlaPolicy(SINGLE, wrist, 0)
    assert VlaPolicy(replace(SINGLE, image="wrist_image"), wrist, 0).tokens == 3
    silent = EnvSpec({"image": spec().observations["image"]}, spec().action, 10)
    with pytest.raises(ConfigError, match="needs the observation 'instruction'"):
        VlaPolicy(SINGLE, silent, 0)


@pytest.mark.parametrize("action", [Discrete(4), UNBOUNDED, Box(-np.ones(()), np.ones(()))])
def test_actions_that_are_no_bounded_vector_are_refused(action: Box | Discrete) -> None:
    with pytest.raises(ConfigError, match="vectors of numbers within bounds"):
        VlaPolicy(SINGLE, EnvSpec(spec().observations, action, 10), 0)


def test_numbers_of_another_shape_and_weights_that_are_no_numbers_are_refused() -> None:
    policy = VlaPolicy(SINGLE, spec(), 0)
    with pytest.raises(RLinfError, match=r"shape \(2, 2, 3\).*\(1, 2, 3\) is right"):
        policy.act(observation(1), numbers(2, policy))
    with torch.no_grad():
        policy.projector.fc2.bias[0] = np.nan
    with pytest.raises(NonFiniteError, match="logits"):
        policy.act(observation(1), numbers(1, policy))


def test_a_policy_without_values_says_so() -> None:
    policy = VlaPolicy(replace(SINGLE, value_level="none"), spec(), 0)
    assert policy.act(observation(1), numbers(1, policy)).values is None
    inputs = policy.prepare(observation(1))
    assert "values" not in policy.evaluate(inputs, torch.full((1, 2, 3), policy.parts.actions.first))
    with pytest.raises(RLinfError, match="model.value_level=none"):
        policy.value(observation(1))


def test_a_chunk_beyond_the_positions_is_refused() -> None:
    with pytest.raises(ConfigError, match="model.chunk=700.*700 x 3 action tokens are 2152 tokens.*2048 positions"):
        VlaPolicy(replace(SINGLE, chunk=700), spec(), 0)


def test_sizes_that_do_not_go_together_are_named() -> None:
    assert check_tiny(TINY) == []
    for changes, key in (
        ({"patch_size": 5}, "patch_size"),
        ({"vision_heads": 3}, "vision_heads"),
        ({"heads": 5}, "heads"),
        ({"kv_heads": 4}, "kv_heads"),
        ({"heads": 32, "kv_heads": 32}, "heads"),
    ):
        problems = check_tiny(replace(TINY, **changes))
        assert problems
        assert problems[0].startswith(f"model.tiny.{key}: ")
        with pytest.raises(ConfigError, match=f"model.tiny.{key}"):
            VlaPolicy(replace(SINGLE, tiny=replace(TINY, **changes)), spec(), 0)


def test_directories_that_are_none_of_openvlas_are_named(tmp_path: Path) -> None:
    assert "does not exist" in check_path(str(tmp_path / "none"))[0]
    assert "the path is empty" in check_path("")[0]
    assert "has no config.json" in check_path(str(tmp_path))[0]
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert "a model of type 'llama'" in check_path(str(tmp_path))[0]
    (tmp_path / "config.json").write_text("{")
    assert "cannot be read" in check_path(str(tmp_path))[0]
    (tmp_path / "config.json").write_text('{"model_type": "openvla"}')
    assert "has no weights" in check_path(str(tmp_path))[0]
    assert check_path(str(tmp_path))[0] in Vla(path=str(tmp_path)).validate(None)


def test_a_directory_that_is_broken_or_of_other_actions_is_refused(tmp_path: Path) -> None:
    made = VlaPolicy(DOUBLE, spec(), 0)
    weights = dict(made.state_dict())
    VlaPolicy.export(made, weights, tmp_path)
    there = replace(DOUBLE, path=str(tmp_path), tiny=TinyVla())
    with pytest.raises(ConfigError, match="acts with 3 numbers"):
        VlaPolicy(there, spec(dims=7), 0)
    with pytest.raises(ConfigError, match=r"no statistics of 'enf' \(did you mean 'env'\?\)"):
        VlaPolicy(replace(there, unnorm_key="enf"), spec(), 0)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "dataset_statistics.json").write_text(json.dumps({"other": config["norm_stats"]["env"]}))
    with pytest.raises(ConfigError, match="model.unnorm_key: .* has statistics of env, other; name one"):
        VlaPolicy(there, spec(), 0)
    assert VlaPolicy(replace(there, unnorm_key="other"), spec(), 0).tokens == 3
    gone = {name: tensor for name, tensor in weights.items() if name != "projector.fc1.bias"}
    VlaPolicy.export(made, gone, tmp_path)
    with pytest.raises(ConfigError, match="no weight projector.fc1.bias"):
        VlaPolicy(there, spec(), 0)
    VlaPolicy.export(made, {**weights, "projector.fc1.bias": torch.zeros(3)}, tmp_path)
    with pytest.raises(ConfigError, match=r"projector.fc1.bias of shape \(3,\)"):
        VlaPolicy(there, spec(), 0)
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="cannot be read"):
        VlaPolicy(there, spec(), 0)


def test_an_image_encoder_that_is_not_known_is_named(tmp_path: Path) -> None:
    made = VlaPolicy(SINGLE, spec(), 0)
    VlaPolicy.export(made, dict(made.state_dict()), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["vision_configs"]
    (tmp_path / "config.json").write_text(json.dumps({**config, "timm_model_ids": ["vit_huge"], "image_sizes": [16]}))
    with pytest.raises(ConfigError, match="image encoders .'vit_huge'.*vit_so400m_patch14_siglip_224"):
        VlaPolicy(replace(SINGLE, path=str(tmp_path)), spec(), 0)
