"""A Hugging Face config as a megatron-core ``TransformerConfig``: sizes, what is refused, layers per stage.

Importing this module loads neither torch nor megatron.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from rlinf_core.errors import ConfigError
from rlinf_engines.trainers.megatron.supported import architecture_problem, split_problems, supported_architecture

ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes and switches of a dense decoder of the supported families.

    ``kv_heads`` query groups; ``head_dim`` may differ from ``hidden / heads``; ``tied`` is whether input and output
    embedding are one weight; ``inverse_frequencies`` are the ``head_dim / 2`` rotary frequencies, in radians per token;
    ``padding`` the token whose input embedding gets no gradient, as in Hugging Face's models.
    """

    architecture: str
    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    max_positions: int
    inverse_frequencies: tuple[float, ...]
    padding: int | None = None

    @property
    def group_rows(self) -> int:
        """Rows of the fused projection of one query group: its queries, its key, its value."""
        return (self.heads // self.kv_heads + 2) * self.head_dim


def read_shape(config: Any) -> Shape:
    """The ``Shape`` of a Hugging Face config object.

    Raises ``ConfigError`` for an architecture, or a switch of one, that this backend does not compute, naming what it
    does support.
    """
    named, kind = list(getattr(config, "architectures", None) or []), str(getattr(config, "model_type", ""))
    architecture = supported_architecture(named, kind)
    if not architecture:
        raise ConfigError(architecture_problem(named, kind))
    where = f"model.path: {architecture}"
    if getattr(config, "hidden_act", "silu") != "silu":
        raise ConfigError(f"{where} has hidden_act {config.hidden_act!r}, not silu; try trainer=torch")
    for key in ("mlp_bias", "attention_bias"):
        if getattr(config, key, False):
            raise ConfigError(f"{where} has {key}, which trainer=megatron does not compute; try trainer=torch")
    for key in ("attention_dropout", "hidden_dropout"):
        if getattr(config, key, 0.0):
            raise ConfigError(
                f"{where} has {key} {getattr(config, key)}; trainer=megatron trains without dropout, set 0"
            )
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        raise ConfigError(
            f"{where} has layers with a sliding window, which trainer=megatron does not compute; try trainer=torch, "
            "or use_sliding_window: false in its config.json if no text is longer than the window"
        )
    heads = int(config.num_attention_heads)
    head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    return Shape(
        architecture=architecture,
        vocab=int(config.vocab_size),
        hidden=int(config.hidden_size),
        intermediate=int(config.intermediate_size),
        layers=int(config.num_hidden_layers),
        heads=heads,
        kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=head_dim,
        eps=float(config.rms_norm_eps),
        tied=bool(config.tie_word_embeddings),
        qkv_bias=architecture == "Qwen2ForCausalLM",
        qk_norm=architecture == "Qwen3ForCausalLM",
        max_positions=int(config.max_position_embeddings),
        inverse_frequencies=_frequencies(config, head_dim, where),
        padding=getattr(config, "pad_token_id", None),
    )


def check_parallel(shape: Shape, tp: int, pp: int) -> None:
    """Refuse (``ConfigError``) a tensor or pipeline parallel size that the model cannot be split by."""
    problems = split_problems(shape.heads, shape.kv_heads, shape.intermediate, shape.layers, tp, pp)
    if problems:
        raise ConfigError("\n".join(problems))


def padded_vocab(vocab: int, tp: int) -> int:
    """The vocabulary with the rows that make it divisible by ``tp``; these rows are zero and never seen by a head."""
    return -(-vocab // tp) * tp


def stage_layers(layers: int, pp: int) -> list[range]:
    """The global layer numbers of each pipeline stage. Layers that do not divide evenly go one each to the middle and
    early stages, never to the last, which has the output layer too."""
    base, more = divmod(layers, pp)
    counts = [base + (stage < more) for stage in range(pp)]
    starts = [sum(counts[:stage]) for stage in range(pp)]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]


def stage_layout(layers: int, pp: int) -> list[list[str]] | None:
    """``stage_layers`` as megatron's ``pipeline_model_parallel_layout``; ``None`` where an even split says the same."""
    if layers % pp == 0:
        return None
    layout = [["decoder"] * len(part) for part in stage_layers(layers, pp)]
    layout[0].insert(0, "embedding")
    layout[-1].append("loss")
    return layout


def transformer_config(
    shape: Shape, *, tp: int, pp: int, sequence_parallel: bool, dtype: Any, recompute: bool, fused: bool
) -> Any:
    """The ``TransformerConfig`` of ``shape`` on a ``tp`` by ``pp`` layout in the torch number format ``dtype``.

    ``fused``: layers are Transformer Engine's. ``recompute`` keeps only each layer's input for the backward pass.
    Losses are sums (``calculate_per_token_loss`` leaves them as they are), micro-batches have any number of tokens.
    """
    import torch
    from megatron.core.transformer.transformer_config import TransformerConfig

    cuda = torch.cuda.is_available()
    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.intermediate,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        layernorm_epsilon=shape.eps,
        normalization="RMSNorm",
        activation_func=torch.nn.functional.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        pipeline_model_parallel_layout=stage_layout(shape.layers, pp),
        sequence_parallel=sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # not used, but the default refuses variable lengths
        deallocate_pipeline_outputs=pp > 1,
        calculate_per_token_loss=True,
        # Weights come from a Hugging Face model: none are drawn.
        perform_initialization=False,
        use_cpu_initialization=not cuda,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=fused,
        recompute_granularity="full" if recompute else None,
        recompute_method="uniform" if recompute else None,
        recompute_num_layers=1 if recompute else None,
    )


def _frequencies(config: Any, head_dim: int, where: str) -> tuple[float, ...]:
    """Rotary frequencies, computed as Hugging Face does (float32), so that both rotate by the same angles."""
    import torch

    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kind = str(rope.get("rope_type", rope.get("type", "default")))
    if kind not in ROPE_TYPES:
        raise ConfigError(
            f"{where} scales its rotary embedding by {kind!r}; trainer=megatron supports {', '.join(ROPE_TYPES)}. "
            "trainer=torch takes any"
        )
    if float(rope.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", 1.0)) or 1.0) != 1.0:
        raise ConfigError(f"{where} rotates a part of each head, which trainer=megatron does not; try trainer=torch")
    theta = float(rope.get("rope_theta", getattr(config, "rope_theta", 10000.0)))
    plain = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    if kind == "linear":
        plain = plain / float(rope["factor"])
    if kind == "llama3":
        plain = _llama3(plain, rope)
    return tuple(plain.tolist())


def _llama3(frequencies: Any, rope: Any) -> Any:
    """Llama 3.1's scaling: low frequencies are divided by ``factor``, high ones kept, those between interpolated."""
    import torch

    factor, length = float(rope["factor"]), float(rope["original_max_position_embeddings"])
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    turns = length * frequencies / (2 * math.pi)  # of the original context
    part = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return torch.lerp(frequencies / factor, frequencies, part)
