"""Hugging Face configs and weights as megatron's, and back: no process group, no megatron."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from rlinf_core.errors import ConfigError  # noqa: E402
from rlinf_engines.trainers.megatron.config import (  # noqa: E402
    Shape,
    check_parallel,
    padded_vocab,
    read_shape,
    stage_layers,
    stage_layout,
)
from rlinf_engines.trainers.megatron.convert import (  # noqa: E402
    Piece,
    from_shards,
    numel,
    shard_shape,
    stage_pieces,
    to_shard,
)
from rlinf_engines.trainers.megatron.supported import ARCHITECTURES  # noqa: E402
from rlinf_engines.trainers.megatron.trainer import MegatronTrainer  # noqa: E402
from rlinf_engines.trainers.torch_trainer import TorchTrainer  # noqa: E402

SMALL = Shape(
    architecture="Qwen2ForCausalLM",
    vocab=17,
    hidden=12,
    intermediate=10,
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=4,
    eps=1e-6,
    tied=True,
    qkv_bias=True,
    qk_norm=False,
    max_positions=64,
    inverse_frequencies=(1.0, 0.1),
)
LLAMA = {"architecture": "LlamaForCausalLM", "tied": False, "qkv_bias": False}
QWEN3 = {"architecture": "Qwen3ForCausalLM", "qkv_bias": False, "qk_norm": True, "head_dim": 6}


def shape_with(**keys: Any) -> Shape:
    return Shape(**{**{name: getattr(SMALL, name) for name in SMALL.__slots__}, **keys})


def pieces_of(shape: Shape, pp: int, *, critic: bool = False, fused: bool = False) -> list[list[Piece]]:
    return [
        stage_pieces(
            shape,
            layers,
            first=stage == 0,
            last=stage == pp - 1,
            pp=pp,
            sequence_parallel=False,
            critic=critic,
            fused_norms=fused,
        )
        for stage, layers in enumerate(stage_layers(shape.layers, pp))
    ]


def random_weights(stages: list[list[Piece]]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    found: dict[str, torch.Tensor] = {}
    for piece in (piece for stage in stages for piece in stage):
        for name, size in zip(piece.sources, piece.shapes, strict=True):
            found.setdefault(name, torch.randn(size, generator=generator))
    return found


@pytest.mark.parametrize("keys", [{}, LLAMA, QWEN3, {"kv_heads": 4}], ids=["qwen2", "llama", "qwen3", "no groups"])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 2), (1, 3)])
def test_weights_come_back_bit_equal(keys: dict[str, Any], tp: int, pp: int) -> None:
    shape = shape_with(**keys)
    stages = pieces_of(shape, pp)
    whole = random_weights(stages)
    back: dict[str, torch.Tensor] = {}
    for piece in (piece for stage in stages for piece in stage):
        sources = [whole[name] for name in piece.sources]
        shards = [to_shard(piece, shape, sources, rank, tp) for rank in range(tp)]
        for shard in shards:
            assert shard.shape == shard_shape(piece, shape, tp)
            assert shard.numel() == numel(piece, shape, tp)
        if not piece.copy:
            back.update(zip(piece.sources, from_shards(piece, shape, shards), strict=True))
    assert back.keys() == whole.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in whole.items())


def test_a_stage_names_every_parameter_once() -> None:
    for critic in (False, True):
        stages = pieces_of(SMALL, 2, critic=critic)
        for stage in stages:
            assert len({piece.name for piece in stage}) == len(stage)
        last = {piece.name: piece for piece in stages[-1]}
        assert ("output_layer.bias" in last) is critic
        # The last stage has a copy of a tied embedding of its own.
        assert last["output_layer.weight"].copy is not critic
    assert "output_layer.weight" not in {piece.name for piece in pieces_of(SMALL, 1)[0]}
    fused = {piece.name for piece in pieces_of(SMALL, 1, fused=True)[0]}
    assert "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight" in fused
    assert "decoder.layers.0.input_layernorm.weight" not in fused


def test_queries_keys_and_values_lie_group_by_group() -> None:
    """Rows of the fused projection: the queries of group 0, its key, its value, then group 1."""
    rows = [
        torch.arange(count, dtype=torch.float32).unsqueeze(1) + start for count, start in ((16, 0), (8, 100), (8, 200))
    ]
    piece = next(piece for piece in pieces_of(SMALL, 1)[0] if piece.name.endswith("linear_qkv.weight"))
    piece = Piece(piece.name, piece.kind, piece.sources, ((16, 1), (8, 1), (8, 1)))
    parts = [to_shard(piece, SMALL, rows, rank, 2).squeeze(1).tolist() for rank in range(2)]
    assert parts[0] == [*range(8), *range(100, 104), *range(200, 204)]
    assert parts[1] == [*range(8, 16), *range(104, 108), *range(204, 208)]


def test_the_vocabulary_is_padded_with_zeros() -> None:
    assert [padded_vocab(17, tp) for tp in (1, 2, 4)] == [17, 18, 20]
    piece = pieces_of(SMALL, 1)[0][0]
    whole = torch.ones(17, 12)
    shards = [to_shard(piece, SMALL, [whole], rank, 4) for rank in range(4)]
    assert [float(shard.sum()) for shard in shards] == [60.0, 60.0, 60.0, 24.0]
    assert torch.equal(from_shards(piece, SMALL, shards)[0], whole)


def test_layers_that_do_not_divide_go_to_early_stages() -> None:
    assert [list(stage) for stage in stage_layers(3, 2)] == [[0, 1], [2]]
    assert [len(stage) for stage in stage_layers(30, 4)] == [8, 8, 7, 7]
    assert stage_layout(4, 2) is None
    assert stage_layout(3, 2) == [["embedding", "decoder", "decoder"], ["decoder", "loss"]]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp", "pp", "message"),
    [
        (9, 3, 2, 1, "trainer.tp: 2 does not divide the model's attention heads 9 (it has 9 attention heads, 3 key-"),
        (8, 2, 4, 1, "trainer.tp: 4 does not divide the model's key-value heads 2"),
        (9, 3, 2, 1, "choose from 1, 3, or split it by trainer.pp"),
        (9, 3, 1, 31, "trainer.pp: 31 stages are more than the model's 30 layers; choose at most 30"),
    ],
)
def test_splits_that_do_not_fit_are_refused(heads: int, kv_heads: int, tp: int, pp: int, message: str) -> None:
    shape = shape_with(heads=heads, kv_heads=kv_heads, layers=30, intermediate=1536)
    check_parallel(shape, 1, 2)
    with pytest.raises(ConfigError) as caught:
        check_parallel(shape, tp, pp)
    assert message in str(caught.value)


def test_ranks_that_hold_no_whole_copy_are_refused_before_the_start() -> None:
    cfg = SimpleNamespace(tp=2, pp=2)
    assert MegatronTrainer.ranks_problem(cfg, 8) == "" and TorchTrainer.ranks_problem(cfg, 3) == ""
    assert "needs a multiple of 4 ranks, and the trainer has 6" in MegatronTrainer.ranks_problem(cfg, 6)


def config(**keys: Any) -> SimpleNamespace:
    """A Hugging Face config, as far as it is read."""
    plain = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 17,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    }
    return SimpleNamespace(**{**plain, **keys})


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"},
            f"model.path: trainer=megatron does not support GPT2LMHeadModel; it supports {', '.join(ARCHITECTURES)}",
        ),
        ({"architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe"}, "does not support Qwen2MoeForCausalLM"),
        ({"hidden_act": "gelu"}, "LlamaForCausalLM has hidden_act 'gelu', not silu"),
        ({"attention_bias": True}, "LlamaForCausalLM has attention_bias"),
        ({"mlp_bias": True}, "LlamaForCausalLM has mlp_bias"),
        ({"attention_dropout": 0.1}, "LlamaForCausalLM has attention_dropout 0.1"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "has layers with a sliding window"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "scales its rotary embedding by 'yarn'"),
        ({"rope_parameters": {"rope_theta": 1.0, "partial_rotary_factor": 0.5}}, "rotates a part of each head"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(keys: dict[str, Any], message: str) -> None:
    assert read_shape(config()).head_dim == 8
    with pytest.raises(ConfigError) as caught:
        read_shape(config(**keys))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 500.0},
        {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0},
        {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ],
)
def test_rotary_frequencies_are_hugging_faces(rope: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    theirs = transformers.LlamaConfig(hidden_size=256, num_attention_heads=4, rope_parameters=rope)
    embedding = LlamaRotaryEmbedding(theirs)
    found = torch.tensor(read_shape(theirs).inverse_frequencies)
    torch.testing.assert_close(found, embedding.inv_freq, rtol=1e-6, atol=0.0)
    assert float(embedding.attention_scaling) == 1.0


def test_weights_are_read_from_the_files_of_the_index(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    from rlinf_engines.trainers.megatron.source import FileWeights

    save_file({"a": torch.arange(3.0)}, tmp_path / "model-1.safetensors")
    save_file({"b": torch.ones(2, dtype=torch.bfloat16)}, tmp_path / "model-2.safetensors")
    save_file({"c": torch.ones(1)}, tmp_path / "other.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    files = FileWeights(tmp_path, torch.float64)
    assert sorted(files) == ["a", "b"] and len(files) == 2
    assert torch.equal(files["a"], torch.arange(3.0, dtype=torch.float64))
    assert files["b"].dtype == torch.float64
    files.close()
    (tmp_path / "model-2.safetensors").write_bytes(b"cut off")
    with pytest.raises(ConfigError, match="cannot be read"):
        FileWeights(tmp_path, torch.float32)
