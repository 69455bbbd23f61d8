"""Perplexity, divergence and agreement against figures worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from w3pack.errors import UsageError
from w3pack.pipeline.evaluate import evaluate, kl_divergence, reference_log_probabilities, token_windows


def table_model(logits: torch.Tensor):  # type: ignore[no-untyped-def]
    """A model whose logits depend on the current token only; logits float32 [vocabulary, vocabulary]."""
    return lambda ids: logits[ids]


def test_windows_drop_the_rest() -> None:
    windows = token_windows(list(range(11)), window=4, tokens=100)
    assert windows.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(UsageError):
        token_windows([1, 2], window=4, tokens=100)


def test_uniform_model_has_perplexity_of_the_vocabulary() -> None:
    windows = torch.randint(0, 7, (3, 16), generator=torch.Generator().manual_seed(0))
    quality = evaluate(table_model(torch.zeros(7, 7)), windows)
    assert quality.perplexity == pytest.approx(7.0, rel=1e-6)
    assert quality.kl_mean is None
    assert quality.tokens == 48


def test_divergence_of_two_coins() -> None:
    p, q = 0.75, 0.5
    reference = torch.tensor([[p, 1 - p]]).log()
    model = torch.tensor([[q, 1 - q]]).log()
    expected = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    assert float(kl_divergence(reference, model)) == pytest.approx(expected, rel=1e-5)
    assert expected != pytest.approx(float(kl_divergence(model, reference)), rel=1e-2)  # the order matters


def test_source_against_itself_and_against_another() -> None:
    generator = torch.Generator().manual_seed(1)
    source = torch.randn(9, 9, generator=generator) * 3
    windows = torch.randint(0, 9, (4, 70), generator=generator)
    reference = reference_log_probabilities(table_model(source), windows)
    itself = evaluate(table_model(source), windows, reference=reference)
    assert itself.kl_mean == pytest.approx(0.0, abs=1e-6)
    assert itself.top1_agreement == 1.0
    other = evaluate(table_model(source.flip(1)), windows, reference=reference)
    assert other.kl_mean is not None
    assert other.kl_p99 is not None
    assert other.top1_agreement is not None
    assert other.kl_p99 > other.kl_mean > 0.5
    assert other.top1_agreement < 0.5
    halves = reference_log_probabilities(table_model(source), windows, dtype=torch.float16)
    rounded = evaluate(table_model(source), windows, reference=halves)
    assert rounded.kl_mean is not None
    assert rounded.kl_mean < 1e-3


def test_non_finite_positions_are_counted_not_averaged() -> None:
    source = torch.zeros(4, 4)
    broken = source.clone()
    broken[2] = float("nan")
    windows = torch.tensor([[0, 1, 2, 3, 0, 1]])
    reference = reference_log_probabilities(table_model(source), windows)
    quality = evaluate(table_model(broken), windows, reference=reference)
    assert quality.non_finite == 1
    assert quality.tokens == 5
    assert quality.perplexity == pytest.approx(4.0, rel=1e-6)


def test_reference_of_another_length_is_refused() -> None:
    windows = torch.zeros(2, 4, dtype=torch.int64)
    with pytest.raises(UsageError):
        evaluate(table_model(torch.zeros(3, 3)), windows, reference=[torch.zeros(4, 3)])
