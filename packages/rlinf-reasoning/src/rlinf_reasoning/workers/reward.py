"""The stage that scores responses; no device."""

from __future__ import annotations

import json
import time
from typing import Any

from rlinf_core import In, Out, Sample, Worker, task
from rlinf_core.errors import RLinfError
from rlinf_core.rundir import guard, to_json
from rlinf_reasoning.evaluation import answers_file, estimates
from rlinf_reasoning.rewards.pool import RewardItem
from rlinf_reasoning.rewards.scorer import Scorer

PROGRESS_S = 10.0
"""How often an evaluation says how far it is."""


class Reward(Worker):
    """Scores samples with the reward that ``cfg.reward`` names, portion by portion.

    A sample whose reward could not be computed (it hung, crashed, raised) fails the run, is dropped by name, or
    counts as 0, as ``cfg.reward.on_error`` says; ``info["reward_error"]`` tells why.
    """

    device = False

    scorer: Scorer | None = None
    """``None`` until it is set up, or where that failed."""

    def setup(self) -> None:
        self.scorer = Scorer(self.cfg.reward)
        self.on_error: str = self.cfg.reward.on_error

    def teardown(self) -> None:
        if self.scorer is not None:
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
    def evaluate(self, samples: In[Sample], when: str = "", total: int = 0) -> dict[str, float]:
        """Score the samples of an evaluation, write them to ``evaluations/<when>.jsonl`` and use them up.

        A response with a reward above ``cfg.eval.threshold`` is right; one that could not be scored is wrong, unless
        ``reward.on_error`` stops the run. ``total``: how many samples will come, for the progress that is told every
        ten seconds.

        Returns ``accuracy`` and ``pass@k`` for each ``cfg.eval.k``, each with the ends of its 95 % interval
        (``accuracy/low``, …/``high``), ``problems``, ``answers``, ``reward/mean``, ``reward/errors``,
        ``response/length`` (tokens) and ``response/truncated`` (share cut by the limit).
        """
        ks, threshold = ([1], 0.5) if "eval" not in self.cfg else (list(self.cfg.eval.k), self.cfg.eval.threshold)
        counts: dict[str, tuple[int, int]] = {}
        count = right = length = truncated = errors = 0
        reward = 0.0
        said = time.monotonic()
        path = answers_file(self.run_dir, when)
        with guard(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = open(path, "w", encoding="utf-8")  # noqa: SIM115 - closed below
        with file:
            for portion in samples.batches():
                errors += self._score(portion)
                lines = []
                for sample in portion:
                    good = (sample.reward or 0.0) > threshold
                    before = counts.get(sample.group, (0, 0))
                    counts[sample.group] = (before[0] + good, before[1] + 1)
                    count, right = count + 1, right + good
                    reward += sample.reward or 0.0
                    length += len(sample.response_ids)
                    truncated += sample.finish_reason == "length"
                    lines.append(json.dumps(to_json(_line(sample, good))[0], ensure_ascii=False) + "\n")
                with guard(path):
                    file.write("".join(lines))
                    file.flush()
                self.trained(portion)
                if count and time.monotonic() - said >= PROGRESS_S:
                    said = time.monotonic()
                    of = f" of {total}" if total else ""
                    self.log.info(f"{when or 'evaluation'}: {count}{of} answers scored, {right / count:.1%} right")
        shares = max(count, 1)
        return {
            **estimates(list(counts.values()), ks),
            "problems": float(len(counts)),
            "answers": float(count),
            "reward/mean": reward / shares,
            "reward/errors": float(errors),
            "response/length": length / shares,
            "response/truncated": truncated / shares,
        }

    def _score(self, samples: list[Sample]) -> int:
        """Fill in the rewards; returns how many could not be computed."""
        assert self.scorer is not None, "setup precedes tasks"
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


def _line(sample: Sample, right: bool) -> dict[str, Any]:
    return {
        "problem": sample.group,
        "sample": sample.index,
        "prompt": sample.prompt_text,
        "response": sample.response_text,
        "answer": sample.answer,
        "reward": sample.reward,
        "right": right,
        "length": len(sample.response_ids),
        "prompt_length": len(sample.prompt_ids),
        "finish_reason": sample.finish_reason,
        "fields": sample.fields,
        "info": sample.info,
    }
