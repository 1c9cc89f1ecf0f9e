"""GRPO side by side with TRL's ``GRPOTrainer``: the same model, prompts, group size, lengths, reward and optimizer.

Each workload first tries every setting of both sides once (TRL: one and two threads; ours: both engines, two ranks of
one thread or one rank of two, both stages staying loaded) and then runs the best of each in turn, ``--rounds`` times.
Both compute in float32 with one optimizer step per batch and no KL term. A run's first steps are left out of its rates.
Memory is looked at in the trials only: looking takes time, the more the more processes there are.

Workloads: ``tiny``, 0.8 M parameters, 64 responses of exactly 64 tokens; ``arithmetic``, sums from a policy after
supervised warm start, responses as long as they get, until the mean reward of five steps reaches ``GOAL``;
``smollm2``, SmolLM2-135M-Instruct in its chat template, 32 responses of exactly 64 tokens.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _common as common
from _memory import PeakMemory
from smollm2 import model_directory

HERE = Path(__file__).resolve().parent
GOAL = 0.6
"""Mean reward over five steps that ``arithmetic`` is run to."""
OURS = {
    "transformers, 2 ranks": ("transformers", 2),
    "transformers, 2 threads": ("transformers", 1),
    "vllm, 2 ranks": ("vllm", 2),
    "vllm, 2 threads": ("vllm", 1),
}
"""Engine, and devices: each stage has a rank on each of them, and the cores are shared out among them."""
PLAN = """
name: in turn, both loaded
cpu: {{reward: 1}}
tree:
  share:
    first: {{leaf: {{stage: generator, devices: "{devices}", resident: true}}}}
    then: {{leaf: {{stage: actor, devices: "{devices}", resident: true}}}}
"""
TRL = {"1 thread": 1, "2 threads": 2}
PARTS = {
    "generation": ["time/generate_s"],
    "training": ["time/train_s"],
    "reward": ["time/score_s"],
    "weights": ["time/publish_weights_s", "time/receive_weights_s"],
    "switching": ["time/switch_s"],
    "framework": ["time/framework_s"],
}


@dataclass
class Workload:
    """One comparison. ``problems``: lists of (prompt, answer), one for each step."""

    name: str
    model: Path
    problems: list[list[tuple[str, str]]]
    group: int
    tokens: int
    reward: str
    lr: float
    fixed: bool
    chat: bool = False
    accumulate: int = 1
    timeout_s: float = 900.0
    warm: int = 2
    """Steps at a run's start that are left out."""

    @property
    def shared(self) -> dict[str, Any]:
        return {"lr": self.lr, "warmup_steps": 0, "betas": [0.9, 0.99], "weight_decay": 0.0}


def sums(steps: int, prompts: int, top: int, seed: int) -> list[list[tuple[str, str]]]:
    rng = random.Random(seed)
    found = []
    for _ in range(steps):
        pairs = [(rng.randint(0, top), rng.randint(0, top)) for _ in range(prompts)]
        found.append([(f"{a}+{b}=", str(a + b)) for a, b in pairs])
    return found


def tiny_model(place: Path) -> Path:
    from types import SimpleNamespace

    from rlinf_engines.models import export_model, load_model, load_tokenizer

    tiny = SimpleNamespace(
        family="qwen2",
        hidden_size=128,
        layers=4,
        heads=4,
        kv_heads=2,
        intermediate_size=384,
        max_positions=128,
        characters="0123456789+=",
    )
    node = SimpleNamespace(path=None, dtype="float32", tiny=tiny)
    export_model(load_model(node, 0), load_tokenizer(node), place / "tiny")
    return place / "tiny"


def warm_model(place: Path) -> Path:
    """The main job's policy after its warm start: one training step at a learning rate that changes nothing."""
    folder, _ = common.run_recipe("reasoning/grpo_arithmetic", "num_steps=1", "eval.problems=1", "trainer.lr=1e-12")
    shutil.copytree(folder / "export", place / "warm")
    return place / "warm"


def workload(name: str, place: Path, steps: int | None) -> Workload:
    if name == "tiny":
        made = sums(steps or 20, 8, 99, 0)
        return Workload(name, tiny_model(place), made, 8, 64, "_trl_reward:even", 2e-4, True)
    if name == "arithmetic":
        made = sums(steps or 120, 32, 30, 0)
        return Workload(name, warm_model(place), made, 8, 5, "_trl_reward:exact", 3e-4, False)
    made = [
        [(f"What is {p[:-1]}? Answer with the number.", a) for p, a in step] for step in sums(steps or 3, 8, 999, 0)
    ]
    return Workload(
        name,
        model_directory("", place),
        made,
        4,
        64,
        "_trl_reward:digits",
        1e-5,
        True,
        chat=True,
        timeout_s=1800.0,
        warm=1,
    )


def run_ours(load: Workload, place: Path, how: str, *, memory: bool = False) -> dict[str, Any]:
    """One run of our recipe; its steps, seconds and memory."""
    data = place / f"{load.name}.jsonl"
    flat = [{"prompt": prompt, "answer": answer} for step in load.problems for prompt, answer in step]
    data.write_text("".join(json.dumps(row) + "\n" for row in _distinct(flat)))
    keys, (engine, devices) = load.shared, OURS[how]
    plan = place / "plan.yaml"
    plan.write_text(PLAN.format(devices="0" if devices == 1 else f"0-{devices - 1}"))
    root = Path(tempfile.mkdtemp(prefix="rlinf-against-"))
    command = [
        *common.RLINF,
        "run",
        "reasoning/grpo_math" if load.chat else "reasoning/grpo_arithmetic",
        f"run_dir={root}",
        f"model.path={load.model}",
        "task=jsonl",
        f"task.path={data}",
        "reward=function",
        f"reward.function={load.reward}",
        f"num_steps={len(load.problems)}",
        f"prompts_per_step={len(load.problems[0])}",
        f"algorithm.group_size={load.group}",
        "algorithm.minibatches=1",
        "algorithm.aggregation=token_mean",
        "warm_start.max_steps=0",
        f"trainer.lr={keys['lr']}",
        f"trainer.warmup_steps={keys['warmup_steps']}",
        f"trainer.betas={keys['betas']}",
        f"trainer.weight_decay={keys['weight_decay']}",
        "trainer.grad_clip=1.0",
        f"sampling.max_new_tokens={load.tokens}",
        f"sampling.ignore_eos={str(load.fixed).lower()}",
        "eval.problems=1",
        f"rollout={engine}",
        f"cluster.virtual_devices={devices}",
        f"plan={plan}",
    ]
    code, seconds, peak = watched(command, {}, load.timeout_s, memory)
    if code:
        raise SystemExit(f"{load.name}, ours with {how}: ended with {code}")
    (folder,) = (path.parent for path in root.rglob("summary.json"))
    rows = common.rows(folder, "train")
    steps = [
        {
            "step_s": row["time/step_s"],
            "tokens": row["tokens_per_s"] * row["time/step_s"],
            "reward": row["reward/mean"],
            "grad_norm": row["grad_norm"],
            "parts": {part: sum(row.get(key, 0.0) for key in names) for part, names in PARTS.items()},
        }
        for row in rows
    ]
    shutil.rmtree(root)
    return {"steps": steps, "wall_s": seconds, "peak_mib": peak}


def run_trl(load: Workload, place: Path, how: str, *, memory: bool = False) -> dict[str, Any]:
    """One run of TRL; the same."""
    spec, out = place / "spec.json", place / "out.json"
    out.unlink(missing_ok=True)
    prompts = [
        [
            {"prompt": [{"role": "user", "content": prompt}] if load.chat else prompt, "answer": answer}
            for prompt, answer in step
        ]
        for step in load.problems
    ]
    spec.write_text(
        json.dumps(
            {
                **load.shared,
                "model": str(load.model),
                "prompts": prompts,
                "group": load.group,
                "max_new_tokens": load.tokens,
                "fixed": load.fixed,
                "reward": load.reward,
                "threads": TRL[how],
                "accumulate": load.accumulate,
                "seed": 0,
            }
        )
    )
    command = [sys.executable, str(HERE / "_trl_run.py"), str(spec), str(out)]
    code, seconds, peak = watched(command, {"OMP_NUM_THREADS": str(TRL[how])}, load.timeout_s, memory)
    if code:
        raise SystemExit(f"{load.name}, TRL with {how}: ended with {code}")
    data = json.loads(out.read_text())
    for row in data["steps"]:
        row["parts"] = {"generation": row.pop("generate_s")}
        row["parts"]["everything else"] = row["step_s"] - row["parts"]["generation"]
    return {"steps": data["steps"], "wall_s": seconds, "peak_mib": peak}


def watched(
    command: Sequence[str], environment: dict[str, str], timeout_s: float, memory: bool
) -> tuple[int, float, float]:
    """(exit code, seconds, peak MiB where ``memory`` is looked at) of a command."""
    paths = [str(HERE), os.environ.get("PYTHONPATH", "")]  # the first: where the reward is
    merged = {**os.environ, **environment, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    began = time.perf_counter()
    process = subprocess.Popen(command, env=merged, stdout=subprocess.DEVNULL)
    looking = PeakMemory(process) if memory else None
    try:
        code = process.wait(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        code = -signal.SIGALRM
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(timeout=60.0)
        peak = looking.stop() if looking else 0.0
    return code, time.perf_counter() - began, peak


def _distinct(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """Each problem once, and as many more as the recipe keeps aside for its evaluation."""
    found = {row["prompt"]: row for row in rows}
    return [*found.values(), *({"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(2))][: len(found) + 2]


def measured(run: dict[str, Any], load: Workload) -> list[dict[str, Any]]:
    """The steps that count."""
    found: list[dict[str, Any]] = run["steps"][load.warm :]
    return found


def rate(run: dict[str, Any], load: Workload) -> float:
    """Response tokens per second of the median step."""
    return statistics.median(row["tokens"] / row["step_s"] for row in measured(run, load))


def to_goal(run: dict[str, Any]) -> float | None:
    """Seconds of training until the mean reward of five steps reaches ``GOAL``."""
    total, rewards = 0.0, []
    for row in run["steps"]:
        total += row["step_s"]
        rewards.append(row["reward"])
        if len(rewards) >= 5 and statistics.mean(rewards[-5:]) >= GOAL:
            return total
    return None


def first_step(run: dict[str, Any]) -> float:
    """Seconds of the command that are not in later steps: start, loading, the first step (and for ours two small
    evaluations and the export)."""
    return float(run["wall_s"] - sum(row["step_s"] for row in run["steps"][1:]))


def compare(load: Workload, place: Path, rounds: int, settings: Sequence[str]) -> dict[str, Any]:
    """Trials of every setting, then the best of both in turn."""
    trials: dict[str, dict[str, float]] = {"ours": {}, "TRL": {}}
    peaks: dict[str, dict[str, float]] = {"ours": {}, "TRL": {}}
    for side, run, ways in (("ours", run_ours, settings), ("TRL", run_trl, list(TRL))):
        for how in ways:
            tried = run(load, place, how, memory=True)
            trials[side][how], peaks[side][how] = rate(tried, load), tried["peak_mib"]
            print(f"{load.name}, trial: {side} with {how}: {trials[side][how]:.0f} tokens/s", flush=True)
    best = {side: max(found, key=lambda how: found[how]) for side, found in trials.items()}
    runs: dict[str, list[dict[str, Any]]] = {"ours": [], "TRL": []}
    for number in range(rounds):
        runs["ours"].append(run_ours(load, place, best["ours"]))
        runs["TRL"].append(run_trl(load, place, best["TRL"]))
        said = ", ".join(f"{side} {rate(found[-1], load):.0f}" for side, found in runs.items())
        print(f"{load.name}, round {number + 1}: {said} tokens/s", flush=True)
    return {"trials": trials, "best": best, "peaks": {side: peaks[side][best[side]] for side in best}, "runs": runs}


def page(load: Workload, found: dict[str, Any]) -> tuple[str, float]:
    """The workload's section, and the ratio of the median rates."""
    runs, best = found["runs"], found["best"]
    rates = {side: [rate(run, load) for run in runs[side]] for side in runs}
    ratio = statistics.median(rates["ours"]) / statistics.median(rates["TRL"])
    lines = []
    for side in ("ours", "TRL"):
        goals = [to_goal(run) for run in runs[side]]
        known = [goal for goal in goals if goal is not None]
        lines.append(
            [
                f"{side} ({best[side]})",
                common.spread(rates[side], 4),
                common.spread([statistics.median(row["step_s"] for row in measured(run, load)) for run in runs[side]]),
                f"{common.spread(known)} in {len(known)} of {len(goals)}" if known else "-",
                f"{found['peaks'][side]:.0f}",
                common.spread([first_step(run) for run in runs[side]]),
                f"{statistics.mean(run['steps'][-1]['reward'] for run in runs[side]):.3f}",
            ]
        )
    header = ["side", "response tokens/s", "step, s", f"s to reward {GOAL}", "peak MiB", "start and first step, s"]
    text = f"\n## {load.name}\n\n{_described(load)}\n\n" + common.table([*header, "last reward"], lines)
    text += f"\nRatio of the medians: **{ratio:.2f}**.\n\nTrials, tokens/s: " + "; ".join(
        f"{side}: " + ", ".join(f"{how} {value:.0f}" for how, value in tried.items())
        for side, tried in found["trials"].items()
    )
    text += ".\n\nWhere a step's time goes (medians over all rounds):\n\n"
    rows = []
    for side in ("ours", "TRL"):
        steps = [row for run in runs[side] for row in measured(run, load)]
        whole = statistics.median(row["step_s"] for row in steps)
        names = list(steps[0]["parts"])
        medians = {name: statistics.median(row["parts"][name] for row in steps) for name in names}
        rows += [[side, name, f"{1000 * value:.0f}", f"{100 * value / whole:.1f} %"] for name, value in medians.items()]
        rest = whole - sum(medians.values())
        rows.append([side, "waiting and rest", f"{1000 * rest:.0f}", f"{100 * rest / whole:.1f} %"])
        if side == "ours":
            bound = medians["generation"] + medians["training"]
            tokens = statistics.median(row["tokens"] for row in steps)
            text += f"Generation and training alone would allow {tokens / bound:.0f} tokens/s.\n\n"
    return text + common.table(["side", "part", "ms", "share"], rows), ratio


def _described(load: Workload) -> str:
    prompts = len(load.problems[0])
    how = "exactly" if load.fixed else "at most"
    return (
        f"{prompts} prompts with {load.group} responses of {how} {load.tokens} tokens, {len(load.problems)} steps, "
        f"learning rate {load.lr:g}."
    )


def _slim(runs: dict[str, list[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    """What is kept of the runs: numbers by column, with four digits, and the medians of the parts."""
    kept: dict[str, list[dict[str, Any]]] = {}
    for side, rows in runs.items():
        kept[side] = []
        for run in rows:
            steps = run["steps"]
            columns = {
                key: [float(f"{step[key]:.4g}") for step in steps]
                for key in ("step_s", "tokens", "reward", "grad_norm")
            }
            parts = {
                part: float(f"{statistics.median(step['parts'].get(part, 0.0) for step in steps):.4g}")
                for part in steps[0]["parts"]
            }
            kept[side].append({**run, "steps": columns, "parts": parts})
    return kept


def main() -> None:
    args = common.arguments(
        __doc__ or "",
        ("--only", {"nargs": "+", "choices": ["tiny", "arithmetic", "smollm2"], "default": ["tiny", "arithmetic"]}),
        ("--rounds", {"type": int, "default": 5}),
        ("--settings", {"nargs": "+", "choices": list(OURS), "default": list(OURS), "help": "ours, to try"}),
        ("--steps", {"type": int, "help": "training steps instead of the workload's own"}),
    )
    import trl

    kept = args.out / "data.json"
    data: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    sections: dict[str, str] = {name: entry["text"] for name, entry in data.items()}
    slow = []
    for name in args.only:
        with tempfile.TemporaryDirectory(prefix="rlinf-trl-") as folder:
            load = workload(name, Path(folder), args.steps)
            found = compare(load, Path(folder), args.rounds, args.settings)
        sections[name], ratio = page(load, found)
        data[name] = {"text": sections[name], "ratio": ratio, **found, "runs": _slim(found["runs"])}
        if ratio < 1.0:
            slow.append(f"{name}: {ratio:.2f} of TRL's tokens/s")
    text = (
        f"TRL {trl.__version__}, `transformers` generation (its vLLM mode cannot install weights into a CPU engine), "
        "no gradient checkpointing, one forward and backward for the whole batch, fused AdamW. Medians, smallest and "
        "largest in brackets; memory is the proportional set size of all processes.\n" + "".join(sections.values())
    )
    common.write(args.out, "GRPO beside TRL", text, data)
    if slow:
        raise SystemExit("; ".join(slow))


if __name__ == "__main__":
    main()
