"""megatron-core's ``GPTModel`` on packed micro-batches: layers, attention, the places that are predicted, the critic.

Importing this module loads megatron-core: call ``compat.import_megatron`` first.

Shape legend: N tokens of a micro-batch, N' padded to a multiple of the tensor parallel size where sequence parallel
ranks share them, M places that predict, H hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor, nn

from rlinf_core.types import Batch
from rlinf_engines.trainers.attention import packed_attention
from rlinf_engines.trainers.megatron.config import Shape, padded_vocab, stage_layers
from rlinf_engines.trainers.megatron.layout import Layout


def uses_transformer_engine(device: torch.device) -> bool:
    """Whether layers are Transformer Engine's: on a GPU, where it is installed."""
    return bool(HAVE_TE) and device.type == "cuda"


@dataclass
class Packed(PackedSeqParams):
    """Where sequences begin, which tokens they share (see ``packed_attention``), and the rotation of each token:
    ``cosine`` and ``sine`` [N', 1, D / 2] in the model's number format, made once for all layers."""

    cosine: Tensor | None = None
    sine: Tensor | None = None
    shared: Tensor | None = None


class PackedAttention(nn.Module):
    """Core attention of packed sequences: rotary embedding by each token's position in its own sequence, then
    ``rlinf_engines.trainers.attention``. It has no parameters."""

    def __init__(self, config: Any, layer_number: int, softmax_scale: float | None = None, **others: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: Packed,
        **others: Any,
    ) -> Tensor:
        """[N', heads, D], [N', groups, D], [N', groups, D] -> [N', heads * D]."""
        cosine, sine = packed_seq_params.cosine, packed_seq_params.sine
        assert cosine is not None and sine is not None
        cu_seqlens, longest = packed_seq_params.cu_seqlens_q, packed_seq_params.max_seqlen_q
        query, key = rotate(query, cosine, sine), rotate(key, cosine, sine)
        shared = packed_seq_params.shared
        return packed_attention(query, key, value, cu_seqlens, longest, scale=self.scale, shared=shared).flatten(1)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary embedding (Su et al., arXiv 2104.09864) of [N, heads, D], the two halves of D being the planes' axes."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


class RmsNorm(nn.Module):
    """RMS norm of the last dimension; ``sequence_parallel`` marks a weight whose gradient each rank has a part of."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **others: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype, device=_device(config)))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        return nn.functional.rms_norm(hidden, self.weight.shape, self.weight, self.eps)


class ValueHead(nn.Module):
    """Instead of the output layer: one number per place."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.empty(1, config.hidden_size, dtype=config.params_dtype, device=_device(config))
        )
        self.bias = nn.Parameter(torch.empty(1, dtype=config.params_dtype, device=_device(config)))

    def forward(self, hidden: Tensor, weight: Tensor | None = None, **others: Any) -> tuple[Tensor, None]:
        """[M, 1, H] -> [M, 1, 1]; ``weight`` (a tied embedding) is not used."""
        return nn.functional.linear(hidden, self.weight, self.bias), None


def build_model(shape: Shape, config: Any, layout: Layout, device: torch.device, *, critic: bool) -> GPTModel:
    """This rank's stage of the model, its weights not set. ``config`` is ``config.transformer_config``'s."""
    fused = uses_transformer_engine(device)
    model = GPTModel(
        config=config,
        transformer_layer_spec=_layers(shape, layout, device),
        vocab_size=padded_vocab(shape.vocab, layout.tp),
        max_sequence_length=shape.max_positions,
        pre_process=layout.first,
        post_process=layout.last,
        parallel_output=True,
        # Across stages the copies of a tied embedding are kept equal by the trainer; a critic has no output layer.
        share_embeddings_and_output_weights=layout.pp == 1 and (shape.tied or critic),
        # Without Transformer Engine the core attention rotates: megatron's own way asks the device in every layer.
        position_embedding_type="rope" if fused else "none",
    )
    frequencies = torch.tensor(shape.inverse_frequencies, dtype=torch.float32)
    if fused:
        model.rotary_pos_emb.inv_freq = frequencies.to(device)
    else:
        model.register_buffer("inverse_frequencies", frequencies, persistent=False)
    if layout.first and shape.padding is not None:
        model.embedding.register_forward_hook(
            _Padding(shape.padding, layout, config.sequence_parallel), with_kwargs=True
        )
    if layout.last:
        if critic:
            model.output_layer = ValueHead(config)
        else:
            # The hidden states are whole when they come here (see ``_Predicting``), also in sequence parallel.
            model.output_layer.sequence_parallel = False
            model.output_layer.allreduce_dgrad = layout.tp > 1
        model.output_layer.register_forward_pre_hook(_select_places)
    return model.to(device)


def packed_forward(model: GPTModel, batch: Batch, layout: Layout, *, sequence_parallel: bool) -> Tensor:
    """Run the stage on a packed micro-batch: [M, V / tp] logits (a critic's values [M, 1]) on the last stage, hidden
    states [N' or N' / tp, 1, H] before it, whose input the pipeline schedule has set."""
    ids, positions, cu_seqlens = batch["input_ids"], batch["position_ids"], batch["cu_seqlens"]
    longest, shared = int(batch["max_len"]), batch.get("shared")
    if sequence_parallel and len(ids) % layout.tp:
        # Ranks share the tokens evenly: less than tp tokens of one more sequence, which nobody reads.
        more = layout.tp - len(ids) % layout.tp
        column = torch.arange(more, device=positions.device)
        if shared is not None:
            shared = torch.cat([shared, len(ids) + column])
        ids = torch.cat([ids, ids.new_zeros(more)])
        positions = torch.cat([positions, column])
        cu_seqlens = torch.cat([cu_seqlens, cu_seqlens[-1:] + more])
        longest = max(longest, more)
    packed = Packed(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        shared=shared,
    )
    if not uses_transformer_engine(ids.device):
        angles = positions[:, None, None].float() * model.inverse_frequencies  # float32, as Hugging Face has them
        dtype = model.config.params_dtype
        packed.cosine, packed.sine = angles.cos().to(dtype), angles.sin().to(dtype)
    if not layout.last:
        return _call(model, ids, positions, packed)
    model.output_layer.places = (batch["predict"], layout.tensor if sequence_parallel else None)
    try:
        return _call(model, ids, positions, packed)[0]
    finally:
        model.output_layer.places = None


def _call(model: GPTModel, ids: Tensor, positions: Tensor, packed: PackedSeqParams) -> Tensor:
    output: Tensor = model(ids.unsqueeze(0), positions.unsqueeze(0), None, packed_seq_params=packed)
    return output


def _select_places(output_layer: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Before the output layer: only the hidden states that predict go on, [N', 1, H] -> [M, 1, H]."""
    places, tensor_group = output_layer.places
    hidden = inputs[0]
    if tensor_group is not None:
        # What follows gives every rank the whole gradient, so backward only takes this rank's part of it.
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False, group=tensor_group)
    return (hidden[places], *inputs[1:])


class _Padding:
    """After the embedding: tokens of the padding id give its row no gradient (they do so as output tokens only, where
    the embedding is tied). It may be a token that texts have, such as one that ends a turn."""

    def __init__(self, padding: int, layout: Layout, sequence_parallel: bool) -> None:
        self.padding, self.layout, self.sequence_parallel = padding, layout, sequence_parallel

    def __call__(self, module: Any, args: Any, kwargs: dict[str, Any], embedded: Tensor) -> Tensor:
        ids = kwargs["input_ids"][0]
        if self.sequence_parallel:  # this rank has its part of the tokens
            ids = ids.chunk(self.layout.tp)[self.layout.part]
        return torch.where((ids == self.padding)[:, None, None], embedded.detach(), embedded)


def _layers(shape: Shape, layout: Layout, device: torch.device) -> TransformerBlockSubmodules:
    count = len(stage_layers(shape.layers, layout.pp)[layout.stage])
    if uses_transformer_engine(device):
        from megatron.core.extensions.transformer_engine import TENorm

        spec = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=shape.qk_norm)
        return TransformerBlockSubmodules(layer_specs=[spec] * count, layer_norm=TENorm)
    spec = get_gpt_layer_local_spec(qk_layernorm=shape.qk_norm, normalization="RMSNorm")
    parts = spec.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RmsNorm
    attention = parts.self_attention.submodules
    attention.core_attention = PackedAttention
    if shape.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RmsNorm
    return TransformerBlockSubmodules(layer_specs=[spec] * count, layer_norm=RmsNorm)


def _device(config: Any) -> torch.device:
    if config.use_cpu_initialization:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
