"""Percentiles and the number of operand sets; what needs a GPU is in test_on_gpu.py."""

from __future__ import annotations

import pytest

from w3pack.bench.timing import MAX_COPIES, Timing, copies_for, graph_time
from w3pack.errors import UsageError


def test_median_percentiles_and_spread() -> None:
    timing = Timing.of([float(value) for value in range(100, 0, -1)])
    assert (timing.median_us, timing.low_us, timing.high_us) == (50.5, 11.0, 90.0)
    assert timing.spread == pytest.approx(79 / 50.5)
    assert Timing.of([2.0]) == Timing(2.0, 2.0, 2.0)
    assert Timing(0.0, 0.0, 0.0).spread == 0.0


@pytest.mark.parametrize("nbytes", [1 << 20, 6 << 20, 92 << 20, 61 << 20])
def test_the_sets_exceed_the_cache_three_times(nbytes: int) -> None:
    count = copies_for(nbytes, l2_bytes=60 << 20)
    assert count >= 2
    assert (count - 1) * nbytes >= 3 * (60 << 20)


def test_there_are_never_too_many_sets() -> None:
    assert copies_for(1, l2_bytes=60 << 20) == MAX_COPIES
    assert copies_for(0, l2_bytes=60 << 20) == MAX_COPIES
    assert copies_for(1 << 40, l2_bytes=60 << 20) == 2


@pytest.mark.parametrize("wrong", [{"copies": 0}, {"copies": 1, "repeats": 0}, {"copies": 1, "outer": 0}])
def test_counts_below_one_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="expected at least one"):
        graph_time(lambda _: None, **wrong)
