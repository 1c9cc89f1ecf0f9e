"""The image encoder: one or two vision transformers side by side, and the projector into the language model.

Shape legend: B pictures, S their side, P patches of one, W an encoder's width (of both together where there are two),
H the language model's width. Blocks are transformers' own (SigLIP, DINOv2 with registers); what is around them follows
timm's models, of which OpenVLA is built: positions for patches alone, the class token without one.

OpenVLA reads the patches after the last block but one. That last block, and what follows it (norm, attention pooling),
have no part in any output, so they are not built here.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from rlinf_core.errors import ConfigError
from rlinf_embodied.policies.vla.pixels import HALF, IMAGENET, Pixels


@dataclass(frozen=True)
class Encoder:
    """Sizes of one encoder. ``depth`` counts blocks as timm does, with the last one, which is not used."""

    kind: str
    image_size: int
    patch_size: int
    width: int
    depth: int
    heads: int
    mlp: int

    def to_config(self) -> dict[str, Any]:
        return asdict(self)


TIMM = {
    "vit_large_patch14_reg4_dinov2.lvd142m": ("dinov2", 14, 1024, 24, 16, 4096),
    "vit_so400m_patch14_siglip_224": ("siglip", 14, 1152, 27, 16, 4304),
    "vit_so400m_patch14_siglip_384": ("siglip", 14, 1152, 27, 16, 4304),
}
"""Encoders that an OpenVLA config names by timm's names: kind, patch, width, depth, heads, feed-forward width."""
REGISTERS = 4


def encoders(config: dict[str, Any], where: str) -> list[Encoder]:
    """The encoders of an OpenVLA ``config.json``: written out (``vision_configs``, ours), or by timm's names."""
    if "vision_configs" in config:
        return [Encoder(**sizes) for sizes in config["vision_configs"]]
    names, sizes = config.get("timm_model_ids") or [], config.get("image_sizes") or []
    unknown = [name for name in names if name not in TIMM]
    if unknown or not names or len(sizes) != len(names):
        raise ConfigError(
            f"model.path: {where} has the image encoders {names} with sizes {sizes}; known are {', '.join(TIMM)}, "
            "with a size each"
        )
    return [
        Encoder(kind, size, patch, width, depth, heads, mlp)
        for size, (kind, patch, width, depth, heads, mlp) in zip(sizes, map(TIMM.__getitem__, names), strict=True)
    ]


def pixels(parts: list[Encoder]) -> Pixels:
    """How pictures for these encoders are prepared."""
    wants = [IMAGENET if part.kind == "dinov2" else HALF for part in parts]
    return Pixels(tuple(part.image_size for part in parts), tuple(w[0] for w in wants), tuple(w[1] for w in wants))


class Featurizer(nn.Module):
    """One encoder: [B, 3, S, S] -> [B, P, W]."""

    def __init__(self, sizes: Encoder) -> None:
        super().__init__()
        dino = sizes.kind == "dinov2"
        patches = (sizes.image_size // sizes.patch_size) ** 2
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(3, sizes.width, sizes.patch_size, stride=sizes.patch_size)})
        self.pos_embed = nn.Parameter(torch.zeros(1, patches, sizes.width))
        if dino:
            self.cls_token = nn.Parameter(torch.zeros(1, 1, sizes.width))
            self.reg_token = nn.Parameter(torch.zeros(1, REGISTERS, sizes.width))
        self.blocks = nn.ModuleList(_blocks(sizes))
        self._dino = dino

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        hidden = self.patch_embed["proj"](pictures).flatten(2).transpose(1, 2) + self.pos_embed
        if self._dino:
            before = torch.cat([self.cls_token, self.reg_token], dim=1).expand(len(hidden), -1, -1)
            hidden = torch.cat([before, hidden], dim=1)
        for block in self.blocks:
            hidden = block(hidden, None)
        return hidden[:, 1 + REGISTERS :] if self._dino else hidden


def _blocks(sizes: Encoder) -> list[nn.Module]:
    """The blocks that are used, with transformers' classes."""
    common = {
        "hidden_size": sizes.width,
        "num_hidden_layers": sizes.depth - 1,
        "num_attention_heads": sizes.heads,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-6,
        "image_size": sizes.image_size,
        "patch_size": sizes.patch_size,
    }
    config: Any
    kind: Any
    if sizes.kind == "dinov2":
        from transformers import Dinov2WithRegistersConfig
        from transformers.models.dinov2_with_registers.modeling_dinov2_with_registers import Dinov2WithRegistersLayer

        config = Dinov2WithRegistersConfig(**common, mlp_ratio=sizes.mlp // sizes.width)
        kind = Dinov2WithRegistersLayer
    else:
        from transformers import SiglipVisionConfig
        from transformers.models.siglip.modeling_siglip import SiglipEncoderLayer

        config = SiglipVisionConfig(**common, intermediate_size=sizes.mlp)
        kind = SiglipEncoderLayer
    config._attn_implementation = "sdpa"
    return [kind(config) for _ in range(sizes.depth - 1)]


class VisionBackbone(nn.Module):
    """[B, 3 K, S, S] (K encoders' pictures one behind the other) -> [B, P, W]."""

    def __init__(self, parts: list[Encoder]) -> None:
        super().__init__()
        self.featurizer = Featurizer(parts[0])
        if len(parts) > 1:
            self.fused_featurizer = Featurizer(parts[1])
        self._fused = len(parts) > 1
        self.width = sum(part.width for part in parts)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        if not self._fused:
            features: torch.Tensor = self.featurizer(pictures)
            return features
        return torch.cat([self.featurizer(pictures[:, :3]), self.fused_featurizer(pictures[:, 3:])], dim=2)


class Projector(nn.Module):
    """[B, P, W] -> [B, P, H]; with two encoders it is wider and has one layer more."""

    def __init__(self, width: int, hidden: int, fused: bool) -> None:
        super().__init__()
        first = 4 * width if fused else hidden
        self.fc1 = nn.Linear(width, first)
        self.fc2 = nn.Linear(first, hidden)
        if fused:
            self.fc3 = nn.Linear(hidden, hidden)
        self._fused = fused

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.fc2(nn.functional.gelu(self.fc1(features)))
        return self.fc3(nn.functional.gelu(hidden)) if self._fused else hidden
