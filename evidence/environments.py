"""Steps a second of the environment plugins, beside Stable-Baselines3's vector where it runs the same simulator, and
what a process of their own costs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import _common as common
import gymnasium
import numpy as np
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import DummyVecEnv

from rlinf_core.config.node import Config
from rlinf_embodied.envs import load_env

Step = Callable[[Any], Any]


def ours(name: str, count: int, **cfg: Any) -> Any:
    keys = {"max_episode_steps": None, "max_restarts": 0, "step_timeout_s": 60.0, "start_timeout_s": 300.0, **cfg}
    env = load_env(Config({"name": name, **keys}, "env"), range(count), 0)
    env.reset()
    return env


def theirs(make: Callable[[], Any], count: int) -> Any:
    env = DummyVecEnv([make] * count)
    env.reset()
    return env


def random_actions(env: Any, steps: int) -> list[Any]:
    """The same for ours and theirs, whatever they are asked through."""
    rng = np.random.default_rng(0)
    space, count = env.spec.action, env.num_envs
    if hasattr(space, "n"):
        return list(rng.integers(0, space.n, (steps, count)))
    low, high = np.maximum(space.low, -1.0), np.minimum(space.high, 1.0)
    return list(rng.uniform(low, high, (steps, count, *space.shape)).astype(np.float32))


def microseconds(step: Callable[[], None], steps: int, clock: Callable[[], float]) -> float:
    began = clock()
    step()
    return (clock() - began) / steps * 1e6


def driven(env: Any, actions: Sequence[Any]) -> Callable[[], None]:
    def run() -> None:
        for action in actions:
            env.step(action)

    return run


def balanced(env: Any, steps: int) -> Callable[[], None]:
    """CartPole with a controller that keeps the pole up, so that episodes have 500 steps and resets are rare."""

    def run() -> None:
        for _ in range(steps):
            obs = env.last
            found = env.step(((obs[:, 2] + 0.5 * obs[:, 3] + 0.1 * obs[:, 1] + 0.02 * obs[:, 0]) > 0).astype(np.int64))
            env.last = found[0] if isinstance(found, tuple) else found.obs["state"]

    return run


def compare(
    contenders: dict[str, Callable[[], None]], steps: int, rounds: int, clock: Callable[[], float] = time.process_time
) -> dict[str, list[float]]:
    """Microseconds for a step of the vector, rounds interleaved; of the processor, which others do not disturb, where
    all is done in this process."""
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for run in contenders.values():
        run()
    for _ in range(rounds):
        for name, run in contenders.items():
            found[name].append(microseconds(run, steps, clock))
    return found


class Remembers:
    """Keeps the last observation, for the controller."""

    def __init__(self, env: Any) -> None:
        self.env = env
        first = env.reset()
        self.last = first["state"] if isinstance(first, dict) else first

    def step(self, actions: Any) -> Any:
        return self.env.step(actions)


def cartpole(count: int, steps: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    bare = {"disable_env_checker": True}
    peers = {
        "DummyVecEnv, gymnasium's checks off": lambda: theirs(lambda: gymnasium.make("CartPole-v1", **bare), count),
        "DummyVecEnv": lambda: theirs(lambda: gymnasium.make("CartPole-v1"), count),
        "make_vec_env (with its Monitor)": lambda: make_vec_env("CartPole-v1", count),
    }
    mine = ours("gymnasium", count, id="CartPole-v1")
    actions = random_actions(mine, steps)
    result = {}
    contenders = {"ours": driven(mine, actions)}
    for name, peer in peers.items():
        env = peer()
        env.reset()
        contenders[name] = driven(env, actions)
    result["CartPole, random actions"] = compare(contenders, steps, rounds)
    contenders = {"ours": balanced(Remembers(ours("gymnasium", count, id="CartPole-v1")), steps)}
    contenders |= {name: balanced(Remembers(peer()), steps) for name, peer in peers.items()}
    result["CartPole, kept upright"] = compare(contenders, steps, rounds)
    isolated = {"in the worker's process": driven(ours("gymnasium", count, id="CartPole-v1"), actions)}
    made = []
    for processes in (1, 2):
        made.append(ours("gymnasium", count, id="CartPole-v1", isolate=True, processes=processes))
        isolated[f"in {processes} of their own"] = driven(made[-1], actions)
    result["CartPole, processes of their own"] = compare(isolated, steps, rounds, time.perf_counter)
    for env in made:
        env.close()
    return result


def others(count: int, rounds: int, names: Sequence[str]) -> dict[str, dict[str, list[float]]]:
    result = {}
    if "reacher" in names:
        mine = ours("gymnasium", count, id="Reacher-v5")
        peer = theirs(lambda: gymnasium.make("Reacher-v5", disable_env_checker=True), count)
        actions = random_actions(mine, 500)
        pair = {"ours": driven(mine, actions), "DummyVecEnv, gymnasium's checks off": driven(peer, actions)}
        result["Reacher (MuJoCo)"] = compare(pair, 500, rounds)
    if "metaworld" in names:
        import metaworld  # noqa: F401 - registers its ids

        mine = ours("metaworld", count, task="reach-v3", max_episode_steps=150)
        peer = theirs(
            lambda: gymnasium.make(
                "Meta-World/MT1", env_name="reach-v3", max_episode_steps=150, disable_env_checker=True
            ),
            count,
        )
        actions = random_actions(mine, 150)
        pair = {"ours": driven(mine, actions), "DummyVecEnv, gymnasium's checks off": driven(peer, actions)}
        result["MetaWorld reach-v3"] = compare(pair, 150, rounds)
    for task in ("PushCube-v1", "PickCube-v1") if "maniskill" in names else ():
        keys = {"task": task, "control_mode": "pd_ee_delta_pos", "reward_mode": "normalized_dense", "device": "cpu"}
        mine = ours("maniskill", count, **keys)
        result[f"ManiSkill {task}"] = compare({"ours": driven(mine, random_actions(mine, 50))}, 50, rounds)
    return result


def main() -> None:
    args = common.arguments(
        __doc__ or "",
        ("--rounds", {"type": int, "default": 9}),
        ("--steps", {"type": int, "default": 2000}),
        ("--envs", {"type": int, "default": 8}),
        ("--only", {"nargs": "*", "default": ["cartpole", "reacher", "metaworld", "maniskill"]}),
    )
    data = cartpole(args.envs, args.steps, args.rounds) if "cartpole" in args.only else {}
    data |= others(args.envs, args.rounds, args.only)
    lines = []
    for case, contenders in data.items():
        base = next(iter(contenders.values()))
        for name, found in contenders.items():
            ratios = [them / us for them, us in zip(found, base, strict=True)]
            rate = args.envs / float(np.median(found)) * 1e6
            lines.append([case, name, common.spread(found), f"{rate:.0f}", common.spread(ratios)])
    text = (
        f"{args.envs} environments in one vector, one thread; {args.rounds} rounds in turn, after one that is not "
        "counted. Microseconds for a step of the vector (of the processor; of the clock for processes of their own) "
        "and their ratio to the first contender's of the same round: median (min-max).\n\n"
        + common.table(["case", "contender", "microseconds", "environment steps/s", "ratio to the first"], lines)
    )
    common.write(args.out, "Environments: steps a second", text, data)


if __name__ == "__main__":
    main()
