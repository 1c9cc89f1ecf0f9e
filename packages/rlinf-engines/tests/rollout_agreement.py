"""New weights again and again: ``rollout_agreement.py BACKEND MODEL INSTALLATIONS OUT``.

MODEL is a directory, or the family of a tiny model. Reports the largest difference of log-probs between the rollout and
a plain forward after each installation, and the process's memory.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm_session import ROLLOUT, TINY

from rlinf_core.types import GenerateRequest, ParallelInfo, SamplingParams
from rlinf_engines.models import load_model, load_tokenizer, named_weights
from rlinf_engines.rollouts.transformers_rollout import TransformersRollout
from rlinf_engines.rollouts.vllm_rollout import VllmRollout

SAMPLING = SamplingParams(max_new_tokens=12, temperature=0.9, seed=3)


def model_node(name: str) -> SimpleNamespace:
    if os.path.isdir(name):
        return SimpleNamespace(path=name, dtype="float32", tiny=None)
    return SimpleNamespace(path=None, dtype="float32", tiny=SimpleNamespace(**{**vars(TINY), "family": name}))


def requests(vocabulary: int, step: int) -> list[GenerateRequest]:
    generator = torch.Generator().manual_seed(step)
    prompts = [tuple(torch.randint(3, vocabulary, (5 + 7 * i,), generator=generator).tolist()) for i in range(4)]
    return [
        GenerateRequest(f"p{p}/{i}", ids, (step, f"p{p}", i), greedy=i == 1)
        for p, ids in enumerate(prompts)
        for i in range(2)
    ]


def difference(responses: list[Any], asked: list[GenerateRequest], network: Any) -> float:
    by_id, worst = {r.id: r for r in asked}, 0.0
    for response in responses:
        request = by_id[response.id]
        ids = torch.tensor([[*request.prompt_ids, *response.token_ids]])
        with torch.no_grad():
            logits = network(ids).logits[0, len(request.prompt_ids) - 1 : -1]
        logps = (logits / (1.0 if request.greedy else 0.9)).log_softmax(-1)
        expected = logps.gather(-1, torch.tensor(response.token_ids).unsqueeze(-1)).squeeze(-1)
        worst = max(worst, float((expected - torch.tensor(response.logprobs)).abs().max()))
    return worst


def resident_mb() -> float:
    """Memory that the process has in use."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def main(backend: str, name: str, installations: int, out: Path) -> None:
    model = model_node(name)
    cfg = SimpleNamespace(**{**vars(ROLLOUT), "max_model_len": None if model.path is None else 256})
    rollout: Any = VllmRollout(cfg) if backend == "vllm" else TransformersRollout(cfg)
    rollout.setup(model, ParallelInfo(), seed=0)
    network, vocabulary = load_model(model, 0), len(load_tokenizer(model))
    found: dict[str, Any] = {"differences": [], "moved": [], "memory_mb": []}
    generator = torch.Generator().manual_seed(1)
    for version in range(1, installations + 1):
        asked = requests(vocabulary, version)
        before = list(rollout.generate(asked, SAMPLING))
        with torch.no_grad():
            for parameter in network.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(noise * (0.1 * float(parameter.abs().mean()) + 1e-4))
        found["moved"].append(difference(before, asked, network))
        rollout.load_weights(version, named_weights(network))
        responses = list(rollout.generate(asked, SAMPLING))
        found["differences"].append(difference(responses, asked, network))
        found["memory_mb"].append(resident_mb())
    out.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
