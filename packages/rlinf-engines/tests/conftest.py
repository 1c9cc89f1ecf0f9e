"""Fixtures of the engine tests: config nodes, a forward function, batches of a few sequences."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

CHARACTERS = "0123456789+-*= "


@pytest.fixture
def make_model() -> Callable[..., SimpleNamespace]:
    """Build a ``model`` config node; keywords replace sizes of the tiny model."""

    def make(dtype: str = "float64", path: str | None = None, **sizes: Any) -> SimpleNamespace:
        tiny = {
            "hidden_size": 64,
            "layers": 2,
            "heads": 2,
            "kv_heads": 1,
            "intermediate_size": 96,
            "max_positions": 64,
            "characters": CHARACTERS,
        }
        return SimpleNamespace(path=path, dtype=dtype, tiny=SimpleNamespace(**{**tiny, **sizes}))

    return make


@pytest.fixture
def make_trainer_cfg() -> Callable[..., SimpleNamespace]:
    """Build a ``trainer`` config node; keywords replace defaults."""

    def make(**keys: Any) -> SimpleNamespace:
        defaults = {
            "name": "torch",
            "lr": 1e-3,
            "betas": [0.9, 0.95],
            "eps": 1e-8,
            "weight_decay": 0.01,
            "grad_clip": 1.0,
            "warmup_steps": 0,
            "schedule": "constant",
            "schedule_steps": 0,
            "min_lr_ratio": 0.0,
            "micro_batch_tokens": 1024,
        }
        return SimpleNamespace(**{**defaults, **keys})

    return make


@pytest.fixture
def forward() -> Callable[[Any, Any], Any]:
    """Log-probs of the tokens that came [B, T-1], from a batch of ``ids`` and ``mask`` [B, T]."""

    def log_probs(model: Any, batch: Any) -> Any:
        ids, mask = batch["ids_BT"], batch["mask_BT"]
        logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
        return logits.log_softmax(-1).gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)

    return log_probs


@pytest.fixture
def loss() -> Callable[[Any, Any], Any]:
    """Negative log-likelihood as sum and count."""

    def nll(outputs: Any, batch: Any) -> Any:
        mask = batch["mask_BT"][:, 1:].bool()
        total = -outputs.where(mask, 0.0).sum()
        return total, float(mask.sum()), {"tokens": float(mask.sum())}

    return nll


@pytest.fixture
def make_batch() -> Callable[..., dict[str, Any]]:
    """A batch of random sequences of different lengths, padded on the right; ``rows`` picks some of them."""

    def make(size: int = 6, seed: int = 0, rows: list[int] | None = None) -> dict[str, Any]:
        import torch

        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(2, 17, (size, 12), generator=generator)
        lengths = torch.randint(4, 13, (size,), generator=generator)
        mask = (torch.arange(12) < lengths.unsqueeze(1)).long()
        ids = torch.where(mask.bool(), ids, 0)
        keep = list(range(size)) if rows is None else rows
        return {"ids_BT": ids[keep], "mask_BT": mask[keep], "ids": [f"p{i}/0" for i in keep]}

    return make
