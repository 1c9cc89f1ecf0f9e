"""The network of the policy and what it is made of: from a directory, or tiny and random.

Shape legend: B decisions, P patches, L prompt tokens, N action tokens of a decision, H the language model's width,
V tokens of the tokenizer.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rlinf_core.errors import ConfigError
from rlinf_embodied.conf.vla import ACTION_BINS, check_path, check_tiny
from rlinf_embodied.envs.base import EnvSpec
from rlinf_embodied.policies.vla import layout
from rlinf_embodied.policies.vla.actions import KEY, ActionTokens, choose_statistics, spec_statistics
from rlinf_embodied.policies.vla.pixels import Pixels
from rlinf_embodied.policies.vla.prompt import tiny_tokenizer
from rlinf_embodied.policies.vla.vision import Encoder, Projector, VisionBackbone, encoders, pixels

INIT_STD = 0.02
PAD_TO = 64
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Parts:
    """All of a model but its weights. ``config`` is what its ``config.json`` holds."""

    config: dict[str, Any]
    encoders: list[Encoder]
    text_config: Any
    tokenizer: Any
    pixels: Pixels
    actions: ActionTokens
    directory: Path | None


def load_parts(cfg: Any, spec: EnvSpec) -> Parts:
    """What ``cfg`` (the node ``model``) describes. Raises ConfigError for a directory that is none of OpenVLA's."""
    if cfg.path is not None:
        return _from_directory(cfg)
    _refuse(check_tiny(cfg.tiny))
    return _tiny(cfg.tiny, spec)


def _from_directory(cfg: Any) -> Parts:
    _refuse(check_path(cfg.path))
    directory = Path(cfg.path).expanduser()
    config = layout.read_json(directory, "config.json")
    from transformers import CONFIG_MAPPING, AutoTokenizer, PreTrainedTokenizerFast

    text = dict(config.get("text_config") or {})
    family = text.pop("model_type", "llama")
    if family not in CONFIG_MAPPING:
        raise ConfigError(f"model.path: {directory} has a language model of type {family!r}, which is unknown")
    text.pop("torch_dtype", None)
    text_config = CONFIG_MAPPING[family](**text)
    # The general way asks for a config class of the model's type, which the library has none of.
    kind: Any = PreTrainedTokenizerFast if (directory / "tokenizer.json").is_file() else AutoTokenizer
    try:
        tokenizer = kind.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        raise ConfigError(f"model.path: {directory} has a tokenizer that does not load: {error}") from error
    statistics = layout.read_statistics(directory, config)
    actions = ActionTokens(
        text_config.vocab_size - int(config.get("pad_to_multiple_of", PAD_TO)),
        int(config.get("n_action_bins", ACTION_BINS)),
        choose_statistics(statistics, cfg.unnorm_key, str(directory)),
    )
    return Parts(
        config={**config, "norm_stats": statistics},
        encoders=encoders(config, str(directory)),
        text_config=text_config,
        tokenizer=tokenizer,
        pixels=layout.read_pixels(directory),
        actions=actions,
        directory=directory,
    )


def _tiny(tiny: Any, spec: EnvSpec) -> Parts:
    import transformers

    statistics = {KEY: {"action": spec_statistics(spec)}}
    tokenizer = tiny_tokenizer(ACTION_BINS)
    kinds = ("dinov2", "siglip") if tiny.vision == "dinosiglip" else ("siglip",)
    width = tiny.vision_size
    parts = [
        Encoder(kind, tiny.image_size, tiny.patch_size, width, tiny.vision_layers + 1, tiny.vision_heads, 2 * width)
        for kind in kinds
    ]
    vocabulary = tokenizer.pad_token_id
    sizes = {
        "vocab_size": vocabulary + PAD_TO,
        "hidden_size": tiny.hidden_size,
        "intermediate_size": tiny.intermediate_size,
        "num_hidden_layers": tiny.layers,
        "num_attention_heads": tiny.heads,
        "num_key_value_heads": tiny.kv_heads,
        "max_position_embeddings": 2048,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "tie_word_embeddings": False,
    }
    kind = transformers.Qwen2Config if tiny.family == "qwen2" else transformers.LlamaConfig
    config = {
        "architectures": ["OpenVLAForActionPrediction"],
        "model_type": "openvla",
        "arch_specifier": "no-align+fused-gelu-mlp" if len(parts) > 1 else "no-align+gelu-mlp",
        "use_fused_vision_backbone": len(parts) > 1,
        "image_resize_strategy": "resize-naive",
        "image_sizes": [part.image_size for part in parts],
        "vision_configs": [part.to_config() for part in parts],
        "llm_max_length": sizes["max_position_embeddings"],
        "text_config": {"model_type": tiny.family, **sizes},
        "pad_token_id": tokenizer.pad_token_id,
        "pad_to_multiple_of": PAD_TO,
        "n_action_bins": ACTION_BINS,
        "norm_stats": statistics,
    }
    actions = ActionTokens(vocabulary, ACTION_BINS, statistics[KEY]["action"])
    return Parts(config, parts, kind(**sizes), tokenizer, pixels(parts), actions, None)


class Network(nn.Module):
    """The parts with gradients, under the names that an OpenVLA checkpoint has, and how they are run."""

    def __init__(self, parts: Parts, value_head: bool) -> None:
        super().__init__()
        from transformers import AutoModelForCausalLM

        width = parts.text_config.hidden_size
        with torch.random.fork_rng(devices=[]):  # the libraries draw weights, which are replaced
            self.vision_backbone = VisionBackbone(parts.encoders)
            self.projector = Projector(self.vision_backbone.width, width, len(parts.encoders) > 1)
            self.language_model = AutoModelForCausalLM.from_config(parts.text_config, attn_implementation="sdpa")
            _exact_norms(self.language_model)
            if value_head:
                self.value_head = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))
        self._first_action = parts.actions.first
        self._bins = parts.actions.bins

    def initialise(self, parts: Parts, dtype: str, seed: int) -> None:
        """Read the directory's weights, or draw them: each a function of its name and the seed alone."""
        if dtype not in DTYPES:
            raise ConfigError(f"model.dtype: {dtype!r} is unknown; choose from {', '.join(DTYPES)}")
        for name, parameter in self.named_parameters():
            if parts.directory is None or name.startswith(layout.HEAD):
                _draw(name, parameter, seed)
            parameter.data = parameter.data.to(DTYPES[dtype])
        if parts.directory is not None:
            layout.load_weights(self, parts.directory)

    @property
    def device(self) -> torch.device:
        return self.projector.fc1.weight.device

    def gradient_checkpointing_enable(self, **options: Any) -> None:
        """Let the language model's blocks keep their inputs only, and run again in the backward."""
        self.language_model.gradient_checkpointing_enable(**options)

    def prefix(self, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(embeddings [B, 1 + P + L', H], which are no padding, their positions) of begin token, patches and prompt.

        Padding that all rows have is left out, so L' < L.
        """
        ids, real = inputs["input_ids"], inputs["prompt_mask"]
        padding = int((real[:, 1:].cumsum(dim=1) == 0).sum(dim=1).min())
        ids, real = ids[:, padding:], real[:, padding:]  # of what is cut off, the begin token alone is needed
        begin = self.embed(inputs["input_ids"][:, :1])
        pictures = inputs["pixel_values"].to(self.projector.fc1.weight.dtype)
        patches = self.projector(self.vision_backbone(pictures))
        embedded = torch.cat([begin, patches, self.embed(ids[:, 1:])], dim=1)
        keep = torch.cat([real.new_ones(len(real), 1 + patches.shape[1]), real[:, 1:]], dim=1)
        return embedded, keep, keep.long().cumsum(dim=1) - 1

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.language_model.get_input_embeddings()(ids)
        return embedded

    def run(
        self, embedded: torch.Tensor, keep: torch.Tensor, positions: torch.Tensor, cache: Any = None
    ) -> torch.Tensor:
        """Hidden states of the last ``embedded.shape[1]`` of all places, ``keep`` [B, all]; those before them are in
        ``cache``. Causal; padding is not attended to."""
        count, total = embedded.shape[1], keep.shape[1]
        mask = keep[:, None, None, :]
        if count > 1:
            causal = torch.ones(count, total, dtype=torch.bool, device=keep.device).tril(total - count)
            mask = mask & causal
        output = self.language_model.model(
            inputs_embeds=embedded,
            attention_mask=mask,
            position_ids=positions[:, -count:],
            past_key_values=cache,
            use_cache=cache is not None,
        )
        hidden: torch.Tensor = output.last_hidden_state
        return hidden

    def extended(self, prefix: tuple[torch.Tensor, torch.Tensor, torch.Tensor], after: torch.Tensor) -> torch.Tensor:
        """Hidden states [B, N, H] that predict N tokens, of which ``after`` [B, N - 1, H] are all but the last."""
        embedded, keep, positions = prefix
        more = after.shape[1]
        steps = torch.arange(1, more + 1, device=keep.device)
        hidden = self.run(
            torch.cat([embedded, after], dim=1),
            torch.cat([keep, keep.new_ones(len(keep), more)], dim=1),
            torch.cat([positions, positions[:, -1:] + steps], dim=1),
        )
        return hidden[:, -more - 1 :]

    def bin_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., H] -> [..., K] of the action tokens, lowest action first; at least float32."""
        logits = self.language_model.lm_head(hidden)[..., self._first_action : self._first_action + self._bins]
        return logits.flip(-1).to(torch.promote_types(logits.dtype, torch.float32))

    def values(self, hidden: torch.Tensor) -> torch.Tensor:
        """[B, H] of the last place of the prefix -> [B, 1]."""
        found: torch.Tensor = self.value_head(hidden)
        return found


def _draw(name: str, parameter: nn.Parameter, seed: int) -> None:
    with torch.no_grad():
        if name.endswith("bias"):
            parameter.zero_()
        elif parameter.dim() > 1:
            digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") & ((1 << 63) - 1))
            parameter.copy_(torch.empty(parameter.shape).normal_(0.0, INIT_STD, generator=generator))


def _exact_norms(model: nn.Module) -> None:
    """Let RMS norms compute in the format of their input, and in float32 for bfloat16: the library's always compute in
    float32, which makes float64 runs inexact."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith("RMSNorm") and hasattr(child, "variance_epsilon"):
                weight: Any = child.weight
                epsilon: Any = child.variance_epsilon
                norm = nn.RMSNorm(weight.shape[0], eps=epsilon)
                norm.weight = weight
                setattr(parent, name, norm)


def _refuse(problems: list[str]) -> None:
    if problems:
        raise ConfigError("\n".join(problems))
