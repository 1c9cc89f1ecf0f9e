"""What the vLLM test looks at, run as a script in a process of its own: ``vllm_session.py OUT``.

vLLM changes its process (environment, threads, compiler switches), so the test process does not load it.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from rlinf_core.errors import RLinfError
from rlinf_core.types import GenerateRequest, ParallelInfo, Rollout, SamplingParams
from rlinf_engines.models import load_model, named_weights
from rlinf_engines.rollouts.vllm_rollout import VllmRollout

TINY = SimpleNamespace(
    family="qwen2",
    hidden_size=64,
    layers=2,
    heads=2,
    kv_heads=1,
    intermediate_size=96,
    max_positions=64,
    characters="0123456789+-*= ",
)
MODEL = SimpleNamespace(path=None, dtype="float32", tiny=TINY)
ROLLOUT = SimpleNamespace(
    max_num_seqs=64,
    max_num_batched_tokens=1024,
    max_model_len=None,
    enforce_eager=True,
    enable_prefix_caching=True,
    kv_cache_gb=1,
    gpu_memory_utilization=0.5,
    gpu_sleep=True,
    tensor_parallel_size=1,
    engine_process=False,
    max_restarts=2,
    stall_timeout_s=60.0,
)
TEMPERATURE = 0.7
SAMPLING = SamplingParams(max_new_tokens=8, temperature=TEMPERATURE, seed=3)


def requests(step: int = 0) -> list[GenerateRequest]:
    generator = torch.Generator().manual_seed(0)
    prompts = [tuple(torch.randint(2, 17, (4 + i,), generator=generator).tolist()) for i in range(8)]
    return [
        GenerateRequest(f"p{p}/{i}", ids, (step, f"p{p}", i), greedy=i == 3)
        for p, ids in enumerate(prompts)
        for i in range(4)
    ]


def worst_difference(responses: list[Any], asked: list[GenerateRequest], network: Any) -> float:
    """The largest difference between the engine's log-probs and those of a Hugging Face forward."""
    by_id, worst = {r.id: r for r in asked}, 0.0
    for response in responses:
        request = by_id[response.id]
        ids = torch.tensor([[*request.prompt_ids, *response.token_ids]])
        logits = network(ids).logits[0, len(request.prompt_ids) - 1 : -1]
        logps = (logits / (1.0 if request.greedy else TEMPERATURE)).log_softmax(-1)
        if request.greedy and not torch.equal(logits.argmax(-1), ids[0, len(request.prompt_ids) :]):
            return float("inf")
        expected = logps.gather(-1, torch.tensor(response.token_ids).unsqueeze(-1)).squeeze(-1)
        worst = max(worst, float((expected - torch.tensor(response.logprobs)).abs().max()))
    return worst


def refused(call: Callable[[], Any]) -> str:
    try:
        call()
    except RLinfError as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def switches(rollout: VllmRollout, asked: list[GenerateRequest], network: Any) -> dict[str, Any]:
    """Offload and load between responses; what the cache's pages and the weights hold meanwhile."""
    found: dict[str, Any] = {}
    from rlinf_engines.rollouts.vllm_worker import cache_tensors, weight_tensors

    engine: Any = rollout.engine
    weights = engine.tensors(weight_tensors)
    (cache, *_) = engine.tensors(cache_tensors)
    before = [tensor.clone() for tensor in weights]
    responses = []
    for response in rollout.generate(asked, SAMPLING):
        responses.append(response)
        rollout.offload()
        if len(responses) == 3:
            storage = torch.empty(0, dtype=torch.uint8).set_(cache.untyped_storage())
            found["cache_left"] = int(storage[4096:-4096].count_nonzero())
        rollout.onload()
    found["switched_ids"] = sorted(r.id for r in responses)
    found["switched_difference"] = worst_difference(responses, asked, network)
    found["weights_kept"] = all(torch.equal(a, b) for a, b in zip(weights, before, strict=True))
    stream = rollout.generate(asked, SAMPLING)
    next(stream)
    rollout.offload()
    found["next_offloaded"] = refused(lambda: list(stream))
    stream.close()
    found["generate_offloaded"] = refused(lambda: list(rollout.generate(asked, SAMPLING)))
    found["load_offloaded"] = refused(lambda: rollout.load_weights(9, []))
    rollout.onload()
    found["after_switches"] = {r.id: r.token_ids for r in rollout.generate(asked, SAMPLING)} == {
        r.id: r.token_ids for r in responses
    }
    return found


def weights_while_running(rollout: VllmRollout, asked: list[GenerateRequest], network: Any) -> dict[str, Any]:
    """New weights between two responses: each token's log-prob is that of the version that drew it."""
    before, after = copy.deepcopy(network), network
    with torch.no_grad():
        generator = torch.Generator().manual_seed(2)
        for parameter in after.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    responses = []
    for response in rollout.generate(asked, SAMPLING):
        responses.append(response)
        if len(responses) == 1:
            rollout.load_weights(6, named_weights(after))
    by_id, worst = {r.id: r for r in asked}, 0.0
    for response in responses:
        request = by_id[response.id]
        ids = torch.tensor([[*request.prompt_ids, *response.token_ids]])
        for version, model in ((4, before), (6, after)):
            logits = model(ids).logits[0, len(request.prompt_ids) - 1 : -1]
            logps = (logits / (1.0 if request.greedy else TEMPERATURE)).log_softmax(-1)
            expected = logps.gather(-1, torch.tensor(response.token_ids).unsqueeze(-1)).squeeze(-1)
            drawn = torch.tensor(response.versions) == version
            worst = max([worst, *(expected - torch.tensor(response.logprobs))[drawn].abs().tolist()])
    return {
        "running_difference": worst,
        "running_versions": sorted({tuple(sorted(set(r.versions))) for r in responses}),
        "running_ids": sorted(r.id for r in responses),
    }


def up_to(text: str, tokens: list[int], tokenizer: Any) -> list[int]:
    """The tokens up to the one that completes ``text``."""
    for end in range(1, len(tokens) + 1):
        if text in tokenizer.decode(tokens[:end]):
            return tokens[:end]
    return tokens


def stop_texts(rollout: VllmRollout, asked: list[GenerateRequest]) -> dict[str, Any]:
    """Responses that end at a text of two characters, beside the same ones that do not."""
    sampling = SamplingParams(max_new_tokens=40, temperature=TEMPERATURE, seed=3)
    free = {r.id: r for r in rollout.generate(asked, sampling)}
    text = rollout.tokenizer.decode(max(free.values(), key=lambda r: len(r.token_ids)).token_ids)[4:6]
    cut = {r.id: r for r in rollout.generate(asked, dataclasses.replace(sampling, stop=(text,)))}
    endless = rollout.generate(asked, dataclasses.replace(sampling, ignore_eos=True))
    expected = {name: up_to(text, response.token_ids, rollout.tokenizer) for name, response in free.items()}
    return {
        "stop_same": {name: r.token_ids for name, r in cut.items()} == expected,
        "stop_number": sum(len(r.token_ids) < len(free[name].token_ids) for name, r in cut.items()),
        "stop_reasons": sorted({r.finish_reason for n, r in cut.items() if len(r.token_ids) < len(free[n].token_ids)}),
        "endless": sorted({(len(r.token_ids), r.finish_reason) for r in endless}),
        "stop_lengths": all(len(r.logprobs) == len(r.token_ids) == len(r.versions) for r in cut.values()),
    }


def shared_prompts(rollout: VllmRollout) -> dict[str, Any]:
    """A group of eight with a prompt of 40 tokens, one block of which can be shared."""
    engine: Any = rollout.engine
    before = engine.prompt_tokens, engine.shared_tokens
    prompt = tuple(2 + i % 15 for i in range(40))
    list(rollout.generate([GenerateRequest(f"g/{i}", prompt, (9, "g", i)) for i in range(8)], SAMPLING))
    return {"prefix": [engine.prompt_tokens - before[0], engine.shared_tokens - before[1]]}


def long_and_short(rollout: VllmRollout) -> dict[str, Any]:
    """One response far longer than the others, which all together are more than are decoded at once."""
    sampling = SamplingParams(max_new_tokens=55, temperature=TEMPERATURE, seed=3)
    asked = [GenerateRequest(f"a{i}", (2 + i % 15, 3), (5, f"a{i}", 0)) for i in range(200)]
    order = list(rollout.generate(asked, sampling))
    longest = max(order, key=lambda r: len(r.token_ids))
    return {
        "long_tokens": len(longest.token_ids),
        "before_long": order.index(longest),
        "first_tokens": len(order[0].token_ids),
    }


def main(out: Path) -> None:
    found: dict[str, Any] = {}
    rollout = VllmRollout(ROLLOUT)
    rollout.setup(MODEL, ParallelInfo(), seed=0)
    found["is_rollout"] = isinstance(rollout, Rollout)
    network, asked = load_model(MODEL, 0), requests()

    first = list(rollout.generate(asked, SAMPLING))
    found["ids"] = sorted(r.id for r in first)
    found["asked"] = sorted(r.id for r in asked)
    found["shapes"] = all(len(r.token_ids) == len(r.logprobs) == len(r.versions) <= 8 for r in first)
    found["ends"] = all((r.token_ids[-1] == 1) == (r.finish_reason == "stop") for r in first)
    found["reasons"] = sorted({r.finish_reason for r in first})
    found["difference"] = worst_difference(first, asked, network)
    again = {r.id: r.token_ids for r in rollout.generate(asked[::-1], SAMPLING)}
    found["same_again"] = again == {r.id: r.token_ids for r in first}
    found["same_next_step"] = {r.id: r.token_ids for r in rollout.generate(requests(1), SAMPLING)} == again

    with torch.no_grad():  # other weights everywhere, the tied embedding included
        generator = torch.Generator().manual_seed(1)
        for parameter in network.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    weights = list(named_weights(network))
    found["stale_difference"] = worst_difference(first, asked, network)
    rollout.load_weights(4, weights)
    second = list(rollout.generate(asked, SAMPLING))
    found["new_difference"] = worst_difference(second, asked, network)
    found["versions"] = sorted({v for r in second for v in r.versions})

    found["missing"] = refused(lambda: rollout.load_weights(5, weights[1:]))
    found["unknown"] = refused(lambda: rollout.load_weights(5, [*weights, ("model.extra", weights[0][1])]))
    found["shape"] = refused(lambda: rollout.load_weights(5, [(weights[0][0], weights[0][1][:2]), *weights[1:]]))
    # Log-probs under top-p are those of the whole distribution.
    narrow = SamplingParams(max_new_tokens=8, temperature=TEMPERATURE, top_p=0.5, seed=3)
    found["top_p_difference"] = worst_difference(list(rollout.generate(asked, narrow)), asked, network)
    found["too_long"] = refused(lambda: rollout.generate(asked, SamplingParams(60)))
    stream = rollout.generate(asked, SAMPLING)
    next(stream)
    stream.close()
    rollout.offload()
    rollout.onload()
    third = list(rollout.generate(asked, SAMPLING))
    found["after_refusals"] = {r.id: r.token_ids for r in third} == {r.id: r.token_ids for r in second}
    found["version"] = rollout.version

    found.update(weights_while_running(rollout, asked, network))
    found.update(stop_texts(rollout, asked))
    found.update(shared_prompts(rollout))
    found.update(long_and_short(rollout))
    found.update(switches(rollout, asked, network))
    out.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
