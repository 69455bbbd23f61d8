"""Choosing a form for each Linear."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from w3pack.errors import UsageError
from w3pack.pipeline.mixed import Candidate, Form, KeepTop, fit_bits, keep_top, mix_of, parse_keep_top


def candidate(name: str, weights: int, losses: tuple[float, float]) -> Candidate:
    """Groups of 128 and 64 in unpadded sizes, and 16 bit."""
    packed = [
        Form(size, weights * 3 // 8 + 2 * weights // size, loss) for size, loss in zip((128, 64), losses, strict=True)
    ]
    return Candidate(module=name, weights=weights, forms=(*packed, Form(None, 2 * weights, 0.0)))


FOUR = (
    candidate("a", 1024, (1.0, 0.9)),
    candidate("b", 2048, (3.0, 2.0)),
    candidate("c", 4096, (4.0, 3.9)),
    candidate("d", 1024, (0.5, 0.1)),
)


def test_share_and_count_are_told_apart() -> None:
    assert parse_keep_top("5%") == KeepTop(share=0.05)
    assert parse_keep_top(" 2.5 % ") == KeepTop(share=0.025)
    assert parse_keep_top("3") == KeepTop(count=3)
    for text in ("", "0", "0%", "100%", "-1", "5 percent", "1e3", "nan", "9" * 30):
        with pytest.raises(UsageError, match="expected --keep-top as a share"):
            parse_keep_top(text)


def test_a_count_takes_the_largest_losses() -> None:
    chosen = keep_top(FOUR, KeepTop(count=2), group_size=128)
    assert chosen == {"a": 128, "b": None, "c": None, "d": 128}
    with pytest.raises(UsageError, match="got 4 of 4"):
        keep_top(FOUR, KeepTop(count=4), group_size=128)


def test_a_share_goes_by_loss_for_each_byte_and_stays_within() -> None:
    # a byte of b buys most, then one of a and c alike (a first), then one of d; all hold 8192 weights
    assert keep_top(FOUR, KeepTop(share=0.25), group_size=128) == {"a": 128, "b": None, "c": 128, "d": 128}
    assert keep_top(FOUR, KeepTop(share=0.40), group_size=128) == {"a": None, "b": None, "c": 128, "d": 128}
    # c does not fit any more, d does
    assert keep_top(FOUR, KeepTop(share=0.5), group_size=128) == {"a": None, "b": None, "c": 128, "d": None}
    with pytest.raises(UsageError, match=r"holds 12% of the bytes, got 5%"):
        keep_top(FOUR, KeepTop(share=0.05), group_size=128)


def loss_of(candidates: tuple[Candidate, ...], chosen: dict[str, int | None]) -> float:
    return math.fsum(next(f.loss for f in c.forms if f.group_size == chosen[c.module]) for c in candidates)


def bytes_of(candidates: tuple[Candidate, ...], chosen: dict[str, int | None]) -> int:
    return sum(next(f.nbytes for f in c.forms if f.group_size == chosen[c.module]) for c in candidates)


@pytest.mark.parametrize("seed", range(40))
def test_bits_are_kept_and_the_loss_is_near_the_least(seed: int) -> None:
    generator = random.Random(seed)
    candidates = tuple(
        candidate(str(n), 64 * generator.randint(1, 40), (generator.uniform(0.2, 2), generator.uniform(0.1, 2.2)))
        for n in range(6)
    )
    weights = sum(one.weights for one in candidates)
    bits = generator.uniform(3.3, 12)
    fixed = {"fixed_bytes": 300, "fixed_weights": 640}
    chosen = fit_bits(candidates, bits, **fixed)
    budget = bits * (weights + 640) / 8 - 300
    assert bytes_of(candidates, chosen) <= budget
    every = (dict(zip("012345", sizes, strict=True)) for sizes in itertools.product((128, 64, None), repeat=6))
    least = min(loss_of(candidates, one) for one in every if bytes_of(candidates, one) <= budget)
    largest_step = max(form.loss for one in candidates for form in one.forms)
    assert least <= loss_of(candidates, chosen) <= least + largest_step
    # nothing better fits into what is left
    for one in candidates:
        for form in one.forms:
            now = next(f for f in one.forms if f.group_size == chosen[one.module])
            fits = bytes_of(candidates, chosen) - now.nbytes + form.nbytes <= budget
            assert not (fits and form.loss < now.loss)


def test_a_form_that_is_larger_and_worse_is_never_taken() -> None:
    padded = Candidate("p", 1000, (Form(128, 500, 1.0), Form(64, 450, 0.8), Form(None, 2000, 0.0)))
    assert fit_bits((padded,), 4.1) == {"p": 64}


def test_too_few_bits_are_refused_with_the_figure_that_would_do() -> None:
    with pytest.raises(UsageError, match=r"at least 3\.125") as caught:
        fit_bits(FOUR, 3.1)
    assert "got 3.1" in str(caught.value)
    assert set(fit_bits(FOUR, 3.125).values()) == {128}


def test_a_mix_holds_what_departs_from_the_options() -> None:
    mix = mix_of({"a": 128, "b": None, "c": 64}, asked="--target-bits 4", group_size=128)
    assert (mix.kept, mix.group_sizes, mix.sizes) == (("b",), (("c", 64),), {"c": 64})
    with pytest.raises(UsageError, match="to leave a Linear to quantise"):
        mix_of({"a": None}, asked="--target-bits 15.9", group_size=128)
