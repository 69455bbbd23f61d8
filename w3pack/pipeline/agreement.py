"""Two sets of logits for the same tokens -> how far one model is from the other, position by position.

Everything is worked out in float64, so that the figure of a model against itself is exactly zero and the noise of a
half-precision run is not hidden by that of a float32 softmax (about 1e-6 nats). A position counts only if the logits of
both models are finite there; the others are counted, not averaged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

TOP = 10
#: Elements of one float64 temporary: 32 MB.
_ELEMENTS_AT_ONCE = 1 << 22
#: Taken from a logit for each id before sorting, so that of equal logits the lower id comes first, on every device.
_TIE = 1e-13

# Columns of what is kept for each position.
_MODEL, _REFERENCE, _KL, _TOP1, _TOP10, _CHANGE, _BYTES = range(7)


@dataclass(frozen=True)
class Fit:
    """How well one model predicts a text; None where no position was finite or the value is beyond float64."""

    nll: float | None
    perplexity: float | None
    bits_per_byte: float | None


@dataclass(frozen=True)
class Divergence:
    """KL(reference || model) over positions, in nats; `se` is the standard error of the mean."""

    mean: float
    se: float | None
    median: float
    p99: float
    p999: float
    largest: float


@dataclass(frozen=True)
class Agreement:
    """One text's figures.

    Attributes:
        positions: predicted tokens that counted.
        nbytes: bytes of text that these tokens spell.
        model, reference: see `Fit`; no reference, no comparison.
        log_ratio: mean of log p_reference - log p_model of the text's own tokens: the log of the ratio of perplexities.
        log_ratio_se: its standard error, from the differences token by token (the two models see the same tokens).
        kl: see `Divergence`.
        top1_agreement: share of positions, 0..1, at which both hold the same token likeliest.
        top10_overlap: mean share, 0..1, of the reference's ten likeliest tokens that are among the model's ten.
        rms_change: root mean square change of the probability of the text's own token.
        non_finite_model, non_finite_reference: positions whose logits hold NaN or infinity.
    """

    positions: int
    nbytes: int
    model: Fit
    reference: Fit | None
    log_ratio: float | None
    log_ratio_se: float | None
    kl: Divergence | None
    top1_agreement: float | None
    top10_overlap: float | None
    rms_change: float | None
    non_finite_model: int
    non_finite_reference: int


@dataclass
class Tally:
    """Fed with logits, batch by batch; `result` sums up."""

    _rows: list[torch.Tensor] = field(default_factory=list)
    _non_finite: list[int] = field(default_factory=lambda: [0, 0])
    _paired: bool = False

    def add(
        self,
        model: torch.Tensor,
        targets: torch.Tensor,
        *,
        nbytes: torch.Tensor,
        reference: torch.Tensor | None = None,
    ) -> None:
        """Count some positions.

        Args:
            model: logits, any float dtype [positions, vocabulary].
            targets: the tokens that follow, int64 [positions].
            nbytes: bytes that each of them spells, int64 [positions].
            reference: logits of the other model, on the same device [positions, vocabulary].
        """
        self._paired = reference is not None
        step = max(1, _ELEMENTS_AT_ONCE // model.shape[-1])
        for start in range(0, model.shape[0], step):
            part = slice(start, start + step)
            finite = torch.isfinite(model[part]).all(dim=-1)
            self._non_finite[0] += int((~finite).sum())
            if reference is not None:
                other = torch.isfinite(reference[part]).all(dim=-1)
                self._non_finite[1] += int((~other).sum())
                finite &= other
            figures = _figures(
                model[part][finite],
                reference[part][finite] if reference is not None else None,
                targets[part].to(model.device)[finite],
            )
            figures[:, _BYTES] = nbytes[part].to(model.device)[finite].to(torch.float64)
            self._rows.append(figures.cpu())

    def result(self) -> Agreement:
        """The figures of everything that was added."""
        rows = torch.cat(self._rows) if self._rows else torch.empty((0, _BYTES + 1), dtype=torch.float64)
        nbytes = int(rows[:, _BYTES].sum())
        paired = self._paired and len(rows) > 0
        difference = rows[:, _MODEL] - rows[:, _REFERENCE]
        return Agreement(
            positions=len(rows),
            nbytes=nbytes,
            model=_fit(rows[:, _MODEL], nbytes),
            reference=_fit(rows[:, _REFERENCE], nbytes) if self._paired else None,
            log_ratio=float(difference.mean()) if paired else None,
            log_ratio_se=_standard_error(difference) if paired else None,
            kl=_divergence(rows[:, _KL]) if paired else None,
            top1_agreement=float(rows[:, _TOP1].mean()) if paired else None,
            top10_overlap=float(rows[:, _TOP10].mean()) if paired else None,
            rms_change=float(rows[:, _CHANGE].square().mean().sqrt()) if paired else None,
            non_finite_model=self._non_finite[0],
            non_finite_reference=self._non_finite[1],
        )


def _figures(model: torch.Tensor, reference: torch.Tensor | None, targets: torch.Tensor) -> torch.Tensor:
    """float64 [positions, columns] of finite logits."""
    found = torch.zeros((model.shape[0], _BYTES + 1), dtype=torch.float64, device=model.device)
    own = torch.log_softmax(model.to(torch.float64), dim=-1)
    own_target = own.gather(1, targets.unsqueeze(1)).squeeze(1)
    found[:, _MODEL] = -own_target
    if reference is None:
        return found
    theirs = torch.log_softmax(reference.to(torch.float64), dim=-1)
    their_target = theirs.gather(1, targets.unsqueeze(1)).squeeze(1)
    found[:, _REFERENCE] = -their_target
    found[:, _CHANGE] = own_target.exp() - their_target.exp()
    found[:, _KL] = (theirs.exp() * (theirs - own)).sum(dim=-1).clamp_min_(0.0)
    ours, expected = _likeliest(model), _likeliest(reference)  # [positions, 10]
    found[:, _TOP1] = (ours[:, 0] == expected[:, 0]).to(torch.float64)
    shared = (ours.unsqueeze(1) == expected.unsqueeze(2)).any(dim=2)  # [positions, 10]
    found[:, _TOP10] = shared.to(torch.float64).mean(dim=1)
    return found


def _likeliest(logits: torch.Tensor) -> torch.Tensor:
    """Ids of the ten largest logits, largest first, of equals the lower id first: int64 [positions, 10]."""
    ids = torch.arange(logits.shape[-1], dtype=torch.float64, device=logits.device)
    keyed = logits.to(torch.float64) - ids * _TIE
    return keyed.topk(min(TOP, logits.shape[-1]), dim=-1).indices


def _fit(nll: torch.Tensor, nbytes: int) -> Fit:
    if len(nll) == 0:
        return Fit(nll=None, perplexity=None, bits_per_byte=None)
    mean = float(nll.mean())
    return Fit(
        nll=mean,
        perplexity=math.exp(mean) if mean < 700 else None,
        bits_per_byte=float(nll.sum()) / math.log(2) / nbytes if nbytes else None,
    )


def _standard_error(values: torch.Tensor) -> float | None:
    return float(values.std()) / math.sqrt(len(values)) if len(values) > 1 else None


def _divergence(kl: torch.Tensor) -> Divergence:
    median, p99, p999 = torch.quantile(kl, torch.tensor([0.5, 0.99, 0.999], dtype=torch.float64)).tolist()
    return Divergence(
        mean=float(kl.mean()),
        se=_standard_error(kl),
        median=median,
        p99=p99,
        p999=p999,
        largest=float(kl.max()),
    )
