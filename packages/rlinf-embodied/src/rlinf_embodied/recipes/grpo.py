"""GRPO for a vision-language-action policy in simulated scenes: episodes that begin alike are compared with each other.

    rlinf run embodied/grpo_libero_vla env.python=.venv-libero/bin/python
    rlinf run embodied/grpo_libero_vla env.python=.venv-libero/bin/python model.path=DIR plan=spatial num_stages=2

In every step groups of environments begin with the same state; each makes one episode, of at most ``rollout_steps``
steps, and is idle afterwards. The policy is a stage of its own, to which simulators send observations
(``inference=channel``), or every simulator has a replica of it (``inference=local``). An episode's advantage is its
return less the mean of its group, in units of the group's standard deviation. After DeepSeekMath (arXiv 2402.03300), as
SimpleVLA-RL (arXiv 2509.09674) and RLinf-VLA (arXiv 2510.06710) apply it to action tokens. Departures:

- No KL penalty and no reference policy, as in both of the latter.
- The policy is tiny and begins with random weights, unless ``model.path`` names one in the OpenVLA layout: what the
  shipped configuration shows is that every part works, not that a robot learns.
- What is compared is a shaped return (``env.reward``), not success alone, so that a policy that never succeeds has
  something to learn from; ``algorithm.score=success_once algorithm.success_filter=true`` compares successes and leaves
  out groups in which all episodes failed, or all succeeded.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from rlinf_core import Flow
from rlinf_embodied.recipes import phases
from rlinf_embodied.slots import training_slots
from rlinf_embodied.workers import Actor, Scorer


def grpo(flow: Flow, cfg: Any) -> None:
    simulator, policy = phases.simulator_and_policy(flow, cfg)
    scorer = flow.group("scorer", Scorer, cfg)
    actor = flow.group("actor", Actor, cfg)
    evaluate = partial(phases.evaluate, flow, cfg, simulator, policy, scorer)

    phases.begin(flow, simulator, policy, actor)
    if not flow.resumed_steps:
        evaluate("before")

    for step in flow.steps(cfg.num_steps, start=flow.resumed_steps):
        trajectories = step.channels("trajectories")
        slots = step.channel("slots", deal="round_robin")
        step.feed(slots, training_slots(cfg, step.index))
        phases.rollout(step, simulator, policy, slots, trajectories)
        step.report(actor.train(trajectories))
        actor.publish_weights(to=policy)
        step.join()
        phases.at_intervals(flow, cfg, step, evaluate, simulator, actor)

    evaluate("after")
    phases.save(flow, cfg.num_steps, simulator, actor)
