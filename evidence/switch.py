"""Seconds and memory of a context switch of a 135-million-parameter model, beside a copy of the same bytes."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import _common as common

# The shape of SmolLM-135M (huggingface.co/HuggingFaceTB/SmolLM-135M, config.json); the weights are random.
SHAPE: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
TRAINER = SimpleNamespace(
    lr=1e-3,
    betas=[0.9, 0.95],
    eps=1e-8,
    weight_decay=0.0,
    grad_clip=1.0,
    warmup_steps=0,
    schedule="constant",
    schedule_steps=0,
    min_lr_ratio=0.0,
    micro_batch_tokens=8192,
    activation_checkpointing=False,
    share_prompts=True,
    sharding="ddp",
)
ENGINES = {
    "trainer": "trainer: weights, gradients, AdamW state",
    "rollout": "rollout: weights alone",
}
ACTIONS = {
    "offload": "offload",
    "load": "load",
    "warm": "copy into memory in use",
    "blocks": "the same, tensor by tensor",
    "cold": "copy into fresh memory",
}


def private_bytes() -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        (line,) = (line for line in file if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


def write_model(folder: Path) -> SimpleNamespace:
    """A model directory with random weights; returns its config node."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from rlinf_engines.models import export_model, load_tokenizer

    torch.manual_seed(0)
    tiny = SimpleNamespace(
        hidden_size=64,
        layers=1,
        heads=1,
        kv_heads=1,
        intermediate_size=64,
        family="qwen2",
        max_positions=64,
        characters="0123456789+-*= ",
    )
    tokenizer = load_tokenizer(SimpleNamespace(path=None, dtype="float32", tiny=tiny))
    export_model(LlamaForCausalLM(LlamaConfig(**SHAPE)), tokenizer, folder / "model")
    return SimpleNamespace(path=str(folder / "model"), dtype="float32")


def make_trainer(model: SimpleNamespace) -> Any:
    """A trainer after one optimizer step, with the gradients of the next one gathered."""
    import torch

    from rlinf_core.types import ParallelInfo
    from rlinf_engines.trainers.torch_trainer import TorchTrainer

    def head(logits: Any, batch: Any, shard: Any) -> dict[str, Any]:
        return {"logsumexp": logits.logsumexp(-1)}

    def loss(outputs: Any, batch: Any) -> Any:
        return outputs["logsumexp"].sum(), float(len(outputs["logsumexp"])), {}

    trainer = TorchTrainer(TRAINER)
    trainer.setup(model, head, ParallelInfo(), seed=0)
    batch = {
        "ids": ["a", "b"],
        "input_ids": torch.arange(2, 34),
        "position_ids": torch.arange(16).repeat(2),
        "cu_seqlens": torch.tensor([0, 16, 32], dtype=torch.int32),
        "max_len": 16,
        "predict": torch.arange(32),
    }
    trainer.accumulate([batch], loss)
    trainer.step(32.0)
    trainer.accumulate([batch], loss)
    return trainer


def make_rollout(model: SimpleNamespace) -> Any:
    from rlinf_core.types import ParallelInfo
    from rlinf_engines.models import named_weights
    from rlinf_engines.rollouts.transformers_rollout import TransformersRollout

    rollout = TransformersRollout(SimpleNamespace(max_num_seqs=8))
    rollout.setup(model, ParallelInfo(), seed=0)
    # Until new weights come, those of the file are mapped and no private memory.
    rollout.load_weights(1, [(name, tensor.clone()) for name, tensor in named_weights(rollout.model)])
    return rollout


def measure(engine_name: str, folder: Path, rounds: int) -> dict[str, Any]:
    """Switch one engine in this process; copies of the same number of bytes come in turn with it."""
    import torch

    from rlinf_engines.offload import distinct_storages, state_tensors

    model = write_model(folder)
    engine = {"trainer": make_trainer, "rollout": make_rollout}[engine_name](model)
    state = list(state_tensors(engine.model, getattr(engine, "optimizer", None)))
    sizes = [storage.nbytes() for storage in distinct_storages(state, torch.device("cpu"))]
    size = sum(sizes)
    expected = [tensor.clone() for tensor in state]
    wall: dict[str, list[float]] = {name: [] for name in ACTIONS}
    cpu: dict[str, list[float]] = {name: [] for name in ACTIONS}
    memory: dict[str, list[int]] = {"before": [], "offloaded": [], "loaded": []}

    def timed(name: str, action: Callable[[], object]) -> None:
        began, began_cpu = time.perf_counter(), time.process_time()
        action()
        wall[name].append(time.perf_counter() - began)
        cpu[name].append(time.process_time() - began_cpu)

    def copy_blocks() -> None:
        at = 0
        for length in sizes:
            ctypes.memmove(target_at + at, source_at + at, length)
            at += length

    def copy_cold() -> None:
        ctypes.memmove(ctypes.addressof(ctypes.c_char.from_buffer(fresh)), source_at, size)

    began = time.perf_counter()
    engine.offload()
    first = time.perf_counter() - began
    engine.onload()
    source, target = mmap.mmap(-1, size), mmap.mmap(-1, size)
    source_at, target_at = (ctypes.addressof(ctypes.c_char.from_buffer(block)) for block in (source, target))
    for at in (source_at, target_at):
        ctypes.memset(at, 1, size)
    for _ in range(rounds):
        memory["before"].append(private_bytes())
        timed("offload", engine.offload)
        memory["offloaded"].append(private_bytes())
        timed("load", engine.onload)
        memory["loaded"].append(private_bytes())
        timed("warm", lambda: ctypes.memmove(target_at, source_at, size))
        timed("blocks", copy_blocks)
        fresh = mmap.mmap(-1, size)
        timed("cold", copy_cold)
        fresh.close()
    equal = all(torch.equal(a, b) for a, b in zip(state, expected, strict=True))
    if not equal:
        raise SystemExit(f"{engine_name}: a switch changed the engine's state")
    return {
        "parameters": sum(p.numel() for p in engine.model.parameters()),
        "bytes": size,
        "storages": len(sizes),
        "first_offload_s": first,
        "wall_s": wall,
        "cpu_s": cpu,
        "private_bytes": memory,
    }


def run_apart(engine: str, args: Any) -> dict[str, Any]:
    """``measure`` in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="rlinf-switch-") as folder:
        command = [sys.executable, __file__, "--out", folder, "--rounds", str(args.rounds), "--engine", engine]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        found: dict[str, Any] = json.loads((Path(folder) / "found.json").read_text())
    return found


def chart(found: dict[str, Any], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), dpi=110, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    for axes, (name, entry) in zip(figure.subplots(1, 2), found.items(), strict=True):
        for place, action in enumerate(reversed(ACTIONS)):
            values = entry["cpu_s"][action]
            middle = statistics.median(values)
            colour = "#2563a8" if action in ("offload", "load") else "#9aa5b1"
            axes.barh(place, middle, color=colour, height=0.6)
            axes.plot([min(values), max(values)], [place, place], color="#1f2933", linewidth=1)
            axes.text(max(values), place, f"  {middle:.2f} s", va="center", fontsize=8, color="#1f2933")
        axes.set_yticks(range(len(ACTIONS)), list(reversed(ACTIONS.values())), fontsize=8)
        axes.set_title(f"{ENGINES[name]} ({entry['bytes'] / 1e9:.2f} GB)", fontsize=9, loc="left")
        axes.set_xlabel("CPU seconds (bar: median, line: least to most)", fontsize=8)
        axes.tick_params(axis="x", labelsize=8)
        axes.set_xlim(0, 1.25 * max(max(values) for values in entry["cpu_s"].values()))
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def main() -> None:
    args = common.arguments(
        __doc__ or "",
        ("--rounds", {"type": int, "default": 9}),
        ("--engine", {"choices": list(ENGINES), "help": "measure this one in this process (used by the experiment)"}),
    )
    if args.engine:
        found = measure(args.engine, args.out, args.rounds)
        (args.out / "found.json").write_text(json.dumps(found))
        return
    load = os.getloadavg()[1]
    engines = {name: run_apart(name, args) for name in ENGINES}
    times, memory = [], []
    for name, entry in engines.items():
        size = entry["bytes"]
        warm, cold = (statistics.median(entry["cpu_s"][kind]) for kind in ("warm", "cold"))
        for action, label in ACTIONS.items():
            spent = statistics.median(entry["cpu_s"][action])
            row = [ENGINES[name], label, common.spread(entry["wall_s"][action]), common.spread(entry["cpu_s"][action])]
            times.append([*row, f"{size / spent / 1e9:.1f}", f"{spent / warm:.2f}", f"{spent / cold:.2f}"])
        held = {key: statistics.median(values) for key, values in entry["private_bytes"].items()}
        given = held["before"] - held["offloaded"]
        row = [ENGINES[name], f"{size / 1e6:.0f}", *(f"{held[key] / 1e6:.0f}" for key in held)]
        memory.append([*row, f"{given / size:.1%}", f"{entry['first_offload_s']:.2f}"])
    parameters = next(iter(engines.values()))["parameters"] / 1e6
    text = (
        f"A Llama of SmolLM-135M's shape ({parameters:.0f} M parameters, float32, tied embedding, random weights) on a "
        f"CPU slot with one thread. Each engine in a process of its own; {args.rounds} rounds of offload, load and the "
        "copies in turn. A copy is a C `memmove` of as many bytes as the engine moves: in one block into memory in use "
        "(the bound for an offload); in blocks of the tensors' sizes, for which the C library does not bypass the "
        "cache; in one block into memory just mapped, whose pages the kernel must clear first (a load, too, takes its "
        "memory anew). "
        f"Load average before: {load:.1f} on {os.cpu_count()} cores; rates and ratios are of CPU seconds (one thread), "
        "which others at work disturb less.\n\n"
        + common.table(
            ["engine", "what", "wall s, median (min-max)", "CPU s", "GB per CPU s", "to copy in use", "to copy fresh"],
            times,
        )
        + "\n![CPU seconds](switch.png)\n\nPrivate memory of the process (`RssAnon`), MB. The first offload also "
        "claims the shared memory that later ones find there.\n\n"
        + common.table(
            ["engine", "moved", "before", "offloaded", "loaded again", "given back / moved", "first offload, s"], memory
        )
        + "\nAfter all rounds every tensor was bit-equal to what it had been.\n"
    )
    chart(engines, args.out / "switch.png")
    common.write(args.out, "Context switch of an engine", text, {"load_average": load, "engines": engines})


if __name__ == "__main__":
    main()
