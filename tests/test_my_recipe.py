"""The example of a user's own recipe, run as a user runs it (in one process, to be quick)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_the_example_recipe_learns(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rlinf_core.cli.main", "run", "./examples/my_recipe.py", "cluster.debug=true"]
    overrides = ["num_steps=8", "pulls_per_step=100", "lr=0.5", f"run_dir={tmp_path}"]
    done = subprocess.run([*command, *overrides], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "my_recipe").iterdir()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    chances = [row["chance/arm_1"] for row in rows if "chance/arm_1" in row]
    assert len(chances) == 8
    assert chances[-1] > 0.6 > chances[0]
