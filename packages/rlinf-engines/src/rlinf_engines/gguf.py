"""A GGUF file (llama.cpp's format, usually quantized) as a Hugging Face directory that trainers and rollouts load.

Importing this module loads the standard library only.
"""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from typing import Any

from rlinf_core.cli.main import Parser
from rlinf_core.errors import ConfigError, MissingExtraError
from rlinf_core.registry import install_command
from rlinf_core.rundir import guard

MAGIC = b"GGUF"
DTYPES = ("float32", "bfloat16")
NEEDED = ("gguf", "accelerate", "transformers", "safetensors")
"""What must be there to read one: transformers does not without accelerate."""


def convert_gguf(gguf_file: str | Path, out_dir: str | Path, dtype: str = "float32") -> Path:
    """Write what ``gguf_file`` holds to ``out_dir``: config, safetensors, tokenizer with its chat template.

    Weights are de-quantized to ``dtype`` and the mark of quantization is taken out of the config, so that the model
    trains like any other. The directory is written aside and renamed when whole; one that exists is refused. Returns
    the directory.

    Raises ``MissingExtraError`` without the packages that read the format, and ``ConfigError`` for a file that is not
    GGUF, is cut off, lacks weights or a tokenizer, or holds an architecture that is not a known causal language model.
    """
    source, target = Path(gguf_file).expanduser(), Path(out_dir).expanduser()
    _check(source, target, dtype)
    _check_contents(source)
    network, tokenizer = _load(source, dtype)
    # What follows the model would otherwise be told that its weights are still packed.
    if hasattr(network.config, "quantization_config"):
        del network.config.quantization_config
    network.hf_quantizer, network.is_quantized = None, False
    network.config._name_or_path = ""
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"{source}: its tokenizer has no end token; the file cannot be trained from")
    if len(tokenizer) > network.get_input_embeddings().num_embeddings:
        raise ConfigError(
            f"{source}: its tokenizer has {len(tokenizer)} tokens, its embedding "
            f"{network.get_input_embeddings().num_embeddings}; the file is not whole"
        )
    from rlinf_engines.models import export_model

    with guard(target):
        export_model(network, tokenizer, target)
    return target


def convert_command(argv: list[str]) -> int:
    """``rlinf convert-gguf FILE DIR``: make a model directory of a GGUF file."""
    parser = Parser(prog="rlinf convert-gguf", description="Make a Hugging Face model directory of a GGUF file.")
    parser.add_argument("file", metavar="FILE", help="the GGUF file")
    parser.add_argument("directory", metavar="DIR", help="the directory to write; it must not exist")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="number format (default: float32)")
    arguments = parser.parse_args(argv)
    directory = convert_gguf(arguments.file, arguments.directory, arguments.dtype)
    print(f"wrote {directory}; use it with model.path={directory}")
    return 0


def _check(source: Path, target: Path, dtype: str) -> None:
    if dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r} is unknown; choose from {', '.join(DTYPES)}")
    if not source.is_file():
        raise ConfigError(f"{source}: there is no such file; give a GGUF file")
    with source.open("rb") as file:
        magic = file.read(len(MAGIC))
    if magic != MAGIC:
        raise ConfigError(f"{source}: is not a GGUF file (it begins with {magic!r}, not {MAGIC!r})")
    if target.exists():
        raise ConfigError(f"{target}: exists already; name a directory that does not")
    with guard(target):  # before minutes of work
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=target.parent):
            pass
    if missing := [package for package in NEEDED if importlib.util.find_spec(package) is None]:
        raise MissingExtraError(
            f"reading GGUF needs {', '.join(missing)}, which is not installed; "
            f"install it with: {install_command('rlinf-engines[gguf]')}"
        )


def _check_contents(source: Path) -> None:
    """Before anything is built: a file without sizes would become a model of the library's default, billions large."""
    from gguf import GGUFReader
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    try:
        reader = GGUFReader(source)
        field = reader.fields.get("general.architecture")
    except (OSError, ValueError, IndexError, KeyError, OverflowError) as error:
        raise ConfigError(f"{source}: is cut off or damaged: {error}") from error
    name = str(field.contents()) if field is not None else "(none named)"
    if name not in GGUF_SUPPORTED_ARCHITECTURES:
        known = ", ".join(sorted(GGUF_SUPPORTED_ARCHITECTURES))
        raise ConfigError(f"{source}: holds architecture {name}, which cannot be converted; those that can: {known}")
    if not reader.tensors:
        raise ConfigError(f"{source}: holds no weights; give the file of a whole model")
    for key in (f"{name}.block_count", f"{name}.embedding_length", "tokenizer.ggml.tokens"):
        if key not in reader.fields:
            raise ConfigError(f"{source}: lacks {key}; give the file of a whole language model")


def _load(source: Path, dtype: str) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    from rlinf_engines.models import torch_dtype

    logging.disable_progress_bar()
    folder, name = str(source.parent), source.name
    try:
        network, info = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=name, dtype=torch_dtype(dtype), local_files_only=True, output_loading_info=True
        )
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, NotImplementedError) as error:
        raise ConfigError(f"{source}: does not load as a causal language model: {error}") from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise ConfigError(f"{source}: lacks {len(missing)} of the model's weights, first {missing[0]}")
    return network, tokenizer
