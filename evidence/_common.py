"""What the experiments share: running a recipe as a user does, and reading what it left."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

RLINF = [sys.executable, "-m", "rlinf_core.cli.main"]


def arguments(doc: str, *more: tuple[str, dict[str, Any]]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--out", type=Path, required=True, help="folder for figures and tables")
    for name, options in more:
        parser.add_argument(name, **options)
    return parser.parse_args()


def run_recipe(recipe: str, *overrides: str) -> tuple[Path, float]:
    """Run a recipe in a process of its own; returns its run directory and the wall time in seconds."""
    root = Path(tempfile.mkdtemp(prefix="rlinf-evidence-"))
    began = time.perf_counter()
    subprocess.run([*RLINF, "run", recipe, f"run_dir={root}", *overrides], check=True)
    seconds = time.perf_counter() - began
    (folder,) = (path.parent for path in root.rglob("summary.json"))
    return folder, seconds


def rows(folder: Path, phase: str) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["phase"] == phase]


def summary(folder: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return data


def spread(values: Sequence[float], digits: int = 3) -> str:
    """``median (min-max)``."""
    return f"{statistics.median(values):.{digits}g} ({min(values):.{digits}g}-{max(values):.{digits}g})"


def table(header: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    cells = [list(map(str, header)), ["---"] * len(header), *(list(map(str, line)) for line in lines)]
    return "\n".join("| " + " | ".join(line) + " |" for line in cells) + "\n"


def write(out: Path, title: str, text: str, data: Any) -> None:
    """``README.md`` for people and ``data.json`` for programs."""
    (out / "README.md").write_text(f"# {title}\n\n{text}")
    (out / "data.json").write_text(json.dumps(data, indent=2) + "\n")
    print(text)
