"""GRPO of a pretrained language model on problems of your own, from a file with one problem a line.

    rlinf run reasoning/grpo_math model.path=MODEL task.path=problems.jsonl
    rlinf run reasoning/grpo_math model.path=MODEL task.path=problems.jsonl rollout=vllm trainer=deepspeed plan=spatial

Each line has a prompt (text or messages) and an answer; prompts go into the model's chat template, and what a response
says is compared with the answer by math-verify (``reward=math``). After DeepSeekMath (arXiv 2402.03300), with these
departures:

- No KL penalty by default (``algorithm.kl_coef=0``); with one, the reference is the model of ``model.path``.
- The loss is averaged over the tokens of the batch, as in DAPO (``algorithm.aggregation=token_mean``).
- Two optimizer steps per batch (``algorithm.minibatches``); the importance ratio is taken against the rollout engine's
  own log-probs (``algorithm.old_logprobs=recompute algorithm.correction=tis`` tells the two apart).
"""

from __future__ import annotations

from functools import partial
from typing import Any

from rlinf_core import Flow
from rlinf_reasoning.recipes import phases
from rlinf_reasoning.tasks.base import load_data
from rlinf_reasoning.workers import Actor, Generator, Reward


def grpo_math(flow: Flow, cfg: Any) -> None:
    data = load_data(cfg)
    generator = flow.group("generator", Generator, cfg)
    reward = flow.group("reward", Reward, cfg)
    actor = flow.group("actor", Actor, cfg, barrier=Actor.barrier_of(cfg))
    evaluate = partial(phases.evaluate, flow, cfg, data, generator, reward)

    if flow.resumed_steps:
        phases.load(flow, generator, actor)
    else:
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
