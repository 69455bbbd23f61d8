"""The second moment is what float64 says it is, and its damping helps exactly where it should."""

from __future__ import annotations

import pytest
import torch

from w3pack.errors import UnsupportedError, UsageError
from w3pack.quantize.moments import TOKENS_AT_ONCE, SecondMoment, check_moment, damped, full_precision


def activations(tokens: int, columns: int, *, seed: int = 0) -> torch.Tensor:
    """float32 with a mean, unequal columns and one massive one."""
    x = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(seed)) * torch.linspace(0.1, 3, columns)
    x[:, 3] = x[:, 3] * 300 + 100
    return x


@pytest.mark.parametrize("total", [torch.float64, torch.float32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_batches_add_up_to_the_mean_of_outer_products(dtype: torch.dtype, total: torch.dtype) -> None:
    x = activations(500, 24).to(dtype)
    moment = SecondMoment(24, dtype=total)
    moment.add(x[:7])
    moment.add(x[7:400].view(3, 131, 24))
    moment.add(x[400:])
    wide = x.to(torch.float64)
    expected = wide.t() @ wide / 500
    assert moment.tokens == 500
    matrix = moment.matrix()
    assert matrix.dtype == torch.float32
    assert torch.equal(matrix, matrix.t())
    torch.testing.assert_close(matrix.to(torch.float64), expected, rtol=1e-4, atol=1e-6 * float(expected.abs().max()))
    torch.testing.assert_close(moment.diagonal(), matrix.diagonal())


def test_half_precision_squares_do_not_overflow() -> None:
    moment = SecondMoment(4)
    moment.add(torch.full((10, 4), 60000.0, dtype=torch.float16))
    assert float(moment.matrix()[0, 1]) == pytest.approx(float(torch.tensor(60000.0).half()) ** 2)


def test_many_small_batches_do_not_drown_in_a_large_total() -> None:
    moment = SecondMoment(2)
    moment.add(torch.full((1, 2), 4096.0))
    for _ in range(100):
        moment.add(torch.ones(1, 2))  # each is half a unit in the last place of a float32 total
    assert float(moment.matrix()[0, 0]) * 101 == pytest.approx(4096.0**2 + 100, rel=1e-7)


def test_long_batches_are_cut() -> None:
    x = activations(2 * TOKENS_AT_ONCE + 5, 4)
    moment = SecondMoment(4)
    moment.add(x)
    wide = x.to(torch.float64)
    torch.testing.assert_close(moment.matrix().to(torch.float64), wide.t() @ wide / x.shape[0], rtol=1e-5, atol=1e-3)


def test_token_weights_and_merging() -> None:
    x = activations(60, 8)
    say = torch.rand(60, generator=torch.Generator().manual_seed(1))
    left, right = SecondMoment(8), SecondMoment(8)
    left.add(x[:20].view(4, 5, 8), weights=say[:20].view(4, 5))
    right.add(x[20:], weights=say[20:])
    left.merge(right)
    wide = x.to(torch.float64)
    expected = (wide * say.to(torch.float64).unsqueeze(1)).t() @ wide / 60
    torch.testing.assert_close(left.matrix().to(torch.float64), expected, rtol=1e-5, atol=1e-3)


def test_refusals() -> None:
    moment = SecondMoment(8)
    with pytest.raises(UsageError, match="none"):
        moment.matrix()
    with pytest.raises(UsageError, match="none"):
        moment.diagonal()
    with pytest.raises(UsageError, match=r"\[tokens, 8\]"):
        moment.add(torch.zeros(3, 7))
    with pytest.raises(UsageError, match="int64"):
        moment.add(torch.zeros(3, 8, dtype=torch.int64))
    with pytest.raises(UsageError, match="each of 3"):
        moment.add(torch.zeros(3, 8), weights=torch.ones(2))
    with pytest.raises(UsageError, match="weights"):
        moment.add(torch.zeros(3, 8), weights=-torch.ones(3))
    with pytest.raises(UsageError, match="merge"):
        moment.merge(SecondMoment(4))
    for bad in (float("nan"), float("inf"), 1e30):
        with pytest.raises(UnsupportedError, match="finite"):
            moment.add(torch.full((3, 8), bad))
    assert moment.tokens == 0
    with pytest.raises(UsageError):
        SecondMoment(0)
    with pytest.raises(UsageError):
        SecondMoment(4, dtype=torch.float16)
    with pytest.raises(UsageError, match="shape"):
        check_moment(torch.zeros(3, 4), columns=4)
    with pytest.raises(UsageError, match="floating"):
        check_moment(torch.zeros(4, 4, dtype=torch.int32), columns=4)
    with pytest.raises(UsageError, match="negative"):
        check_moment(-torch.eye(4), columns=4)
    with pytest.raises(UnsupportedError, match="finite"):
        check_moment(torch.full((4, 4), float("nan")), columns=4)
    with pytest.raises(UsageError, match="damping"):
        damped(torch.eye(4), -0.1)


def test_full_precision_is_asked_for_and_given_back() -> None:
    before = torch.get_float32_matmul_precision()
    try:
        for setting in ("high", "highest"):
            torch.set_float32_matmul_precision(setting)
            with full_precision():
                assert torch.get_float32_matmul_precision() == "highest"
            assert torch.get_float32_matmul_precision() == setting
    finally:
        torch.set_float32_matmul_precision(before)


def test_damping_is_relative_and_revives_dead_inputs() -> None:
    x = activations(10, 32)
    x[:, [5, 20]] = 0.0
    moment = (x.t() @ x) / 10
    copy = moment.clone()
    heavy = damped(moment, 0.1)
    assert torch.equal(moment, copy)
    live = moment.diagonal() > 0
    torch.testing.assert_close(heavy.diagonal()[live], moment.diagonal()[live] * 1.1)
    typical = moment.diagonal()[live].median() * 1.1
    assert torch.equal(heavy.diagonal()[~live], typical.expand(2))
    off = ~torch.eye(32, dtype=torch.bool)
    assert torch.equal(heavy[off], moment[off])
    assert torch.equal(damped(moment.diagonal(), 0.1), heavy.diagonal())
    assert torch.equal(damped(torch.zeros(4), 0.5), torch.full((4,), 1.5))
