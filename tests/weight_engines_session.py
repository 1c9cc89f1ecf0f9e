"""What the engines' test looks at, run as a script in a process of its own: ``weight_engines_session.py KIND OUT``.

An engine of ``KIND`` (``vllm`` or ``transformers``) generates, gets new weights from two processes that have half of
the rows of every parameter each, and generates again.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from rlinf_comm.arena import Arena
from rlinf_comm.communicator import Communicator
from rlinf_comm.directory import FileDirectory
from rlinf_comm.weights import CommunicatorControl, ControlMover, Layout, Receiver, Sender, fsdp, replicated, spec_of
from rlinf_core.types import GenerateRequest, ParallelInfo, SamplingParams

TINY = SimpleNamespace(
    hidden_size=64,
    layers=2,
    heads=2,
    kv_heads=1,
    intermediate_size=96,
    family="qwen2",
    max_positions=64,
    characters="0123456789+-*= ",
)
MODEL = SimpleNamespace(path=None, dtype="float32", tiny=TINY)
VLLM = SimpleNamespace(
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
    stall_timeout_s=300.0,
)
SAMPLING = SamplingParams(max_new_tokens=8, temperature=0.7, seed=3)
SHARDS = 2
DEADLINE_S = 120.0
SECRET = b"of this test"


def network(version: int) -> Any:
    """The model after ``version`` updates, each of which changes every parameter."""
    from rlinf_engines.models import load_model

    made = load_model(MODEL, 0)
    generator = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for parameter in made.parameters() if version else ():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return made


def layouts(weights: dict[str, torch.Tensor]) -> tuple[Layout, Layout]:
    """Of the trainer (rows over the shards) and of the engine (everything whole)."""
    specs = {name: spec_of(tensor) for name, tensor in weights.items()}
    tied = {"lm_head.weight": "model.embed_tokens.weight"}
    return fsdp(specs, SHARDS, tied), replicated(specs, 1, tied)


def shard(rank: int, folder: Path) -> None:
    """One rank of the trainer: sends its rows of two versions."""
    weights = torch.load(folder / "weights.pt")
    source, target = layouts(weights[1])
    with Communicator(f"shard {rank}", SECRET, FileDirectory(folder), timeout=DEADLINE_S) as communicator:
        mover = ControlMover(CommunicatorControl(communicator, lambda _: "engine"), Arena(16 << 20))
        sender = Sender(rank, source, target, mover, bucket_bytes=1 << 14, checksum="crc32")
        for version in (1, 2):
            parts = source.ranks[rank].parts
            rows = {part.place: weights[version][part.parameter][slice(*part.box[0])] for part in parts}
            sender.send(version, rows, DEADLINE_S)
        sender.close(DEADLINE_S)  # the engine may still wait for the other shard


def requests() -> list[GenerateRequest]:
    generator = torch.Generator().manual_seed(0)
    prompts = [tuple(torch.randint(2, 17, (4 + i,), generator=generator).tolist()) for i in range(4)]
    return [GenerateRequest(f"p{p}/{i}", ids, (0, f"p{p}", i)) for p, ids in enumerate(prompts) for i in range(2)]


def worst_difference(responses: list[Any], model: Any) -> float:
    """The largest difference between the engine's log-probs and those of a Hugging Face forward."""
    by_id, worst = {r.id: r for r in requests()}, 0.0
    for response in responses:
        prompt = by_id[response.id].prompt_ids
        ids = torch.tensor([[*prompt, *response.token_ids]])
        logps = (model(ids).logits[0, len(prompt) - 1 : -1] / SAMPLING.temperature).log_softmax(-1)
        expected = logps.gather(-1, torch.tensor(response.token_ids).unsqueeze(-1)).squeeze(-1)
        worst = max(worst, float((expected - torch.tensor(response.logprobs)).abs().max()))
    return worst


def start(kind: str) -> Any:
    if kind == "vllm":
        from rlinf_engines.rollouts.vllm_rollout import VllmRollout

        rollout: Any = VllmRollout(VLLM)
    else:
        from rlinf_engines.rollouts.transformers_rollout import TransformersRollout

        rollout = TransformersRollout(SimpleNamespace(max_num_seqs=64))
    rollout.setup(MODEL, ParallelInfo(), seed=0)
    return rollout


def main(kind: str, out: Path) -> None:
    from rlinf_engines.models import named_weights

    context = mp.get_context("spawn")
    networks = [network(version) for version in range(3)]
    weights = {version: dict(named_weights(networks[version])) for version in (1, 2)}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        torch.save(weights, folder / "weights.pt")
        shards = [context.Process(target=shard, args=(rank, folder)) for rank in range(SHARDS)]
        for process in shards:
            process.start()
        rollout = start(kind)
        responses = list(rollout.generate(requests(), SAMPLING))
        differences = {"0 of 0": worst_difference(responses, networks[0])}
        versions = []
        with Communicator("engine", SECRET, FileDirectory(folder), timeout=DEADLINE_S) as communicator:
            mover = ControlMover(CommunicatorControl(communicator, lambda rank: f"shard {rank}"))
            receiver = Receiver(0, layouts(weights[1])[1], mover, install=rollout.load_weights)
            for version in (1, 2):
                assert receiver.receive(DEADLINE_S) == version
                responses = list(rollout.generate(requests(), SAMPLING))
                for other in (version - 1, version):
                    differences[f"{version} of {other}"] = worst_difference(responses, networks[other])
                versions.append(sorted({v for r in responses for v in r.versions}))
        for process in shards:
            process.join(DEADLINE_S)
        codes = [process.exitcode for process in shards]
    out.write_text(json.dumps({"differences": differences, "versions": versions, "exit codes": codes}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
