"""Ends of responses that are texts: ``sampling.stop``."""

from __future__ import annotations

from typing import Any

from rlinf_core.errors import ConfigError

# What a tokenizer decodes the first bytes of a character to.
UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class StopStrings:
    """Watches one response for texts that end it, token by token.

    The text is what the response's tokens decode to, special tokens included, the prompt not. It is decoded
    incrementally: a token is decoded together with those before it back to the last word that was whole, since what a
    token reads as depends on its neighbours. The token that completes a text is the response's last one, and what it
    has beyond the text stays.
    """

    def __init__(self, tokenizer: Any, stop: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._longest = max(map(len, stop), default=0)
        self._ids: list[int] = []
        self._known = ""  # what the ids that were seen before decode to, as far as they are kept
        self._tail = ""  # the end of the text, as long as a stop text could begin in it

    def push(self, token: int) -> bool:
        """Take the next token; whether a stop text is now complete."""
        if not self._stop:
            return False
        self._ids.append(token)
        text = self._decode(self._ids)
        if text.endswith(UNFINISHED):
            return False  # in the middle of a character
        new = text[len(self._known) :]
        # Two tokens of context are enough for every tokenizer in use, and keep each step short.
        self._ids = self._ids[-2:]
        self._known = self._decode(self._ids)
        seen = self._tail + new
        self._tail = seen[-(self._longest - 1) :] if self._longest > 1 else ""
        return any(text in seen for text in self._stop)

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def check_stop(stop: tuple[str, ...]) -> None:
    """Refuse stop texts that would end every response, by name."""
    for text in stop:
        if not isinstance(text, str) or not text:
            raise ConfigError(f"sampling.stop: {text!r} is not a text of at least one character; leave it out")
