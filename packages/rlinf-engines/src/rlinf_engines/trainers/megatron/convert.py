"""Hugging Face weights as one rank's megatron shard, and back: pure functions of tensors, bit-equal both ways.

A ``Piece`` says which Hugging Face tensors make one megatron parameter and how tensor parallel ranks divide it. The
same functions serve anything of a parameter's shape (master weights, optimizer averages).

Shape legend: D head size, G query groups (key-value heads), Q queries per group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlinf_engines.trainers.megatron.config import Shape, padded_vocab

# How tensor parallel ranks divide a parameter: every rank has all of it; a block of rows of the padded vocabulary; a
# block of columns; the fused query-key-value projection by query groups; gate and up projection, each by rows.
REPLICATED, VOCAB, COLUMNS, QKV, GATE_UP = "replicated", "vocab", "columns", "qkv", "gate_up"


@dataclass(frozen=True, slots=True)
class Piece:
    """One megatron parameter.

    ``name`` is its name in the model of its stage (layers counted from 0 *in the stage*); ``sources`` the Hugging Face
    names of the whole tensors it is made of, and ``shapes`` theirs; ``copy`` marks the second copy of a tied embedding,
    which is trained with the first and not written twice; ``partial`` that each tensor parallel rank sees only a part
    of its gradient although all hold the same values.
    """

    name: str
    kind: str
    sources: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    copy: bool = False
    partial: bool = False

    @property
    def sharded(self) -> bool:
        """Whether tensor parallel ranks hold different parts."""
        return self.kind != REPLICATED


def stage_pieces(
    shape: Shape,
    layers: range,
    *,
    first: bool,
    last: bool,
    pp: int,
    sequence_parallel: bool,
    critic: bool,
    fused_norms: bool,
) -> list[Piece]:
    """The parameters of one pipeline stage with the global ``layers``, in the order of the Hugging Face model.

    ``fused_norms``: the layer norms are part of the projections after them (Transformer Engine's layers).
    ``critic``: one number per position (``score``) instead of the output layer.
    """
    found: list[Piece] = []
    if first:
        embedding = ("model.embed_tokens.weight",)
        found.append(Piece("embedding.word_embeddings.weight", VOCAB, embedding, ((shape.vocab, shape.hidden),)))
    for index, layer in enumerate(layers):
        found += layer_pieces(shape, index, layer, sequence_parallel=sequence_parallel, fused_norms=fused_norms)
    if last:
        found.append(
            Piece(
                "decoder.final_layernorm.weight",
                REPLICATED,
                ("model.norm.weight",),
                ((shape.hidden,),),
                partial=sequence_parallel,
            )
        )
    if last and critic:
        found.append(Piece("output_layer.weight", REPLICATED, ("score.weight",), ((1, shape.hidden),)))
        found.append(Piece("output_layer.bias", REPLICATED, ("score.bias",), ((1,),)))
    elif last and not (shape.tied and pp == 1):
        source = "model.embed_tokens.weight" if shape.tied else "lm_head.weight"
        found.append(Piece("output_layer.weight", VOCAB, (source,), ((shape.vocab, shape.hidden),), copy=shape.tied))
    return found


def layer_pieces(shape: Shape, index: int, layer: int, *, sequence_parallel: bool, fused_norms: bool) -> list[Piece]:
    """The parameters of the global ``layer``, the ``index``-th of its stage."""
    here, there = f"decoder.layers.{index}.", f"model.layers.{layer}."
    attention, mlp = there + "self_attn.", there + "mlp."
    query, key = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    norms = ("self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight")
    if not fused_norms:
        norms = ("input_layernorm.weight", "pre_mlp_layernorm.weight")
    sources = tuple(attention + name for name in ("q_proj", "k_proj", "v_proj"))
    found = [
        Piece(
            here + norms[0],
            REPLICATED,
            (there + "input_layernorm.weight",),
            ((shape.hidden,),),
            partial=sequence_parallel,
        ),
        Piece(
            here + "self_attention.linear_qkv.weight",
            QKV,
            tuple(name + ".weight" for name in sources),
            ((query, shape.hidden), (key, shape.hidden), (key, shape.hidden)),
        ),
    ]
    if shape.qkv_bias:
        bias = tuple(name + ".bias" for name in sources)
        found.append(Piece(here + "self_attention.linear_qkv.bias", QKV, bias, ((query,), (key,), (key,))))
    if shape.qk_norm:
        for name in ("q", "k"):
            found.append(
                Piece(
                    f"{here}self_attention.{name}_layernorm.weight",
                    REPLICATED,
                    (f"{attention}{name}_norm.weight",),
                    ((shape.head_dim,),),
                    partial=True,  # a rank normalises its own heads only
                )
            )
    found += [
        Piece(
            here + "self_attention.linear_proj.weight",
            COLUMNS,
            (attention + "o_proj.weight",),
            ((shape.hidden, query),),
        ),
        Piece(
            here + norms[1],
            REPLICATED,
            (there + "post_attention_layernorm.weight",),
            ((shape.hidden,),),
            partial=sequence_parallel,
        ),
        Piece(
            here + "mlp.linear_fc1.weight",
            GATE_UP,
            (mlp + "gate_proj.weight", mlp + "up_proj.weight"),
            ((shape.intermediate, shape.hidden),) * 2,
        ),
        Piece(
            here + "mlp.linear_fc2.weight",
            COLUMNS,
            (mlp + "down_proj.weight",),
            ((shape.hidden, shape.intermediate),),
        ),
    ]
    return found


def to_shard(piece: Piece, shape: Shape, whole: Sequence[Tensor], rank: int, tp: int) -> Tensor:
    """The part of tensor parallel rank ``rank`` of ``tp``, from the whole tensors of ``piece.sources``."""
    for name, tensor, expected in zip(piece.sources, whole, piece.shapes, strict=True):
        assert tuple(tensor.shape) == expected, f"{name} is {tuple(tensor.shape)}, expected {expected}"
    if piece.kind == REPLICATED:
        return whole[0]
    if piece.kind == VOCAB:
        return _pad_rows(whole[0], padded_vocab(shape.vocab, tp)).chunk(tp, dim=0)[rank]
    if piece.kind == COLUMNS:
        return whole[0].chunk(tp, dim=1)[rank]
    if piece.kind == GATE_UP:
        return torch.cat([tensor.chunk(tp, dim=0)[rank] for tensor in whole])
    return _fuse_qkv(shape, *whole).chunk(tp, dim=0)[rank]


def from_shards(piece: Piece, shape: Shape, shards: Sequence[Tensor]) -> list[Tensor]:
    """The whole tensors of ``piece.sources``, from the parts of all tensor parallel ranks in rank order."""
    if piece.kind == REPLICATED:
        return [shards[0]]
    if piece.kind == VOCAB:
        return [_join(shards, 0)[: shape.vocab]]
    if piece.kind == COLUMNS:
        return [_join(shards, 1)]
    if piece.kind == GATE_UP:
        halves = [shard.chunk(2, dim=0) for shard in shards]
        return [torch.cat([half[i] for half in halves]) for i in range(2)]
    return _split_qkv(shape, _join(shards, 0))


def shard_shape(piece: Piece, shape: Shape, tp: int) -> tuple[int, ...]:
    """The shape of a rank's part."""
    rows, rest = piece.shapes[0][0], piece.shapes[0][1:]
    if piece.kind == REPLICATED:
        return piece.shapes[0]
    if piece.kind == VOCAB:
        return (padded_vocab(shape.vocab, tp) // tp, *rest)
    if piece.kind == COLUMNS:
        return (rows, rest[0] // tp)
    if piece.kind == GATE_UP:
        return (2 * rows // tp, *rest)
    return (shape.kv_heads * shape.group_rows // tp, *rest)


def numel(piece: Piece, shape: Shape, tp: int) -> int:
    """The number of elements of a rank's part."""
    return math.prod(shard_shape(piece, shape, tp))


def _fuse_qkv(shape: Shape, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """[Q G D, ...], [G D, ...], [G D, ...] -> [G (Q + 2) D, ...]: group by group its queries, its key, its value."""
    rest = query.shape[1:]
    parts = [tensor.reshape(shape.kv_heads, -1, *rest) for tensor in (query, key, value)]
    return torch.cat(parts, dim=1).reshape(-1, *rest)


def _split_qkv(shape: Shape, fused: Tensor) -> list[Tensor]:
    """The inverse of ``_fuse_qkv``."""
    rest = fused.shape[1:]
    rows = shape.head_dim
    parts = fused.reshape(shape.kv_heads, shape.group_rows, *rest).split(
        [shape.group_rows - 2 * rows, rows, rows], dim=1
    )
    return [part.reshape(-1, *rest) for part in parts]


def _pad_rows(tensor: Tensor, rows: int) -> Tensor:
    if tensor.shape[0] == rows:
        return tensor
    return torch.cat([tensor, tensor.new_zeros(rows - tensor.shape[0], *tensor.shape[1:])])


def _join(shards: Sequence[Tensor], dim: int) -> Tensor:
    return shards[0] if len(shards) == 1 else torch.cat(list(shards), dim=dim)
