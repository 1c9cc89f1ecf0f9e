"""Models and tokenizers from the ``model`` config node. Importing this module loads torch, not transformers.

The tiny model's weights are a function of the root seed alone, the same in every process and for every
number format (up to its rounding).
"""

from __future__ import annotations

import json
import shutil
import stat
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rlinf_core.errors import ConfigError
from rlinf_engines.model_check import (
    check_model_path,
    check_tiny,
    max_positions,
    vocabulary_problem,
    vocabulary_size,
)
from rlinf_engines.seeds import derive_seed

__all__ = [
    "empty_network",
    "export_model",
    "load_config",
    "load_model",
    "load_tokenizer",
    "max_positions",
    "named_weights",
    "parameter_shapes",
    "stop_ids",
    "torch_dtype",
]

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
INIT_STD = 0.02
ALIGNMENT = 64
"""Bytes, of the memory that torch allocates on a CPU."""


def torch_dtype(name: str) -> torch.dtype:
    """The torch number format called ``name`` in the config."""
    if name not in DTYPES:
        raise ConfigError(f"model.dtype: {name!r} is unknown; choose from {', '.join(DTYPES)}")
    return DTYPES[name]


def load_model(model: Any, seed: int, dtype: torch.dtype | None = None, role: str = "policy") -> Any:
    """A causal language model on the CPU, in evaluation mode, gradients off.

    ``model`` is the config node; ``seed`` the root seed (read by the tiny model and by the head of a critic);
    ``dtype`` replaces ``model.dtype``. A path that is not a whole causal language model is refused by name.

    ``role="critic"`` gives a token classifier with one output (``score``) on the same backbone, without dropout before
    it: its ``logits`` [B, T, 1] are values. The head's weights are drawn from the seed, its bias is 0.
    """
    dtype = dtype or torch_dtype(model.dtype)
    network = _tiny_model(model.tiny, seed, role) if model.path is None else _path_model(str(model.path), dtype, role)
    if role == "critic":
        _new_score(network, seed)
    # Parameters only: rotary frequencies are buffers and stay as exact as they were made.
    for parameter in network.parameters():
        parameter.data = _aligned(parameter.data.to(dtype))
        parameter.requires_grad_(False)
    network.config.dtype = dtype
    if dtype == torch.float64:
        _norms_in_float64(network)
    return network.eval()


def _aligned(weight: torch.Tensor) -> torch.Tensor:
    """``weight`` where torch would place it. In a mapped file it may lie anywhere, and that can decide in which order a
    matrix product adds: an export would not give the numbers of the model that wrote it."""
    return weight.clone() if weight.data_ptr() % ALIGNMENT else weight


def load_tokenizer(model: Any) -> Any:
    """The model's tokenizer, with a pad token. Characters outside the tiny alphabet are refused by name."""
    if model.path is None:
        _refuse(check_tiny(model.tiny))
        from rlinf_engines.tokenizer import CharTokenizer

        return CharTokenizer(model.tiny.characters, model_max_length=model.tiny.max_positions)
    path = str(Path(model.path).expanduser())
    _refuse(check_model_path(path))
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        raise ConfigError(f"model.path: {path} has a tokenizer that does not load: {error}") from error
    characters = tokenizer.init_kwargs.get("characters")
    if characters:  # an export of the tiny model
        from rlinf_engines.tokenizer import CharTokenizer

        tokenizer = CharTokenizer(characters, model_max_length=tokenizer.model_max_length)
    _check_vocabulary(path, tokenizer)
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"model.path: {path} has a tokenizer without an end token (eos_token); name one")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def stop_ids(network: Any, tokenizer: Any) -> tuple[int, ...]:
    """Tokens that end a response: the tokenizer's end token and those of the model's generation config."""
    found = {int(tokenizer.eos_token_id)}
    declared = getattr(getattr(network, "generation_config", None), "eos_token_id", None)
    if declared is not None:
        found.update(int(i) for i in (declared if isinstance(declared, (list, tuple)) else [declared]))
    return tuple(sorted(found))


def named_weights(network: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and persistent buffers under their Hugging Face names, tied ones once, detached, not copied."""
    seen: set[int] = set()
    for name, tensor in network.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor.detach()


def empty_network(config: Any, role: str = "policy") -> Any:
    """The Hugging Face network of a config without memory for its weights (on the ``meta`` device)."""
    from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

    kind = AutoModelForTokenClassification if role == "critic" else AutoModelForCausalLM
    with torch.device("meta"):
        return kind.from_config(config)


def load_config(path: str) -> Any:
    """The Hugging Face config of a model directory."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(path, local_files_only=True)


def parameter_shapes(config: Any) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """(name -> shape of each weight, tied name -> the one that stands for it) without allocating any."""
    network = empty_network(config)
    first: dict[int, str] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    aliases: dict[str, str] = {}
    for name, tensor in network.state_dict(keep_vars=True).items():
        known = first.setdefault(id(tensor), name)
        if known == name:
            shapes[name] = tuple(tensor.shape)
        else:
            aliases[name] = known
    return shapes, aliases


def export_model(
    network: Any,
    tokenizer: Any,
    path: Path,
    dtype: torch.dtype | None = None,
    state: dict[str, torch.Tensor] | None = None,
) -> None:
    """Write a Hugging Face directory (config, safetensors, tokenizer): aside first, renamed when whole.

    ``state`` stands for the network's own weights (which may then be empty); ``dtype`` is the format to write.
    """
    target = Path(path)
    aside = target.with_name(f".{target.name}.part")
    shutil.rmtree(aside, ignore_errors=True)
    own = network.config.dtype
    state = {
        name: tensor.detach().to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
        for name, tensor in (network.state_dict() if state is None else state).items()
    }
    _quiet()
    try:
        with _unwrapped():
            network.save_pretrained(aside, state_dict=state)
        tokenizer.save_pretrained(aside)
        if dtype is not None:  # the library writes down the format that it finds in memory
            config = json.loads((aside / "config.json").read_text(encoding="utf-8"))
            config["dtype"] = str(dtype).removeprefix("torch.")
            (aside / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        mode = stat.S_IMODE((aside / "config.json").stat().st_mode)
        for weights in aside.glob("*.safetensors"):
            weights.chmod(mode)  # safetensors makes files that only their owner can read, whatever the umask says
    finally:
        network.config.dtype = own
    replace_directory(aside, target)


@contextmanager
def _unwrapped() -> Iterator[None]:
    """The library looks for wrappers of DeepSpeed around a model that it saves, and imports all of that (a second, and
    a warning) where it is installed. Ours has none."""
    from transformers import modeling_utils

    unwrap = modeling_utils.unwrap_model
    modeling_utils.unwrap_model = lambda model, *_, **__: model
    try:
        yield
    finally:
        modeling_utils.unwrap_model = unwrap


def replace_directory(aside: Path, target: Path) -> None:
    """Put the whole directory ``aside`` in the place of ``target``, which is never seen half-written."""
    old = target.with_name(f".{target.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        target.rename(old)
    aside.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def _quiet() -> None:
    """No progress bars of the library for files that take no time."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def _refuse(problems: list[str]) -> None:
    if problems:
        raise ConfigError("\n".join(problems))


def _check_vocabulary(path: str, tokenizer: Any) -> None:
    """Refuse a tokenizer that gives ids which the model has no embedding for."""
    size = vocabulary_size(path)
    highest = max(tokenizer.get_vocab().values())
    if size is not None and highest >= size:
        raise ConfigError(vocabulary_problem(path, highest, tokenizer.convert_ids_to_tokens(highest), size))


def _tiny_model(tiny: Any, seed: int, role: str) -> Any:
    _refuse(check_tiny(tiny))
    config, policy, critic = _tiny_kind(tiny)
    with torch.random.fork_rng(devices=[]):  # the library draws weights that are replaced below
        network = (critic if role == "critic" else policy)(config)
    # A generator of our own: neither the library's initialisation nor other threads change the weights.
    generator = torch.Generator().manual_seed(derive_seed(seed, "model"))
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.empty(parameter.shape).normal_(0.0, INIT_STD, generator=generator))
        for module in network.modules():
            if isinstance(module, nn.Linear) and module.bias is not None:
                module.bias.zero_()
    return network


def _tiny_kind(tiny: Any) -> tuple[Any, Any, Any]:
    """(config, class of a policy, class of a critic) of the tiny model's family."""
    import transformers

    sizes = {
        "vocab_size": len(tiny.characters) + 2,
        "hidden_size": tiny.hidden_size,
        "intermediate_size": tiny.intermediate_size,
        "num_hidden_layers": tiny.layers,
        "num_attention_heads": tiny.heads,
        "num_key_value_heads": tiny.kv_heads,
        "max_position_embeddings": tiny.max_positions,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
        "attn_implementation": "sdpa",
        "classifier_dropout": 0.0,
        "num_labels": 1,
    }
    if tiny.family == "llama":
        config = transformers.LlamaConfig(**sizes, tie_word_embeddings=False)
        return config, transformers.LlamaForCausalLM, transformers.LlamaForTokenClassification
    config = transformers.Qwen2Config(**sizes, tie_word_embeddings=True)
    return config, transformers.Qwen2ForCausalLM, transformers.Qwen2ForTokenClassification


def _new_score(network: Any, seed: int) -> None:
    """Draw the head of a critic, and let nothing be dropped before it."""
    network.dropout.p = 0.0
    generator = torch.Generator().manual_seed(derive_seed(seed, "critic"))
    with torch.no_grad():
        weight = torch.empty(network.score.weight.shape).normal_(0.0, INIT_STD, generator=generator)
        network.score.weight.copy_(weight)
        if network.score.bias is not None:
            network.score.bias.zero_()


def _path_model(path: str, dtype: torch.dtype, role: str) -> Any:
    path = str(Path(path).expanduser())
    _refuse(check_model_path(path))
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoModelForTokenClassification
    from transformers.utils import logging

    _quiet()
    kind = AutoModelForTokenClassification if role == "critic" else AutoModelForCausalLM
    # Dropout is switched off below: most configs have no key for it, and would pass it on to the class, which refuses.
    extra = {"num_labels": 1} if role == "critic" else {}
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # its report of weights that are new or not used: what matters is checked below
    try:
        network, info = kind.from_pretrained(
            path,
            dtype=dtype,
            local_files_only=True,
            attn_implementation="sdpa",
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, by name
            **extra,
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        what = "critic (a token classifier)" if role == "critic" else "causal language model"
        raise ConfigError(f"model.path: {path} does not load as a {what}: {_first_line(error)}") from error
    finally:
        logging.set_verbosity(level)
    # Weights that are missing or of another size would be drawn at random without a word.
    sizes = sorted(entry for entry in info["mismatched_keys"] if role != "critic" or not entry[0].startswith("score."))
    if sizes:
        name, theirs, ours = sizes[0]
        raise ConfigError(
            f"model.path: {path} has {len(sizes)} weights of another size than its config.json says, first {name}: "
            f"{list(theirs)} in the file, {list(ours)} by the config; the two do not belong together"
        )
    missing = sorted(name for name in info["missing_keys"] if role != "critic" or not name.startswith("score."))
    if missing:
        raise ConfigError(
            f"model.path: {path} lacks {len(missing)} of the model's weights, first {missing[0]}; "
            "its files do not belong to its config.json, or are not all there"
        )
    if role == "critic" and not (hasattr(network, "score") and hasattr(network, "dropout")):
        raise ConfigError(f"model.path: {type(network).__name__} has no head `score` and cannot be a critic")
    return network


def _first_line(error: BaseException) -> str:
    """What the library says, without its advice to change its version."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _norms_in_float64(network: Any) -> None:
    """Let RMS norms compute in float64: the library's cast to float32 would amplify the last bits of a
    float64 input into float32 rounding steps, and batches of different shapes would then differ by 1e-8."""
    for module in network.modules():
        if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
            module.forward = types.MethodType(_rms_norm_float64, module)


def _rms_norm_float64(self: Any, hidden: torch.Tensor) -> torch.Tensor:
    if hidden.dtype != torch.float64:
        return type(self).forward(self, hidden)
    variance = hidden.pow(2).mean(-1, keepdim=True)
    return self.weight * (hidden * torch.rsqrt(variance + self.variance_epsilon))
