"""Two sub-batches of environments against one (``num_stages``) with the tiny vision-language-action policy, beside what
the measured times of stepping and inference allow.

What is checked: the median of the rounds is at least 1.3.
"""

from __future__ import annotations

import os
import statistics
from pathlib import Path

import _common as common
from embodied_plans import BLOCK, RECIPE, SEEN, SIM, STAGES, VLA, one_rollout, waiting

from rlinf_sched.cycles import round_seconds

SETTING = "the tiny VLA, inference-heavy"
ENVS, WAIT, WIDTH, LAYERS = 16, 0.012, 512, 6
STAGES[SETTING] = (
    RECIPE,
    [
        *(*BLOCK, *VLA, *SEEN, f"num_envs={ENVS}", "rollout_steps=8", *waiting(SIM, fixed=0.0, item=WAIT)),
        *(f"model.tiny.hidden_size={WIDTH}", f"model.tiny.layers={LAYERS}", "model.tiny.intermediate_size=1024"),
    ],
)
AIM = 1.3
Round = dict[str, dict[str, float]]


def turns(one: dict[str, float]) -> tuple[float, float, float]:
    """Milliseconds of a turn, a step and a decision in every environment, and of stepping and inference in it."""
    return 1e3 * one["rollout"] / one["turns"], 1e3 * one["stepping"], 1e3 * one["inference"]


def ratios(one: Round) -> dict[str, float]:
    """What two stages gain, and the most they could: if halves took half as long, and with the halves as measured."""
    whole, step, infer = turns(one["1"])
    halves, half_step, half_infer = turns(one["2"])
    return {
        "measured": whole / halves,
        "halves": (step + infer) / max(step, infer),
        "bound": (step + infer) / float(round_seconds(half_step, half_infer, 2)),
        "with_rest": whole / float(round_seconds(half_step, half_infer, 2, max(0.0, whole - step - infer))),
    }


def page(rounds: list[Round], load: list[float]) -> str:
    gains = [ratios(one) for one in rounds]
    lines = []
    for stages in ("1", "2"):
        times = list(zip(*(turns(one[stages]) for one in rounds), strict=True))
        rest = [turn - (step + infer) * int(stages) for turn, step, infer in zip(*times, strict=True)]
        cells = [common.spread(found) for found in times]
        lines.append([stages, cells[0], cells[1], cells[2], common.spread(rest) if stages == "1" else "overlap"])
    cases = {
        "measured": "measured",
        "halves": "bound, if halves took half as long: (s + i) / max(s, i)",
        "bound": "bound by the times of halves as measured: (s + i) / max(2 max(s', i'), s' + i')",
        "with_rest": "the same, with the rest of a turn in both",
    }
    table = [[text, common.spread([one[key] for one in gains])] for key, text in cases.items()]
    return (
        f"{ENVS} environments with pictures of 64 x 64 and an instruction, whose simulator waits for {1e3 * WAIT:g} ms "
        f"a step and environment; the policy (a language model of {LAYERS} layers, {WIDTH} wide) computes. Each has a "
        "device. With `num_stages=1` the simulator waits while the policy decides for all; with 2, one half is "
        f"stepped while the other is decided for. {len(rounds)} rounds, in each both in turn; median (min-max).\n\n"
        "Milliseconds of a turn, in which every environment is stepped once; s and i of one block (all "
        "environments, or a half).\n\n"
        + common.table(["stages", "turn", "stepping s", "inference i", "rest of the turn"], lines)
        + "\n"
        + common.table(["speed-up of two stages over one", "median (min-max)"], table)
        + f"\nAimed at: {AIM}. Load of the machine at begin and end: {load[0]:.1f} and {load[1]:.1f} on "
        f"{os.cpu_count()} cores.\n\n![turns of one and of two stages, and the bound](turns.png)\n"
    )


def plot(rounds: list[Round], path: Path) -> None:
    """A bar for the turn of one stage, made of its parts, one for two stages, and the bound as a line."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 2.6), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    one, two = ([turns(found[k]) for found in rounds] for k in ("1", "2"))
    whole, step, infer = (statistics.median(column) for column in zip(*one, strict=True))
    halves, half_step, half_infer = (statistics.median(column) for column in zip(*two, strict=True))
    left = 0.0
    for width, colour, label in (
        (step, "C0", "stepping"),
        (infer, "C1", "inference"),
        (max(0.0, whole - step - infer), "0.8", "rest of the turn"),
    ):
        axis.barh(1.0, width, 0.5, left, color=colour, label=label)
        left += width
    for number in range(2):  # the second half is stepped while the first is decided for, and the other way round
        axis.barh(0.12, half_step, 0.22, number * halves / 2, color="C0", alpha=1.0 - 0.4 * number)
        axis.barh(-0.12, half_infer, 0.22, ((1 - number) * halves) / 2, color="C1", alpha=1.0 - 0.4 * number)
    for place, found in ((1.0, [turn for turn, _, _ in one]), (0.0, [turn for turn, _, _ in two])):
        axis.plot(found, [place] * len(found), "k|", markersize=16, label="rounds" if place else None)
    bound = float(round_seconds(half_step, half_infer, 2))
    axis.axvline(bound, color="k", linestyle=":", linewidth=1, label="bound")
    axis.set_yticks([1.0, 0.0], ["one stage", "two stages"])
    axis.set_xlabel("ms of a turn (medians)")
    axis.legend(fontsize=7, ncols=2)
    figure.savefig(path, dpi=110)


def main() -> None:
    args = common.arguments(
        __doc__ or "",
        ("--rounds", {"type": int, "default": 5}),
        ("--steps", {"type": int, "default": 4, "help": "measured steps of a run"}),
        ("--ray", {"action": "store_true", "help": "a process for every stage, instead of threads of one"}),
    )
    load, rounds = [os.getloadavg()[0]], []
    for number in range(args.rounds):
        rounds.append({str(k): one_rollout(SETTING, k, args.steps, not args.ray) for k in (1, 2)})
        print(f"round {number + 1} of {args.rounds}: {ratios(rounds[-1])['measured']:.2f}", flush=True)
    load.append(os.getloadavg()[0])
    plot(rounds, args.out / "turns.png")
    common.write(args.out, "Two stages against one, tiny VLA", page(rounds, load), {"rounds": rounds, "load": load})
    found = statistics.median(ratios(one)["measured"] for one in rounds)
    if found < AIM:
        raise SystemExit(f"two stages are {found:.2f} times as fast, not {AIM}")


if __name__ == "__main__":
    main()
