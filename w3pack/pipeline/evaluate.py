"""How far a model is from its source: perplexity, divergence and agreement on windows of tokens.

Pure functions over anything that maps token ids to logits. The reference is run once and kept; every candidate is then
compared with it on the same tokens. Divergence is KL(reference || model) of the next-token distributions in nats per
token, the figure that follows the share of changed answers most closely
("Accuracy is Not All You Need", arXiv 2407.09141).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from w3pack.errors import UsageError

# Positions compared at once: bounds the float32 temporaries to 64 x vocabulary.
_SLICE = 64

Model = Callable[[torch.Tensor], Any]


@dataclass(frozen=True)
class Quality:
    """One model on one text.

    Attributes:
        tokens: positions at which distributions were compared.
        perplexity: exp of the mean negative log-likelihood of the text's own next tokens, within each window.
        kl_mean: mean KL(reference || model), nats per token; None without a reference.
        kl_p99: 99th percentile of the same.
        top1_agreement: share of positions, 0..1, at which both hold the same token likeliest.
        non_finite: positions whose logits hold NaN or infinity; they are left out of all other figures.
    """

    tokens: int
    perplexity: float
    kl_mean: float | None
    kl_p99: float | None
    top1_agreement: float | None
    non_finite: int


def token_windows(ids: Sequence[int], *, window: int, tokens: int) -> torch.Tensor:
    """Consecutive windows of the first `tokens` ids; what does not fill a window is dropped.

    Returns:
        int64 [windows, window].
    """
    if window < 2:
        raise UsageError(f"expected windows of at least 2 tokens; got {window}; use 512 or more")
    count = min(len(ids), tokens) // window
    if count == 0:
        raise UsageError(f"expected at least {window} tokens of text; got {min(len(ids), tokens)}; give a longer text")
    return torch.tensor(list(ids[: count * window]), dtype=torch.int64).view(count, window)


def log_probabilities(model: Model, window: torch.Tensor) -> torch.Tensor:
    """Next-token log-probabilities.

    Args:
        model: maps int64 [1, window] to logits [1, window, vocabulary], or to an object that has them as `.logits`.
        window: int64 [window].

    Returns:
        float32 [window, vocabulary].
    """
    with torch.inference_mode():
        output = model(window.unsqueeze(0))
        logits: torch.Tensor = output if isinstance(output, torch.Tensor) else output.logits
        return torch.log_softmax(logits[0].to(torch.float32), dim=-1)


def reference_log_probabilities(
    model: Model, windows: torch.Tensor, *, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """What `evaluate` compares with: one [window, vocabulary] tensor per window.

    float16 halves the memory; its rounding is finest where the probability is large, and adds about 1e-4 nats
    (compare the source with itself to see it).
    """
    return [log_probabilities(model, window).to(dtype) for window in windows]


def kl_divergence(reference: torch.Tensor, model: torch.Tensor) -> torch.Tensor:
    """KL(reference || model) per position.

    Args:
        reference: log-probabilities [positions, vocabulary].
        model: log-probabilities [positions, vocabulary].

    Returns:
        float32 [positions], nats; not below zero.
    """
    parts = []
    for start in range(0, reference.shape[0], _SLICE):
        wide = reference[start : start + _SLICE].to(torch.float32)
        other = model[start : start + _SLICE].to(torch.float32)
        parts.append((wide.exp() * (wide - other)).sum(dim=-1))
    return torch.cat(parts).clamp_min_(0.0)


def evaluate(model: Model, windows: torch.Tensor, *, reference: Sequence[torch.Tensor] | None = None) -> Quality:
    """Run the model over all windows and compare it with the reference, if there is one.

    Args:
        model: see `log_probabilities`.
        windows: int64 [windows, window].
        reference: from `reference_log_probabilities` on the same windows.
    """
    if reference is not None and len(reference) != len(windows):
        raise UsageError(
            f"expected one reference per window ({len(windows)}); got {len(reference)}; rebuild the reference"
        )
    loss = 0.0
    predicted = 0
    non_finite = 0
    divergences: list[torch.Tensor] = []
    same = 0
    for index, window in enumerate(windows):
        mine = log_probabilities(model, window)
        finite = torch.isfinite(mine).all(dim=-1)
        non_finite += int((~finite).sum())
        picked = mine[:-1].gather(1, window[1:].unsqueeze(1).to(mine.device)).squeeze(1)[finite[:-1]]
        loss -= float(picked.to(torch.float64).sum())
        predicted += picked.numel()
        if reference is not None:
            theirs = reference[index].to(mine.device)
            divergences.append(kl_divergence(theirs, mine)[finite])
            same += int((theirs.argmax(dim=-1) == mine.argmax(dim=-1))[finite].sum())
    perplexity = math.exp(loss / predicted) if predicted else math.nan
    if reference is None:
        return Quality(windows.numel() - non_finite, perplexity, None, None, None, non_finite)
    divergence = torch.cat(divergences).to(torch.float64)
    compared = divergence.numel()
    return Quality(
        tokens=compared,
        perplexity=perplexity,
        kl_mean=float(divergence.mean()) if compared else math.nan,
        kl_p99=float(torch.quantile(divergence, 0.99)) if compared else math.nan,
        top1_agreement=same / compared if compared else math.nan,
        non_finite=non_finite,
    )
