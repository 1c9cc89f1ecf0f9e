"""One training by Stable-Baselines3's PPO for ``evidence/against_sb3.py``: settings in as JSON, figures out."""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

import gymnasium as gym
import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv, VecNormalize


def make_env(settings: dict[str, Any], index: int) -> Any:
    def make() -> Any:
        if settings["metaworld"]:
            import metaworld  # noqa: F401 - registers the ids

            env = gym.make("Meta-World/MT1", env_name=settings["id"], seed=1000 * settings["seed"] + index)
            bare: Any = env.unwrapped
            # As in ours: the goal is in the observation, and another one in every episode.
            bare._partially_observable = bare._freeze_rand_vec = False
            bare.seeded_rand_vec = bare._set_task_called = True
            bare.__dict__.pop("sawyer_observation_space", None)
            bare.seed(1000 * settings["seed"] + index)
            env = gym.wrappers.TimeLimit(bare, settings["limit"])
        else:
            env = gym.make(settings["id"])
        return Monitor(env, info_keywords=("success",) if settings["metaworld"] else ())

    return make


class Curve(BaseCallback):
    """When each update begins, and what the episodes since the last one came to."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, float]] = []
        self._returns: list[float] = []
        self.began = 0.0

    def _on_training_start(self) -> None:
        self.began = time.perf_counter()

    def _on_step(self) -> bool:
        self._returns += [info["episode"]["r"] for info in self.locals["infos"] if "episode" in info]
        return True

    def _on_rollout_end(self) -> None:
        row = {"env_steps": float(self.num_timesteps), "seconds": time.perf_counter() - self.began}
        if self._returns:
            row["return"] = statistics.mean(self._returns)
        self.rows.append(row)
        self._returns = []


def main() -> None:
    settings = json.loads(sys.argv[1])
    torch.set_num_threads(1)  # the faster setting for networks of this size
    envs = settings["num_envs"]
    kind = SubprocVecEnv if settings["subprocesses"] else DummyVecEnv
    vector: Any = kind([make_env(settings, index) for index in range(envs)])
    if settings["normalise"]:
        vector = VecNormalize(vector, gamma=settings["gamma"])
    lr = settings["lr"]
    model = PPO(
        "MlpPolicy",
        vector,
        learning_rate=(lambda left: lr * left) if settings["linear"] else lr,
        n_steps=settings["rollout_steps"],
        batch_size=settings["minibatch_size"],
        n_epochs=settings["epochs"],
        gamma=settings["gamma"],
        gae_lambda=settings["lam"],
        clip_range=0.2,
        ent_coef=0.0,
        vf_coef=0.5,
        max_grad_norm=0.5,
        policy_kwargs={"net_arch": settings["hidden"], "log_std_init": settings["log_std_init"]},
        seed=settings["seed"],
        device="cpu",
    )
    curve = Curve()
    began = time.perf_counter()
    model.learn(settings["num_steps"] * settings["rollout_steps"] * envs, callback=curve)
    seconds = time.perf_counter() - began
    # Without the first step, which also pays for what is loaded lazily: as with ours.
    rest = curve.rows[-1]["env_steps"] - curve.rows[0]["env_steps"]
    rate = rest / (curve.rows[-1]["seconds"] - curve.rows[0]["seconds"])
    vector.close()
    print(json.dumps({"env_steps_per_s": rate, "seconds": seconds, "curve": curve.rows}))


if __name__ == "__main__":
    main()
