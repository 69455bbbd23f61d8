"""Random operands must be able to show a fault."""

from __future__ import annotations

import pytest
import torch

from w3pack.bench.operands import random_weights, random_x, relative_error
from w3pack.bench.shapes import Case
from w3pack.pack.words import unpack_codes, unpack_scales

CPU = torch.device("cpu")
CASES = [
    Case(rows=192, columns=256, tokens=3),
    Case(rows=100, columns=200, tokens=1, group_size=64, layout="nibble", qmap_dtype="float16", x_dtype="bfloat16"),
    Case(rows=192, columns=128, tokens=9, map_kind="tile"),
    Case(rows=130, columns=320, tokens=2, group_size=64, qmap_dtype="float16", map_kind="row"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_all_codes_distinct_maps_and_scales_of_both_signs(case: Case) -> None:
    spec, weights = case.spec, random_weights(case.spec, device=CPU)
    assert torch.equal(unpack_codes(weights.codes, spec).unique(), torch.arange(8, dtype=torch.uint8))
    scales = unpack_scales(weights.scales, spec)
    assert bool((scales > 0).any())
    assert bool((scales < 0).any())
    assert bool(scales.isfinite().all())
    assert scales.unique().numel() > 0.9 * scales.numel()
    assert tuple(weights.qmap.shape) == spec.qmap_shape
    assert all(one.unique().numel() == 8 for one in weights.qmap)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_truth_is_the_matrix_times_x(case: Case) -> None:
    weights, x = random_weights(case.spec, device=CPU), random_x(case, device=CPU)
    assert (tuple(x.shape), x.dtype) == ((case.tokens, case.columns), getattr(torch, case.x_dtype))
    truth = x.double() @ weights.dense(torch.float64).t()
    assert relative_error(weights.exact(x), truth) < 1e-12
    assert relative_error(torch.nn.functional.linear(x, weights.dense(x.dtype)), truth) < 0.02


def test_copies_are_equal_and_lie_elsewhere() -> None:
    weights = random_weights(CASES[0].spec, device=CPU)
    copies = weights.copies(3)
    assert len({one.codes.data_ptr() for one in copies}) == 3
    assert all(torch.equal(one.codes, weights.codes) and torch.equal(one.scales, weights.scales) for one in copies)


def test_an_error_is_relative_and_nan_shows() -> None:
    truth = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert relative_error(torch.tensor([3.0, 4.5]), truth) == pytest.approx(0.1)
    assert not relative_error(torch.tensor([3.0, float("nan")]), truth) <= 1.0
