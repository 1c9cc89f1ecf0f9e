"""How evenly the three ways of dealing a channel's items spread long-tailed work over ranks: simulated, and one run."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import _balance_recipe as real
import _common as common
import numpy as np

from rlinf_core.board.dealing import DealtQueue
from rlinf_core.board.entries import Entry, Want
from rlinf_core.board.events import ANY, Deal
from rlinf_core.board.portions import fair_parts

RANKS = (2, 4, 8, 32)
ITEMS_A_RANK = 32
NOISE = 0.5
"""Standard deviation of the logarithm of a guessed length over the true one."""
LOAD = 0.9
"""Offered load where items come one by one: their length in a second over what all ranks can do in it."""
COLOURS = ("#2563a8", "#7fa8d6", "#3f8f5f", "#d9730d", "#7a5ea8", "#b04a5a")

Lengths = Any
Split = list[list[int]]


# ------------------------------------------------------------------ lengths, with mean 1


def lognormal(rng: Any, count: int) -> Lengths:
    return rng.lognormal(-0.5, 1.0, count)


def pareto(rng: Any, count: int) -> Lengths:
    """Index 1.5, cut at 30 times the shortest, as a limit of tokens does."""
    drawn = np.minimum((1.0 - rng.random(count)) ** (-1 / 1.5), 30.0)
    return drawn / 2.635  # its mean: 3 - 2 / sqrt(30)


def bimodal(rng: Any, count: int) -> Lengths:
    """One in ten is ten times as long."""
    return np.where(rng.random(count) < 0.1, 10.0, 1.0) / 1.9


DISTRIBUTIONS: dict[str, Callable[[Any, int], Lengths]] = {
    "log-normal (σ = 1)": lognormal,
    "Pareto (α = 1.5, cut)": pareto,
    "bimodal (10 % × 10)": bimodal,
}


# ------------------------------------------------------------------ who gets what: by the code that is shipped


def dealt(deal: Deal, weights: Sequence[float], ranks: int) -> Split:
    queue = DealtQueue("items", "ranks", ranks, deal, "item", None)
    for uid, entry in enumerate(entries(weights)):
        entry.uid = uid
        queue.add(entry)
    queue.finish()
    shares: Split = []
    for rank in range(ranks):
        taken = queue.take(Want(rank, rank, "items", len(weights), key=ANY))
        shares.append([entry.uid for entry in taken] if isinstance(taken, tuple) else [])
    return shares


def parts(weights: Sequence[float], ranks: int) -> Split:
    """``batches()`` of a shared channel when the plan moves everything at once."""
    atoms = [(entry,) for entry in entries(weights)]
    return [[atom[0].uid for atom in part] for part in fair_parts(atoms, ranks)]


def entries(weights: Sequence[float]) -> list[Entry]:
    return [Entry(uid, (), None, float(weight), (), None, 1) for uid, weight in enumerate(weights)]


# ------------------------------------------------------------------ when who is done


def on_demand(lengths: Lengths, arrivals: Lengths, ranks: int, portion: int = 1) -> tuple[Lengths, float]:
    """Ranks that take ``portion`` items from one queue whenever they are free; returns work by rank and the end."""
    free, work = np.zeros(ranks), np.zeros(ranks)
    for start in range(0, len(lengths), portion):
        rank = int(free.argmin())
        size = float(lengths[start : start + portion].sum())
        began = max(free[rank], arrivals[min(start + portion, len(lengths)) - 1])
        free[rank] = began + size
        work[rank] += size
    return work, float(free.max())


def own_share(split: Split, lengths: Lengths, arrivals: Lengths) -> tuple[Lengths, float]:
    """Ranks that work through what was dealt to them, in order."""
    end = 0.0
    for share in split:
        now = 0.0
        for index in share:
            now = max(now, arrivals[index]) + lengths[index]
        end = max(end, now)
    return np.array([lengths[share].sum() if share else 0.0 for share in split]), end


WAYS = ("shared", "shared, portions of 8", "everything at once", "round_robin", "weight", "weight, guessed")
PLAIN_WAYS = {
    "shared": "`shared`, one at a time",
    "shared, portions of 8": "`shared`, `batches(8)`",
    "everything at once": "`shared`, everything at once (`batches()` of such a plan)",
    "round_robin": "`round_robin`; also `weight` without weights",
    "weight": "`weight`, lengths known",
    "weight, guessed": "`weight`, lengths guessed",
}


def simulate(draw: Callable[[Any, int], Lengths], ranks: int, seed: int) -> dict[str, dict[str, float]]:
    rng = np.random.default_rng(seed)
    count = ranks * ITEMS_A_RANK
    lengths = draw(rng, count)
    guesses = lengths * np.exp(rng.normal(0.0, NOISE, count))
    at_once = np.zeros(count)
    one_by_one = np.cumsum(rng.exponential(1 / (LOAD * ranks), count))
    splits = {
        "everything at once": parts(lengths, ranks),
        "round_robin": dealt("round_robin", lengths, ranks),
        "weight": dealt("weight", lengths, ranks),
        "weight, guessed": dealt("weight", guesses, ranks),
    }
    found: dict[str, dict[str, float]] = {}
    for way in WAYS:
        seen: dict[str, float] = {}
        for name, arrivals in (("there", at_once), ("stream", one_by_one)):
            if way in splits:
                late = np.full(count, arrivals[-1]) if way == "everything at once" else arrivals
                work, end = own_share(splits[way], lengths, late)
            else:
                work, end = on_demand(lengths, arrivals, ranks, 8 if "8" in way else 1)
            seen[f"imbalance_{name}"] = float(work.max() / work.mean())
            seen[f"idle_{name}"] = float(1 - work.sum() / (ranks * end))
        found[way] = seen
    return found


# ------------------------------------------------------------------ one real run


def measure(way: str, deal: str, noise: float) -> dict[str, Any]:
    """The recipe of ``_balance_recipe.py`` in threads; imbalance of the measured work, and what is predicted for it."""
    folder, _ = common.run_recipe(
        str(Path(real.__file__)), f"channels.deals.items={deal}", f"noise={noise}", "cluster.debug=true"
    )
    measured, predicted, counts = [], [], []
    for step, row in enumerate(common.rows(folder, "train")):
        work = [row[f"work/{rank}"] for rank in range(real.RANKS)]
        measured.append(max(work) / statistics.fmean(work))
        counts.append([int(row[f"items/{rank}"]) for rank in range(real.RANKS)])
        lengths = real.lengths(step, real.RANKS * real.ITEMS_A_RANK)
        guesses = lengths * np.exp(np.random.default_rng(1000 + step).normal(0.0, noise, len(lengths)))
        nothing = np.zeros(len(lengths))
        if deal == "shared":
            work, _ = on_demand(lengths, nothing, real.RANKS)
        else:
            split = dealt("weight" if deal == "weight" else "round_robin", guesses, real.RANKS)
            work, _ = own_share(split, lengths, nothing)
            if [len(share) for share in split] != counts[-1]:
                raise SystemExit(f"{way}, step {step}: dealt {counts[-1]} items, the simulation {split}")
        predicted.append(float(max(work) / np.mean(work)))
    return {"measured": measured, "predicted": predicted, "items": counts}


# ------------------------------------------------------------------ the page


def main() -> None:
    args = common.arguments(__doc__ or "", ("--seeds", {"type": int, "default": 100}))
    data: dict[str, Any] = {}
    for name, draw in DISTRIBUTIONS.items():
        for ranks in RANKS:
            runs = [simulate(draw, ranks, seed) for seed in range(args.seeds)]
            data[f"{name}, {ranks} ranks"] = {
                way: {key: [run[way][key] for run in runs] for key in runs[0][way]} for way in WAYS
            }
    measured = {
        way: measure(way, deal, noise)
        for way, deal, noise in (
            ("shared", "shared", 0.0),
            ("round_robin", "round_robin", 0.0),
            ("weight", "weight", 0.0),
            ("weight, guessed", "weight", NOISE),
        )
    }
    text = page(data, measured, args.seeds)
    chart(data, args.out / "balance.png")
    brief = {
        case: {
            way: {key: [float(np.median(v)), *map(float, np.percentile(v, [10, 90]))] for key, v in seen.items()}
            for way, seen in ways.items()
        }
        for case, ways in data.items()
    }
    about = {"seeds": args.seeds, "items_a_rank": ITEMS_A_RANK, "noise": NOISE, "load": LOAD}
    common.write(args.out, "Balanced dequeue", text, {**about, "median_p10_p90": brief, "run": measured})
    check(data)


def page(data: dict[str, Any], measured: dict[str, Any], seeds: int) -> str:
    text = (
        f"Each rank takes as long as an item's true length; {ITEMS_A_RANK} items a rank, {seeds} seeds. Imbalance is "
        "the work of the busiest rank over the mean (1 is best). Which rank gets what is decided by the shipped code. "
        f"A guessed length is the true one times e^N(0, {NOISE}²): half of the guesses are off by more than "
        f"{np.exp(0.6745 * NOISE):.2g} ×.\n\n![imbalance](balance.png)\n\n"
        "## All items are there\n\nImbalance, median (90th percentile). The share of time that ranks are idle is "
        "1 − 1 / imbalance.\n\n"
    )
    for name in DISTRIBUTIONS:
        lines = [
            [PLAIN_WAYS[w], *(cell(data[f"{name}, {r} ranks"][w]["imbalance_there"]) for r in RANKS)] for w in WAYS
        ]
        text += common.table([name, *(f"{ranks} ranks" for ranks in RANKS)], lines) + "\n"
    text += (
        f"## Items come one by one\n\nA Poisson stream that offers {LOAD:.0%} of what the ranks can do: idle share "
        "until the last item is done, median (90th percentile). Some of it is the load's and the last item's; no "
        "dealing can avoid that.\n\n"
    )
    for name in DISTRIBUTIONS:
        lines = [
            [PLAIN_WAYS[w], *(cell(data[f"{name}, {r} ranks"][w]["idle_stream"], "%") for r in RANKS)] for w in WAYS
        ]
        text += common.table([name, *(f"{ranks} ranks" for ranks in RANKS)], lines) + "\n"
    lines = [
        [PLAIN_WAYS[way], common.spread(run["measured"]), common.spread(run["predicted"])]
        for way, run in measured.items()
    ]
    return (
        text
        + f"## One real run\n\n`cluster.debug=true`, {real.RANKS} ranks, {real.ITEMS_A_RANK} log-normal items each, "
        f"waits of 10 ms on average, {len(measured['shared']['measured'])} steps: imbalance of the measured time, and "
        "what the simulation says for the same lengths; median (min-max). A wait takes a little longer than asked for, "
        "each by about as much, which makes the measured work more even than the lengths are.\n\n"
        + common.table(["dealing", "measured", "simulated"], lines)
        + "\n## Reading\n\n"
        + reading(data)
    )


def reading(data: dict[str, Any]) -> str:
    def worst(way: str) -> str:
        return f"{max(float(np.median(ways[way]['imbalance_there'])) for ways in data.values()):.2f}"

    return (
        "In brackets the largest median of the first tables.\n\n"
        f"- `shared` needs no weights and keeps everybody at work ({worst('shared')}): what is left over is a "
        f"long item that is begun late. That is for ranks that take one item at a time; with `batches(8)` it is "
        f"{worst('shared, portions of 8')}. Who gets what depends on timing.\n"
        f"- `weight` with known lengths is the same ({worst('weight')}): the rank with least weight so far is the one "
        "that will be free first. It is so whatever the portion, and who gets what depends on the items alone. With "
        f"guesses ({worst('weight, guessed')}) it keeps about half of what it gains over `round_robin`.\n"
        f"- `round_robin` ({worst('round_robin')}) is for items of about one length, or for a split to be foretold.\n"
        "- Where the plan moves everything at once, a shared channel's parts are the most even "
        f"({worst('everything at once')}), since all weights are seen before anything is dealt. Items of a stream "
        "wait for that until the last one is there.\n"
    )


def cell(values: Sequence[float], unit: str = "") -> str:
    median, high = float(np.median(values)), float(np.percentile(values, 90))
    return f"{median:.1%} ({high:.1%})" if unit else f"{median:.2f} ({high:.2f})"


def chart(data: dict[str, Any], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 3.6), dpi=120, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(DISTRIBUTIONS), sharey=True)
    for axes, name in zip(panels, DISTRIBUTIONS, strict=True):
        for colour, way in zip(COLOURS, WAYS, strict=True):
            rows = [data[f"{name}, {ranks} ranks"][way]["imbalance_there"] for ranks in RANKS]
            style: dict[str, Any] = {"ls": "--", "zorder": 5} if way == "shared" else {}  # it lies on that of weight
            axes.plot(RANKS, [np.median(r) for r in rows], marker="o", color=colour, markersize=4, label=way, **style)
            low, high = ([np.percentile(row, q) for row in rows] for q in (10, 90))
            axes.fill_between(RANKS, low, high, color=colour, alpha=0.12, linewidth=0)
        axes.set_xscale("log", base=2)
        axes.set_xticks(RANKS, [str(ranks) for ranks in RANKS])
        axes.set(title=name, xlabel="ranks")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("busiest rank's work over the mean")
    panels[0].set_ylim(bottom=1.0)
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False, fontsize=8
    )
    figure.savefig(path)


def check(data: dict[str, Any]) -> None:
    """What the documentation claims."""
    for case, ways in data.items():
        median = {way: float(np.median(seen["imbalance_there"])) for way, seen in ways.items()}
        if not median["everything at once"] <= median["weight"] + 1e-9 or not median["weight"] < median["round_robin"]:
            raise SystemExit(f"{case}: {median}")
        if not median["weight, guessed"] < median["round_robin"] or not median["shared"] < median["round_robin"]:
            raise SystemExit(f"{case}: {median}")


if __name__ == "__main__":
    main()
