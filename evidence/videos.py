"""One tiled video of evaluated episodes for each simulator, as a recipe writes them, and a picture of each video.

Pages are put together from what is there: ``--only`` makes some videos anew and keeps the others.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import _common as common
import yaml

LIMIT = 1_000_000
"""Bytes that a video may have, so that a repository can hold it."""

CASES: dict[str, tuple[str, tuple[str, ...], str]] = {
    "gymnasium": (
        "embodied/ppo_cartpole",
        ("num_steps=100",),
        "CartPole-v1 after training: the pole is kept upright for 500 steps.",
    ),
    "metaworld": (
        "embodied/ppo_reach",
        ("num_steps=40",),
        "MetaWorld's reach-v3 after half the usual training: the gripper goes to the red ball.",
    ),
    "maniskill": (
        "embodied/ppo_pushcube",
        ("num_steps=60",),
        "ManiSkill's PushCube after training: the arm pushes the cube onto the target on the table, not always.",
    ),
    "libero": (
        "embodied/grpo_libero_vla",
        ("num_steps=1", "eval.num_envs=2", "env.max_episode_steps=100"),
        "Task 0 of LIBERO's spatial suite with the tiny vision-language-action policy, which has random weights.",
    ),
}


def make(name: str, episodes: int, out: Path, folder: Path | None = None) -> dict[str, Any]:
    """Run the recipe, or take the run that is in ``folder``; its video and a picture of it go to ``out``."""
    recipe, overrides, _ = CASES[name]
    if folder is None:
        folder, _ = common.run_recipe(recipe, *overrides, f"eval.episodes={episodes}", f"eval.videos={episodes}")
    after = {k: v for k, v in common.summary(folder)["after"].items() if not k.startswith("time")}
    video = out / f"{name}.mp4"
    shutil.copyfile(folder / "evaluations" / "after.mp4", video)
    return {
        "after": after,
        "steps": yaml.safe_load((folder / "config.yaml").read_text())["num_steps"],
        "bytes": video.stat().st_size,
        "frames": still(video, out / f"{name}.png"),
    }


def still(video: Path, picture: Path) -> int:
    """Keep the first, a middle and the last frame, one below the other; returns how many frames there are."""
    import imageio_ffmpeg
    import numpy as np
    from PIL import Image

    reader = imageio_ffmpeg.read_frames(str(video))
    width, height = next(reader)["size"]
    frames = [np.frombuffer(frame, np.uint8).reshape(height, width, 3) for frame in reader]
    strip = np.concatenate([frames[0], frames[len(frames) // 2], frames[-1]], axis=int(width <= height * 2))
    Image.fromarray(strip).quantize(128).save(picture, optimize=True)
    return len(frames)


def page(data: dict[str, Any]) -> str:
    header = ["simulator", "recipe", "training steps", "episodes", "return", "success once", "kB", "frames"]
    lines = [
        [
            f"[{name}]({name}.mp4)",
            f"`{CASES[name][0]}`",
            one["steps"],
            f"{one['after']['episodes']:.0f}",
            f"{one['after']['return']:.4g}",
            f"{one['after']['success_once']:.0%}",
            f"{one['bytes'] / 1000:.0f}",
            one["frames"],
        ]
        for name, one in data.items()
    ]
    text = (
        "Episodes of the evaluation after training, side by side: a border is green where the episode succeeded and "
        "red where it did not (CartPole knows no success), and an episode that is over darkens. Below, the first, a "
        "middle and the last frame of each.\n\n" + common.table(header, lines)
    )
    for name in data:
        text += f"\n## {name}\n\n{CASES[name][2]}\n\n![three frames of {name}.mp4]({name}.png)\n"
    return text


def main() -> None:
    args = common.arguments(
        __doc__ or "",
        ("--only", {"nargs": "+", "choices": list(CASES), "default": list(CASES)}),
        ("--episodes", {"type": int, "default": 4}),
        ("--libero-episodes", {"type": int, "default": 2, "help": "episodes of LIBERO, whose pictures take longest"}),
        ("--run", {"nargs": "+", "default": [], "help": "NAME=DIR: the video of a run that is there already"}),
    )
    there = dict(one.split("=", 1) for one in args.run)
    kept = args.out / "data.json"
    data = json.loads(kept.read_text()) if kept.exists() else {}
    for name in args.only:
        count = args.libero_episodes if name == "libero" else args.episodes
        data[name] = make(name, count, args.out, Path(there[name]) if name in there else None)
    data = {name: data[name] for name in CASES if name in data}
    common.write(args.out, "Videos", page(data), data)
    if large := [name for name, one in data.items() if one["bytes"] > LIMIT]:
        raise SystemExit(f"larger than {LIMIT / 1e6:g} MB: {', '.join(large)}; take fewer episodes")


if __name__ == "__main__":
    main()
