"""Faults of a model config that the standard library alone can find.

These run when a configuration is composed, before torch or transformers is loaded. Each function returns
messages of the form ``key: what is wrong, what would be right``; an empty list means nothing was found.
The arguments are config nodes: anything with attributes.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin", "model*.safetensors.index.json")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tokenizer_config.json")
FAMILIES = ("qwen2", "llama")
POSITION_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len")


def check_model_path(path: str) -> list[str]:
    """Say why ``path`` cannot be a Hugging Face causal language model directory."""
    directory = Path(path).expanduser()
    want = "give a directory with config.json, weights and a tokenizer, or null for the tiny model"
    if not path:  # which would be the directory that the run was started in
        return [f"model.path: the path is empty; {want}"]
    if not directory.exists():
        if re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", path):
            want += (
                f". A model of that name on the Hugging Face hub is not downloaded by a run: `hf download {path} "
                "--local-dir DIR` does it, then give model.path=DIR"
            )
        return [f"model.path: {path} does not exist; {want}"]
    if not directory.is_dir():
        return [f"model.path: {path} is not a directory; {want}"]
    config, problem = _read_config(directory)
    if problem:
        return [f"model.path: {path} {problem}; {want}"]
    architectures = config.get("architectures") or []
    if architectures and not any(_is_causal(str(name)) for name in architectures):
        names = ", ".join(map(str, architectures))
        return [f"model.path: {path} holds {names}, not a causal language model; {want}"]
    if not any(any(directory.glob(pattern)) for pattern in WEIGHT_FILES):
        return [f"model.path: {path} has no weights (*.safetensors or pytorch_model*.bin); {want}"]
    if problem := _weights_problem(directory):
        return [f"model.path: {path} {problem}"]
    if not any((directory / name).is_file() for name in TOKENIZER_FILES):
        return [f"model.path: {path} has no tokenizer ({', '.join(TOKENIZER_FILES[:2])}, ...); {want}"]
    return []


def check_tiny(tiny: Any) -> list[str]:
    """Say which sizes of the tiny model do not go together."""
    problems = []
    if tiny.family not in FAMILIES:
        problems.append(f"model.tiny.family: {tiny.family!r} is unknown; choose from {', '.join(FAMILIES)}")
    if tiny.hidden_size % tiny.heads:
        problems.append(
            f"model.tiny.heads: {tiny.heads} does not divide hidden_size {tiny.hidden_size}; choose a divisor"
        )
    elif (tiny.hidden_size // tiny.heads) % 2:
        problems.append(f"model.tiny.heads: hidden_size / heads is {tiny.hidden_size // tiny.heads}; it must be even")
    if tiny.heads % tiny.kv_heads:
        problems.append(f"model.tiny.kv_heads: {tiny.kv_heads} does not divide heads {tiny.heads}; choose a divisor")
    if not tiny.characters:
        problems.append("model.tiny.characters: is empty; list the characters that prompts and answers use")
    twice = sorted({c for c in tiny.characters if tiny.characters.count(c) > 1})
    if twice:
        problems.append(f"model.tiny.characters: {twice[0]!r} is there twice; list each character once")
    return problems


def max_positions(model: Any) -> int | None:
    """The most tokens that prompt and response may have together; ``None`` when the model does not say."""
    if model.path is None:
        return int(model.tiny.max_positions)
    return _number(str(model.path), POSITION_KEYS)


def vocabulary_size(path: str) -> int | None:
    """The tokens that the model at ``path`` has embeddings for; ``None`` when its config does not say."""
    return _number(path, ("vocab_size",))


def check_vocabulary(path: str) -> list[str]:
    """Say when tokenizer.json gives ids that the model has no embedding for.

    The worker that loads the tokenizer looks again, and at other kinds of tokenizers too.
    """
    size = vocabulary_size(path)
    directory = Path(path).expanduser()
    try:
        data = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
        tokens = {str(added["content"]): int(added["id"]) for added in data.get("added_tokens") or []}
        known = data.get("model", {}).get("vocab") or {}
        # A unigram model lists (token, score) pairs in the order of their ids.
        pairs = known.items() if isinstance(known, dict) else ((pair[0], place) for place, pair in enumerate(known))
        tokens.update((str(token), int(place)) for token, place in pairs)
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        return [f"model.path: {path} has a tokenizer.json that cannot be read ({type(error).__name__}: {error})"]
    highest = max(tokens, key=lambda token: tokens[token], default=None)
    if size is None or highest is None or tokens[highest] < size:
        return []
    return [vocabulary_problem(path, tokens[highest], highest, size)]


def vocabulary_problem(path: str, highest: int, token: str, size: int) -> str:
    """The message about a tokenizer whose ``highest`` id is beyond a model's ``size`` tokens."""
    return (
        f"model.path: {path} has a tokenizer with ids up to {highest} ({token!r}) and a model for {size} tokens (ids "
        f"up to {size - 1}); they do not belong together"
    )


def attention_heads(model: Any) -> tuple[int, int] | None:
    """(attention heads, key-value heads); ``None`` when the model does not say."""
    if model.path is None:
        return int(model.tiny.heads), int(model.tiny.kv_heads)
    heads = _number(str(model.path), ("num_attention_heads", "n_head"))
    if heads is None:
        return None
    return heads, _number(str(model.path), ("num_key_value_heads",)) or heads


def head_size(model: Any) -> int | None:
    """The width of one attention head; ``None`` when the model does not say, or has heads of several widths."""
    if model.path is None:
        return int(model.tiny.hidden_size) // int(model.tiny.heads)
    path = str(model.path)
    if _number(path, ("kv_lora_rank", "qk_nope_head_dim")) is not None:
        return None
    own = _number(path, ("head_dim",))
    if own is not None:
        return own
    width, heads = _number(path, ("hidden_size", "n_embd")), _number(path, ("num_attention_heads", "n_head"))
    return width // heads if width and heads else None


def check_lengths(
    model: Any, prompt_tokens: int, response_tokens: int, *, prompt_key: str, response_key: str
) -> list[str]:
    """Say when a prompt of ``prompt_tokens`` with a response of ``response_tokens`` cannot fit the model."""
    limit = max_positions(model)
    if limit is None or prompt_tokens + response_tokens <= limit:
        return []
    return [
        f"{response_key}: {prompt_key} {prompt_tokens} and {response_key} {response_tokens} are "
        f"{prompt_tokens + response_tokens} tokens together, the model takes {limit}; lower one of them"
    ]


def _number(path: str, keys: tuple[str, ...]) -> int | None:
    """The first of ``keys`` that config.json, or its part about text, has as a number."""
    config, problem = _read_config(Path(path).expanduser())
    if problem:
        return None
    text = config.get("text_config")
    for source in (config, text if isinstance(text, dict) else {}):
        for key in keys:
            if isinstance(source.get(key), int):
                return int(source[key])
    return None


def _weights_problem(directory: Path) -> str:
    """What the index and the headers of the weight files tell of a directory that is not whole; empty when nothing."""
    try:
        index = json.loads((directory / "model.safetensors.index.json").read_text(encoding="utf-8"))
        wanted = sorted(set(index["weight_map"].values()))
    except FileNotFoundError:
        wanted = []
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"has a model.safetensors.index.json that cannot be read ({error})"
    absent = [name for name in wanted if not (directory / name).is_file()]
    if absent:
        return (
            f"lacks {len(absent)} of the {len(wanted)} weight files that its index names, first {absent[0]}; "
            "copy or download them again"
        )
    for file in sorted(directory.glob("*.safetensors")):
        if problem := _cut_off(file):
            return f"has a weight file {file.name} that {problem}; copy or download it again"
    return ""


def _cut_off(file: Path) -> str:
    """Why a safetensors file cannot be whole: its header says how long it is."""
    try:
        size = file.stat().st_size
        with file.open("rb") as data:
            first = data.read(8)
            if first == b"version ":
                return "is a Git LFS pointer, not the weights themselves (git lfs pull brings them)"
            length = int.from_bytes(first, "little")
            if size < 8 + length or not length:
                return f"is cut off or damaged ({size} bytes)"
            header = json.loads(data.read(length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        return f"cannot be read ({error})"
    whole = 8 + length + max(ends, default=0)
    return "" if size == whole else f"has {size} of {whole} bytes"


def _is_causal(architecture: str) -> bool:
    return architecture.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration"))


def _read_config(directory: Path) -> tuple[dict[str, Any], str]:
    """(config.json as a dict, "") or ({}, what is wrong with it)."""
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}, "has no config.json, so it is not a model"
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        return {}, f"has a config.json that cannot be read ({error})"
    if not isinstance(config, dict):
        return {}, "has a config.json that is not an object"
    return config, ""
