"""DAPO on arithmetic: GRPO that trains on groups with right and wrong answers alone, and draws until there are enough.

    rlinf run reasoning/dapo_arithmetic
    rlinf run reasoning/dapo_arithmetic plan=spatial algorithm.max_refills=8 algorithm.on_shortage=fail
    rlinf run reasoning/dapo_math model.path=MODEL task.path=problems.jsonl

After DAPO (arXiv 2503.14476): clip-higher (0.2 and 0.28), the loss averaged over the tokens of the batch, dynamic
sampling, and soft over-long punishment (``algorithm.overlong_cache``, ``overlong_filter``). Prompts, responses and
scores run in a cycle: the sampler draws new prompts for groups whose answers are all right or all wrong, and ends it.
Departures:

- The policy starts from a short supervised warm start instead of a pretrained model; ``reasoning/dapo_math`` is the
  same program with a pretrained model, problems of a file and no warm start.
- A step draws again in at most ``algorithm.max_refills`` rounds, of as many prompts as the groups so far suggest (the
  paper draws until the batch is full), and goes on with fewer groups after that (``algorithm.on_shortage``).
- New prompts are further training problems of the step's own random order, not those of the next batch: what a step
  trains on is a function of seed and step. Groups beyond those needed are dropped, where the paper may keep them.
- Two optimizer steps per batch (``algorithm.minibatches``; the paper: 16), and rewards of 0 and 1 instead of -1 and 1,
  which gives the same advantages.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from rlinf_core import Flow
from rlinf_reasoning.recipes import phases
from rlinf_reasoning.refill import candidates
from rlinf_reasoning.tasks.base import load_data
from rlinf_reasoning.workers import Actor, Generator, PromptSampler, Reward


def dapo_arithmetic(flow: Flow, cfg: Any) -> None:
    data = load_data(cfg)
    sampler = flow.group("sampler", PromptSampler, cfg)
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
        samples, scored, kept = step.channels("samples", "scored", "kept")
        prompts = step.channel("prompts", deal="round_robin")
        drawn = candidates(data, step.index, cfg.algorithm.max_refills)
        step.report(sampler.sample(drawn, scored, prompts, kept))
        step.report(generator.generate(prompts, samples), reduce="sum")
        step.report(reward.score(samples, scored))
        step.report(actor.train(kept))
        actor.publish_weights(to=generator)
        step.join()
        phases.at_intervals(flow, cfg, step, evaluate, actor)

    evaluate("after")
    phases.save(flow, cfg.num_steps, actor)
