"""The tiny model and its tokenizer, directories, and what is refused by name."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import AutoTokenizer  # noqa: E402

from rlinf_core.errors import ConfigError  # noqa: E402
from rlinf_engines.models import (  # noqa: E402
    empty_network,
    export_model,
    load_config,
    load_model,
    load_tokenizer,
    named_weights,
    parameter_shapes,
    stop_ids,
)

FINGERPRINT = (
    "import hashlib, types, torch\n"
    "from rlinf_engines.models import load_model, named_weights\n"
    "torch.rand(3)\n"
    "tiny = types.SimpleNamespace(hidden_size=64, layers=2, heads=2, kv_heads=1, intermediate_size=96,"
    " family='qwen2', max_positions=64, characters='0123456789+-*= ')\n"
    "model = load_model(types.SimpleNamespace(path=None, dtype='float32', tiny=tiny), 7)\n"
    "print(hashlib.sha256(b''.join(t.numpy().tobytes() for _, t in named_weights(model))).hexdigest())\n"
)


@pytest.fixture
def directory(make_model: Any, tmp_path: Path) -> Path:
    """A Hugging Face directory of the tiny model."""
    tiny = make_model("float32")
    export_model(load_model(tiny, 0), load_tokenizer(tiny), tmp_path / "hf")
    return tmp_path / "hf"


def digest(network: Any) -> str:
    import hashlib

    return hashlib.sha256(b"".join(t.numpy().tobytes() for _, t in named_weights(network))).hexdigest()


def test_the_tiny_model_is_a_function_of_the_seed_in_every_process(make_model: Any) -> None:
    model = make_model("float32")
    here = digest(load_model(model, 7))
    torch.rand(5)
    assert digest(load_model(model, 7)) == here != digest(load_model(model, 8))
    other = subprocess.run([sys.executable, "-c", FINGERPRINT], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == here


def test_loading_leaves_the_random_numbers_of_others_in_their_place(make_model: Any) -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    load_model(make_model(), 0)
    assert torch.equal(torch.rand(4), expected)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_number_formats_differ_by_rounding_alone(make_model: Any, dtype: str) -> None:
    exact = dict(named_weights(load_model(make_model("float32"), 0)))
    for name, tensor in named_weights(load_model(make_model(dtype), 0)):
        assert str(tensor.dtype) == f"torch.{dtype}"
        assert torch.equal(tensor, exact[name].to(tensor.dtype))


def test_float64_is_float64_throughout(make_model: Any) -> None:
    network = load_model(make_model(), 0)
    ids = torch.randint(2, 17, (1, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        base = network(ids).logits
        network.model.layers[0].self_attn.v_proj.weight[0, 0] += 1e-13
        change = float((network(ids).logits - base).abs().max())
    # float32 anywhere on the way would swallow such a change, or blow it up to 1e-8.
    assert 0.0 < change < 1e-11


def test_an_unknown_format_is_refused(make_model: Any) -> None:
    with pytest.raises(ConfigError, match="model.dtype: 'float16'"):
        load_model(make_model("float16"), 0)


def test_tied_weights_come_once(make_model: Any) -> None:
    network = load_model(make_model(), 0)
    names = [name for name, _ in named_weights(network)]
    shapes, aliases = parameter_shapes(network.config)
    assert names == list(shapes)
    assert aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    assert {name: tuple(t.shape) for name, t in named_weights(network)} == shapes


@pytest.mark.parametrize("text", ["", "1+2= 3", "  = =", "0123456789+-*= ", "1" * 50])
def test_characters_round_trip_exactly(make_model: Any, text: str) -> None:
    tokenizer = load_tokenizer(make_model())
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text


def test_any_character_can_be_in_the_alphabet(make_model: Any) -> None:
    alphabet = "ab\n\té ß\u4e2d\U0001f600.\\[]^$<>"
    tokenizer = load_tokenizer(make_model(characters=alphabet))
    assert tokenizer.decode(tokenizer.encode(alphabet)) == alphabet
    assert len(tokenizer.encode(alphabet)) == len(alphabet)
    assert len(tokenizer) == len(alphabet) + 2


@pytest.mark.parametrize(("call", "text"), [("encode", "3x"), ("__call__", "3x"), ("__call__", ["1", "3x"])])
def test_a_character_outside_the_alphabet_is_refused_by_name(make_model: Any, call: str, text: Any) -> None:
    tokenizer = load_tokenizer(make_model())
    with pytest.raises(ConfigError, match=r"model.tiny.characters: 'x' \(U\+0078\) in '3x'"):
        getattr(tokenizer, call)(text)


def test_pad_and_end_tokens(make_model: Any) -> None:
    tokenizer = load_tokenizer(make_model())
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    network = load_model(make_model(), 0)
    assert stop_ids(network, tokenizer) == (1,)
    network.generation_config.eos_token_id = [1, 9]
    assert stop_ids(network, tokenizer) == (1, 9)


def test_a_directory_is_what_was_exported(make_model: Any, directory: Path) -> None:
    again = make_model("float32", path=str(directory))
    assert digest(load_model(again, 99)) == digest(load_model(make_model("float32"), 0))
    tokenizer = load_tokenizer(again)
    assert tokenizer.encode("1+2") == load_tokenizer(make_model()).encode("1+2")
    with pytest.raises(ConfigError, match="'x'"):
        tokenizer.encode("x")
    assert AutoTokenizer.from_pretrained(directory).encode("1+2") == tokenizer.encode("1+2")
    assert load_config(str(directory)).max_position_embeddings == 64
    assert sorted(p.name for p in directory.parent.iterdir()) == ["hf"]


def test_exported_files_follow_the_umask(make_model: Any, tmp_path: Path) -> None:
    node = make_model("float32")
    before = os.umask(0o026)
    try:
        export_model(load_model(node, 0), load_tokenizer(node), tmp_path / "out")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()}
    assert modes["model.safetensors"] == 0o640 and set(modes.values()) == {0o640}, modes


def break_directory(path: Path, how: str) -> None:
    config = path / "config.json"
    if how == "absent":
        shutil.rmtree(path)
    elif how == "file":
        shutil.rmtree(path)
        path.write_text("")
    elif how == "no config":
        config.unlink()
    elif how == "bad config":
        config.write_text("{")
    elif how == "other kind":
        config.write_text(json.dumps({"architectures": ["BertForMaskedLM"], "model_type": "bert"}))
    elif how == "no weights":
        (path / "model.safetensors").unlink()
    elif how == "no tokenizer":
        for file in path.glob("*token*"):
            file.unlink()
    elif how == "cut weights":
        data = (path / "model.safetensors").read_bytes()
        (path / "model.safetensors").write_bytes(data[: len(data) // 2])
    elif how == "pointer":
        (path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    elif how == "no shard":
        index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
        (path / "model.safetensors").rename(path / "model-1.safetensors")
    elif how == "other size":
        wider = {"intermediate_size": json.loads(config.read_text())["intermediate_size"] + 2}
        config.write_text(json.dumps({**json.loads(config.read_text()), **wider}))
    elif how == "other weights":
        deeper = {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3}
        config.write_text(json.dumps({**json.loads(config.read_text()), **deeper}))
    elif how == "unknown kind":
        config.write_text(json.dumps({"architectures": ["XForCausalLM"], "model_type": "nobody"}))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("absent", "does not exist"),
        ("file", "is not a directory"),
        ("no config", "has no config.json, so it is not a model"),
        ("bad config", "config.json that cannot be read"),
        ("other kind", "holds BertForMaskedLM, not a causal language model"),
        ("no weights", "has no weights"),
        ("no tokenizer", "has no tokenizer"),
        ("cut weights", r"a weight file model.safetensors that has \d+ of \d+ bytes"),
        ("pointer", "model.safetensors that is a Git LFS pointer"),
        ("no shard", "lacks 1 of the 2 weight files that its index names, first model-2.safetensors"),
        (
            "other size",
            r"weights of another size than its config.json says, first .*mlp.* in the file, .* by the config",
        ),
        ("other weights", r"lacks \d+ of the model's weights, first model.layers.2"),
        ("unknown kind", "does not load"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")  # the library's own words before the error
def test_what_is_not_a_model_is_refused_by_name(make_model: Any, directory: Path, how: str, message: str) -> None:
    break_directory(directory, how)
    with pytest.raises(ConfigError, match=f"model.path: {directory} .*{message}"):
        load_model(make_model("float32", path=str(directory)), 0)


def test_a_tokenizer_of_another_model_is_refused_by_name(make_model: Any, directory: Path) -> None:
    load_tokenizer(make_model("float32", characters="0123456789+-*= abc")).save_pretrained(directory)
    message = r"tokenizer with ids up to 19 \('c'\) and a model for 17 tokens \(ids up to 16\)"
    with pytest.raises(ConfigError, match=message):
        load_tokenizer(make_model("float32", path=str(directory)))
    config = directory / "config.json"
    content = json.loads(config.read_text())
    # Embeddings to spare are usual, and a model of several kinds of input says the size further down.
    for whole in ({**content, "vocab_size": 20}, {"text_config": {"vocab_size": 20}}, {}):
        config.write_text(json.dumps({**whole, "model_type": "qwen2"}))
        assert len(load_tokenizer(make_model("float32", path=str(directory)))) == 20


def test_the_families_differ_and_an_unknown_one_is_refused(make_model: Any) -> None:
    llama = load_model(make_model(family="llama"), 0)
    assert type(llama).__name__ == "LlamaForCausalLM"
    assert "lm_head.weight" in dict(named_weights(llama))  # not tied, unlike qwen2's
    assert type(load_model(make_model(), 0)).__name__ == "Qwen2ForCausalLM"
    with pytest.raises(ConfigError, match="model.tiny.family: 'gpt' is unknown; choose from qwen2, llama"):
        load_model(make_model(family="gpt"), 0)


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_a_critic_has_the_policy_s_backbone_and_a_head_of_its_own(make_model: Any, family: str) -> None:
    policy = dict(named_weights(load_model(make_model(family=family), 3)))
    critic = load_model(make_model(family=family), 3, role="critic")
    values = dict(named_weights(critic))
    assert set(values) - set(policy) == {"score.weight", "score.bias"}
    assert all(torch.equal(values[name], policy[name]) for name in values if name in policy)
    assert values["score.weight"].shape == (1, 64) and 0.0 < float(values["score.weight"].abs().max()) < 0.2
    assert not values["score.bias"].any()
    ids = torch.randint(2, 17, (2, 9), generator=torch.Generator().manual_seed(0))
    critic.train()
    with torch.no_grad():
        assert critic(ids).logits.shape == (2, 9, 1)
        assert torch.equal(critic(ids).logits, critic(ids).logits)  # nothing is dropped
    other = dict(named_weights(load_model(make_model(family=family), 4, role="critic")))
    assert not torch.equal(values["score.weight"], other["score.weight"])


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_a_directory_becomes_a_critic(make_model: Any, family: str, tmp_path: Path) -> None:
    tiny = make_model("float32", family=family)
    export_model(load_model(tiny, 0), load_tokenizer(tiny), tmp_path / "hf")
    config = tmp_path / "hf" / "config.json"
    keys = json.loads(config.read_text())
    del keys["classifier_dropout"]  # as in the directories that others have made
    config.write_text(json.dumps(keys))
    one, two = (load_model(make_model("float32", path=str(tmp_path / "hf")), 3, role="critic") for _ in range(2))
    assert digest(one) == digest(two)
    expected = dict(named_weights(load_model(tiny, 3, role="critic")))["score.weight"]
    assert torch.equal(one.score.weight, expected)
    assert torch.equal(one.model.embed_tokens.weight, load_model(tiny, 0).model.embed_tokens.weight)
    assert one.config.num_labels == 1 and one.dropout.p == 0.0


def test_a_critic_of_half_a_model_is_refused(make_model: Any, directory: Path) -> None:
    break_directory(directory, "other weights")
    with pytest.raises(ConfigError, match=r"lacks \d+ of the model's weights, first model.layers.2"):
        load_model(make_model("float32", path=str(directory)), 0, role="critic")


def test_an_export_takes_weights_from_elsewhere(make_model: Any, tmp_path: Path) -> None:
    network = load_model(make_model("float32", family="llama"), 0)
    state = {name: tensor + 1.0 for name, tensor in named_weights(network)}
    hollow = empty_network(network.config)
    assert all(parameter.is_meta for parameter in hollow.parameters())
    export_model(hollow, load_tokenizer(make_model()), tmp_path / "hf", torch.float32, state)
    again = dict(named_weights(load_model(make_model("float32", path=str(tmp_path / "hf")), 0)))
    assert again.keys() == state.keys()
    assert all(torch.equal(again[name], state[name]) for name in state)


def test_a_broken_tokenizer_is_refused_by_name(make_model: Any, directory: Path) -> None:
    (directory / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="model.path: .* has a tokenizer that does not load"):
        load_tokenizer(make_model("float32", path=str(directory)))
