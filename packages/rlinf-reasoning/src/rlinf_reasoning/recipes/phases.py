"""The phases that the recipes have in common: evaluation, checkpoints, and going on from one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlinf_core import Flow
from rlinf_core.flow import Group, Step
from rlinf_reasoning.tasks.base import PromptData


def evaluate(flow: Flow, cfg: Any, data: PromptData, generator: Group, reward: Group, when: str) -> Any:
    """Answer the problems that no phase trains on, ``cfg.eval.samples`` times each, and record how many are right.

    Every answer is written to ``evaluations/<when>.jsonl``. Returns the metrics (while traced: what cannot be read).
    """
    report: Any = None
    samples = cfg.eval.samples
    for step in flow.steps(1, name="evaluate"):
        prompts, answers = step.channels("prompts", "samples")
        step.feed(prompts, data.eval_prompts(samples=samples, greedy=cfg.eval.greedy))
        step.report(generator.generate(prompts, answers), reduce="sum")
        step.report(reward.evaluate(answers, when, len(data.eval) * samples))
        report = step.join()
        flow.record(when, report)
    return report


def at_intervals(
    flow: Flow, cfg: Any, step: Step, evaluate: Callable[[str], Any], actor: Group, *others: Group
) -> None:
    """After a joined training step, the last one left out: evaluate every ``cfg.eval.every`` steps, and ``save`` every
    ``cfg.checkpoint.every``, in this order, so that a checkpoint knows how good it is."""
    if flow.every(step, cfg.eval.every) and not step.last:
        evaluate(f"step {step.index + 1}")
    if flow.every(step, cfg.checkpoint.every) and not step.last:
        save(flow, step.index + 1, actor, *others)


def save(flow: Flow, steps_done: int, actor: Group, *others: Group) -> None:
    """A checkpoint of the actor (and others that learn), and the policy as a Hugging Face directory."""
    with flow.checkpoint(steps_done) as path:
        for step in flow.steps(1, name="save"):
            for group in (actor, *others):
                group.save_checkpoint(path)
            actor.export()
            step.join()


def load(flow: Flow, generator: Group, actor: Group, *others: Group) -> None:
    """Go on from the checkpoint that the run resumes: training state, and the policy for the generator."""
    for step in flow.steps(1, name="resume"):
        for group in (actor, *others):
            group.load_checkpoint(flow.resumed_path)
        actor.publish_weights(to=generator)
        step.join()
