"""Micro-batches whose prompts are computed once, against the same ones as they are."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from trainer_cases import Row, collate, make_rows, model_config  # noqa: E402

from rlinf_engines.models import load_model  # noqa: E402
from rlinf_engines.trainers import attention, plans  # noqa: E402
from rlinf_engines.trainers.attention import packed_attention, packed_inputs  # noqa: E402
from rlinf_engines.trainers.plans import make_plan, make_trees  # noqa: E402
from rlinf_engines.trainers.sharing import can_share, share_prompts  # noqa: E402


def rows_of(*texts: str) -> list[Row]:
    """Rows written as ``prompt>response``, a character a token."""
    rows = []
    for i, text in enumerate(texts):
        prompt, response = ([ord(c) - ord("a") for c in part] for part in text.split(">"))
        rows.append(Row(f"p{i}", prompt, response, [0.0] * len(response), 1.0, [0.0] * len(response)))
    return rows


def text_of(ids: Any) -> str:
    return "".join(chr(ord("a") + int(i)) for i in ids)


def sequences(batch: dict[str, Any]) -> list[str]:
    """The sequences of a shared batch, laid out again."""
    whole = batch["input_ids"][batch["shared"]]
    return [text_of(whole[a:b]) for a, b in pairwise(batch["cu_seqlens"].tolist())]


def test_prompts_once_and_ends_left_out() -> None:
    rows = rows_of("abc>de", "abc>fgh", "xy>z", "abc>d")
    batch = share_prompts(collate(rows))
    assert text_of(batch["input_ids"]) == "abcd" + "fg" + "xy"
    assert batch["position_ids"].tolist() == [0, 1, 2, 3, 3, 4, 0, 1]
    assert sequences(batch) == ["abcd", "abcfg", "xy", "abc"]
    assert batch["max_len"] == 5
    assert text_of(batch["input_ids"][batch["predict"]]) == "cd" + "cfg" + "y" + "c"
    assert batch["predict"].tolist() == [2, 3, 2, 4, 5, 7, 2]
    whole = collate(rows)
    assert all(torch.equal(batch[name], whole[name]) for name in ("targets", "mask", "segments", "advantages"))


def test_what_leaves_out_too_little_is_left_alone() -> None:
    batch = collate(rows_of("abcdefghijkl>mnopqrstu", "bcdefghijkl>mnopqrstu"))
    assert share_prompts(batch) is batch
    assert share_prompts(batch, worth=1.0)["input_ids"].shape == (39,)


def test_a_prompt_that_begins_as_another_is_not_the_same() -> None:
    batch = share_prompts(collate(rows_of("ab>cd", "abc>d", "ab>e")))
    assert text_of(batch["input_ids"]) == "abc" + "abc"
    assert sequences(batch) == ["abc", "abc", "ab"]


def test_sequences_of_which_nothing_is_predicted_and_the_place_after_the_last_token() -> None:
    batch = collate(rows_of("ab>cd", "ab>cd", "ab>e"))
    keep = batch["segments"] != 2
    for name in ("predict", "targets", "segments"):
        batch[name] = batch[name][keep]
    batch["predict"] = torch.cat([batch["predict"], torch.tensor([10])])  # after "e"
    batch["segments"] = torch.cat([batch["segments"], torch.tensor([3])])
    shared = share_prompts(batch, worth=2.0)
    assert sequences(shared) == ["abc", "abcd", "abe"]
    assert text_of(shared["input_ids"][shared["predict"]]) == "bcbe"


@pytest.mark.parametrize("tree", [0, 1000])
@pytest.mark.parametrize("cost", [0, 4096])
@pytest.mark.parametrize("window", [None, 3])
def test_attention_over_shared_tokens(
    cost: int, window: int | None, tree: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "BUCKET_COST", cost)
    monkeypatch.setattr(plans, "LARGEST_TREE", tree)
    batch = share_prompts(collate(make_rows(14)), worth=1.0)
    shared, cu, longest = batch["shared"], batch["cu_seqlens"], batch["max_len"]
    count = len(batch["input_ids"])
    assert len(shared) == int(cu[-1]) > count
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(count, n, 8, dtype=torch.float64, generator=generator) for n in (4, 2, 2)]
    factor = torch.randn(count, 4, 8, dtype=torch.float64, generator=generator)
    own = [x.clone().requires_grad_() for x in tensors]
    found = packed_attention(*own, cu, longest, sliding_window=window, shared=shared)
    (found * factor).sum().backward()
    laid = [x.clone().requires_grad_() for x in tensors]
    whole = packed_attention(*(x[shared] for x in laid), cu.clone(), longest, sliding_window=window)
    first = [shared.tolist().index(token) for token in range(count)]
    (whole[first] * factor).sum().backward()
    torch.testing.assert_close(found, whole[first], rtol=0.0, atol=1e-12)
    for a, b in zip(own, laid, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=0.0, atol=1e-12)


def test_a_tree_is_a_prompt_with_its_responses() -> None:
    batch = share_prompts(collate(rows_of("ab>cd", "ab>ef", "x>y")))
    trees = make_trees(batch["cu_seqlens"], batch["shared"])
    assert trees is not None and trees.buckets == [(2, 4)]
    assert text_of(batch["input_ids"][trees.places]) == "abce" + "xxxx"
    assert trees.slots.tolist() == [0, 1, 2, 3, 4]
    sees = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 1]]  # "e" does not see "c"
    assert trees.mask[0, 0].int().tolist() == sees and torch.equal(trees.mask[1, 0], torch.eye(4, dtype=torch.bool))
    assert plans.trees_of(batch["cu_seqlens"], batch["shared"]) is plans.trees_of(batch["cu_seqlens"], batch["shared"])
    long = share_prompts(collate(rows_of("ab>cd" + "e" * 60, "ab>cd" + "f" * 60)), worth=1.0)
    assert make_trees(long["cu_seqlens"], long["shared"]) is None


def test_a_plan_refuses_shared_tokens_of_other_sequences() -> None:
    with pytest.raises(ValueError, match="3 shared tokens for sequences of 5"):
        make_plan(torch.tensor([0, 2, 5], dtype=torch.int32), torch.tensor([0, 1, 0]))


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize(("checkpointing", "tree"), [(False, 0), (True, 0), (False, 64), (True, 64)])
def test_outputs_and_gradients_are_those_of_the_whole_batch(
    family: str, checkpointing: bool, tree: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "LARGEST_TREE", tree)
    batch = collate(make_rows(20))
    shared = share_prompts(batch)
    assert len(shared["input_ids"]) < 0.8 * len(batch["input_ids"])
    found = []
    for given in (batch, shared):
        network = load_model(model_config(family, "float64"), 0, torch.float64).requires_grad_(True).train()
        attention.use_packed_attention(network)
        if checkpointing:
            network.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        logits = network(**packed_inputs(given)).logits[0, given["predict"]]
        logprobs = logits.log_softmax(-1).gather(1, batch["targets"][:, None])
        (logprobs[:, 0] * batch["advantages"]).sum().backward()
        found.append((logprobs.detach(), [p.grad for p in network.parameters()]))
    (plain, plain_grads), (once, once_grads) = found
    torch.testing.assert_close(once, plain, rtol=0.0, atol=1e-12)
    for a, b in zip(once_grads, plain_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=0.0, atol=1e-11)


def test_only_networks_that_give_the_same_share() -> None:
    network = load_model(model_config("llama"), 0, torch.float32)
    attention.use_packed_attention(network)
    assert can_share(network)
    network.model.layers[0].mlp.register_forward_hook(lambda module, args, out: out + out.roll(1, dims=1))
    assert not can_share(network)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_flash_kernels_share_as_buckets_do() -> None:
    batch = share_prompts(collate(make_rows(14)), worth=1.0)
    count, longest = len(batch["input_ids"]), batch["max_len"]
    generator = torch.Generator().manual_seed(0)
    exact = [torch.randn(count, n, 64, generator=generator) for n in (4, 2, 2)]
    low = [x.to("cuda", torch.bfloat16).requires_grad_() for x in exact]
    expected = packed_attention(*exact, batch["cu_seqlens"], longest, shared=batch["shared"])
    cu, shared = batch["cu_seqlens"].cuda(), batch["shared"].cuda()
    found = packed_attention(*low, cu, longest, shared=shared)
    assert float((found.float().cpu() - expected).abs().max()) < 0.05
    found.float().sum().backward()
    assert all(bool(x.grad.isfinite().all()) for x in low)
