"""Padding, cutting, and log-probs against the plain formula."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlinf_core.errors import ConfigError
from rlinf_reasoning.batch import Row, TokenForward, collate, micro_batches, per_row

ROWS = [
    Row("b", [5, 6, 7], [8, 1], old_logprobs=[-0.5, -0.25], advantage=2.0),
    Row("a", [4], [9, 9, 9, 1], old_logprobs=[-1.0, -2.0, -3.0, -4.0], advantage=-1.0),
]


class Model:
    """Logits that depend on the token and on its position, as a causal model's do."""

    def __init__(self, vocabulary: int = 12) -> None:
        generator = torch.Generator().manual_seed(0)
        self.table = torch.randn(vocabulary, vocabulary, generator=generator, dtype=torch.float64)
        self.by_position = torch.randn(64, vocabulary, generator=generator, dtype=torch.float64)

    def __call__(self, input_ids: Any, attention_mask: Any, position_ids: Any, logits_to_keep: int) -> Any:
        logits = self.table[input_ids] + self.by_position[position_ids]
        return SimpleNamespace(logits=logits[:, -logits_to_keep:])


def test_collate_pads_right_and_marks_response_tokens() -> None:
    batch = collate(ROWS, pad_id=0)
    assert batch["ids"] == ["b", "a"]
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 1], [4, 9, 9, 9, 1]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1]] * 2
    assert batch["targets"].tolist() == [[6, 7, 8, 1], [9, 9, 9, 1]]
    assert batch["mask"].tolist() == [[False, False, True, True], [True] * 4]
    assert batch["old_logprobs"].tolist() == [[0.0, 0.0, -0.5, -0.25], [-1.0, -2.0, -3.0, -4.0]]
    assert batch["advantages"].tolist() == [2.0, -1.0]
    longer = collate([*ROWS, Row("c", [3, 3], [3] * 5)], pad_id=0)
    assert longer["input_ids"][0].tolist() == [5, 6, 7, 8, 1, 0, 0]
    assert longer["attention_mask"][0].tolist() == [1, 1, 1, 1, 1, 0, 0]
    assert longer["position_ids"][0].tolist() == [0, 1, 2, 3, 4, 4, 4]
    assert per_row(batch["old_logprobs"], batch["mask"]) == [[-0.5, -0.25], [-1.0, -2.0, -3.0, -4.0]]


def test_collate_refuses_what_cannot_be_trained_on() -> None:
    with pytest.raises(ConfigError, match="sample x has an empty response"):
        collate([Row("x", [1], [])], pad_id=0)
    with pytest.raises(ConfigError, match="sample x has an empty prompt"):
        collate([Row("x", [], [1])], pad_id=0)
    with pytest.raises(ValueError, match="sample x: 1 old log-probs for 2 response tokens"):
        collate([Row("x", [1], [2, 3], old_logprobs=[0.5])], pad_id=0)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_forward_equals_the_plain_formula(temperature: float) -> None:
    model, batch = Model(), collate(ROWS, pad_id=0)
    out = TokenForward(temperature)(model, batch)
    found = per_row(out["logprobs"], batch["mask"])
    for row, logprobs, entropies in zip(ROWS, found, per_row(out["entropy"], batch["mask"]), strict=True):
        tokens = [*row.prompt_ids, *row.response_ids]
        for i, (logprob, entropy) in enumerate(zip(logprobs, entropies, strict=True)):
            position = len(row.prompt_ids) + i - 1
            expected = ((model.table[tokens[position]] + model.by_position[position]) / temperature).log_softmax(-1)
            assert logprob == pytest.approx(float(expected[tokens[position + 1]]), abs=1e-12)
            assert entropy == pytest.approx(float(-(expected.exp() * expected).sum()), abs=1e-12)
    assert not out["logprobs"][~batch["mask"]].any()
    logits = model(batch["input_ids"], None, batch["position_ids"], 5).logits[:, :-1]
    assert torch.equal(out["greedy"], logits.argmax(-1) == batch["targets"])


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=30), st.integers(1, 60))
def test_micro_batches_keep_every_row_in_id_order_within_the_budget(
    lengths: list[tuple[int, int]], budget: int
) -> None:
    rows = [Row(f"s{i * 7 % 31:02d}", [1] * p, [1] * r) for i, (p, r) in enumerate(lengths)]
    parts = list(micro_batches(rows, budget))
    assert [row.id for part in parts for row in part] == sorted(row.id for row in rows)
    for part in parts:
        padded = max(row.num_tokens for row in part) * len(part)
        assert padded <= budget or len(part) == 1
