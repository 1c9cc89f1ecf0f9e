"""GRPO on arithmetic: a small language model learns to add, from right and wrong answers alone.

    rlinf run reasoning/grpo_arithmetic
    rlinf run reasoning/grpo_arithmetic plan=spatial rollout=vllm task=jsonl task.path=problems.jsonl reward=math

After DeepSeekMath (arXiv 2402.03300), with these departures:

- The policy starts from a short supervised warm start (``warm_start``) instead of an instruction-tuned model.
- No KL penalty by default (``algorithm.kl_coef=0``); with one, the reference is the policy after the warm start.
- The loss is averaged over the tokens of the batch, as in DAPO (``algorithm.aggregation=token_mean``); the paper
  averages over each response first (``sequence_mean_of_token_means``).
- Two optimizer steps per batch (``algorithm.minibatches``), and the importance ratio is taken against the rollout
  engine's own log-probs, so that it also covers the engine's numerical differences.
"""

from __future__ import annotations

from typing import Any

from rlinf_core import Flow
from rlinf_reasoning.tasks.base import load_data
from rlinf_reasoning.workers import Actor, Generator, Reward


def grpo_arithmetic(flow: Flow, cfg: Any) -> None:
    data = load_data(cfg)
    generator = flow.group("generator", Generator, cfg)
    reward = flow.group("reward", Reward, cfg)
    actor = flow.group("actor", Actor, cfg, barrier=Actor.barrier_of(cfg))

    def evaluate(when: str) -> None:
        """Greedy accuracy on problems that no phase trains on."""
        for step in flow.steps(1, name="evaluate"):
            prompts, samples = step.channels("prompts", "samples")
            step.feed(prompts, data.eval_prompts())
            generator.generate(prompts, samples)
            step.report(reward.evaluate(samples))
            flow.record(when, step.join())

    def save(steps_done: int) -> None:
        for step in flow.steps(1, name="save"):
            actor.save_checkpoint(steps_done)
            actor.export()
            step.join()

    for step in flow.steps(1, name="warm_start"):
        step.report(actor.warm_start(data.warm_start_prompts()))
        actor.publish_weights(to=generator)
        flow.record("warm_start", step.join())
    evaluate("before")

    for step in flow.steps(cfg.num_steps, max_staleness=cfg.algorithm.max_staleness):
        prompts, samples, scored = step.channels("prompts", "samples", "scored")
        step.feed(prompts, data.batch(step.index))
        generator.generate(prompts, samples)
        step.report(reward.score(samples, scored))
        step.report(actor.train(scored))
        actor.publish_weights(to=generator)
        step.join()
        if flow.every(step, cfg.eval.every) and not step.last:
            evaluate(f"step {step.index + 1}")
        if flow.every(step, cfg.checkpoint.every) and not step.last:
            save(step.index + 1)

    evaluate("after")
    save(cfg.num_steps)
