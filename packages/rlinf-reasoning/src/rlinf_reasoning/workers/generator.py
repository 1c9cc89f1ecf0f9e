"""The stage that draws responses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rlinf_core import In, Out, Prompt, Sample, Worker, task
from rlinf_core.config import Config
from rlinf_core.errors import ConfigError
from rlinf_core.registry import Registry
from rlinf_core.types import Generated, GenerateRequest, Rollout, SamplingParams
from rlinf_reasoning.tasks.base import check_longest
from rlinf_reasoning.tasks.chat import PromptEncoder, Prompting, refusal, room_for_prompts

if TYPE_CHECKING:
    import torch


class Generator(Worker):
    """Draws ``group_size`` responses for every prompt with the rollout backend that ``cfg.rollout.name`` names.

    Reads ``cfg.rollout`` (a plan's ``slots`` stand in for its ``max_num_seqs``), ``cfg.model``, ``cfg.sampling``, and
    of ``cfg.task`` how prompts become tokens (``tasks.chat.Prompting``): one that is too long stops the run, is
    dropped by name, or is cut, as ``task.too_long`` says.
    Random numbers are keyed by (seed, step, prompt, index), so that the responses do not depend on which rank draws
    them or with what others.
    """

    engine: Rollout

    def setup(self) -> None:
        rollout = self.cfg.rollout
        if self.slots is not None:  # the plan decides how many are decoded together
            if "max_num_seqs" not in rollout:
                raise ConfigError(
                    f"the plan gives {self.name} slots={self.slots}, and rollout={rollout.name} has no slots"
                )
            rollout = Config({**rollout.to_dict(), "max_num_seqs": self.slots})
        self.engine = Registry("rlinf.rollouts").load(rollout.name)(rollout)
        self.engine.setup(self.cfg.model, self.parallel, seed=self.seed)
        how = Prompting.of(self.cfg.task) if "task" in self.cfg else Prompting()
        self.encode = PromptEncoder(self.engine.tokenizer, how, room=room_for_prompts(self.cfg))
        if "task" in self.cfg and self.rank == 0:
            check_longest(self.cfg, self.encode)
        sampling = self.cfg.sampling
        self.sampling = SamplingParams(
            max_new_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=self.seed,
            stop=tuple(sampling.stop),
            ignore_eos=sampling.ignore_eos,
        )

    def teardown(self) -> None:
        self.engine.close()

    def onload(self) -> None:
        self.engine.onload()

    def offload(self) -> None:
        self.engine.offload()

    @task
    def generate(self, prompts: In[Prompt], samples: Out[Sample]) -> dict[str, float]:
        """Answer every prompt; samples leave as they finish, keyed by their group and weighed by their tokens.

        Returns ``prompt/dropped`` and ``prompt/truncated``, the numbers of prompts that were too long (report them with
        ``reduce="sum"``).
        """
        dropped = truncated = 0
        for portion in prompts.batches():
            encoded: list[tuple[Prompt, list[int]]] = []
            for prompt in portion:
                found = self.encode(prompt)
                if not found.problem:
                    truncated += found.length > len(found.ids)
                    encoded.append((prompt, found.ids))
                elif self.encode.how.too_long == "drop":
                    dropped += 1
                    self.drop(prompt, found.problem)
                else:
                    raise refusal(prompt, found)
            if encoded:
                with self.on_device():
                    for sample in self.samples_of(encoded):
                        samples.put(sample, key=sample.group, weight=sample.num_tokens)
        return {"prompt/dropped": float(dropped), "prompt/truncated": float(truncated)}

    def samples_of(self, prompts: Sequence[tuple[Prompt, list[int]]]) -> Iterator[Sample]:
        """Draw the responses to ``prompts``, each with its token ids; yields each as it finishes."""
        by_id: dict[str, tuple[Prompt, int, list[int]]] = {}
        requests = []
        for prompt, prompt_ids in prompts:
            for index, name in enumerate(prompt.account_ids()):
                by_id[name] = (prompt, index, prompt_ids)
                requests.append(
                    GenerateRequest(name, tuple(prompt_ids), (prompt.step, prompt.id, index), prompt.greedy)
                )
        for response in self.engine.generate(requests, self.sampling):
            yield _sample(response, *by_id[response.id], self.engine.tokenizer)

    def install_weights(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.engine.load_weights(version, weights)


def _sample(response: Generated, prompt: Prompt, index: int, prompt_ids: list[int], tokenizer: Any) -> Sample:
    return Sample(
        id=response.id,
        group=prompt.id,
        index=index,
        group_size=prompt.group_size,
        prompt_text=prompt.text,
        prompt_ids=list(prompt_ids),
        response_ids=list(response.token_ids),
        response_text=tokenizer.decode(response.token_ids, skip_special_tokens=True),
        logprobs=list(response.logprobs),
        versions=list(response.versions),
        finish_reason=response.finish_reason,
        answer=prompt.answer,
        fields=dict(prompt.fields),
    )
