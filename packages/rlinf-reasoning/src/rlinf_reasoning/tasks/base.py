"""Problems, their split into phases, and the batches of a step. Standard library only."""

from __future__ import annotations

import hashlib
import heapq
import logging
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rlinf_core.errors import ConfigError
from rlinf_core.types import Prompt
from rlinf_reasoning.tasks.chat import PromptEncoder, has_chat_template, refusal

log = logging.getLogger("rlinf.task")


@dataclass(frozen=True, slots=True)
class Problem:
    """A prompt text, the answer it is scored against, and whatever else its source says of it.

    ``messages``: the conversation whose text ``prompt`` is, where the source gives one.
    """

    prompt: str
    answer: str
    fields: dict[str, Any] = field(default_factory=dict)
    messages: tuple[dict[str, str], ...] | None = None


class Task(Protocol):
    """A source of problems (entry-point group ``rlinf.tasks``; the entry is the class).

    The constructor takes the task's config node. ``problems`` gives all of them, in a fixed order; texts may
    repeat. ``source`` names the source in messages. A task that has problems of its own for evaluation gives them with
    a method ``eval_problems(seed)`` (``None``: it has none, they are cut from the others).
    """

    source: str

    def problems(self, seed: int) -> Iterable[Problem]: ...


class PromptData:
    """The problems of a run: those that accuracy is measured on, and those that are trained on.

    ``eval`` shares no prompt text with the others; ``train``, which the steps draw from, is all the rest, and
    ``warm_start`` the first part of it, for the supervised phase. They are cut from the distinct problems in the
    order of a seeded hash of the prompt text, so that they depend on the seed and on nothing else. A text that
    repeats counts once, with its first answer.

    Args:
        problems: all problems; repeated texts are removed.
        seed: root seed of the run.
        source: name of the source, for messages.
        eval_problems: size of the part for evaluation; ``None`` for all there are.
        warm_start_problems: size of that part.
        prompts_per_step, group_size: what ``batch`` deals; 0 prompts when nothing is trained.
        evaluation: problems for evaluation that come from elsewhere (``eval_problems`` is then the most that are
            taken, and ``problems`` lose those with the same text).

    Raises:
        ConfigError: when the distinct problems do not fill the parts and one batch; the message has the numbers.
    """

    def __init__(
        self,
        problems: Iterable[Problem],
        *,
        seed: int,
        source: str,
        eval_problems: int | None,
        warm_start_problems: int,
        prompts_per_step: int,
        group_size: int,
        evaluation: Iterable[Problem] | None = None,
    ) -> None:
        self.seed = seed
        self.conflicts = 0
        """Problems left out whose text came before with another answer."""
        ordered = self._distinct(problems)
        held: Sequence[Problem]
        if evaluation is not None:
            every = self._distinct(evaluation)
            held = every[:eval_problems]
            texts = {problem.prompt for problem in every}
            ordered = [problem for problem in ordered if problem.prompt not in texts]
            cut = 0
        else:
            cut = len(ordered) if eval_problems is None else eval_problems
            held = ordered[:cut]
        needed = cut + max(warm_start_problems, prompts_per_step)
        if len(ordered) < needed:
            share = f"{cut} for evaluation (eval.problems) and beside them " if evaluation is None else ""
            beside = "" if share else " beside those for evaluation"
            raise ConfigError(
                f"task: {source} has {len(ordered)} distinct problems{beside}, fewer than the {needed} needed: "
                f"{share}{warm_start_problems} for the warm start (warm_start.problems) or {prompts_per_step} for one "
                "batch (prompts_per_step), whichever is more"
            )
        self.group_size = group_size
        self.prompts_per_step = prompts_per_step
        self.eval: Sequence[Problem] = tuple(held)
        self.train: Sequence[Problem] = tuple(ordered[cut:])
        self.warm_start: Sequence[Problem] = self.train[:warm_start_problems]
        self._epoch = -1
        self._order: list[int] = []

    def _distinct(self, problems: Iterable[Problem]) -> list[Problem]:
        """The first problem of each prompt text, in the order of a seeded hash of the text."""
        distinct: dict[str, Problem] = {}
        for problem in problems:
            self.conflicts += distinct.setdefault(problem.prompt, problem).answer != problem.answer
        return sorted(distinct.values(), key=lambda problem: _rank(self.seed, problem.prompt))

    @property
    def batches_per_epoch(self) -> int:
        """Whole batches in one pass over ``train``; the few left over take their turn in other epochs."""
        return len(self.train) // self.prompts_per_step

    def batch(self, step: int) -> list[Prompt]:
        """The prompts of step ``step`` (from 0 or 1, as the caller counts): a pure function of seed and step.

        An epoch is one shuffle of ``train``; no problem comes twice in it.
        """
        epoch, turn = divmod(step, self.batches_per_epoch)
        if epoch != self._epoch:
            order = list(range(len(self.train)))
            random.Random(f"{self.seed}/epoch/{epoch}").shuffle(order)
            self._epoch, self._order = epoch, order
        chosen = self._order[turn * self.prompts_per_step : (turn + 1) * self.prompts_per_step]
        return [self.prompt(self.train[i], step, n) for n, i in enumerate(chosen)]

    def prompt(self, problem: Problem, step: int, number: int) -> Prompt:
        """The prompt of a training problem that is number ``number`` of step ``step``."""
        return _prompt(problem, f"train/{step}/p{number}", step, self.group_size)

    def eval_prompts(self, step: int = 0, samples: int = 1, greedy: bool | None = None) -> list[Prompt]:
        """Every evaluation problem with ``samples`` answers; a lone one is greedy unless ``greedy`` says otherwise."""
        chosen = samples == 1 if greedy is None else greedy
        return [_prompt(p, f"eval/{step}/p{n}", step, samples, greedy=chosen) for n, p in enumerate(self.eval)]

    def warm_start_prompts(self) -> list[Prompt]:
        """The problems of the supervised phase, with their answers."""
        return [_prompt(p, f"warm/p{n}", 0, 1) for n, p in enumerate(self.warm_start)]


def load_data(cfg: Any, task: Task | None = None, *, tell: bool = True) -> PromptData:
    """Load the task that ``cfg.task.name`` names and cut it as the recipe's config says.

    Reads ``cfg.seed``, ``cfg.task``, ``cfg.eval.problems``, ``cfg.warm_start.problems`` (where there is such a phase),
    ``cfg.prompts_per_step``, ``cfg.algorithm.group_size`` and, for the tiny model, ``cfg.model`` and
    ``cfg.sampling.max_new_tokens``. A recipe without ``prompts_per_step`` trains on nothing: all problems that there
    are (at most ``eval.problems``, when that is not null) are for evaluation. ``tell``: warn of prompts that come with
    two answers.

    Raises:
        ConfigError: too few problems, or one that is too long for the tiny model or cannot be written in its
            alphabet, messages for a model without a chat template; and what the task itself finds.
    """
    if task is None:
        from rlinf_core.registry import Registry

        task = Registry("rlinf.tasks").load(cfg.task.name)(cfg.task)
    separate = getattr(task, "eval_problems", None)
    evaluation = separate(cfg.seed) if callable(separate) else None
    warm = cfg.warm_start.problems if "warm_start" in cfg and cfg.warm_start.max_steps else 0
    if "prompts_per_step" in cfg:
        data = PromptData(
            task.problems(cfg.seed),
            seed=cfg.seed,
            source=task.source,
            eval_problems=cfg.eval.problems,
            warm_start_problems=warm,
            prompts_per_step=cfg.prompts_per_step,
            group_size=cfg.algorithm.group_size,
            evaluation=evaluation,
        )
    else:
        data = PromptData(
            (),
            seed=cfg.seed,
            source=task.source,
            eval_problems=cfg.eval.problems,
            warm_start_problems=0,
            prompts_per_step=0,
            group_size=1,
            evaluation=task.problems(cfg.seed) if evaluation is None else evaluation,
        )
        if not data.eval:
            raise ConfigError(f"task: {task.source} has no problem to evaluate on")
    if tell:
        _tell_conflicts(data, task.source)
    if cfg.model.path is None:
        _check_messages(data)
        _check_length(data, cfg.sampling.max_new_tokens, cfg.model.tiny.max_positions)
        _check_characters(data, cfg.model.tiny.characters)
    elif has_chat_template(cfg.model.path) is False:
        _check_messages(data)
    return data


_told: set[str] = set()


def _tell_conflicts(data: PromptData, source: str) -> None:
    """Warn, once in this process, of problems that were left out although they have an answer of their own."""
    if data.conflicts and source not in _told:
        _told.add(source)
        log.warning(
            "task: %s has %d problem(s) whose prompt came before with another answer; the first answer counts, the "
            "others are left out",
            source,
            data.conflicts,
        )


LONGEST = 64
"""How many problems, those with the most characters, are tried before anything is drawn."""


def check_longest(cfg: Any, encode: PromptEncoder) -> None:
    """Refuse a file with a prompt that is too long before anything is drawn, not when its turn comes.

    Where ``task.too_long`` is ``refuse`` and the problems are a file's, the longest of them by characters are encoded.
    """
    if encode.how.too_long != "refuse" or "name" not in cfg.task or cfg.task.name != "jsonl":
        return
    data = load_data(cfg, tell=False)  # the driver has told
    for problem in heapq.nlargest(LONGEST, (*data.eval, *data.train), key=lambda problem: len(problem.prompt)):
        prompt = _prompt(problem, f"a problem of {cfg.task.path}", 0, 1)
        found = encode(prompt)
        if found.problem:
            raise refusal(prompt, found)


def _check_messages(data: PromptData) -> None:
    """Refuse conversations for a model that has no chat template."""
    for problem in (*data.eval, *data.train):
        if problem.messages is not None:
            raise ConfigError(
                "model.path: the model has no chat template (chat_template.jinja, or in tokenizer_config.json), which "
                f"prompts that are lists of messages need; the first such prompt: {problem.prompt[:200]!r}"
            )


def _check_length(data: PromptData, max_new_tokens: int, max_positions: int) -> None:
    """Refuse prompts that leave the tiny model (one token per character) no room for a response."""
    longest = max((*data.eval, *data.train), key=lambda p: len(p.prompt))
    length = len(longest.prompt)
    if length + max_new_tokens > max_positions:
        raise ConfigError(
            f"model.tiny.max_positions: the model takes {max_positions} tokens; the longest prompt has {length} and a "
            f"response may have {max_new_tokens} (sampling.max_new_tokens), {length + max_new_tokens} together. "
            f"The prompt: {longest.prompt[:200]!r}"
        )


def _check_characters(data: PromptData, characters: str) -> None:
    """Refuse an alphabet of the tiny model in which a prompt, or an answer of the warm start, cannot be written."""
    texts = [*(p.prompt for p in (*data.eval, *data.train)), *(p.answer for p in data.warm_start)]
    missing = sorted(set().union(*map(set, texts)) - set(characters))
    if missing:
        first = next(text for text in texts if not set(characters).issuperset(text))
        shown = ", ".join(f"{c!r} (U+{ord(c):04X})" for c in missing[:20]) + (", …" if len(missing) > 20 else "")
        raise ConfigError(
            f"model.tiny.characters: the alphabet {characters!r} lacks {shown}, which the problems need; "
            f"the first such text: {first[:200]!r}"
        )


def _prompt(problem: Problem, name: str, step: int, group_size: int, greedy: bool = False) -> Prompt:
    return Prompt(
        id=name,
        text=problem.prompt,
        answer=problem.answer,
        group_size=group_size,
        step=step,
        greedy=greedy,
        fields=dict(problem.fields),
        messages=None if problem.messages is None else list(problem.messages),
    )


def _rank(seed: int, text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16, key=str(seed).encode()).digest()
