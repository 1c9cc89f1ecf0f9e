"""The stages that step environments: with decisions from a policy worker, or with their own."""

from __future__ import annotations

from rlinf_core import In, Out, Trajectory, task
from rlinf_embodied.data import Answered, Asked, Finished, Slot
from rlinf_embodied.workers.environments import Environments
from rlinf_embodied.workers.exchange import Local, OverChannels
from rlinf_embodied.workers.holder import HoldsReplica


class Simulator(Environments):
    """Steps environments as a ``PolicyWorker`` decides (``inference=channel``).

    A rank cuts its environments into sub-batches (``cfg.num_stages`` of them, or more if the plan's portion says so):
    while one is stepped the policy answers for another. A sub-batch is a block on the channels, with key (rank,
    number), and stays together as long as its episodes go on over steps.
    """

    @task(ends=True)
    def rollout(
        self, slots: In[Slot], actions: In[Answered], observations: Out[Asked], trajectories: Out[Trajectory]
    ) -> dict[str, float]:
        """Make ``cfg.rollout_steps`` steps in every environment; one trajectory for each slot.

        Returns, to be reported with ``reduce="sum"``: ``rollout/env_steps``, ``episodes/dropped``,
        ``rollout/env_steps_per_s``, and seconds of an average rank, ``rollout/stepping_s`` and ``rollout/waiting_s``
        (for actions).
        """
        return self._roll(slots, OverChannels(observations, actions), trajectories)

    @task(ends=True)
    def evaluate(
        self, slots: In[Slot], actions: In[Answered], observations: Out[Asked], episodes: Out[Finished]
    ) -> dict[str, float]:
        """One episode for each slot, in environments of their own. Returns ``episodes/dropped``."""
        return self._play(slots, OverChannels(observations, actions), episodes)


class ActingSimulator(HoldsReplica, Environments):
    """Steps environments as a replica of the policy in its own process decides (``inference=local``).

    Every rank has a replica, which is built in ``begin`` and gets the trainer's weights. Reads ``cfg.model`` besides.
    """

    @task
    def rollout(self, slots: In[Slot], trajectories: Out[Trajectory]) -> dict[str, float]:
        """As ``Simulator.rollout``. Instead of ``rollout/waiting_s`` it reports ``rollout/inference_s``, the seconds of
        an average rank in which it decided."""
        report = self._roll(slots, Local(self._there(), self.step), trajectories)
        report["rollout/inference_s"] = report.pop("rollout/waiting_s")
        return report

    @task
    def evaluate(self, slots: In[Slot], episodes: Out[Finished]) -> dict[str, float]:
        """As ``Simulator.evaluate``."""
        return self._play(slots, Local(self._there(), self.step), episodes)
