"""What the tensor-parallel test of vLLM looks at: ``vllm_tensor_parallel.py OUT``. Two processes hold one model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm_session import MODEL, ROLLOUT, SAMPLING, TINY, requests, worst_difference

from rlinf_core.types import ParallelInfo
from rlinf_engines.models import load_model, named_weights
from rlinf_engines.rollouts.vllm_rollout import VllmRollout


def main(out: Path) -> None:
    found: dict[str, Any] = {}
    before = set(Path("/dev/shm").iterdir())
    model = SimpleNamespace(**{**vars(MODEL), "tiny": SimpleNamespace(**{**vars(TINY), "kv_heads": 2})})
    rollout = VllmRollout(SimpleNamespace(**{**vars(ROLLOUT), "tensor_parallel_size": 2}))
    rollout.setup(model, ParallelInfo(), seed=0)
    network, asked = load_model(model, 0), requests()
    found["difference"] = worst_difference(list(rollout.generate(asked, SAMPLING)), asked, network)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(1)
        for parameter in network.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    rollout.load_weights(3, named_weights(network))
    responses = list(rollout.generate(asked, SAMPLING))
    found["new_difference"] = worst_difference(responses, asked, network)
    found["versions"] = sorted({v for r in responses for v in r.versions})
    shared = {path for path in set(Path("/dev/shm").iterdir()) - before if path.name.startswith("vllm_dist")}
    rollout.close()
    found["shared"], found["left_behind"] = len(shared), sorted(path.name for path in shared if path.exists())
    out.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
