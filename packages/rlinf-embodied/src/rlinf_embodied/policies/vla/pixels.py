"""Pictures as the tensors that the image encoder sees (OpenVLA's ``resize-naive``).

Shape legend: B pictures of H x W, K encoders (1 or 2), S the side of what an encoder sees.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch.nn import functional

IMAGENET = ((0.484375, 0.455078125, 0.40625), (0.228515625, 0.2236328125, 0.224609375))
"""Means and deviations that DINOv2 wants, rounded as OpenVLA's preprocessor_config.json has them."""
HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
"""Those that SigLIP wants."""


@dataclass(frozen=True)
class Pixels:
    """How pictures are prepared. ``sizes`` [K], ``means`` and ``stds`` [K][3], one per encoder."""

    sizes: tuple[int, ...]
    means: tuple[tuple[float, ...], ...]
    stds: tuple[tuple[float, ...], ...]

    def __call__(self, images: NDArray[Any]) -> torch.Tensor:
        """uint8 [B, H, W, 3] -> float32 [B, 3 K, S, S]; bicubic with antialiasing, on bytes, as PIL does it."""
        raw = torch.from_numpy(images).permute(0, 3, 1, 2)
        parts = []
        for size, mean, std in zip(self.sizes, self.means, self.stds, strict=True):
            part = raw
            if part.shape[-2:] != (size, size):
                part = functional.interpolate(part, (size, size), mode="bicubic", antialias=True, align_corners=False)
            parts.append((part.float() / 255.0 - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None])
        return torch.cat(parts, dim=1)

    def to_config(self) -> dict[str, Any]:
        """What a ``preprocessor_config.json`` says of it."""
        return {
            "auto_map": {
                "AutoImageProcessor": "processing_prismatic.PrismaticImageProcessor",
                "AutoProcessor": "processing_prismatic.PrismaticProcessor",
            },
            "image_processor_type": "PrismaticImageProcessor",
            "processor_class": "PrismaticProcessor",
            "use_fused_vision_backbone": len(self.sizes) > 1,
            "image_resize_strategy": "resize-naive",
            "input_sizes": [[3, size, size] for size in self.sizes],
            "interpolations": ["bicubic"] * len(self.sizes),
            "means": [list(mean) for mean in self.means],
            "stds": [list(std) for std in self.stds],
            "tvf_do_letterbox": False,
            "tvf_letterbox_fill": None,
            "tvf_resize_params": [
                {"antialias": True, "interpolation": 3, "max_size": None, "size": [size, size]} for size in self.sizes
            ],
            "tvf_crop_params": [{"output_size": [size, size]} for size in self.sizes],
            "tvf_normalize_params": [
                {"inplace": False, "mean": list(mean), "std": list(std)}
                for mean, std in zip(self.means, self.stds, strict=True)
            ],
        }
