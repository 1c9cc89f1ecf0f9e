"""Where whole Hugging Face weights come from: the files of a model directory, tensor by tensor, or a network.

Every rank reads only what its part is made of, so that host memory need not hold the model once per rank.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlinf_core.errors import ConfigError


class FileWeights(Mapping[str, Tensor]):
    """The tensors of a directory's safetensors files by name, each read when it is asked for.

    ``dtype`` is the number format to give. Close it after use.
    """

    def __init__(self, directory: Path, dtype: torch.dtype) -> None:
        from safetensors import SafetensorError, safe_open

        self._dtype = dtype
        self._files = ExitStack()
        self._of: dict[str, Any] = {}
        try:
            for path in _files(directory):
                file = self._files.enter_context(safe_open(path, framework="pt"))
                self._of.update(dict.fromkeys(file.keys(), file))
        except (OSError, ValueError, SafetensorError) as error:
            self.close()
            raise ConfigError(f"model.path: the weights in {directory} cannot be read: {error}") from error

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._of[name].get_tensor(name)
        return tensor.to(self._dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._of)

    def __len__(self) -> int:
        return len(self._of)

    def close(self) -> None:
        """Close the files."""
        self._files.close()


def _files(directory: Path) -> list[Path]:
    """The weight files: those of the index, or all there are."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return [directory / name for name in sorted(set(names))]
    return sorted(directory.glob("*.safetensors"))
