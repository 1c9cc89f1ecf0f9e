"""The character tokenizer of the tiny model. Importing this module loads transformers."""

from __future__ import annotations

from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlinf_core.errors import ConfigError

PAD, EOS = "<pad>", "<eos>"


class CharTokenizer(PreTrainedTokenizerFast):
    """One token per character, after the pad token (id 0) and the end token (id 1).

    Decoding gives back exactly what was encoded, and a character outside the alphabet is refused by name.
    A saved one loads with ``AutoTokenizer`` as the plain fast tokenizer.
    """

    slow_tokenizer_class = None

    def __init__(self, characters: str = "", **kwargs: Any) -> None:
        if kwargs.get("tokenizer_object") is None and kwargs.get("tokenizer_file") is None:
            kwargs["tokenizer_object"] = _backend(characters)
        kwargs.setdefault("pad_token", PAD)
        kwargs.setdefault("eos_token", EOS)
        kwargs["clean_up_tokenization_spaces"] = False
        super().__init__(characters=characters, **kwargs)
        self.characters = characters

    def _encode_plus(self, text: Any, text_pair: Any = None, *args: Any, **kwargs: Any) -> Any:
        for part in (text, text_pair):
            self._check(part)
        return super()._encode_plus(text, text_pair, *args, **kwargs)

    def _check(self, text: Any) -> None:
        if isinstance(text, (list, tuple)):
            for part in text:
                self._check(part)
        elif isinstance(text, str):
            plain = text.replace(PAD, "").replace(EOS, "")
            for character in plain:
                if character not in self.characters:
                    raise ConfigError(
                        f"model.tiny.characters: {character!r} (U+{ord(character):04X}) in {text!r} is not "
                        f"in the alphabet {self.characters!r}; add it there"
                    )


def _backend(characters: str) -> Tokenizer:
    vocabulary = {token: i for i, token in enumerate([PAD, EOS, *characters])}
    backend = Tokenizer(models.WordLevel(vocabulary))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("(?m:.)"), "isolated")
    backend.decoder = decoders.Fuse()
    return backend
