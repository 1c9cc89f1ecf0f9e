"""Measure and print the table of docs/benchmarks/algorithms.md.

    python benchmarks/table.py [--large] [--rounds N] [--only WORD] [--threads N]

Contenders of a case run interleaved; medians and quartiles of one process. Peak memory is measured in a process of its
own per contender: resident size at its highest less the size when the inputs were ready.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from contenders import CASES, LARGE

EVERYTHING = {**CASES, **LARGE}


def resident(field: str) -> int:
    """A line of /proc/self/status in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) // 1024
    raise RuntimeError(f"no {field} in /proc/self/status")


def measure_memory(case: str, name: str) -> int:
    """In this process: peak MiB of one run beyond its inputs."""
    run = EVERYTHING[case]()[name]
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    run()
    return resident("VmHWM") - before


def memory(case: str, name: str, threads: int) -> int:
    command = [sys.executable, __file__, "--memory", case, name, "--threads", str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(json.loads(done.stdout.splitlines()[-1]))


def times(runs: dict, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each contender, interleaved; the first round warms up."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for k in range(rounds + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if k:
                found[name].append(1e3 * (time.perf_counter() - start))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--large", action="store_true", help="the 4096 x 152k cases (needs 11 GiB)")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--memory", nargs=2, metavar=("CASE", "NAME"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.memory:
        print(json.dumps(measure_memory(*options.memory)))
        return
    print(f"torch {torch.__version__}, {options.threads} thread(s), {options.rounds} rounds\n")
    for case, make in (LARGE if options.large else CASES).items():
        if options.only not in case:
            continue
        runs = make()
        found = times(runs, options.rounds)
        names = list(runs)
        del runs
        with_memory = "log-probs" in case or "hidden" in case
        print(f"| {case} | median ms | quartiles | to ours |" + (" peak MiB |" if with_memory else ""))
        print("|---|---|---|---|" + ("---|" if with_memory else ""))
        first = statistics.median(found[names[0]])
        for name in names:
            q = statistics.quantiles(found[name], n=4) if len(found[name]) > 1 else [found[name][0]] * 3
            row = f"| {name} | {q[1]:.3g} | {q[0]:.3g} – {q[2]:.3g} | {q[1] / first:.2f} |"
            print(row + (f" {memory(case, name, options.threads)} |" if with_memory else ""), flush=True)
        print()


if __name__ == "__main__":
    main()
