"""Response tokens per second of the rollout backends in the main job, runs interleaved."""

from __future__ import annotations

import statistics

import _common as common

RECIPE = "reasoning/grpo_arithmetic"


def main() -> None:
    args = common.arguments(__doc__ or "", ("--rounds", {"type": int, "default": 3}))
    speeds: dict[str, list[float]] = {"transformers": [], "vllm": []}
    for _ in range(args.rounds):
        for name, found in speeds.items():
            folder, _ = common.run_recipe(RECIPE, f"rollout={name}", "num_steps=10")
            steps = common.rows(folder, "train")[1:]  # the first compiles and warms caches
            found.append(statistics.median(row["response/tokens"] / row["time/generate_s"] for row in steps))
    lines = [[name, common.spread(found)] for name, found in speeds.items()]
    text = (
        f"64 prompts x 8 responses a step, two generator processes of one thread each; per run the median of 9 steps, "
        f"median (min-max) of {args.rounds} interleaved runs.\n\n"
        + common.table(["rollout", "response tokens/s"], lines)
    )
    common.write(args.out, "Rollout backends", text, speeds)


if __name__ == "__main__":
    main()
