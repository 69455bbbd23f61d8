"""The figures that a run ends with, as plain data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from w3pack.format.linear import LinearSpec
from w3pack.pipeline.selection import kind_of


@dataclass(frozen=True)
class ModuleError:
    """Squared sums over one Linear: of the error and of the weights it replaces."""

    squared_error: float
    squared_weight: float

    @property
    def relative(self) -> float:
        """||W' - W|| / ||W|| (Frobenius); 0 for an all-zero matrix."""
        return math.sqrt(self.squared_error / self.squared_weight) if self.squared_weight else 0.0

    @property
    def snr_db(self) -> float | None:
        """Signal to noise in decibels; None when there is no error to compare with."""
        if not self.squared_error or not self.squared_weight:
            return None
        return 10 * math.log10(self.squared_weight / self.squared_error)


@dataclass(frozen=True)
class KindRow:
    """One line of the report: all modules of a kind."""

    kind: str
    modules: int
    weights: int
    relative_error: float
    snr_db: float | None
    bits_per_weight: float


@dataclass(frozen=True)
class Report:
    """What a run did."""

    output: str
    kinds: tuple[KindRow, ...]
    modules: int
    weights: int
    bits_per_weight: float
    coverage: float
    source_bytes: int
    output_bytes: int
    seconds: float
    weights_per_second: float
    worst: tuple[tuple[str, float], ...]
    notes: tuple[str, ...]
    calibration: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return asdict(self)


def kind_rows(specs: Mapping[str, LinearSpec], errors: Mapping[str, ModuleError]) -> tuple[KindRow, ...]:
    """Sum the modules up by kind, in the order in which kinds first occur."""
    by_kind: dict[str, list[str]] = {}
    for module in specs:
        by_kind.setdefault(kind_of(module), []).append(module)
    rows = []
    for kind, members in by_kind.items():
        total = ModuleError(
            squared_error=sum(errors[module].squared_error for module in members),
            squared_weight=sum(errors[module].squared_weight for module in members),
        )
        weights = sum(specs[module].weights for module in members)
        rows.append(
            KindRow(
                kind=kind,
                modules=len(members),
                weights=weights,
                relative_error=total.relative,
                snr_db=total.snr_db,
                bits_per_weight=8 * sum(specs[module].nbytes for module in members) / weights,
            )
        )
    return tuple(rows)
