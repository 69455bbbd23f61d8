"""The figures of `Tally` against numpy in float64, written separately."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from w3pack.pipeline import agreement
from w3pack.pipeline.agreement import Tally

POSITIONS, VOCABULARY = 57, 41


def logits(seed: int, *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (3 * torch.randn(POSITIONS, VOCABULARY, generator=torch.Generator().manual_seed(seed))).to(dtype)


def tokens() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (POSITIONS,), generator=torch.Generator().manual_seed(9))


def widths() -> torch.Tensor:
    return torch.arange(POSITIONS) % 5 + 1


def softmax(values: torch.Tensor) -> np.ndarray:
    wide = values.to(torch.float64).numpy()
    exponents = np.exp(wide - wide.max(axis=1, keepdims=True))
    return exponents / exponents.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("elements", [1 << 22, 100])  # all at once, and two positions at a time
def test_figures_equal_numpy(dtype: torch.dtype, elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "_ELEMENTS_AT_ONCE", elements)
    mine, theirs, follow = logits(0, dtype=dtype), logits(1, dtype=dtype) + logits(0, dtype=dtype), tokens()
    tally = Tally()
    for part in (slice(0, 20), slice(20, None)):
        tally.add(mine[part], follow[part], nbytes=widths()[part], reference=theirs[part])
    found = tally.result()

    q, p = softmax(mine), softmax(theirs)
    at = np.arange(POSITIONS), follow.numpy()
    kl = (p * (np.log(p) - np.log(q))).sum(axis=1)
    difference = np.log(p[at]) - np.log(q[at])
    assert found.positions == POSITIONS
    assert found.nbytes == int(widths().sum())
    assert found.reference is not None
    assert found.kl is not None
    assert found.model.nll == pytest.approx(-np.log(q[at]).mean(), rel=1e-12)
    assert found.model.perplexity == pytest.approx(math.exp(-np.log(q[at]).mean()), rel=1e-12)
    assert found.reference.bits_per_byte == pytest.approx(-np.log2(p[at]).sum() / found.nbytes, rel=1e-12)
    assert found.log_ratio == pytest.approx(difference.mean(), rel=1e-9)
    assert found.log_ratio_se == pytest.approx(difference.std(ddof=1) / math.sqrt(POSITIONS), rel=1e-9)
    assert found.log_ratio == pytest.approx(
        math.log(found.model.perplexity or 0) - math.log(found.reference.perplexity or 0), rel=1e-9
    )
    assert found.kl.mean == pytest.approx(kl.mean(), rel=1e-9)
    assert found.kl.se == pytest.approx(kl.std(ddof=1) / math.sqrt(POSITIONS), rel=1e-9)
    for name, share in (("median", 50), ("p99", 99), ("p999", 99.9), ("largest", 100)):
        assert getattr(found.kl, name) == pytest.approx(np.percentile(kl, share), rel=1e-9)
    # equal logits, which half precision has, are ranked by id
    ours, expected = (np.argsort(-x.to(torch.float64).numpy(), axis=1, kind="stable")[:, :10] for x in (mine, theirs))
    assert found.top1_agreement == pytest.approx((ours[:, 0] == expected[:, 0]).mean())
    shared = [len(set(one) & set(two)) / 10 for one, two in zip(ours.tolist(), expected.tolist(), strict=True)]
    assert found.top10_overlap == pytest.approx(np.mean(shared))
    assert 0.05 < found.top1_agreement < 0.95
    assert found.rms_change == pytest.approx(math.sqrt(((q[at] - p[at]) ** 2).mean()), rel=1e-9)
    assert (found.non_finite_model, found.non_finite_reference) == (0, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_model_against_itself(dtype: torch.dtype) -> None:
    tally = Tally()
    tally.add(logits(0, dtype=dtype), tokens(), nbytes=widths(), reference=logits(0, dtype=dtype))
    found = tally.result()
    assert found.kl is not None
    assert (found.kl.mean, found.kl.largest, found.log_ratio, found.log_ratio_se, found.rms_change) == (0, 0, 0, 0, 0)
    assert (found.top1_agreement, found.top10_overlap) == (1, 1)


def test_non_finite_positions_are_counted_and_left_out() -> None:
    mine, theirs = logits(0), logits(1)
    mine[3, 7], mine[4, 0], theirs[4, 1], theirs[8, 2] = float("nan"), float("inf"), float("nan"), float("-inf")
    tally, sound = Tally(), Tally()
    tally.add(mine, tokens(), nbytes=widths(), reference=theirs)
    keep = torch.tensor([index for index in range(POSITIONS) if index not in (3, 4, 8)])
    sound.add(mine[keep], tokens()[keep], nbytes=widths()[keep], reference=theirs[keep])
    found, expected = tally.result(), sound.result()
    assert (found.non_finite_model, found.non_finite_reference) == (2, 2)
    assert found.positions == POSITIONS - 3
    assert (found.kl, found.model, found.nbytes) == (expected.kl, expected.model, expected.nbytes)


def test_nothing_finite_gives_no_figures() -> None:
    tally = Tally()
    tally.add(logits(0) * float("nan"), tokens(), nbytes=widths(), reference=logits(1))
    found = tally.result()
    assert (found.positions, found.non_finite_model) == (0, POSITIONS)
    assert found.kl is found.log_ratio is found.top1_agreement is found.model.perplexity is None


def test_without_a_reference() -> None:
    tally = Tally()
    tally.add(logits(0), tokens(), nbytes=widths())
    found = tally.result()
    assert found.model.perplexity is not None
    assert found.reference is found.kl is found.log_ratio is None


def test_certain_and_wrong_is_no_overflow() -> None:
    sure = torch.zeros(2, 3)
    sure[:, 0] = 3000
    tally = Tally()
    tally.add(sure, torch.tensor([1, 2]), nbytes=torch.tensor([1, 1]), reference=torch.zeros(2, 3))
    found = tally.result()
    assert found.model.nll == pytest.approx(3000)
    assert found.model.perplexity is None
