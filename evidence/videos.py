"""One tiled video of evaluated episodes for each simulator, as a recipe writes them."""

from __future__ import annotations

import shutil
from typing import Any

import _common as common

CASES: dict[str, tuple[str, tuple[str, ...]]] = {
    "gymnasium": ("embodied/ppo_cartpole", ("num_steps=100",)),
    "metaworld": ("embodied/ppo_reach", ("num_steps=80",)),
    "maniskill": ("embodied/ppo_pushcube", ("num_steps=1",)),
    "libero": ("embodied/grpo_libero_vla", ("num_steps=1", "eval.episodes=2", "eval.videos=2")),
}


def main() -> None:
    args = common.arguments(
        __doc__ or "",
        ("--only", {"nargs": "+", "choices": list(CASES), "default": list(CASES)}),
        ("--episodes", {"type": int, "default": 9}),
    )
    lines: list[list[Any]] = []
    data = {}
    for name in args.only:
        recipe, overrides = CASES[name]
        count = str(args.episodes)
        folder, seconds = common.run_recipe(recipe, f"eval.episodes={count}", f"eval.videos={count}", *overrides)
        after = {k: v for k, v in common.summary(folder)["after"].items() if not k.startswith("time")}
        video = folder / "evaluations" / "after.mp4"
        shutil.copyfile(video, args.out / f"{name}.mp4")
        lines.append(
            [
                f"[{name}]({name}.mp4)",
                f"`{recipe}` {' '.join(overrides)}",
                f"{after['episodes']:.0f}",
                f"{after['return']:.4g}",
                f"{after['success_once']:.0%}",
                f"{video.stat().st_size / 1000:.0f}",
            ]
        )
        data[name] = {"after": after, "seconds": seconds, "bytes": video.stat().st_size}
    header = ["simulator", "recipe", "episodes", "return", "success once", "kB"]
    text = "Episodes of the evaluation after training, side by side.\n\n" + common.table(header, lines)
    common.write(args.out, "Videos", text, data)


if __name__ == "__main__":
    main()
