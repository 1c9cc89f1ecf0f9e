"""The same rows on every trainer backend, rank count, micro-batch split and parallel split: loss and gradient norm.

Each layout trains two optimizer steps of a tiny model in float32 in processes of its own. The reference is a plain
Hugging Face model on padded rows with torch's AdamW (``packages/rlinf-engines/tests/trainer_cases.py``).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import _common as common

LIMITS = {"losses": 1e-4, "norms": 1e-4, "first": 1e-5, "weights": 1e-5}
"""Loss and norm relative, log-probs or values of the first forward and weights after the last step absolute."""
ONE = [[0, 1, 2], [3, 4, 5, 6, 7]]
SPLITS: dict[str, list[list[list[int]]]] = {
    "2": [ONE],
    "1": [[[0, 1, 2, 3, 4, 5, 6, 7]]],
    "8": [[[i] for i in range(8)]],
    "3 + 1": [[[0], [1, 2, 3], [6]], [[4, 5, 7]]],
    "2 + 0": [[[0, 1, 2, 3], [4, 5, 6, 7]], []],
}
"""Micro-batches by name, for each replica: the rows of each."""
DEEPSPEED = {"bucket_elements": 50_000_000, "persistence_elements": 1000}
MODULES = {
    "torch": "rlinf_engines.trainers.torch_trainer:TorchTrainer",
    "deepspeed": "rlinf_engines.trainers.deepspeed_trainer:DeepSpeedTrainer",
    "megatron": "rlinf_engines.trainers.megatron.trainer:MegatronTrainer",
}


def layouts() -> list[dict[str, Any]]:
    """Every layout: what it is called, its backend, ranks, keys of ``trainer`` and the micro-batch splits to try."""

    def zero(stage: int, **keys: Any) -> dict[str, Any]:
        base = {"zero_stage": stage, "offload_optimizer": False, "offload_parameters": False}
        return {**base, **DEEPSPEED, **keys}

    def mega(tp: int, pp: int, sequence: bool = False) -> dict[str, Any]:
        return {"tp": tp, "pp": pp, "sequence_parallel": sequence}

    alone, two = ["1", "2", "8"], ["3 + 1", "2 + 0"]
    found = [
        ("torch", "torch", 1, {"sharding": "ddp"}, alone),
        ("torch, checkpointing", "torch", 1, {"sharding": "ddp", "activation_checkpointing": True}, ["2"]),
        ("torch DDP", "torch", 2, {"sharding": "ddp"}, two),
        ("torch FSDP2", "torch", 2, {"sharding": "fsdp2"}, two),
        ("DeepSpeed ZeRO 0", "deepspeed", 1, zero(0), alone),
        *((f"DeepSpeed ZeRO {stage}", "deepspeed", 2, zero(stage), two) for stage in range(4)),
        ("DeepSpeed ZeRO 2, optimizer offloaded", "deepspeed", 2, zero(2, offload_optimizer=True), ["3 + 1"]),
        ("Megatron", "megatron", 1, mega(1, 1), alone),
        ("Megatron DP 2", "megatron", 2, mega(1, 1), two),
        ("Megatron TP 2", "megatron", 2, mega(2, 1), alone),
        ("Megatron TP 2, sequence parallel", "megatron", 2, mega(2, 1, True), ["2"]),
        ("Megatron PP 2", "megatron", 2, mega(1, 2), alone),
    ]
    return [
        {"name": name, "backend": backend, "ranks": ranks, "keys": keys, "splits": splits}
        for name, backend, ranks, keys, splits in found
    ]


def cases_module() -> Any:
    """``trainer_cases`` of the engines' tests."""
    tests = Path(__file__).resolve().parents[1] / "packages" / "rlinf-engines" / "tests"
    sys.path.insert(0, str(tests))
    import trainer_cases

    return trainer_cases


def rank_main(rank: int, world: int, folder: Path, case: dict[str, Any]) -> None:
    """One rank of one layout: every family, role and split, the differences from the reference as JSON."""
    import importlib

    cases = cases_module()
    from rlinf_core.types import ParallelInfo

    module, _, name = MODULES[case["backend"]].partition(":")
    backend = getattr(importlib.import_module(module), name)
    found = []
    for family in ("qwen2", "llama"):
        for role in ("policy", "critic"):
            for split in case["splits"]:
                meet = f"file://{folder}/meet-{family}-{role}-{split.replace(' ', '')}" if world > 1 else ""
                place = ParallelInfo(rank=rank, world_size=world, init_method=meet, timeout_s=120.0)
                cfg, model = cases.trainer_config(case["backend"], **case["keys"]), cases.model_config(family)
                expected = cases.reference(model, cfg, role=role)
                trainer = backend(cfg)
                trainer.setup(model, cases.head if role == "policy" else None, place, seed=0, role=role)
                parts = SPLITS[split]
                if len(parts) != trainer.replicas:
                    raise SystemExit(
                        f"{case['name']}: split {split} is for {len(parts)} replicas, not {trainer.replicas}"
                    )
                numbers = cases.train(trainer, parts[trainer.replica], role=role)
                trainer.close()
                apart = cases.differences(numbers, expected)
                found.append(
                    {
                        "family": family,
                        "role": role,
                        "split": split,
                        "loss": numbers.losses,
                        "norm": numbers.norms,
                        **{name: apart.get(name, 0.0) for name in LIMITS},
                    }
                )
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))


def measure(case: dict[str, Any], timeout_s: float) -> list[dict[str, Any]]:
    """Run all ranks of a layout; for each family, role and split the largest difference of any rank."""
    with tempfile.TemporaryDirectory(prefix="rlinf-trainers-") as name:
        folder, world = Path(name), case["ranks"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        processes = [
            subprocess.Popen(
                [sys.executable, __file__, "--rank", str(rank), str(world), name, json.dumps(case)], env=environment
            )
            for rank in range(world)
        ]
        try:
            codes = [process.wait(timeout=timeout_s) for process in processes]
        finally:
            for process in processes:
                process.kill()
        if any(codes):
            raise SystemExit(f"{case['name']}: a rank ended with {codes}")
        ranks = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(world)]
    return [{**row[0], **{key: max(one[key] for one in row) for key in LIMITS}} for row in zip(*ranks, strict=True)]


def main() -> None:
    args = common.arguments(
        __doc__ or "",
        ("--only", {"default": "", "help": "layouts whose name has this in it"}),
        ("--timeout", {"type": float, "default": 600.0, "help": "seconds for one layout"}),
    )
    data: dict[str, Any] = {}
    lines, numbers = [], []
    for case in layouts():
        if args.only.lower() not in case["name"].lower():
            continue
        rows = measure(case, args.timeout)
        data[case["name"]] = rows
        splits = ", ".join(f"({split})" for split in case["splits"])
        worst = [f"{max(row[key] for row in rows):.1e}" for key in LIMITS]
        lines.append([case["name"], case["ranks"], splits, *worst])
        first = next(row for row in rows if row["family"] == "qwen2" and row["role"] == "policy")
        numbers.append([case["name"], *(f"{value:.7g}" for value in (*first["loss"], *first["norm"]))])
        print(f"{case['name']}: {dict(zip(LIMITS, worst, strict=True))}", flush=True)
    text = (
        "Largest difference from a plain Hugging Face model on padded rows with torch's AdamW, over two families "
        "(Qwen2 and Llama, 2 layers, 4 heads), two roles (policy and critic), two optimizer steps with clipping, and "
        "the splits into micro-batches in brackets (for each replica). Loss and gradient norm relative; log-probs (or "
        "values) of the first forward and weights after the steps absolute. Claimed: "
        f"{', '.join(f'{k} {v:g}' for k, v in LIMITS.items())}.\n\n"
        + common.table(["layout", "ranks", "micro-batches", "loss", "norm", "forward", "weights"], lines)
        + "\nThe numbers themselves (Qwen2, policy, first split):\n\n"
        + common.table(["layout", "loss, step 1", "loss, step 2", "norm, step 1", "norm, step 2"], numbers)
    )
    common.write(args.out, "The same batch on every trainer backend", text, data)
    far = [
        f"{name} {row['family']} {row['role']} ({row['split']}): {key} {row[key]:.2e}"
        for name, rows in data.items()
        for row in rows
        for key, limit in LIMITS.items()
        if not row[key] <= limit
    ]
    if far:
        raise SystemExit("too far from the reference: " + "; ".join(far))


if __name__ == "__main__":
    if len(sys.argv) == 6 and sys.argv[1] == "--rank":
        rank_main(int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), json.loads(sys.argv[5]))
    else:
        main()
