"""The second moment of a Linear's inputs, H = E[x x^T], and its damping.

For a Linear y = W x the mean squared error of the output is sum over rows of (What - W)_n H (What - W)_n^T, so H is all
that layer-wise calibration needs to know of the data (Optimal Brain Surgeon; GPTQ, arXiv 2210.17323).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from w3pack.errors import UnsupportedError, UsageError

TOKENS_AT_ONCE = 4096  # bounds the length of a float32 sum before it is added to the wide total
# Columns of a strip: products run from a strip's first column to the last, since the rest is their mirror image. That takes
# 0.6 of the time of whole products for 1,536 columns and 0.7 for 576 (one core, MKL); strips of 128 to 384 are alike.
STRIP = 192
DEVICE_STRIP = 2048  # each strip waits for the device once


class SecondMoment:
    """Accumulates sum(w_t x_t x_t^T) over batches of activations.

    Products are float32, whatever the activations are, in pieces of at most 4,096 tokens; the total is float64 unless
    told otherwise (8 bytes x columns^2: 0.5 GiB for 8,192 columns). TF32 is never used.

    Args:
        columns: in_features K of the Linear.
        device: where the total lives; activations are moved there.
        dtype: of the total, torch.float64 or, where memory is short, torch.float32.
    """

    def __init__(self, columns: int, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float64) -> None:
        if columns < 1:
            raise UsageError(f"expected at least one column; got {columns}; give the in_features of the Linear")
        if dtype not in (torch.float64, torch.float32):
            raise UsageError(f"expected a total in float64 or float32; got {dtype}; narrower sums lose the data")
        self.columns = columns
        self.tokens = 0
        self._total = torch.zeros(columns, columns, dtype=dtype, device=device)

    def add(self, activations: torch.Tensor, *, weights: torch.Tensor | None = None) -> None:
        """Count some tokens.

        Args:
            activations: [..., columns] of any floating dtype; leading axes are tokens.
            weights: floating [...] with the same leading axes, non-negative: each token's say, for a guided moment
                (GuidedQuant, arXiv 2505.07004: the squared gradient of the loss by the output, mean over a group of
                rows). Left out, every token counts 1.
        """
        if activations.dim() < 1 or activations.shape[-1] != self.columns:
            raise UsageError(
                f"expected activations of shape [tokens, {self.columns}]; got {list(activations.shape)}; "
                "pass the input of the Linear, not its output"
            )
        if not activations.dtype.is_floating_point:
            raise UsageError(f"expected floating-point activations; got {activations.dtype}; convert them first")
        tokens = activations.detach().reshape(-1, self.columns)
        say = None if weights is None else self._checked_weights(weights, tokens.shape[0])
        width = STRIP if self._total.device.type == "cpu" else DEVICE_STRIP
        for first in range(0, tokens.shape[0], TOKENS_AT_ONCE):
            piece = tokens[first : first + TOKENS_AT_ONCE].to(self._total.device, torch.float32)
            left = piece if say is None else piece * say[first : first + TOKENS_AT_ONCE].unsqueeze(1)
            with full_precision():
                for start in range(0, self.columns, width):
                    strip = left[:, start : start + width].t() @ piece[:, start:]
                    if not bool(torch.isfinite(strip.diagonal().sum())):
                        raise UnsupportedError(
                            "expected finite activations; got NaN or infinity, or squares beyond float32; "
                            "run the calibration in float32 or bfloat16"
                        )
                    self._total[start : start + width, start:] += strip  # only the upper triangle is kept up
        self.tokens += tokens.shape[0]

    def _checked_weights(self, weights: torch.Tensor, tokens: int) -> torch.Tensor:
        say = weights.detach().reshape(-1).to(self._total.device, torch.float32)
        if say.shape[0] != tokens:
            raise UsageError(f"expected a weight for each of {tokens} tokens; got {say.shape[0]}; pass one per token")
        if bool((say < 0).any()) or not bool(torch.isfinite(say).all()):
            raise UsageError("expected finite weights of at least 0; got others; square the gradients first")
        return say

    def merge(self, other: SecondMoment) -> None:
        """Add what another accumulator of the same columns has seen."""
        if other.columns != self.columns:
            raise UsageError(f"expected a moment of {self.columns} columns; got {other.columns}; merge like with like")
        self._total += other._total.to(self._total)
        self.tokens += other.tokens

    def matrix(self) -> torch.Tensor:
        """E[x x^T] over the tokens added: float32 [columns, columns], exactly symmetric."""
        if self.tokens == 0:
            raise UsageError("expected activations before the moment is read; got none; run the calibration first")
        mean = (self._total / self.tokens).triu_()
        return (mean + mean.triu(1).t()).to(torch.float32)

    def diagonal(self) -> torch.Tensor:
        """E[x_k^2], what an importance matrix of llama.cpp holds: float32 [columns]."""
        if self.tokens == 0:
            raise UsageError("expected activations before the moment is read; got none; run the calibration first")
        return (self._total.diagonal() / self.tokens).to(torch.float32)


@contextmanager
def full_precision() -> Iterator[None]:
    """Let float32 products on a GPU be float32: TF32 in H or its factor costs positive definiteness."""
    before = torch.get_float32_matmul_precision()
    if before == "highest":
        yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def check_moment(moment: torch.Tensor, *, columns: int) -> torch.Tensor:
    """A caller's second moment as float32 on its device, or an error that says what is wrong with it.

    Args:
        moment: floating [columns, columns], symmetric, or [columns], its diagonal; finite; diagonal at least 0.
        columns: columns of the weight.
    """
    if tuple(moment.shape) not in ((columns,), (columns, columns)):
        raise UsageError(
            f"expected a second moment of shape [{columns}, {columns}] or its diagonal [{columns}]; "
            f"got {list(moment.shape)}; collect it from the inputs of this Linear"
        )
    if not moment.dtype.is_floating_point:
        raise UsageError(f"expected a floating-point second moment; got {moment.dtype}; convert it first")
    matrix = moment.detach().to(torch.float32)
    if not bool(torch.isfinite(matrix).all()):
        raise UnsupportedError("expected a finite second moment; got NaN or infinity; collect it in float32")
    if bool((diagonal_of(matrix) < 0).any()):
        raise UsageError("expected mean squares of at least 0; got negative ones; check where the moment comes from")
    return matrix


def diagonal_of(moment: torch.Tensor) -> torch.Tensor:
    """[columns] of a moment [columns, columns] or [columns]."""
    return moment if moment.dim() == 1 else moment.diagonal()


def damped(moment: torch.Tensor, relative: float) -> torch.Tensor:
    """H + relative * diag(H), with dead inputs given the median of the live ones.

    Damping by a part of each diagonal entry is the same as adding a constant after scaling H to a unit diagonal. The
    usual part of the *mean* diagonal is ruled by massive activations: one per cent of it was five times the median
    in a down_proj of SmolLM2. An input that was always zero (H_kk = 0) says nothing of its weight, which is then
    rounded like one of ordinary importance instead of at random.

    Args:
        moment: floating [columns, columns], symmetric positive semidefinite, or [columns], its diagonal.
        relative: part of the diagonal to add, at least 0; 0.1 suits tens of thousands of tokens, 0.01 millions.

    Returns:
        Same shape and dtype, a new tensor; all ones on the diagonal where every input is dead.
    """
    if not relative >= 0:
        raise UsageError(f"expected a damping of at least 0; got {relative}; use 0.1, or 0.01 for much data")
    filled = moment.clone()
    diagonal = diagonal_of(filled)
    live = diagonal > 0
    typical = diagonal[live].median() if bool(live.any()) else diagonal.new_ones(())
    diagonal.copy_(torch.where(live, diagonal, typical) * (1.0 + relative))
    return filled
