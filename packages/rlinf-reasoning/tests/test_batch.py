"""Packing, cutting, and log-probs against the plain formula."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf_core.errors import ConfigError
from rlinf_core.types import VocabShard
from rlinf_reasoning.batch import Row, TokenHead, collate, micro_batches, per_row

ROWS = [
    Row("b", [5, 6, 7], [8, 1], behaviour_logprobs=[-0.5, -0.25], advantages=2.0),
    Row("a", [4], [9, 9, 9, 1], behaviour_logprobs=[-1.0, -2.0, -3.0, -4.0], advantages=[-1.0, 1.0, 0.0, 3.0]),
]


def test_collate_lays_sequences_end_to_end() -> None:
    batch = collate(ROWS)
    assert batch["ids"] == ["b", "a"]
    assert batch["input_ids"].tolist() == [5, 6, 7, 8, 1, 4, 9, 9, 9, 1]
    assert batch["position_ids"].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4]
    assert batch["cu_seqlens"].tolist() == [0, 5, 10] and batch["cu_seqlens"].dtype == torch.int32
    assert batch["max_len"] == 5
    assert batch["predict"].tolist() == [2, 3, 5, 6, 7, 8]
    assert batch["targets"].tolist() == [8, 1, 9, 9, 9, 1]
    assert batch["input_ids"][batch["predict"] + 1].tolist() == batch["targets"].tolist()
    assert batch["mask"].tolist() == [True] * 6
    assert batch["segments"].tolist() == [1, 1, 2, 2, 2, 2]
    assert batch["behaviour_logprobs"].tolist() == [-0.5, -0.25, -1.0, -2.0, -3.0, -4.0]
    assert batch["advantages"].tolist() == [2.0, 2.0, -1.0, 1.0, 0.0, 3.0]
    assert batch["advantages"].dtype == torch.float64
    assert "ref_logprobs" not in batch and "old_logprobs" not in batch
    assert per_row(batch["advantages"], ROWS) == [[2.0, 2.0], [-1.0, 1.0, 0.0, 3.0]]


def test_the_state_after_the_last_token_has_a_place_of_its_own() -> None:
    rows = [Row("x", [5, 6], [7, 8], advantages=1.0, after=True), Row("y", [3], [4], advantages=2.0)]
    batch = collate(rows)
    assert batch["predict"].tolist() == [1, 2, 3, 4]
    assert batch["mask"].tolist() == [True, True, False, True]
    assert batch["segments"].tolist() == [1, 1, 1, 2]
    assert batch["advantages"].tolist() == [1.0, 1.0, 0.0, 2.0]
    assert per_row(torch.arange(4.0), rows) == [[0.0, 1.0, 2.0], [3.0]]


def test_collate_refuses_what_cannot_be_trained_on() -> None:
    with pytest.raises(ConfigError, match="sample x has an empty response"):
        collate([Row("x", [1], [])])
    with pytest.raises(ConfigError, match="sample x has an empty prompt"):
        collate([Row("x", [], [1])])
    with pytest.raises(ValueError, match="sample x: 1 old_logprobs for 2 response tokens"):
        collate([Row("x", [1], [2, 3], old_logprobs=[0.5])])
    with pytest.raises(ValueError, match="sample y: 0 ref_logprobs for 1 response tokens"):
        collate([Row("x", [1], [2], ref_logprobs=[0.5]), Row("y", [1], [2])])
    with pytest.raises(ValueError, match="at least one row"):
        collate([])


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_head_is_the_plain_formula(temperature: float) -> None:
    batch = collate(ROWS)
    logits = torch.randn(6, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    out = TokenHead(temperature)(logits, batch, VocabShard())
    for place, target in enumerate(batch["targets"].tolist()):
        expected = (logits[place] / temperature).log_softmax(-1)
        assert float(out["logprobs"][place]) == pytest.approx(float(expected[target]), abs=1e-12)
        assert float(out["entropy"][place]) == pytest.approx(float(-(expected.exp() * expected).sum()), abs=1e-12)
        assert bool(out["greedy"][place]) == (int(logits[place].argmax()) == target)


def test_a_split_vocabulary_gives_the_same(tmp_path: Path) -> None:
    """Two ranks, in processes of their own, each with a part of the logits; ties go to the smaller id."""
    import torch.multiprocessing as mp

    mp.spawn(_shard, (f"file://{tmp_path}/meet",), nprocs=2)  # raises what a rank raises


def _shard(rank: int, meet: str) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=2)
    try:
        batch = collate(ROWS)
        logits = torch.randn(6, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        logits[0, 8] = logits[0, 3] = 9.0  # the target of the first place is 8: a tie that it loses
        logits[2, 9] = 9.0
        whole = logits.clone().requires_grad_(True)
        part = logits[:, 5 * rank : 5 + 7 * rank].clone().requires_grad_(True)
        expected = TokenHead(0.7)(whole, batch, VocabShard())
        found = TokenHead(0.7)(part, batch, VocabShard(dist.group.WORLD, 5 * rank))
        for name in ("logprobs", "entropy"):
            assert torch.allclose(found[name], expected[name], atol=1e-12), name
        assert found["greedy"].tolist() == expected["greedy"].tolist()
        assert found["greedy"].tolist()[0] is False and found["greedy"].tolist()[2] is True
        for out in (expected, found):
            (out["logprobs"].sum() + out["entropy"].sum()).backward()
        assert whole.grad is not None and part.grad is not None
        assert torch.allclose(part.grad, whole.grad[:, 5 * rank : 5 + 7 * rank], atol=1e-12)
    finally:
        dist.destroy_process_group()


LENGTHS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=30)


def rows_of(lengths: list[tuple[int, int]]) -> list[Row]:
    return [Row(f"s{i * 7 % 31:02d}", [1] * p, [1] * r) for i, (p, r) in enumerate(lengths)]


@settings(deadline=None)
@given(LENGTHS, st.integers(1, 60), st.integers(0, 40))
def test_micro_batches_keep_every_row_in_id_order_within_the_budget(
    lengths: list[tuple[int, int]], budget: int, others: int
) -> None:
    rows = rows_of(lengths)
    parts = micro_batches(rows, budget, lambda number: max(number, others))
    assert [row.id for part in parts for row in part] == sorted(row.id for row in rows)
    assert all(parts)
    for part in parts:
        assert sum(row.num_tokens for row in part) <= budget or len(part) == 1
    assert len(parts) >= min(others, len(rows))
    assert parts == micro_batches(rows[::-1], budget, lambda number: max(number, others))


def test_ranks_cut_equally_often() -> None:
    barrier, numbers, counts = threading.Barrier(2, timeout=30), [0, 0], [0, 0]

    def rank(k: int, rows: list[Row]) -> None:
        def most(number: int) -> int:
            numbers[k] = number
            barrier.wait()
            return max(numbers)

        counts[k] = len(micro_batches(rows, 10, most))

    threads: list[Any] = [
        threading.Thread(target=rank, args=(0, rows_of([(5, 5)] * 6))),
        threading.Thread(target=rank, args=(1, rows_of([(1, 1)] * 8))),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert numbers == [6, 2] and counts == [6, 6]
