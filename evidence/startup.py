"""How long the command line takes to answer: help, and a misspelt key."""

from __future__ import annotations

import subprocess
import time

import _common as common


def seconds(command: list[str], code: int) -> float:
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    spent = time.perf_counter() - began
    if done.returncode != code:
        raise SystemExit(f"{command} ended with {done.returncode}: {done.stderr}")
    return spent


def main() -> None:
    args = common.arguments(__doc__ or "", ("--rounds", {"type": int, "default": 10}))
    error = [*common.RLINF, "run", "reasoning/grpo_arithmetic", "trainer.lrr=1"]
    data: dict[str, list[float]] = {"rlinf --help": [], "a misspelt key": []}
    for _ in range(args.rounds):
        data["rlinf --help"].append(seconds([*common.RLINF, "--help"], 0))
        data["a misspelt key"].append(seconds(error, 2))
    lines = [[name, common.spread(found)] for name, found in data.items()]
    text = f"Seconds, median (min-max) of {args.rounds}.\n\n" + common.table(["command", "seconds"], lines)
    common.write(args.out, "Answers of the command line", text, data)


if __name__ == "__main__":
    main()
