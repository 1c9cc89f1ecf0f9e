"""What spans keys in ``task``, ``eval`` and ``reward``.

Each check returns messages ``key: what is wrong, what would be right``.
"""

from __future__ import annotations

import re
from typing import Any

from rlinf_core.errors import nearest
from rlinf_reasoning.tasks.chat import CHAT, has_chat_template

# Arguments of ``apply_chat_template`` with which prompts are encoded.
TAKEN = ("conversation", "add_generation_prompt", "tokenize", "return_dict")


def check_answer_pattern(pattern: str | None) -> list[str]:
    if pattern is None:
        return []
    try:
        re.compile(pattern)
    except re.error as error:
        return [f"task.answer_pattern: {pattern!r} is not a regular expression: {error}"]
    return []


def check_fields(prompt: str, answer: str) -> list[str]:
    """That a line's answer is not its prompt."""
    return [f"task.answer_field: {answer!r} is the field of the prompt (task.prompt_field)"] if prompt == answer else []


def check_chat(task: Any, root: Any) -> list[str]:
    """That the model has the chat template that is asked for, where its directory shows it."""
    chat = task.chat_template.lower()
    if chat not in CHAT:
        return [f"task.chat_template={task.chat_template}: must be one of {', '.join(CHAT)}{nearest(chat, CHAT)}"]
    if task.system is not None and chat == "false":
        return ["task.system: without a chat template (task.chat_template=false) there is no place for it"]
    if taken := sorted(set(task.chat_options) & set(TAKEN)):
        return [f"task.chat_options.{taken[0]}: is set by the recipe, it is no setting of the template; leave it out"]
    if "path" not in root.model:
        return []
    path = root.model.path
    if path is None:
        model, known = "the tiny model", False
    else:
        model, known = f"model.path={path}", has_chat_template(path) is not False
    asked = "task.chat_template" if chat == "true" else "task.system" if task.system is not None else ""
    if known or not asked:
        return []
    return [
        f"{asked}: {model} has no chat template (chat_template.jinja, or in tokenizer_config.json); use an "
        "instruction-tuned model, add the file to its directory, or leave the key out"
    ]


def check_format(format: str, score: float) -> list[str]:
    """That a reward for the form of an answer has a form to look for."""
    if not score or format in ("boxed", "hashes"):
        return []
    return [f"reward.format_score: with reward.format={format} no form is asked for; use format=boxed or hashes, or 0"]


def check_eval(evaluation: Any) -> list[str]:
    """That every pass@k can be estimated from ``eval.samples`` answers."""
    problems = []
    samples, ks = evaluation.samples, list(evaluation.k)
    if not ks:
        problems.append("eval.k: is empty; [1] estimates pass@1")
    if twice := sorted({k for k in ks if ks.count(k) > 1}):
        problems.append(f"eval.k: {twice[0]} is there twice")
    if ks and max(ks) > samples:
        problems.append(f"eval.k: pass@{max(ks)} needs at least {max(ks)} answers per problem, eval.samples={samples}")
    if evaluation.greedy and samples > 1:
        problems.append(f"eval.greedy: {samples} greedy answers (eval.samples) would all be equal; use eval.samples=1")
    return problems
