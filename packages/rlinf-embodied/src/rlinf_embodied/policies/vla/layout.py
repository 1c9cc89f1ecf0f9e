"""A vision-language-action model as a directory in the layout of OpenVLA's Hugging Face checkpoints.

``config.json`` (``model_type`` openvla, ``text_config``, ``norm_stats``, ``n_action_bins``, ``pad_to_multiple_of``, the
image encoders), weights as safetensors (``vision_backbone.featurizer.*`` and ``fused_featurizer.*`` under timm's names,
``projector.fc1 ... fc3``, ``language_model.*``), the tokenizer, ``preprocessor_config.json`` and
``dataset_statistics.json``. What OpenVLA has no place for, the value head, is in ``value_head.safetensors``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from rlinf_core.errors import ConfigError
from rlinf_embodied.policies.vla.pixels import Pixels

HEAD = "value_head."
HEAD_FILE = "value_head.safetensors"
WEIGHTS_FILE = "model.safetensors"
_BLOCK = re.compile(r"(vision_backbone\.(?:fused_)?featurizer\.blocks\.\d+\.)(.+)")
# Names inside a block: transformers' of either encoder -> timm's as OpenVLA has them.
_TIMM = {
    "layer_norm1": "norm1",
    "layer_norm2": "norm2",
    "self_attn.out_proj": "attn.proj",
    "attention.o_proj": "attn.proj",
    "layer_scale1.lambda1": "ls1.scale_factor",
    "layer_scale2.lambda1": "ls2.scale_factor",
}
_ATTENTION = re.compile(r"(?:self_attn|attention)\.([qkv])_proj\.(weight|bias)")


def openvla_name(name: str) -> tuple[str, int | None]:
    """(name in an OpenVLA checkpoint, which third of it) of one of this package's parameters; the third is for query,
    key and value, which timm keeps in one; else ``None``."""
    block = _BLOCK.fullmatch(name)
    if block is None:
        return name, None
    attention = _ATTENTION.fullmatch(block[2])
    if attention is not None:
        return f"{block[1]}attn.qkv.{attention[2]}", "qkv".index(attention[1])
    for ours, theirs in _TIMM.items():
        if block[2] == ours or block[2].startswith(f"{ours}."):
            return block[1] + theirs + block[2][len(ours) :], None
    return name, None


def to_openvla(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights under the names of an OpenVLA checkpoint."""
    thirds: dict[str, dict[int, torch.Tensor]] = {}
    found: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        theirs, third = openvla_name(name)
        if third is None:
            found[theirs] = tensor.contiguous()
        else:
            thirds.setdefault(theirs, {})[third] = tensor
    found.update({name: torch.cat([parts[i] for i in range(3)]) for name, parts in thirds.items()})
    return found


def load_weights(network: torch.nn.Module, directory: Path) -> None:
    """Copy a directory's weights into ``network``, into its number format.

    Weights of the directory that no output depends on are passed over (see ``vision``). Raises ConfigError when one is
    missing or of another shape.
    """
    from safetensors import SafetensorError, safe_open

    places: dict[str, Any] = {}
    try:
        for file in sorted(directory.glob("*.safetensors")):
            opened = safe_open(file, framework="pt")
            places.update(dict.fromkeys(opened.keys(), opened))
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"model.path: {file} cannot be read: {error}; copy it again") from error
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            theirs, third = openvla_name(name)
            if theirs not in places:
                if name.startswith(HEAD):
                    continue
                raise ConfigError(f"model.path: {directory} has no weight {theirs}, which its config.json asks for")
            tensor = places[theirs].get_tensor(theirs)
            if third is not None:
                tensor = tensor.chunk(3)[third]
            if tensor.shape != parameter.shape:
                raise ConfigError(
                    f"model.path: {directory} has {theirs} of shape {tuple(tensor.shape)}, "
                    f"and its config.json makes it {tuple(parameter.shape)}"
                )
            parameter.copy_(tensor)


def read_json(directory: Path, name: str) -> dict[str, Any]:
    """One of the directory's small files. Raises ConfigError when it is not there or no JSON object."""
    try:
        content = json.loads((directory / name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: {directory} needs a {name} that can be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"model.path: {directory}/{name} holds no JSON object")
    return content


def read_pixels(directory: Path) -> Pixels:
    """How the directory's ``preprocessor_config.json`` wants pictures."""
    config = read_json(directory, "preprocessor_config.json")
    strategy = config.get("image_resize_strategy")
    if strategy != "resize-naive":
        raise ConfigError(
            f"model.path: {directory} wants pictures prepared by {strategy!r}; resize-naive is what works here"
        )
    normal = config.get("tvf_normalize_params") or [
        {"mean": mean, "std": std} for mean, std in zip(config["means"], config["stds"], strict=True)
    ]
    return Pixels(
        tuple(int(size[-1]) for size in config["input_sizes"]),
        tuple(tuple(part["mean"]) for part in normal),
        tuple(tuple(part["std"]) for part in normal),
    )


def read_statistics(directory: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Action statistics: of ``config.json``, and of ``dataset_statistics.json`` (that of fine-tuning) over them."""
    stats = dict(config.get("norm_stats") or {})
    if (directory / "dataset_statistics.json").is_file():
        stats.update(read_json(directory, "dataset_statistics.json"))
    return stats


def write(
    directory: Path,
    config: dict[str, Any],
    weights: dict[str, torch.Tensor],
    tokenizer: Any,
    pixels: Pixels,
) -> None:
    """Write everything into ``directory``, which exists. Tensors are written in the formats that they have."""
    from safetensors.torch import save_file

    model = {name: tensor for name, tensor in weights.items() if not name.startswith(HEAD)}
    head = {name: tensor.contiguous() for name, tensor in weights.items() if name.startswith(HEAD)}
    save_file(to_openvla(model), directory / WEIGHTS_FILE, metadata={"format": "pt"})
    if head:
        save_file(head, directory / HEAD_FILE, metadata={"format": "pt"})
    tokenizer.save_pretrained(directory)
    dtype = _dtype(model.values())
    for name, content in (
        ("config.json", {**config, "torch_dtype": dtype, "dtype": dtype}),
        ("preprocessor_config.json", pixels.to_config()),
        ("dataset_statistics.json", config["norm_stats"]),
    ):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _dtype(tensors: Iterable[torch.Tensor]) -> str:
    """The number format of the first tensor, as configs have it."""
    return str(next(iter(tensors)).dtype).removeprefix("torch.")
