"""GRPO on arithmetic: a small language model learns to add, from right and wrong answers alone.

    rlinf run reasoning/grpo_arithmetic
    rlinf run reasoning/grpo_arithmetic plan=spatial rollout=vllm task=jsonl task.path=problems.jsonl reward=math
    rlinf run reasoning/async_arithmetic plan=spatial

After DeepSeekMath (arXiv 2402.03300), with these departures:

- The policy starts from a short supervised warm start (``warm_start``) instead of an instruction-tuned model.
- No KL penalty by default (``algorithm.kl_coef=0``); with one, the reference is the policy after the warm start.
- The loss is averaged over the tokens of the batch, as in DAPO (``algorithm.aggregation=token_mean``); the paper
  averages over each response first (``sequence_mean_of_token_means``).
- Two optimizer steps per batch (``algorithm.minibatches``), and the importance ratio is taken against the rollout
  engine's own log-probs, so that it also covers the engine's numerical differences.

``reasoning/async_arithmetic`` is the same program with ``algorithm=async_ppo``: the next step's responses are drawn
while a step is trained (``max_staleness``), and the loss is decoupled PPO after AReaL (arXiv 2505.24298), which keeps
the ratio to the trainer's policy at the step's start apart from the weight of older samples. Departures: advantages by
group, without a critic, and the weight is clamped (``algorithm.behaviour_cap``) where AReaL drops the token.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from rlinf_core import Flow
from rlinf_reasoning.recipes import phases
from rlinf_reasoning.tasks.base import load_data
from rlinf_reasoning.workers import Actor, Generator, Reward


def grpo_arithmetic(flow: Flow, cfg: Any) -> None:
    data = load_data(cfg)
    generator = flow.group("generator", Generator, cfg)
    reward = flow.group("reward", Reward, cfg)
    actor = flow.group("actor", Actor, cfg, barrier=Actor.barrier_of(cfg))
    evaluate = partial(phases.evaluate, flow, cfg, data, generator, reward)

    if flow.resumed_steps:
        phases.load(flow, generator, actor)
    else:
        if cfg.warm_start.max_steps:
            for step in flow.steps(1, name="warm_start"):
                step.report(actor.warm_start(data.warm_start_prompts()))
                actor.publish_weights(to=generator)
                flow.record("warm_start", step.join())
        evaluate("before")

    staleness = cfg.algorithm.max_staleness
    for step in flow.steps(cfg.num_steps, start=flow.resumed_steps, max_staleness=staleness):
        prompts, samples, scored = step.channels("prompts", "samples", "scored")
        step.feed(prompts, data.batch(step.index))
        step.report(generator.generate(prompts, samples), reduce="sum")
        step.report(reward.score(samples, scored))
        step.report(actor.train(scored))
        actor.publish_weights(to=generator)
        step.join()
        phases.at_intervals(flow, cfg, step, evaluate, actor)

    evaluate("after")
    phases.save(flow, cfg.num_steps, actor)
