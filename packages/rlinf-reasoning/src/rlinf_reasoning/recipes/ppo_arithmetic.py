"""PPO on arithmetic: a critic learns what a half-written answer is worth, and the policy learns from it.

    rlinf run reasoning/ppo_arithmetic
    rlinf run reasoning/ppo_arithmetic plan=spatial cluster.virtual_devices=3 algorithm.lam=0.95
    rlinf run reasoning/ppo_math model.path=MODEL task.path=problems.jsonl

After PPO (arXiv 1707.06347) as Open-Reasoner-Zero applies it to language models (arXiv 2503.24290): tokens are steps,
gamma = lambda = 1, advantages by GAE whitened over the batch, both losses clipped, no KL. The critic has the policy's
architecture with one number per position and is a group of its own (``critic``: keys of ``trainer`` that differ); it
learns alone for the first steps (``algorithm.critic_warmup_steps``). Departures:

- The policy starts from a short supervised warm start, and the critic from that policy; ``reasoning/ppo_math`` is the
  same program with a pretrained model, which both start from, problems of a file and no warm start.
- Two optimizer steps per batch (``algorithm.minibatches``) and one epoch.
- A response that the limit cuts off has value 0 after it (``algorithm.bootstrap_truncated``), as one that has ended.
- The importance ratio is taken against the rollout engine's own log-probs (``algorithm.old_logprobs``).
"""

from __future__ import annotations

from functools import partial
from typing import Any

from rlinf_core import Flow
from rlinf_reasoning.recipes import phases
from rlinf_reasoning.tasks.base import load_data
from rlinf_reasoning.workers import Actor, Critic, Generator, Reward


def ppo_arithmetic(flow: Flow, cfg: Any) -> None:
    data = load_data(cfg)
    generator = flow.group("generator", Generator, cfg)
    reward = flow.group("reward", Reward, cfg)
    critic = flow.group("critic", Critic, cfg, barrier=Critic.barrier_of(cfg))
    actor = flow.group("actor", Actor, cfg, barrier=Actor.barrier_of(cfg))
    kl_in_reward = cfg.algorithm.kl_coef > 0.0 and cfg.algorithm.kl_in == "reward"
    evaluate = partial(phases.evaluate, flow, cfg, data, generator, reward)

    if flow.resumed_steps:
        phases.load(flow, generator, actor, critic)
    else:
        if cfg.warm_start.max_steps:  # otherwise both begin as the model of the configuration
            for step in flow.steps(1, name="warm_start"):
                step.report(actor.warm_start(data.warm_start_prompts()))
                actor.export()
                actor.publish_weights(to=generator)
                flow.record("warm_start", step.join())
            for step in flow.steps(1, name="critic"):
                critic.begin(str(flow.run_dir / "export"))
                step.join()
        evaluate("before")

    staleness = cfg.algorithm.max_staleness
    for step in flow.steps(cfg.num_steps, start=flow.resumed_steps, max_staleness=staleness):
        prompts, samples, scored, valued = step.channels("prompts", "samples", "scored", "valued")
        step.feed(prompts, data.batch(step.index))
        step.report(generator.generate(prompts, samples), reduce="sum")
        step.report(reward.score(samples, scored))
        if kl_in_reward:  # the returns count it, so it must be known before both updates
            compared = step.channels("compared")
            actor.reference(scored, compared)
            scored = compared
        critic.value(scored, valued)
        step.report(actor.train(valued))
        step.report(critic.train(valued))
        actor.publish_weights(to=generator)
        step.join()
        phases.at_intervals(flow, cfg, step, evaluate, actor, critic)

    evaluate("after")
    phases.save(flow, cfg.num_steps, actor, critic)
