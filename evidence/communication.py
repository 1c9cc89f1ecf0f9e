"""Throughput, round trips and processor time of every way from one process to another, beside peers and limits.

Writes docs/benchmarks/communication.md with its chart, and the single figures to the folder of the evidence.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import _common as common

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from ways import channel, gloo, memcpy, ours, queues, rayways, ring  # noqa: E402 - found just now
from ways.cases import CASES  # noqa: E402
from ways.run import measure, rows, started_ray  # noqa: E402
from ways.table import draw, page  # noqa: E402

CONTENDERS = [
    ours.Communicators,
    channel.Channel,
    channel.ChannelMany,
    channel.ChannelSocket,
    gloo.Gloo,
    rayways.RayQueue,
    rayways.RayQueueBatches,
    rayways.RayObjects,
    rayways.RayPut,
    queues.Queue,
    queues.SimpleQueue,
    ring.Ring,
    memcpy.Memcpy,
]


def commit() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no")
    return f"`{git('rev-parse', '--short', 'HEAD')}`" + (" with uncommitted changes" if changed else "")


def main() -> None:
    args = common.arguments(
        __doc__ or "",
        ("--rounds", {"type": int, "default": 5, "help": "measured rounds"}),
        ("--seconds", {"type": float, "default": 0.5, "help": "of throughput for each contender, case and round"}),
        ("--trips", {"type": float, "default": 0.2, "help": "seconds of round trips, likewise"}),
        ("--only", {"default": "", "help": "a part of the names of the contenders to run"}),
        ("--cases", {"default": "", "help": "names of cases, with commas; default: all"}),
    )
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    kinds = [kind for kind in CONTENDERS if args.only in kind.name]
    cases = [CASES[name] for name in (args.cases.split(",") if args.cases else CASES)]
    with started_ray(), contextlib.ExitStack() as stack:
        contenders = [stack.enter_context(kind()) for kind in kinds]
        figures = measure(contenders, cases, rounds=args.rounds, seconds=args.seconds, trips_s=args.trips)
    given = shlex.join(sys.argv[3:])
    facts = {
        "command": "make evidence NAME=communication" + (f" ARGS={given!r}" if given else ""),
        "commit": commit(),
        "rounds": args.rounds,
        "seconds": args.seconds,
        "cores": os.cpu_count(),
    }
    whole = len(kinds) == len(CONTENDERS) and len(cases) == len(CASES)
    folder = ROOT / "docs" / "benchmarks" if whole else args.out  # a part of the table does not replace all of it
    (args.out / "data.json").write_text(json.dumps(rows(figures), indent=1) + "\n")
    draw(figures, folder / "communication.png")
    text = page(figures, facts, "communication.png")
    (folder / "communication.md").write_text(text)
    (args.out / "README.md").write_text(
        "# Communication\n\nThe tables and the chart are in [docs/benchmarks](../../benchmarks/communication.md); "
        "`data.json` has every round.\n"
    )
    print(text)


if __name__ == "__main__":
    main()
