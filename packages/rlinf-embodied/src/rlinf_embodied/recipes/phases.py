"""What the recipes have in common: who decides, and the phases of beginning, evaluation and checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlinf_core import Flow
from rlinf_core.flow import ChannelRef, Group, Step
from rlinf_embodied.slots import evaluation_slots
from rlinf_embodied.workers import ActingSimulator, PolicyWorker, Simulator


def simulator_and_policy(flow: Flow, cfg: Any) -> tuple[Group, Group]:
    """The group that steps environments and the one that decides: one and the same with ``inference=local``."""
    if cfg.inference == "local":
        both = flow.group("simulator", ActingSimulator, cfg)
        return both, both
    return flow.group("simulator", Simulator, cfg), flow.group("policy", PolicyWorker, cfg)


def rollout(step: Step, simulator: Group, policy: Group, slots: ChannelRef, trajectories: ChannelRef) -> None:
    """The trajectory of each slot: simulators step environments as the policy decides."""
    if policy is simulator:
        step.report(simulator.rollout(slots, trajectories), reduce="sum")
        return
    observations, actions = step.channels("observations", "actions")
    step.report(simulator.rollout(slots, actions, observations, trajectories), reduce="sum")
    step.report(policy.act(observations, actions), reduce="sum")


def begin(flow: Flow, simulator: Group, policy: Group, actor: Group) -> None:
    """Build policy and trainer for the environments that the simulators have; in a run that goes on, from its
    checkpoint."""
    for step in flow.steps(1, name="describe"):
        simulator.describe()
        step.join()
    for step in flow.steps(1, name="begin"):
        policy.begin()
        actor.begin()
        if flow.resumed_steps:
            simulator.load_checkpoint(flow.resumed_path)
            actor.load_checkpoint(flow.resumed_path)
        actor.publish_weights(to=policy)
        step.join()


def evaluate(flow: Flow, cfg: Any, simulator: Group, policy: Group, scorer: Group, when: str) -> None:
    """``cfg.eval.episodes`` episodes in environments of their own, recorded under ``when``.

    Every episode is written to ``evaluations/<when>.jsonl``, ``cfg.eval.videos`` of them to ``<when>.mp4`` there.
    """
    for step in flow.steps(1, name="evaluate"):
        episodes = step.channels("episodes")
        slots = step.channel("slots", deal="round_robin")
        step.feed(slots, evaluation_slots(cfg))
        if policy is simulator:
            step.report(simulator.evaluate(slots, episodes), reduce="sum")
        else:
            observations, actions = step.channels("observations", "actions")
            step.report(simulator.evaluate(slots, actions, observations, episodes), reduce="sum")
            step.report(policy.act(observations, actions), reduce="sum")
        step.report(scorer.evaluate(episodes, when, cfg.eval.episodes))
        flow.record(when, step.join())


def at_intervals(
    flow: Flow, cfg: Any, step: Step, evaluate: Callable[[str], None], simulator: Group, actor: Group
) -> None:
    """After a joined training step, the last one left out: evaluate every ``cfg.eval.every`` steps, and save every
    ``cfg.checkpoint.every``, in this order, so that a checkpoint knows how good it is."""
    if flow.every(step, cfg.eval.every) and not step.last:
        evaluate(f"step {step.index + 1}")
    if flow.every(step, cfg.checkpoint.every) and not step.last:
        save(flow, step.index + 1, simulator, actor)


def save(flow: Flow, steps_done: int, simulator: Group, actor: Group) -> None:
    """A checkpoint of the trainer and of where environments are, and the policy as a directory ``export/``."""
    with flow.checkpoint(steps_done) as path:
        for step in flow.steps(1, name="save"):
            actor.save_checkpoint(path)
            simulator.save_checkpoint(path)
            actor.export()
            step.join()
