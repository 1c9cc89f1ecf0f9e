"""Environment steps per second of whole trainings, beside Stable-Baselines3's PPO.

The same environment, number of environments, network, batch, minibatches and epochs; both on the cores of this machine,
in turn, round after round. Stable-Baselines3 runs with each of its vector environments (``DummyVecEnv``, and
``SubprocVecEnv`` with one process per environment) and torch with one thread, its faster setting here; it is compared
at its better one. Rates are those of steps of rollout and update together, from the second step on.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from itertools import accumulate
from pathlib import Path
from typing import Any

import _common as common

from rlinf_core import compose

CASES: dict[str, tuple[str, tuple[str, ...], int]] = {
    "CartPole": ("embodied/ppo_cartpole", (), 100),
    "MetaWorld reach-v3": ("embodied/ppo_reach", (), 12),
}
PEERS = {"SB3, DummyVecEnv": False, "SB3, SubprocVecEnv": True}


def ours(recipe: str, overrides: list[str], seed: int) -> dict[str, Any]:
    """One training by the recipe; its evaluations are not counted."""
    folder, seconds = common.run_recipe(recipe, *overrides, f"seed={seed}", "eval.episodes=1", "loggers=[jsonl]")
    rows = common.rows(folder, "train")
    spent = [row["time/step_s"] for row in rows]
    steps = [row["env_steps"] for row in rows]
    curve = [
        {"env_steps": done, "seconds": at} | ({"return": row["return"]} if "return" in row else {})
        for row, done, at in zip(rows, accumulate(steps), accumulate(spent), strict=True)
    ]
    return {"env_steps_per_s": sum(steps[1:]) / sum(spent[1:]), "seconds": seconds, "curve": curve}


def theirs(cfg: Any, subprocesses: bool, seed: int) -> dict[str, Any]:
    """One training by Stable-Baselines3 with the recipe's settings."""
    metaworld = cfg.env.name == "metaworld"
    settings = {
        "metaworld": metaworld,
        "id": cfg.env.task if metaworld else cfg.env.id,
        "limit": cfg.env.max_episode_steps,
        "num_envs": cfg.num_envs,
        "subprocesses": subprocesses,
        "normalise": cfg.model.normalise_observations,
        "rollout_steps": cfg.rollout_steps,
        "minibatch_size": cfg.algorithm.minibatch_size,
        "epochs": cfg.algorithm.epochs,
        "gamma": cfg.algorithm.gamma,
        "lam": cfg.algorithm.lam,
        "lr": cfg.trainer.lr,
        "linear": cfg.trainer.schedule == "linear",
        "hidden": list(cfg.model.hidden),
        "log_std_init": cfg.model.log_std_init,
        "num_steps": cfg.num_steps,
        "seed": seed,
    }
    command = [sys.executable, str(Path(__file__).with_name("_sb3_run.py")), json.dumps(settings)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    args = common.arguments(
        __doc__ or "",
        ("--rounds", {"type": int, "default": 5}),
        ("--only", {"default": "", "help": "cases whose name has this in it"}),
        ("overrides", {"nargs": "*", "help": "key=value given to every run"}),
    )
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for case in [case for case in CASES if args.only.lower() in case.lower()]:
        recipe, own, steps = CASES[case]
        overrides = [f"num_steps={steps}", *own, *args.overrides]
        cfg = compose(recipe, overrides)
        runs = found[case] = {"RLinf": [], **{peer: [] for peer in PEERS}}
        for number in range(args.rounds):
            runs["RLinf"].append(ours(recipe, overrides, number))
            for peer, subprocesses in PEERS.items():
                runs[peer].append(theirs(cfg, subprocesses, number))
            print(
                f"{case}, round {number}: " + ", ".join(f"{k} {v[-1]['env_steps_per_s']:.0f}" for k, v in runs.items()),
                flush=True,
            )
    lines, wrong = [], []
    for case, runs in found.items():
        rates = {name: [one["env_steps_per_s"] for one in many] for name, many in runs.items()}
        best = max(PEERS, key=lambda peer: statistics.median(rates[peer]))
        ratios = [a / b for a, b in zip(rates["RLinf"], rates[best], strict=True)]
        lines.append([case, *(common.spread(rates[name]) for name in ("RLinf", *PEERS)), f"{common.spread(ratios)}×"])
        if statistics.median(ratios) < 1.0:
            wrong.append(f"{case}: {statistics.median(ratios):.2f} times {best}")
    text = (
        "Environment steps per second of training (rollout and update), median (least-most).\n\n"
        + common.table(["case", "RLinf", *PEERS, "against the better one"], lines)
        + "\n![return of training episodes](curves.png)\n"
    )
    plot(found, args.out / "curves.png")
    common.write(args.out, "Beside Stable-Baselines3", text, found)
    if wrong:
        raise SystemExit("\n".join(wrong))


def plot(found: dict[str, dict[str, list[dict[str, Any]]]], path: Path) -> None:
    """Return of training episodes over environment steps: the median over rounds, and each round faintly."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * len(found), 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(found), squeeze=False)[0]
    for axis, (case, runs) in zip(axes, found.items(), strict=True):
        for place, (name, many) in enumerate(runs.items()):
            by_steps: dict[float, list[float]] = {}
            for one in many:
                points = [(row["env_steps"], row["return"]) for row in one["curve"] if "return" in row]
                axis.plot(*zip(*points, strict=True), color=f"C{place}", alpha=0.2, linewidth=0.8)
                for steps, value in points:
                    by_steps.setdefault(steps, []).append(value)
            middle = sorted((steps, statistics.median(values)) for steps, values in by_steps.items())
            axis.plot(*zip(*middle, strict=True), color=f"C{place}", label=name, linewidth=1.6)
        axis.set_title(case, fontsize=10)
        axis.set_xlabel("environment steps")
        axis.set_ylabel("return of training episodes")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
