"""The stage that scores responses; no device."""

from __future__ import annotations

from rlinf_core import In, Out, Sample, Worker, task
from rlinf_core.errors import RLinfError
from rlinf_reasoning.rewards.pool import RewardItem
from rlinf_reasoning.rewards.scorer import Scorer


class Reward(Worker):
    """Scores samples with the reward that ``cfg.reward`` names, portion by portion.

    A sample whose reward could not be computed (it hung, crashed, raised) fails the run, is dropped by name, or
    counts as 0, as ``cfg.reward.on_error`` says; ``info["reward_error"]`` tells why.
    """

    device = False

    def setup(self) -> None:
        self.scorer = Scorer(self.cfg.reward)
        self.on_error: str = self.cfg.reward.on_error

    def teardown(self) -> None:
        self.scorer.close()

    @task
    def score(self, samples: In[Sample], scored: Out[Sample]) -> dict[str, float]:
        """Set ``reward`` of every sample and pass it on. Returns ``reward/errors``, their number."""
        errors = 0
        for portion in samples.batches():
            errors += self._score(portion)
            for sample in portion:
                if sample.reward is None:
                    self.drop(sample, f"no reward: {sample.info['reward_error']}")
            good = [sample for sample in portion if sample.reward is not None]
            scored.put_many(good, [sample.group for sample in good], [sample.num_tokens for sample in good])
        return {"reward/errors": float(errors)}

    @task
    def evaluate(self, samples: In[Sample]) -> dict[str, float]:
        """Score the samples of an evaluation and use them up.

        Returns ``accuracy`` (mean reward; what could not be scored counts as 0), ``problems``,
        ``response/length`` (tokens) and ``response/truncated`` (share cut by the limit).
        """
        count = length = truncated = 0
        total = 0.0
        for portion in samples.batches():
            self._score(portion)
            for sample in portion:
                count += 1
                total += sample.reward or 0.0
                length += len(sample.response_ids)
                truncated += sample.finish_reason == "length"
            self.trained(portion)
        shares = max(count, 1)
        return {
            "accuracy": total / shares,
            "problems": float(count),
            "response/length": length / shares,
            "response/truncated": truncated / shares,
        }

    def _score(self, samples: list[Sample]) -> int:
        """Fill in the rewards; returns how many could not be computed."""
        scores = self.scorer.score([RewardItem(s.response_text, s.answer, s.fields) for s in samples])
        errors = 0
        for sample, score in zip(samples, scores, strict=True):
            sample.reward = score.value
            if score.value is not None:
                continue
            errors += 1
            sample.info["reward_error"] = score.error
            if self.on_error == "fail":
                raise RLinfError(
                    f"reward {self.scorer.name}: sample {sample.id} {score.error}; its response is "
                    f"{sample.response_text[:200]!r}, the answer {sample.answer[:200]!r} "
                    "(reward.on_error=drop or zero would go on)"
                )
            if self.on_error == "zero":
                sample.reward = 0.0
        return errors
