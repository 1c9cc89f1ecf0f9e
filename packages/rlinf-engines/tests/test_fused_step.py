"""The fused decoding step: the library's logits, on parameters that stay the model's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from rlinf_engines.models import load_model  # noqa: E402
from rlinf_engines.rollouts.decoding import growing_cache  # noqa: E402
from rlinf_engines.rollouts.fused_step import TABLE, fused_step  # noqa: E402

TINY = {
    "hidden_size": 32,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "intermediate_size": 64,
    "max_positions": 400,
    "characters": "0123456789+-*= ",
}


def network(family: str = "qwen2", dtype: str = "float32") -> Any:
    tiny = SimpleNamespace(**TINY, family=family)
    return load_model(SimpleNamespace(path=None, dtype=dtype, tiny=tiny), 3).requires_grad_(False)


@pytest.mark.parametrize("family", ["qwen2", "llama"])
@pytest.mark.parametrize("length", [1, 7, TABLE - 2])
def test_steps_give_the_logits_of_the_library(family: str, length: int) -> None:
    model = network(family)
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(2, 17, (3, length + 4), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, : length // 2] = 0  # padded on the left
    position = (mask.cumsum(dim=1) - 1).clamp(min=0)
    expected = model(input_ids=ids, attention_mask=mask, position_ids=position).logits
    step = fused_step(model)
    assert step is not None
    assert torch.equal(model(input_ids=ids, attention_mask=mask, position_ids=position).logits, expected)
    cache = growing_cache(model.config)
    model(
        input_ids=ids[:, :length],
        attention_mask=mask[:, :length],
        position_ids=position[:, :length],
        past_key_values=cache,
        use_cache=True,
    )
    for place in range(length, length + 4):
        bias = torch.zeros(3, place + 1).masked_fill_(mask[:, : place + 1] == 0, float("-inf"))[:, None, None]
        found = step(ids[:, place], position[:, place], bias, cache)
        assert torch.allclose(found, expected[:, place], atol=2e-6)


def test_new_weights_that_are_copied_into_the_parameters_are_used() -> None:
    model, other = network(), network("qwen2")
    step = fused_step(model)
    assert step is not None
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
        mine = dict(model.named_parameters())
        for name, parameter in other.named_parameters():
            mine[name].copy_(parameter)
    cache = growing_cache(model.config)
    ids = torch.tensor([[3, 4, 5, 6]])
    model(input_ids=ids[:, :3], past_key_values=cache, use_cache=True)
    found = step(ids[:, 3], torch.tensor([3]), None, cache)
    assert torch.allclose(found, other(input_ids=ids).logits[:, -1], atol=2e-6)


def test_other_models_go_on_with_the_library() -> None:
    assert fused_step(network(dtype="float64")) is None
    assert fused_step(network(dtype="bfloat16")) is None
    scaled = network()
    scaled.config.rope_parameters = {**scaled.config.rope_parameters, "rope_type": "dynamic"}
    assert fused_step(scaled) is None
    strange = network()
    strange.model.layers[1].self_attn.scaling *= 2.0  # the first layer's is not this one's
    assert fused_step(strange) is None
