"""PPO in simulated environments: balancing a pole, reaching with a robot's arm, pushing a cube.

    rlinf run embodied/ppo_cartpole
    rlinf run embodied/ppo_cartpole plan=spatial cluster.virtual_devices=3 inference=channel num_stages=2
    rlinf run embodied/ppo_gymnasium env.id=Pendulum-v1
    rlinf run embodied/ppo_reach eval.videos=9
    rlinf run embodied/ppo_pushcube

Simulators step environments as the policy decides, the trainer learns from what came of it. The policy is small, so
every simulator has a replica of it (``inference=local``); with ``inference=channel`` it is a stage of its own, and the
two feed each other (observations, actions). After PPO
(arXiv 1707.06347) with generalised advantage estimation (arXiv 1506.02438) and the details that matter in practice
(Huang et al., "The 37 Implementation Details of PPO", ICLR Blog Track 2022). Departures:

- Where a time limit cuts an episode, the value of the observation before the reset stands for what would have come
  (Pardo et al., arXiv 1712.00378); most implementations take it for an end.
- Random numbers are keyed by (seed, step, environment, decision): the actions do not depend on how environments are
  shared out, nor on the plan.
- The statistics that normalise observations are those of earlier steps: they change between steps, with the weights.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from rlinf_core import Flow
from rlinf_embodied.recipes import phases
from rlinf_embodied.slots import training_slots
from rlinf_embodied.workers import Actor, Scorer


def ppo(flow: Flow, cfg: Any) -> None:
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
