"""Config schema of ``model/vla``: the vision-language-action policy. Standard library only."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlinf_core.registry import check_name

DTYPES = ("float32", "float64", "bfloat16")
FAMILIES = ("llama", "qwen2")
VISION = ("siglip", "dinosiglip")
DECODING = ("autoregressive", "parallel")
VALUE_LEVELS = ("chunk", "none")
ACTION_BINS = 256


def _key(default: Any, text: str, **limits: Any) -> Any:
    """A dataclass field with its help text and limits."""
    return field(default=default, metadata={"help": text, **limits})


@dataclass
class TinyVla:
    """A small model with random weights, built from its config: nothing is downloaded."""

    vision: str = _key("siglip", "image encoder: one SigLIP, or DINOv2 and SigLIP side by side", choices=VISION)
    image_size: int = _key(64, "side of the square image that the encoder sees, in pixels", min=8)
    patch_size: int = _key(16, "side of a patch in pixels; must divide image_size", min=1)
    vision_size: int = _key(64, "width of the image encoder", min=2)
    vision_layers: int = _key(2, "transformer blocks of the image encoder", min=1)
    vision_heads: int = _key(4, "attention heads of the image encoder; must divide vision_size", min=1)
    family: str = _key("llama", "architecture of the language model", choices=FAMILIES)
    hidden_size: int = _key(128, "width of the language model", min=2)
    layers: int = _key(2, "transformer blocks of the language model", min=1)
    heads: int = _key(4, "attention heads of the language model; must divide hidden_size", min=1)
    kv_heads: int = _key(2, "key-value heads; must divide heads", min=1)
    intermediate_size: int = _key(256, "width of the language model's feed-forward layer", min=1)


@dataclass
class Vla:
    """A vision-language-action policy: an image and an instruction to action tokens."""

    name: str = _key("vla", "policy")
    path: str | None = _key(None, "directory in the OpenVLA layout; null: the tiny model")
    tiny: TinyVla = field(default_factory=TinyVla, metadata={"help": "the tiny model, when path is null"})
    dtype: str = _key("float32", "number format of weights and computation", choices=DTYPES)
    chunk: int = _key(4, "environment steps per decision", min=1)
    decoding: str = _key(
        "autoregressive", "action tokens one after the other, or all at once and independent", choices=DECODING
    )
    temperature: float = _key(1.0, "logits of action tokens are divided by it", min=1e-3)
    value_level: str = _key("chunk", "one value per decision (PPO), or none (GRPO)", choices=VALUE_LEVELS)
    image: str = _key("image", "observation with the picture")
    prompt_tokens: int = _key(64, "most tokens of the instruction with the prompt around it", min=8)
    unnorm_key: str | None = _key(None, "which action statistics of the directory; null: the only ones")

    def validate(self, root: Any) -> list[str]:
        problems = check_name("rlinf.policies", self.name, "model.name")
        return problems + (check_tiny(self.tiny) if self.path is None else check_path(self.path))


def check_tiny(tiny: Any) -> list[str]:
    """Say which sizes of the tiny model do not go together."""
    problems = []
    for part, whole in (("patch_size", "image_size"), ("vision_heads", "vision_size"), ("heads", "hidden_size")):
        if getattr(tiny, whole) % getattr(tiny, part):
            problems.append(
                f"model.tiny.{part}: {getattr(tiny, part)} does not divide {whole} {getattr(tiny, whole)}; "
                "choose a divisor"
            )
    if tiny.hidden_size % tiny.heads == 0 and (tiny.hidden_size // tiny.heads) % 2:
        problems.append(f"model.tiny.heads: hidden_size / heads is {tiny.hidden_size // tiny.heads}; it must be even")
    if tiny.heads % tiny.kv_heads:
        problems.append(f"model.tiny.kv_heads: {tiny.kv_heads} does not divide heads {tiny.heads}; choose a divisor")
    return problems


def check_path(path: str) -> list[str]:
    """Say why ``path`` cannot be a directory in the OpenVLA layout, as far as its small files show it."""
    directory = Path(path).expanduser()
    want = "give a directory in the OpenVLA layout (docs/embodied.md), or null for the tiny model"
    if not path:
        return [f"model.path: the path is empty; {want}"]
    if not directory.is_dir():
        return [f"model.path: {path} {'is not a directory' if directory.exists() else 'does not exist'}; {want}"]
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return [f"model.path: {path} has no config.json; {want}"]
    except (OSError, ValueError) as error:
        return [f"model.path: {path} has a config.json that cannot be read ({error}); {want}"]
    if config.get("model_type") != "openvla":
        return [f"model.path: {path} holds a model of type {config.get('model_type')!r}, not 'openvla'; {want}"]
    if not any(directory.glob("*.safetensors")):
        return [f"model.path: {path} has no weights (*.safetensors); {want}"]
    return []


SCHEMAS: dict[str, type] = {"model/vla": Vla}
