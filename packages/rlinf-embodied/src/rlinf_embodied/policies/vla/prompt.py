"""Instructions as token ids, and the tokenizer of the tiny model.

Shape legend: B instructions, L tokens (``model.prompt_tokens``).
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlinf_core.errors import RLinfError

TEMPLATE = "In: What action should the robot take to {instruction}?\nOut:"
"""The prompt of OpenVLA, around an instruction in lower case."""
EMPTY = "\u2581"
"""The piece that Llama's tokenizer puts between the prompt and an answer; OpenVLA was trained with it there."""
PAD, BOS, EOS, UNKNOWN = "<pad>", "<s>", "</s>", "<unk>"
WORDS = (
    "in what action should the robot take to out pick up place put it on onto into and open close push pull turn off "
    "press reach grasp lift move stack insert slide from at of with next between under inside left right front back "
    "top bottom middle center side black white red green blue yellow orange wooden bowl plate mug book drawer cabinet "
    "stove table shelf rack basket box pot pots moka pan frying microwave caddy compartment tray wine bottle butter "
    "cream cheese cookie chocolate pudding ramekin alphabet soup tomato sauce salad dressing bbq ketchup milk juice "
    "them both cube goal block ball button door window handle peg hole target object tool gripper hand forward down"
)
"""Those that the tiny tokenizer has whole."""


class Prompts:
    """Instructions to ids of equal length, each distinct one tokenised once."""

    def __init__(self, tokenizer: Any, length: int) -> None:
        self._tokenizer = tokenizer
        self._length = length
        self._bos = tokenizer.bos_token_id
        self._pad = tokenizer.pad_token_id
        empty = tokenizer.convert_tokens_to_ids(EMPTY)
        self._empty = None if empty in (None, tokenizer.unk_token_id) else empty
        self._known: dict[str, NDArray[np.int64]] = {}

    def __call__(self, instructions: Sequence[str]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """(ids [B, L], which of them are no padding [B, L]). First comes the begin token, then padding, then the text.

        Raises RLinfError when an instruction does not fit.
        """
        rows = [self._row(text) for text in instructions]
        ids = np.full((len(rows), self._length), self._pad, dtype=np.int64)
        real = np.zeros(ids.shape, dtype=bool)
        for place, row in enumerate(rows):
            ids[place, 0] = self._bos
            real[place, 0] = True
            ids[place, self._length - len(row) :] = row
            real[place, self._length - len(row) :] = True
        return ids, real

    def _row(self, instruction: str) -> NDArray[np.int64]:
        """Ids of the prompt without the begin token."""
        row = self._known.get(instruction)
        if row is None:
            text = TEMPLATE.format(instruction=instruction.strip().lower())
            ids = [i for i in self._tokenizer(text, add_special_tokens=False)["input_ids"] if i != self._bos]
            if self._empty is not None and ids[-1:] != [self._empty]:
                ids.append(self._empty)
            if len(ids) + 1 > self._length:
                raise RLinfError(
                    f"model.prompt_tokens={self._length}: the instruction {instruction!r} takes {len(ids) + 1} tokens "
                    "with the prompt around it; raise model.prompt_tokens to at least that"
                )
            row = self._known[instruction] = np.asarray(ids, dtype=np.int64)
        return row


def tiny_tokenizer(actions: int) -> Any:
    """Words of manipulation tasks whole, others letter by letter; the last ``actions`` ids are action tokens.

    The padding token comes after the vocabulary, as in OpenVLA.
    """
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    letters = sorted(set(string.printable.lower()) - set(string.whitespace))
    pieces = dict.fromkeys([UNKNOWN, BOS, EOS, *letters, *(f"##{letter}" for letter in letters), *WORDS.split()])
    pieces.update(dict.fromkeys(f"<action_{number}>" for number in range(actions, 0, -1)))
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    backend = Tokenizer(models.WordPiece(vocabulary, unk_token=UNKNOWN, max_input_chars_per_word=1000))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, vocabulary[BOS])])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token=UNKNOWN, bos_token=BOS, eos_token=EOS, padding_side="left"
    )
    tokenizer.add_special_tokens({"pad_token": PAD})
    return tokenizer
