"""From a problem to the tokens of its prompt: messages, the model's chat template, and prompts that are too long.

Standard library only; the tokenizer is given.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlinf_core.errors import ConfigError, nearest
from rlinf_core.types import Prompt

ROLES = ("system", "user", "assistant", "tool")
CHAT = ("auto", "true", "false")
TOO_LONG = ("refuse", "drop", "truncate")
Message = dict[str, str]


def check_messages(value: Any) -> str:
    """What is wrong with a list of messages, in words; empty when it is one: objects with ``role`` and ``content``,
    the last of them not the assistant's."""
    if not isinstance(value, list) or not value:
        return "must be a string or a list of messages, and not empty"
    for index, message in enumerate(value):
        if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
            return f"message {index} is not an object with 'role' and 'content'"
        if not isinstance(message["content"], str):
            return f"message {index} has a content that is not a string (images and parts are not supported)"
        if message["role"] not in ROLES:
            near = nearest(str(message["role"]), ROLES)
            return f"message {index} has the role {message['role']!r}{near}; roles: {', '.join(ROLES)}"
    if value[-1]["role"] == "assistant":
        return "ends with an assistant's message, so there is nothing to answer"
    return ""


def text_of(messages: Sequence[Mapping[str, str]]) -> str:
    """Messages as one text, for people and for telling prompts apart: the content of a lone user message, else one
    paragraph ``role: content`` each."""
    if len(messages) == 1 and messages[0]["role"] == "user":
        return messages[0]["content"]
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)


def has_chat_template(path: str) -> bool | None:
    """Whether a model directory has a chat template; ``None`` when that cannot be told from its files."""
    directory = Path(path).expanduser()
    if any((directory / name).is_file() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    if (directory / "additional_chat_templates").is_dir():
        return True
    try:
        config = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return bool(config.get("chat_template")) if isinstance(config, dict) else None


def room_for_prompts(cfg: Any) -> int | None:
    """The most tokens of a prompt that leave room for ``sampling.max_new_tokens`` in the model of a recipe's ``cfg``;
    ``None`` when its directory does not tell."""
    model, limits = cfg.model, []
    if "path" in model and model.path is None:
        limits.append(int(model.tiny.max_positions))
    elif "path" in model:
        try:
            config = json.loads((Path(model.path).expanduser() / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            config = {}
        nested = config.get("text_config") if isinstance(config, dict) else None
        sources = [source for source in (config, nested) if isinstance(source, dict)]
        limits += [source[key] for source in sources for key in _POSITIONS if isinstance(source.get(key), int)]
    if "max_model_len" in cfg.rollout and cfg.rollout.max_model_len is not None:
        limits.append(int(cfg.rollout.max_model_len))
    return min(limits) - int(cfg.sampling.max_new_tokens) if limits else None


_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len")


@dataclass(frozen=True)
class Prompting:
    """How prompts become tokens: the keys of ``task`` that every source of problems has.

    ``chat``: ``"true"`` puts every prompt into the model's chat template, ``"auto"`` does where there is one,
    ``"false"`` takes texts as they are. ``options`` go to the template (``enable_thinking``). ``most``: most tokens of
    a prompt, ``None`` for as many as the model takes.
    """

    chat: str = "auto"
    system: str | None = None
    options: Mapping[str, Any] | None = None
    most: int | None = None
    too_long: str = "refuse"

    @classmethod
    def of(cls, task: Any) -> Prompting:
        """Read them from a ``task`` node; a task of another package need not have them."""
        has = {name: task[name] for name in _KEYS if name in task}
        options = has.get("chat_options") or {}
        return cls(
            chat=str(has.get("chat_template", "auto")).lower(),
            system=has.get("system"),
            options=dict(options.to_dict() if hasattr(options, "to_dict") else options),
            most=has.get("max_prompt_tokens"),
            too_long=has.get("too_long", "refuse"),
        )


_KEYS = ("chat_template", "system", "chat_options", "max_prompt_tokens", "too_long")


@dataclass(frozen=True, slots=True)
class Encoded:
    """``ids``: the prompt's tokens, at most the limit when it was cut. ``length``: how many there were.
    ``problem``: why the prompt cannot be used, else empty."""

    ids: list[int]
    length: int
    problem: str = ""


class PromptEncoder:
    """Prompts to token ids, as ``how`` says.

    A text becomes one user message (after ``how.system``) when the chat template is used, and is encoded as it is
    otherwise. Messages need the template; a system message of theirs is kept, and ``how.system`` put before those that
    have none. Cutting keeps the end.

    Raises:
        ConfigError: a template is asked for, or needed by ``how.system``, and the tokenizer has none.
    """

    def __init__(self, tokenizer: Any, how: Prompting, *, room: int | None = None) -> None:
        """``room``: the most tokens that the model has for a prompt, ``None`` when that is not known."""
        self.tokenizer = tokenizer
        self.how = how
        self.most = how.most if room is None else room if how.most is None else min(how.most, room)
        template = bool(getattr(tokenizer, "chat_template", None))
        self.chat = how.chat == "true" or (how.chat == "auto" and template)
        if self.chat and not template:
            raise ConfigError(f"task.chat_template: the model's tokenizer has no chat template; {_WITHOUT}")
        if how.system is not None and not self.chat:
            raise ConfigError(f"task.system: the prompts are not put into a chat template; {_WITHOUT}")
        self._template = template

    def __call__(self, prompt: Prompt) -> Encoded:
        """The tokens of one prompt."""
        ids = self._ids(prompt)
        if not ids:
            raise ConfigError(f"prompt {prompt.id} is empty after tokenization: {prompt.text!r}")
        if self.most is None or len(ids) <= self.most:
            return Encoded(ids, len(ids))
        if self.how.too_long == "truncate" and self.most > 0:
            return Encoded(ids[-self.most :], len(ids))
        return Encoded(ids, len(ids), f"prompt longer than {self.most} tokens ({self._limit()})")

    def _limit(self) -> str:
        own = self.how.most is not None and self.most == self.how.most
        return "task.max_prompt_tokens" if own else "what the model takes less sampling.max_new_tokens"

    def _ids(self, prompt: Prompt) -> list[int]:
        messages = prompt.messages
        if messages is not None and not self._template:
            raise ConfigError(
                f"prompt {prompt.id} is a list of messages, and the model's tokenizer has no chat template; {_WITHOUT}"
            )
        if messages is None:
            if not self.chat:
                return [int(i) for i in self.tokenizer.encode(prompt.text)]
            messages = [{"role": "user", "content": prompt.text}]
        if self.how.system is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.how.system}, *messages]
        try:
            ids = self.tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=True, return_dict=False, **(self.how.options or {})
            )
        except Exception as error:  # the template is a program of the model's own, with exceptions of its own
            raise ConfigError(
                f"task.chat_template: the model's chat template refuses prompt {prompt.id} "
                f"({text_of(messages)[:200]!r}): {type(error).__name__}: {error}"
            ) from error
        return [int(i) for i in ids]


_WITHOUT = "use an instruction-tuned model, add chat_template.jinja to its directory, or set task.chat_template=false"


def refusal(prompt: Prompt, encoded: Encoded) -> ConfigError:
    """The error of a prompt that is too long where ``task.too_long`` is ``refuse``."""
    return ConfigError(
        f"task.max_prompt_tokens: {prompt.id} has {encoded.length} tokens, {encoded.problem}; it begins "
        f"{prompt.text[:200]!r} (task.too_long=drop or truncate would go on)"
    )
