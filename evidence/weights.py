"""Seconds until new weights of 135 M parameters are usable by two receivers, beside a copy of the same bytes."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import mmap
import multiprocessing as mp
import os
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import _common as common

# The shapes of SmolLM2-135M (huggingface.co/HuggingFaceTB/SmolLM2-135M, config.json); the values are random.
VOCABULARY, HIDDEN, INNER, LAYERS, KEYS = 49152, 576, 1536, 30, 192
SEED = 0
RECEIVERS = 2
SECRET = b"of this experiment"
MODES = {"views": "both point at the new weights", "own": "copied into both's own parameters"}
CHECKSUMS = ("none", "crc32", *(["xxh3"] if importlib.util.find_spec("xxhash") else []))
PAST_CACHE = "GLIBC_TUNABLES=glibc.cpu.x86_non_temporal_threshold=0x100000"
CORES = len(os.sched_getaffinity(0))
SETTINGS = {
    "one": (1, "One thread copies at the sender"),
    "past": (1, f"The same with `{PAST_CACHE}` in all processes"),
    **({"all": (CORES, f"{CORES} threads copy at the sender")} if CORES > 1 else {}),
}
BOUNDS = {
    "block": "memmove, one block, once",
    "tensors": "memmove, tensor by tensor, once",
    "each": "memmove, one block, once for each receiver",
}


def shapes() -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for i in range(LAYERS):
        head = f"model.layers.{i}."
        found |= {
            head + "self_attn.q_proj.weight": (HIDDEN, HIDDEN),
            head + "self_attn.k_proj.weight": (KEYS, HIDDEN),
            head + "self_attn.v_proj.weight": (KEYS, HIDDEN),
            head + "self_attn.o_proj.weight": (HIDDEN, HIDDEN),
            head + "mlp.gate_proj.weight": (INNER, HIDDEN),
            head + "mlp.up_proj.weight": (INNER, HIDDEN),
            head + "mlp.down_proj.weight": (HIDDEN, INNER),
            head + "input_layernorm.weight": (HIDDEN,),
            head + "post_attention_layernorm.weight": (HIDDEN,),
        }
    return found | {"model.norm.weight": (HIDDEN,)}


def layout(ranks: int) -> Any:
    from rlinf_comm.weights import Spec, replicated

    specs = {name: Spec(shape) for name, shape in shapes().items()}
    return replicated(specs, ranks, {"lm_head.weight": "model.embed_tokens.weight"})


def build(seed: int) -> dict[str, Any]:
    import torch

    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes().items()}


def fingerprint(tensors: dict[str, Any]) -> int:
    value = 0
    for name in sorted(tensors):
        value = zlib.crc32(tensors[name].numpy(), value)
    return value


def private_bytes() -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        (line,) = (line for line in file if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


def receiver_process(rank: int, folder: str, orders: Connection) -> None:
    """For each order (``views`` or ``own``) receive a version and say when it was usable and the CPU seconds spent."""
    import torch

    from rlinf_comm.communicator import Communicator
    from rlinf_comm.directory import FileDirectory
    from rlinf_comm.weights import CommunicatorControl, ControlMover, Receiver

    torch.set_num_threads(1)
    own = {name: torch.zeros(shape) for name, shape in shapes().items()}
    shown: dict[str, Any] = {}

    def point(version: int, tensors: Any) -> None:
        shown.clear()
        shown.update(tensors)

    with Communicator(f"receiver {rank}", SECRET, FileDirectory(folder)) as communicator:
        mover = ControlMover(CommunicatorControl(communicator, lambda _: "trainer"))
        receivers = {
            "views": Receiver(rank, layout(RECEIVERS), mover, install=point, views=True),
            "own": Receiver(rank, layout(RECEIVERS), mover, into=own),
        }
        before = private_bytes()
        orders.send("ready")
        while (order := orders.recv()) is not None:
            if order == "check":
                orders.send([fingerprint(shown), fingerprint(own)])
                continue
            began = time.process_time()
            receivers[order].receive(60.0)
            orders.send((time.perf_counter(), time.process_time() - began, private_bytes() - before))


def bounds(model: dict[str, Any], size: int) -> dict[str, Callable[[], None]]:
    """Copies into memory that is in use."""
    blocks = [(ctypes.c_char * size).from_buffer(mmap.mmap(-1, size)) for _ in range(1 + RECEIVERS)]
    for block in blocks:
        ctypes.memset(block, 1, size)
    source, *targets = blocks
    tensors = [(tensor.data_ptr(), tensor.numel() * tensor.element_size()) for tensor in model.values()]

    def one_by_one() -> None:
        at = ctypes.addressof(targets[0])
        for start, length in tensors:
            ctypes.memmove(at, start, length)
            at += length

    def for_each() -> None:
        for target in targets:
            ctypes.memmove(target, source, size)

    def one_block() -> None:
        ctypes.memmove(targets[0], source, size)

    return {"block": one_block, "tensors": one_by_one, "each": for_each}


def measure(rounds: int, bucket_bytes: int, threads: int) -> dict[str, Any]:
    import torch

    from rlinf_comm.arena import Arena
    from rlinf_comm.communicator import Communicator
    from rlinf_comm.directory import FileDirectory
    from rlinf_comm.weights import CommunicatorControl, ControlMover, Sender

    torch.set_num_threads(threads)
    model = build(SEED)
    size = sum(tensor.numel() * tensor.element_size() for tensor in model.values())
    copies = bounds(model, size)
    context = mp.get_context("spawn")
    orders: list[Connection] = []
    wall: dict[str, list[float]] = {}
    cpu: dict[str, list[float]] = {}
    memory: dict[str, int] = {}
    first: dict[str, float] = {}

    def note(key: str, turn: int, seconds: float, cpu_seconds: float) -> None:
        if turn < 0:
            first.setdefault(key, seconds)
        else:
            wall.setdefault(key, []).append(seconds)
            cpu.setdefault(key, []).append(cpu_seconds)

    with tempfile.TemporaryDirectory() as folder:
        for rank in range(RECEIVERS):
            mine, theirs = context.Pipe()
            context.Process(target=receiver_process, args=(rank, folder, theirs), daemon=True).start()
            orders.append(mine)
        for order in orders:
            order.recv()
        with Communicator("trainer", SECRET, FileDirectory(folder)) as communicator:
            arena = Arena(6 * size)
            mover = ControlMover(CommunicatorControl(communicator, lambda rank: f"receiver {rank}"), arena)
            version = 0
            for turn in range(-2, rounds):  # two rounds to touch all memory
                for mode in MODES:
                    for kind in CHECKSUMS:
                        sender = Sender(
                            0, layout(1), layout(RECEIVERS), mover, bucket_bytes=bucket_bytes, checksum=kind
                        )
                        version += 1
                        for order in orders:
                            order.send(mode)
                        # What is held in place belongs to the other receiver's version.
                        held = arena.stats().bytes_in_use if mode == "own" else 0
                        began, began_cpu = time.perf_counter(), time.process_time()
                        sender.send(version, model)
                        spent = time.process_time() - began_cpu
                        taken = arena.stats().bytes_in_use - held
                        answers = [order.recv() for order in orders]
                        ended = max(answer[0] for answer in answers)
                        key = f"{mode}/{kind}"
                        note(key, turn, ended - began, spent + sum(answer[1] for answer in answers))
                        memory[mode] = max(memory.get(mode, 0), taken)
                        memory["private"] = max(memory.get("private", 0), *(answer[2] for answer in answers))
                for name, copy in copies.items():
                    began, began_cpu = time.perf_counter(), time.process_time()
                    copy()
                    note(name, turn, time.perf_counter() - began, time.process_time() - began_cpu)
            expected = fingerprint(model)
            for order in orders:
                order.send("check")
                if order.recv() != [expected, expected]:
                    raise SystemExit("what the receivers have is not what was sent")
                order.send(None)
        buckets = len(sender.plan.buckets[0])
    return {
        "parameters": size // 4,
        "bytes": size,
        "bucket_bytes": bucket_bytes,
        "buckets": buckets,
        "threads": threads,
        "wall_s": wall,
        "cpu_s": cpu,
        "first_s": first,
        "memory": memory,
        "reserved": arena.stats().bytes_reserved,
    }


def label(key: str) -> str:
    if key in BOUNDS:
        return BOUNDS[key]
    mode, kind = key.split("/")
    return f"transfer, {MODES[mode]}" + ("" if kind == "none" else f", {kind}")


def rows_of(found: dict[str, Any]) -> list[list[object]]:
    rows: list[list[object]] = []
    wall, cpu = ({key: statistics.median(v) for key, v in found[kind].items()} for kind in ("wall_s", "cpu_s"))
    for key in [*BOUNDS, *(f"{mode}/{kind}" for mode in MODES for kind in CHECKSUMS)]:
        row = [label(key), common.spread(found["wall_s"][key])]
        row += [f"{wall[key] / wall[bound]:.2f}" for bound in BOUNDS]
        row += [common.spread(found["cpu_s"][key]), f"{cpu[key] / cpu['each']:.2f}"]
        rows.append([*row, f"{cpu[key] / found['bytes'] * 1e9:.2f}"])
    return rows


def chart(found: dict[str, dict[str, Any]], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    keys = [*BOUNDS, *(f"{mode}/{kind}" for mode in MODES for kind in CHECKSUMS)]
    figure = Figure(figsize=(4 + 2.6 * len(found), 3.4), dpi=110, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    titles = {"one": "one thread", "past": "one thread, past the cache", "all": f"{CORES} threads"}
    plots = figure.subplots(1, len(found), squeeze=False, sharey=True)[0]
    for axes, (name, entry) in zip(plots, found.items(), strict=True):
        for place, key in enumerate(reversed(keys)):
            values = entry["cpu_s"][key]
            middle = statistics.median(values)
            axes.barh(place, middle, color="#9aa5b1" if key in BOUNDS else "#2563a8", height=0.6)
            axes.plot([min(values), max(values)], [place, place], color="#1f2933", linewidth=1)
            axes.text(max(values), place, f"  {middle:.2f}", va="center", fontsize=8, color="#1f2933")
        axes.set_yticks(range(len(keys)), [label(key) for key in reversed(keys)], fontsize=7)
        axes.set_title(titles[name], fontsize=9, loc="left")
        axes.set_xlabel("CPU seconds, all processes", fontsize=8)
        axes.tick_params(axis="x", labelsize=8)
        axes.set_xlim(0, 1.25 * max(max(values) for values in entry["cpu_s"].values()))
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def measure_apart(name: str, args: Any) -> dict[str, Any]:
    """``measure`` in a process of its own: the C library reads its settings when it is loaded."""
    environment = {key: value for key, value in os.environ.items() if key != "GLIBC_TUNABLES"}
    if name == "past":
        environment |= dict([PAST_CACHE.split("=", 1)])
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--out", folder, "--setting", name]
        command += ["--rounds", str(args.rounds), "--bucket-mib", str(args.bucket_mib)]
        subprocess.run(command, check=True, env=environment)
        found: dict[str, Any] = json.loads((Path(folder) / "found.json").read_text())
    return found


def main() -> None:
    args = common.arguments(
        __doc__ or "",
        ("--rounds", {"type": int, "default": 9}),
        ("--bucket-mib", {"type": int, "default": 128}),
        ("--setting", {"choices": list(SETTINGS), "help": "measure this one in this process (used by the experiment)"}),
    )
    if args.setting:
        one = measure(args.rounds, args.bucket_mib << 20, SETTINGS[args.setting][0])
        (args.out / "found.json").write_text(json.dumps(one))
        return
    load = os.getloadavg()[0]
    found = {name: measure_apart(name, args) for name in SETTINGS}
    entry = found["one"]
    columns = ["wall s, median (min-max)", "to block", "to tensors", "to each", "CPU s, all", "CPU to each", "CPU ns/B"]
    header = ["what", *columns]
    text = (
        f"{entry['parameters'] / 1e6:.0f} M float32 parameters ({entry['bytes'] / 1e6:.0f} MB, the shapes of "
        f"SmolLM2-135M, random values, seed {SEED}, tied output head sent once) from one trainer process to two "
        f"receiver processes on one machine ({CORES} cores), in {entry['buckets']} buckets of at most "
        f"{entry['bucket_bytes'] >> 20} MiB. {args.rounds} rounds, each with every kind of transfer and the bounds in "
        "turn, after two rounds that touch all memory. The clock starts when the trainer begins to send and stops when "
        "the slower receiver has the version installed. *Both point*: both use the new weights in place, in shared "
        "memory that was written once. *Own parameters*: each receiver copies them into its own after all has come. "
        "CPU seconds are those of all three processes; others at work on the machine disturb them less than the wall "
        "clock. Bounds are `memmove` into memory in use, by one thread: once as one block, which the C library copies "
        "past the cache; once tensor by tensor, as the parameters lie; and as one block once for each receiver. Load "
        f"average before: {load:.1f}. In the second table all copies of 1 MiB and more go past the cache, which the C "
        "library does here from about 100 MB on by itself.\n"
    )
    for name, one in found.items():
        text += f"\n## {SETTINGS[name][1]}\n\n" + common.table(header, rows_of(one))
    memory, size = entry["memory"], entry["bytes"]
    text += (
        "\n![CPU seconds](weights.png)\n\nMemory beside the parameters themselves, in multiples of the bytes: "
        f"{memory['own'] / size:.2f} shared while a version is on its way into own parameters; "
        f"{memory['views'] / size:.2f} where the version before is in use meanwhile; "
        f"{memory['private'] / size:.2f} private in a receiver. {entry['reserved'] / size:.2f} stay reserved for the "
        f"next versions (sizes are rounded up). The very first version takes {entry['first_s']['views/none']:.2f} s: "
        "its pages are touched for the first time.\n\n"
        "After all rounds both receivers had, in place and in their own parameters, the bytes that were sent.\n"
    )
    chart(found, args.out / "weights.png")
    common.write(args.out, "Weight transfer", text, {"load_average": load, "settings": found})


if __name__ == "__main__":
    main()
