"""What every simulator worker does, however it gets its decisions."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlinf_core import In, Out, Trajectory, Worker, task
from rlinf_core.errors import RLinfError
from rlinf_core.rundir import guard
from rlinf_embodied.data import Answered, Finished, Slot
from rlinf_embodied.envs import VectorEnv, load_env
from rlinf_embodied.slots import group_size_of
from rlinf_embodied.specfile import write_spec
from rlinf_embodied.workers.block import Block
from rlinf_embodied.workers.exchange import Exchange
from rlinf_embodied.workers.simulator_state import load_blocks, save_blocks
from rlinf_embodied.workers.trial import Trial


def sub_batches(envs: Sequence[int], portion: int | None, stages: int) -> list[list[int]]:
    """Environments of a rank cut into sub-batches: ``stages`` of about equal size or, where they are smaller, of
    ``portion`` each (the last may be smaller still)."""
    if not envs:
        return []
    if portion is not None and -(-len(envs) // portion) >= stages:
        return [list(envs[i : i + portion]) for i in range(0, len(envs), portion)]
    count = min(stages, len(envs))
    return [list(envs[k * len(envs) // count : (k + 1) * len(envs) // count]) for k in range(count)]


class Environments(Worker):
    """Steps ``cfg.num_envs`` environments of ``cfg.env``; environment i is at rank i mod n.

    Its subclasses give the tasks of a rollout and of an evaluation. Reads ``cfg.env``, ``cfg.num_envs``,
    ``cfg.num_stages``, ``cfg.rollout_steps`` and ``cfg.eval``.
    """

    @classmethod
    def check_ranks(cls, cfg: Any, ranks: int) -> str:
        parts = ranks * cfg.num_stages
        if cfg.num_envs % parts == 0:
            return ""
        more = -(-cfg.num_envs // parts) * parts
        return (
            f"num_envs={cfg.num_envs} cannot be shared out over {ranks} rank{'s' if ranks > 1 else ''} × num_stages="
            f"{cfg.num_stages} sub-batches; give num_envs={more}, or another number of devices or stages"
        )

    def setup(self) -> None:
        self.mine = list(range(self.rank, self.cfg.num_envs, self.world_size))
        self.blocks: list[Block] = []
        self._trials: list[Trial] = []
        self._told_not_shown = False
        self._make_blocks(sub_batches(self.mine, None, self.cfg.num_stages))

    def teardown(self) -> None:
        for env in [part.env for part in self.blocks] + [part.env for part in self._trials]:
            env.close()

    @task
    def describe(self) -> None:
        """Write what the environments look like into the run directory, for policy and trainer."""
        if self.rank == 0:
            write_spec(self.run_dir, self.blocks[0].env.spec)

    @task
    def save_checkpoint(self, path: str) -> None:
        """Save below ``path`` where every environment is, so that a run that goes on does so from there. Nothing where
        every step begins new episodes."""
        if group_size_of(self.cfg) > 1:
            return
        folder = Path(path) / self.name
        with self.on_device(), guard(folder):
            save_blocks(folder, self.rank, self.blocks)

    @task
    def load_checkpoint(self, path: str) -> None:
        """Go on from what ``save_checkpoint`` saved. Where the environments are shared out otherwise now, they begin
        new episodes."""
        if group_size_of(self.cfg) > 1:
            return
        with self.on_device():
            problem = load_blocks(Path(path) / self.name, self.blocks, self._make_blocks, self.mine)
        if problem:
            self.log.warning(f"{problem}: environments begin new episodes")

    def _roll(self, slots: In[Slot], decisions: Exchange, trajectories: Out[Trajectory]) -> dict[str, float]:
        """A step of training; see ``Simulator.rollout``. Seconds of this rank: ``stepping`` and ``waiting``."""
        began = time.perf_counter()
        mine = {slot.env: slot for portion in slots.batches() for slot in portion}
        if list(mine) != self.mine:
            raise RLinfError(
                f"rank {self.rank} has environments {self.mine} and was given slots of {sorted(mine)}: deal the "
                'channel of slots "round_robin", in the order of the environments'
            )
        # One section: a wait for actions in it lets others have the devices, and gets them back with the actions.
        with self.on_device():
            if group_size_of(self.cfg) > 1 or not any(block.begun.any() for block in self.blocks):
                # Otherwise episodes are going on, which a plan that changes, or a run that goes on, must not break off.
                self._make_blocks(sub_batches(self.mine, decisions.portion, self.cfg.num_stages))
            for block in self.blocks:
                slots_of = [mine[env] for env in block.env.indices]
                decisions.ask(block.begin(slots_of, self.step_index, self.cfg.rollout_steps))
            stepping, waiting, found = self._step_all(decisions)
        trajectories.put_many(found)
        dropped = [(block.slots[row], why) for block in self.blocks for row, why in block.lost.items()]
        for slot, why in dropped:
            self.drop(slot, f"environment {slot.env} failed: {why}")
        steps = float(sum(block.made for block in self.blocks))
        return {
            "rollout/env_steps": steps,
            "rollout/env_steps_per_s": steps / (time.perf_counter() - began),
            "episodes/dropped": float(len(dropped)),
            "rollout/stepping_s": stepping / self.world_size,
            "rollout/waiting_s": waiting / self.world_size,
        }

    def _step_all(self, decisions: Exchange) -> tuple[float, float, list[Trajectory]]:
        """Do what is decided, block after block, until the step is done. Returns seconds of stepping and of waiting,
        and the trajectories."""
        stepping = waiting = 0.0
        finished: dict[int, Answered | None] = {}
        last: set[int] = set()
        clock = time.perf_counter
        while len(finished) < len(self.blocks):
            for number, block in enumerate(self.blocks):
                if number in finished:
                    continue
                at = clock()
                answer = decisions.answer(block.place)
                came = clock()
                waiting += came - at
                if number in last:
                    finished[number] = answer
                    continue
                question = block.advance(answer)
                stepping += clock() - came
                if question is None:
                    finished[number] = None
                    continue
                if not question.act:
                    last.add(number)
                decisions.ask(question)
        decisions.close()
        return (
            stepping,
            waiting,
            [t for number, block in enumerate(self.blocks) for t in block.finish(finished[number])],
        )

    def _play(self, slots: In[Slot], decisions: Exchange, episodes: Out[Finished]) -> dict[str, float]:
        """An evaluation; see ``Simulator.evaluate``."""
        waiting = deque(slot for portion in slots.batches() for slot in portion)
        dropped = 0
        with self.on_device():
            trials = self._trials_for(len(waiting), decisions.portion)
            running = {number: trial for number, trial in enumerate(trials)}
            for number, trial in enumerate(trials):
                question = trial.begin(waiting)
                if question is None:
                    del running[number]
                else:
                    decisions.ask(question)
            while running:
                for number, trial in list(running.items()):
                    question = trial.advance(decisions.answer(trial.place), waiting)
                    if done := trial.finished():
                        episodes.put_many(done)
                    for slot, why in trial.lost():
                        dropped += 1
                        self.drop(slot, f"evaluation episode {slot.env}: its simulator failed: {why}")
                    if question is None:
                        del running[number]
                    else:
                        decisions.ask(question)
            decisions.close()
        return {"episodes/dropped": float(dropped)}

    def _make_env(self, indices: Sequence[int], what: str = "") -> VectorEnv:
        return load_env(self.cfg.env, indices, self.seed, what=what)

    def _make_blocks(self, parts: list[list[int]]) -> None:
        """Have these sub-batches; nothing happens where they are there."""
        if [list(block.env.indices) for block in self.blocks] == parts:
            return
        for block in self.blocks:
            block.env.close()
        self.blocks.clear()
        for k, part in enumerate(parts):
            self.blocks.append(Block((self.rank, k), self._make_env(part)))

    def _not_shown(self, why: str) -> None:
        if self._told_not_shown:
            return
        self._told_not_shown = True
        self.log.warning(why)

    def _trials_for(self, episodes: int, portion: int | None) -> list[Trial]:
        """The environments for an evaluation with so many episodes at this rank."""
        wanted = self.cfg.eval.num_envs or self.cfg.num_envs
        mine = list(range(self.rank, wanted, self.world_size))[: max(1, episodes)]
        parts = sub_batches(mine, portion, self.cfg.num_stages)
        if [list(trial.env.indices) for trial in self._trials] != parts:
            for trial in self._trials:
                trial.env.close()
            self._trials = [
                Trial((self.rank, k), self._make_env(part, "evaluation"), self.cfg.eval, self._not_shown)
                for k, part in enumerate(parts)
            ]
        return self._trials
