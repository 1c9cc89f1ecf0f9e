"""The stage that decides what is done in the environments."""

from __future__ import annotations

import time
from contextlib import ExitStack

from rlinf_core import In, Out, task
from rlinf_embodied.data import Answered, Asked
from rlinf_embodied.workers.holder import HoldsReplica


class PolicyWorker(HoldsReplica):
    """Answers blocks of observations with the policy that ``cfg.model.name`` names, block by block.

    Blocks are never merged: what a block is answered depends on it alone, so that neither timing nor the number of
    ranks changes a number. Reads ``cfg.model``. ``begin`` builds the policy, once the environment has been described.
    """

    @task
    def act(self, observations: In[Asked], actions: Out[Answered]) -> dict[str, float]:
        """Answer until nothing more is asked. Returns ``rollout/inference_s``, seconds of an average rank (report it
        with ``reduce="sum"``)."""
        spent = 0.0
        with ExitStack() as section:
            first = True
            for asked in observations:  # one by one: what waits is for other ranks too
                if first:
                    # One section for all that follows: a wait in it lets others have the devices and gets them back
                    # with what was waited for, which spares the hub a question per block.
                    section.enter_context(self.on_device())
                    first = False
                began = time.perf_counter()
                answer = self._answer(asked)
                spent += time.perf_counter() - began
                actions.put(answer, key=asked.place, weight=len(asked.keys))
        return {"rollout/inference_s": spent / self.world_size}

    def _answer(self, asked: Asked) -> Answered:
        return self._there().answer(asked, self.step)
