"""Which tokens an error of a Linear's output matters for: weights of a guided second moment.

GuidedQuant (Kim et al., ICML 2025, arXiv 2505.07004) replaces the error of a layer's output by the change of the model's loss
that it causes, to second order and without products of different outputs: sum over tokens t and rows n of
(g[t, n] * e[t, n])^2, with g the gradient of the loss by the output and e = (W' - W) x its error. Averaging g^2 over a group
of rows makes that the layer loss of every row under one moment a group,

    H = E[s_t x_t x_t^T],     s_t = mean of g[t, n]^2 over the rows of the group,

which every solver here takes as it takes E[x x^T]: `SecondMoment.add(x, weights=s)` collects it.
"""

from __future__ import annotations

import torch

from w3pack.errors import UnsupportedError, UsageError


def token_weights(gradients: torch.Tensor, *, groups: int = 1) -> torch.Tensor:
    """The say of each token for each of equal ranges of rows.

    Args:
        gradients: floating [tokens, rows] of the loss by the outputs of a Linear, in any unit.
        groups: ranges of rows; divides their number. The paper finds 1 as good as 4.

    Returns:
        float32 [groups, tokens], at least 0.

    Raises:
        UsageError: another shape, or groups that do not divide the rows.
        UnsupportedError: NaN or infinite gradients, or squares beyond float32.
    """
    if gradients.dim() != 2 or not gradients.dtype.is_floating_point:
        raise UsageError(
            f"expected floating-point gradients [tokens, rows], got {gradients.dtype} {list(gradients.shape)}; flatten them"
        )
    tokens, rows = gradients.shape
    if groups < 1 or rows % groups:
        raise UsageError(f"expected a number of groups that divides {rows} rows, got {groups}; use 1")
    squares = gradients.detach().to(torch.float32).square().view(tokens, groups, rows // groups)
    found = squares.mean(dim=2).t().contiguous()
    if not bool(torch.isfinite(found).all()):
        raise UnsupportedError("expected finite gradients, got NaN or infinity; run the backward pass in float32")
    return found


def even_out(weights: torch.Tensor) -> torch.Tensor:
    """Weights divided by their mean, all ones where that is 0: a guided moment of the size of the unguided one.

    Args:
        weights: float32 of any shape, at least 0.
    """
    mean = float(weights.mean(dtype=torch.float64)) if weights.numel() else 0.0
    return weights / mean if mean > 0 else torch.ones_like(weights)
