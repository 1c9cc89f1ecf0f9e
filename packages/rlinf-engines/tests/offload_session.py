"""Memory of a process that switches, run as a script: ``offload_session.py measure|hold``.

``measure`` prints private memory before, offloaded and loaded again; ``hold`` offloads, prints its shared files and
waits for the end of its input.
"""

from __future__ import annotations

import json
import os
import sys

import torch

from rlinf_engines.offload import DeviceStore


def private_bytes() -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        (line,) = (line for line in file if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024


def main(task: str) -> None:
    # Large blocks, which the C library maps one by one, and small ones from its heap.
    sizes = [20_000_000] * 2 + [300_000] * 40 + [20_000] * 200
    tensors = [torch.randn(size) for size in sizes]
    expected = [float(tensor.sum()) for tensor in tensors]
    store = DeviceStore("engine", torch.device("cpu"), lambda: tensors)
    moved = sum(tensor.nbytes for tensor in tensors)
    if task == "hold":
        store.offload()
        files = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
        held = [name for name in files if os.path.islink(name) and os.readlink(name).startswith("/dev/shm")]
        found = {
            "files": [os.readlink(name) for name in held],
            "links": max(os.stat(name).st_nlink for name in held),
            "bytes": os.stat(held[0]).st_size,
        }
        print(json.dumps(found), flush=True)
        sys.stdin.read()
        return
    before, turns = private_bytes(), []
    for _ in range(3):
        store.offload()
        offloaded = private_bytes()
        store.onload()
        turns.append((offloaded, private_bytes()))
    equal = expected == [float(tensor.sum()) for tensor in tensors]
    print(json.dumps({"bytes": moved, "before": before, "turns": turns, "equal": equal}))


if __name__ == "__main__":
    main(sys.argv[1])
