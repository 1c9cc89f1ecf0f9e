"""``run(..., quiet=True)``: nothing is shown, neither by the run nor by its workers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

RECIPE = """
from rlinf_core import In, Prompt, Worker, recipe, task

class Loud(Worker):
    @task
    def drop_all(self, prompts: In[Prompt]):
        for prompt in prompts:
            self.log.warning("a warning")
            self.drop(prompt, "not wanted")

@recipe
def program(flow, cfg):
    group = flow.group("loud", Loud, cfg)
    for step in flow.steps(cfg.num_steps):
        prompts = step.channels("prompts")
        step.feed(prompts, [Prompt("p", "text")])
        group.drop_all(prompts)
        step.join()
"""

CODE = """
import sys
from rlinf_core import runner
from rlinf_core.config import compose_full

found = compose_full("loud_recipe.py", ["num_steps=1", "cluster.debug=true", "loggers=[jsonl]"])
for quiet in False, True:
    assert runner.run(found.config, found.name, quiet=quiet) == 0
    print("----", file=sys.stderr)
"""


def test_a_quiet_run_shows_nothing(tmp_path: Path) -> None:
    (tmp_path / "loud_recipe.py").write_text(RECIPE)
    words = [sys.executable, "-c", CODE]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    loud, quiet, _ = done.stderr.split("----\n")
    assert "a warning" in loud and "dropped: not wanted" in loud
    assert quiet == done.stdout == ""
