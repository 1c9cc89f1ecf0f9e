"""The decoding loop: the same responses in any batch, log-probs that a trainer agrees with, faults by name."""

from __future__ import annotations

import dataclasses
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from rlinf_core.errors import ConfigError, NonFiniteError, RLinfError  # noqa: E402
from rlinf_core.types import (  # noqa: E402
    Generated,
    GenerateRequest,
    ParallelInfo,
    Rollout,
    SamplingParams,
)
from rlinf_engines.models import export_model, load_model, load_tokenizer, named_weights  # noqa: E402
from rlinf_engines.rollouts.transformers_rollout import TransformersRollout  # noqa: E402

SAMPLING = SamplingParams(max_new_tokens=8, temperature=0.8, seed=11)


@pytest.fixture
def make_rollout(make_model: Any) -> Any:
    def make(max_num_seqs: int = 64, seed: int = 0, **keys: Any) -> TransformersRollout:
        rollout = TransformersRollout(SimpleNamespace(max_num_seqs=max_num_seqs))
        rollout.setup(make_model(**keys), ParallelInfo(), seed=seed)
        return rollout

    return make


def requests(prompts: int = 12, group: int = 4, greedy: bool = False) -> list[GenerateRequest]:
    """Groups of equal prompts of 1 to 20 tokens."""
    rng = random.Random(0)
    found = []
    for p in range(prompts):
        ids = tuple(rng.randrange(2, 17) for _ in range(rng.randint(1, 20)))
        found += [GenerateRequest(f"p{p}/{i}", ids, (0, f"p{p}", i), greedy) for i in range(group)]
    return found


def by_id(responses: Any) -> dict[str, Generated]:
    found = {r.id: r for r in responses}
    return dict(sorted(found.items()))


def tokens(responses: Any) -> dict[str, list[int]]:
    return {name: r.token_ids for name, r in by_id(responses).items()}


def test_it_is_a_rollout(make_rollout: Any) -> None:
    assert isinstance(make_rollout(), Rollout)


def test_closed_it_draws_nothing(make_rollout: Any) -> None:
    rollout = make_rollout()
    rollout.close()
    rollout.close()
    TransformersRollout(SimpleNamespace(max_num_seqs=1)).close()
    with pytest.raises(RLinfError, match="closed, or was never set up"):
        list(rollout.generate(requests(1), SAMPLING))


def test_every_request_is_answered_once(make_rollout: Any) -> None:
    asked = requests()
    got = list(make_rollout().generate(asked, SAMPLING))
    assert sorted(r.id for r in got) == sorted(r.id for r in asked)
    for r in got:
        assert 1 <= len(r.token_ids) <= 8
        assert len(r.token_ids) == len(r.logprobs) == len(r.versions)
        ended = r.token_ids[-1] == 1
        assert r.finish_reason == ("stop" if ended else "length")
        assert ended or len(r.token_ids) == 8
        assert 1 not in r.token_ids[:-1]
    assert {r.finish_reason for r in got} == {"stop", "length"}
    assert list(make_rollout().generate([], SAMPLING)) == []


def test_responses_do_not_depend_on_batch_order_or_waves(make_rollout: Any) -> None:
    asked = requests()
    whole = make_rollout()
    expected = by_id(whole.generate(asked, SAMPLING))
    shuffled = random.Random(1).sample(asked, len(asked))
    halves = [*whole.generate(shuffled[:17], SAMPLING), *whole.generate(shuffled[17:], SAMPLING)]
    single = [r for request in asked[:6] for r in whole.generate([request], SAMPLING)]
    waves = make_rollout(max_num_seqs=5).generate(shuffled, SAMPLING)
    for other in (by_id(halves), by_id(waves)):
        assert {n: r.token_ids for n, r in other.items()} == {n: r.token_ids for n, r in expected.items()}
        for name, response in other.items():
            assert response.logprobs == pytest.approx(expected[name].logprobs, abs=1e-9)
    for response in single:
        assert response.token_ids == expected[response.id].token_ids


def test_seed_and_key_change_responses(make_rollout: Any) -> None:
    rollout, asked = make_rollout(), requests()
    first = tokens(rollout.generate(asked, SAMPLING))
    assert tokens(rollout.generate(asked, SAMPLING)) == first
    other_seed = tokens(rollout.generate(asked, SamplingParams(8, temperature=0.8, seed=12)))
    other_step = [GenerateRequest(r.id, r.prompt_ids, (1, *r.key[1:])) for r in asked]
    assert first != other_seed != tokens(rollout.generate(other_step, SAMPLING)) != first
    # The samples of one prompt differ from each other.
    assert len({tuple(first[f"p0/{i}"]) for i in range(4)}) > 1


def test_log_probs_agree_with_a_forward_over_the_whole_sequence(make_rollout: Any) -> None:
    rollout, asked = make_rollout(), requests()
    for r in rollout.generate(asked, SAMPLING):
        prompt = next(q.prompt_ids for q in asked if q.id == r.id)
        logits = rollout.model(torch.tensor([[*prompt, *r.token_ids]])).logits[0, len(prompt) - 1 : -1]
        expected = (logits / 0.8).log_softmax(-1).gather(-1, torch.tensor(r.token_ids).unsqueeze(-1))
        assert r.logprobs == pytest.approx(expected.squeeze(-1).tolist(), abs=1e-9)


def test_greedy_takes_the_most_likely_token_and_mixes_with_sampling(make_rollout: Any) -> None:
    rollout, asked = make_rollout(), requests()
    mixed = [GenerateRequest(r.id, r.prompt_ids, r.key, greedy=r.id.endswith("/0")) for r in asked]
    got, sampled = by_id(rollout.generate(mixed, SAMPLING)), tokens(rollout.generate(asked, SAMPLING))
    for request in mixed:
        response = got[request.id]
        if not request.greedy:
            assert response.token_ids == sampled[request.id]
            continue
        ids, logprobs = list(request.prompt_ids), []
        for _ in range(8):
            logits = rollout.model(torch.tensor([ids])).logits[0, -1]
            ids.append(int(logits.argmax()))
            logprobs.append(float(logits.log_softmax(-1)[ids[-1]]))
            if ids[-1] == 1:
                break
        assert response.token_ids == ids[len(request.prompt_ids) :]
        assert response.logprobs == pytest.approx(logprobs, abs=1e-9)


def test_other_stop_tokens_end_a_response(make_rollout: Any) -> None:
    sampling = SamplingParams(8, stop_token_ids=(5, 6))
    got = list(make_rollout().generate(requests(), sampling))
    assert {r.token_ids[-1] for r in got if r.finish_reason == "stop"} == {1, 5, 6}
    assert all(not {1, 5, 6} & set(r.token_ids[:-1]) for r in got)


def test_finished_responses_leave_before_the_others(make_rollout: Any) -> None:
    rollout = make_rollout()
    calls: list[int] = []
    forward = rollout._forward
    rollout._forward = lambda ids, *rest: (calls.append(len(ids)), forward(ids, *rest))[1]
    stream = rollout.generate(requests(), SAMPLING)
    first = next(stream)
    assert first.finish_reason == "stop" and len(calls) == len(first.token_ids)
    rest = list(stream)
    assert [len(r.token_ids) for r in [first, *rest]] == sorted(len(r.token_ids) for r in [first, *rest])
    assert calls[0] == 12, "equal prompts are prefilled once"
    assert calls[1] == 48 and min(calls[1:]) < 48, "finished rows leave the batch"


def test_new_weights_give_what_a_fresh_model_gives(make_rollout: Any) -> None:
    old, new, asked = make_rollout(), make_rollout(seed=5), requests()
    expected = by_id(new.generate(asked, SAMPLING))
    old.load_weights(3, named_weights(new.model))
    got = by_id(old.generate(asked, SAMPLING))
    assert old.version == 3
    assert {n: r.token_ids for n, r in got.items()} == {n: r.token_ids for n, r in expected.items()}
    assert all(set(r.versions) == {3} for r in got.values())


def test_each_token_records_its_version(make_rollout: Any) -> None:
    rollout, other = make_rollout(), make_rollout(seed=5)
    stream = rollout.generate(requests(), SAMPLING)
    first = next(stream)
    rollout.load_weights(1, named_weights(other.model))
    drawn = len(first.token_ids)
    assert set(first.versions) == {0}
    late = [r for r in stream if len(r.token_ids) > drawn]
    assert late
    for r in late:
        assert r.versions == [0] * drawn + [1] * (len(r.token_ids) - drawn)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w[1:], "1 are missing, first model.embed_tokens.weight"),
        (lambda w: [*w, ("model.extra", w[0][1])], "has no parameter 'model.extra'"),
        (lambda w: [(w[0][0], w[0][1][:2]), *w[1:]], r"embed_tokens.weight has shape \(2, 64\)"),
    ],
)
def test_weights_that_do_not_fit_are_refused_and_nothing_is_drawn_from_them(
    make_rollout: Any, change: Any, message: str
) -> None:
    rollout = make_rollout()
    weights = [(n, t.clone()) for n, t in named_weights(rollout.model)]
    with pytest.raises(RLinfError, match=message):
        rollout.load_weights(2, change(weights))
    assert rollout.version == 0
    with pytest.raises(RLinfError, match="version 2 was only partly installed"):
        list(rollout.generate(requests(1), SAMPLING))
    rollout.load_weights(3, weights)
    assert list(rollout.generate(requests(1), SAMPLING))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (GenerateRequest("a", (), (0,)), "'a' has an empty prompt"),
        (GenerateRequest("a", (17,), (0,)), "'a' has a token outside the vocabulary of 17"),
        (GenerateRequest("a", (-1,), (0,)), "outside the vocabulary"),
        (GenerateRequest("a", (2,) * 57, (0,)), "65 together; the model takes 64"),
        (GenerateRequest("p0/0", (2,), (0,)), "'p0/0' is there twice"),
    ],
)
def test_bad_requests_are_refused_by_name_before_anything_is_drawn(
    make_rollout: Any, bad: GenerateRequest, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_rollout().generate([*requests(1), bad], SAMPLING)


def test_non_finite_log_probs_are_named(make_rollout: Any) -> None:
    rollout = make_rollout()
    with torch.no_grad():
        rollout.model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(NonFiniteError, match=r"request 'p\d+/0' at position 0 is not finite"):
        list(rollout.generate(requests(2, 1), SAMPLING))


def test_a_directory_gives_the_same_responses(make_rollout: Any, make_model: Any, tmp_path: Path) -> None:
    tiny = make_model("float32")
    export_model(load_model(tiny, 0), load_tokenizer(tiny), tmp_path / "hf")
    asked = requests()
    expected = tokens(make_rollout(dtype="float32").generate(asked, SAMPLING))
    assert tokens(make_rollout(dtype="float32", path=str(tmp_path / "hf")).generate(asked, SAMPLING)) == expected


def inner(tensor: torch.Tensor) -> torch.Tensor:
    """What surely lies on whole pages of the tensor's own memory."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())[4096:-4096]


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's memory calls")
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_switches_between_any_two_responses_change_nothing(make_rollout: Any, dtype: str) -> None:
    plain, rollout = make_rollout(dtype=dtype), make_rollout(dtype=dtype)
    asked = requests(24)  # caches of many pages
    expected = list(plain.generate(asked, SAMPLING))
    got, largest = [], 0
    for response in rollout.generate(asked, SAMPLING):
        got.append(response)
        largest = max(
            [largest, *(layer.keys.untyped_storage().nbytes() for cache in rollout._caches for layer in cache.layers)]
        )
        rollout.offload()
        # Caches too: between two responses, nothing of a running generation stays on the device.
        assert not any(inner(layer.keys).any() for cache in rollout._caches for layer in cache.layers)
        rollout.onload()
    assert got == expected
    assert largest > 10 * 4096
    assert not rollout._caches


def test_use_while_offloaded_is_refused_and_changes_nothing(make_rollout: Any) -> None:
    rollout, asked = make_rollout(), requests()
    whole = tokens(rollout.generate(asked, SAMPLING))
    weights = [(n, t.clone()) for n, t in named_weights(rollout.model)]
    stream = rollout.generate(asked, SAMPLING)
    next(stream)
    rollout.offload()
    with pytest.raises(RLinfError, match="rollout: generate while offloaded"):
        list(stream)
    with pytest.raises(RLinfError, match="rollout: generate while offloaded"):
        list(rollout.generate(asked, SAMPLING))
    with pytest.raises(RLinfError, match="rollout: load_weights of version 1 while offloaded"):
        rollout.load_weights(1, weights)
    rollout.onload()
    assert rollout.version == 0
    assert tokens(rollout.generate(asked, SAMPLING)) == whole


def test_stop_texts_end_responses_after_the_token_that_completes_them(make_rollout: Any) -> None:
    rollout, asked = make_rollout(), requests()
    sampling = SamplingParams(max_new_tokens=30, temperature=0.8, seed=11)
    free = by_id(rollout.generate(asked, sampling))
    longest = max(free.values(), key=lambda r: len(r.token_ids))
    text = rollout.tokenizer.decode(longest.token_ids[3:5])
    cut = by_id(rollout.generate(asked, dataclasses.replace(sampling, stop=("never seen", text))))
    shortened = 0
    for name, response in cut.items():
        whole = free[name]
        ends = [n for n in range(1, len(whole.token_ids) + 1) if text in rollout.tokenizer.decode(whole.token_ids[:n])]
        assert response.token_ids == whole.token_ids[: min([*ends, len(whole.token_ids)])]
        assert response.logprobs == pytest.approx(whole.logprobs[: len(response.token_ids)], abs=1e-9)
        shortened += len(response.token_ids) < len(whole.token_ids)
        assert response.finish_reason == ("stop" if ends else whole.finish_reason)
    assert shortened
    endless = by_id(rollout.generate(asked, dataclasses.replace(sampling, ignore_eos=True)))
    assert {(len(r.token_ids), r.finish_reason) for r in endless.values()} == {(30, "length")}
    for name, whole in free.items():
        assert endless[name].token_ids[: len(whole.token_ids)] == whole.token_ids
    with pytest.raises(ConfigError, match="sampling.stop: '' is not a text"):
        rollout.generate(asked, dataclasses.replace(sampling, stop=("",)))


def test_switching_before_setup_is_harmless() -> None:
    TransformersRollout(SimpleNamespace()).offload()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_offload_frees_the_gpu(make_model: Any) -> None:
    rollout = TransformersRollout(SimpleNamespace(max_num_seqs=64))
    rollout.setup(make_model("float32"), ParallelInfo(device="cuda"), seed=0)
    expected = tokens(rollout.generate(requests(2), SAMPLING))
    loaded = torch.cuda.memory_allocated()
    rollout.offload()
    assert loaded - torch.cuda.memory_allocated() >= sum(p.nbytes for p in rollout.model.parameters())
    rollout.onload()
    assert tokens(rollout.generate(requests(2), SAMPLING)) == expected
