"""The stage that draws prompts again for groups that teach nothing."""

from __future__ import annotations

from rlinf_core import In, Out, Prompt, Sample, Worker, task
from rlinf_core.errors import RLinfError
from rlinf_reasoning.refill import Refill


class PromptSampler(Worker):
    """Dynamic sampling (DAPO, arXiv 2503.14476, equation 11): a step is trained on groups whose rewards differ.

    It is the end of the cycle prompts -> samples -> scored -> prompts: it puts the step's prompts, waits for their
    groups, and puts further ones for those without signal, in rounds, ``algorithm.max_refills`` at most. What is drawn
    and what is kept is a function of the rewards alone, see ``refill.Refill``, so it does not depend on timing.
    Groups that are not kept are dropped by name. No response may be dropped on the way (a group would never be whole).
    """

    device = False
    barrier = "group"

    @task(ends=True)
    def sample(
        self, candidates: list[Prompt], scored: In[Sample], prompts: Out[Prompt], kept: Out[Sample]
    ) -> dict[str, float]:
        """Keep ``prompts_per_step`` groups with signal out of ``candidates``, which are drawn in their order.

        Returns the numbers of groups: ``groups/drawn``, ``groups/kept``, ``groups/missing``, and those dropped by
        reason, ``groups/all_right``, ``groups/all_wrong``, ``groups/equal`` (otherwise, or all but one cut off) and
        ``groups/surplus``; and ``groups/refills``, the rounds beyond the first.
        """
        algorithm = self.cfg.algorithm
        refill = Refill(
            candidates,
            self.cfg.prompts_per_step,
            algorithm.max_refills,
            filtered=algorithm.overlong_filter,
        )
        arriving = scored.batches()
        while drawn := refill.draw():
            prompts.put_many(drawn)
            waiting = {prompt.id for prompt in drawn}
            groups: dict[str, list[Sample]] = {}
            while waiting:
                for sample in next(arriving):
                    groups.setdefault(sample.group, []).append(sample)
                waiting -= set(groups)
            for name, reason in refill.judge(groups).items():
                members = sorted(groups[name], key=lambda s: s.id)
                if reason:
                    self.drop(members, reason)
                else:
                    kept.put_many(members, [s.group for s in members], [s.num_tokens for s in members])
        prompts.close()
        if refill.missing and algorithm.on_shortage == "fail":
            raise RLinfError(
                f"step {self.step}: {refill.explain()} algorithm.max_refills={algorithm.max_refills} are used up; "
                "raise it, or train with fewer groups (algorithm.on_shortage=train)"
            )
        return refill.metrics()
