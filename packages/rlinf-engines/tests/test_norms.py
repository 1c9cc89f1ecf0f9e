"""Gradient norms of large models: float32 sums of squares would be off in the digits that are compared here."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import trainer_cases as cases  # noqa: E402

from rlinf_core.types import ParallelInfo  # noqa: E402
from rlinf_engines.trainers.norms import sum_of_squares  # noqa: E402
from rlinf_engines.trainers.torch_trainer import TorchTrainer  # noqa: E402

CPU = torch.device("cpu")


def test_squares_are_added_in_float64() -> None:
    tensors = [torch.full((1 << 21,), 0.1), torch.full((3, 1000, 1001), 0.1), torch.full((), 0.1)]
    exact = sum(tensor.numel() for tensor in tensors) * float(tensors[0][0]) ** 2
    found = sum_of_squares(tensors, CPU)
    assert found.dtype == torch.float64
    assert float(found) == pytest.approx(exact, rel=1e-12)
    rounded = float(torch.linalg.vector_norm(torch.cat([tensor.reshape(-1) for tensor in tensors]))) ** 2
    assert abs(rounded / exact - 1.0) > 1e-4  # what this is for


def test_parts_and_empty_tensors_count_once() -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((1 << 16,), (65537,), (3, 5))]
    exact = math.fsum(float(tensor.pow(2).sum()) for tensor in tensors)
    strided = torch.stack([tensors[2], tensors[2]], dim=-1)[..., 0]
    assert not strided.is_contiguous()
    given = [*tensors[:2], torch.zeros(0), strided]
    assert float(sum_of_squares(given, CPU)) == pytest.approx(exact, rel=1e-14)
    assert float(sum_of_squares([], CPU)) == 0.0
    assert float(sum_of_squares([torch.zeros(0, 4)], CPU)) == 0.0


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_bad_elements_show(value: float) -> None:
    tensor = torch.ones(70000)
    tensor[66000] = value
    found = float(sum_of_squares([torch.ones(3), tensor], CPU))
    assert math.isnan(found) if math.isnan(value) else found == math.inf


def test_squares_beyond_float32_are_finite() -> None:
    assert float(sum_of_squares([torch.full((4,), 1e30)], CPU)) == pytest.approx(4e60, rel=1e-6)


def test_the_trainer_s_norm_is_exact_for_millions_of_elements() -> None:
    trainer = TorchTrainer(cases.trainer_config(grad_clip=0.0))
    model = cases.model_config(hidden_size=64, intermediate_size=12000, layers=2)
    trainer.setup(model, cases.head, ParallelInfo(), seed=0)
    elements = sum(parameter.numel() for parameter in trainer.model.parameters())
    assert elements > 4_000_000
    for parameter in trainer.model.parameters():
        parameter.grad = torch.full_like(parameter, 0.1)
    expected = math.sqrt(elements) * float(torch.tensor(0.1))
    assert trainer.step(1.0).grad_norm == pytest.approx(expected, rel=1e-9)
