"""The figures that a run ends with, as plain data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from w3pack.format import names
from w3pack.format.linear import LinearSpec
from w3pack.pipeline.selection import block_of, kind_of


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
class LinearRow:
    """One Linear.

    Attributes:
        bits_per_weight: padding included.
        weight_error: ||W' - W|| / ||W||.
        relative_loss: E |W' x - W x|^2 / E |W x|^2 over the calibration text; None without it.
        expected_loss: what its error is expected to cost the model, in the unit of `Report.sensitivity`; None where
            sensitivities were not measured.
    """

    module: str
    bits_per_weight: float
    weight_error: float
    relative_loss: float | None
    expected_loss: float | None


@dataclass(frozen=True)
class BlockRow:
    """One block of the decoder.

    Attributes:
        output_error: ||y' - y|| / ||y - x|| of its output y and input x, both of the quantised model, on one batch of the
            calibration text; None without it.
        expected_loss: the sum over its Linears.
    """

    block: str
    output_error: float | None
    expected_loss: float | None


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
    sensitivity: dict[str, Any] | None = None
    linears: tuple[LinearRow, ...] = ()
    blocks: tuple[BlockRow, ...] = ()

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


def expected_loss(
    module: str, group_size: int, *, sensitivity: Mapping[str, Any] | None, story: Mapping[str, Any] | None
) -> float | None:
    """What the error of a Linear is expected to cost, see `LinearRow`.

    Measured for the solver that knows the diagonal of the inputs' second moment, it shrinks like the loss of the layer
    where a finer one has run.

    Args:
        sensitivity: facts of `w3pack.pipeline.mixing`, None where nothing was measured.
        story: what calibration says of the Linear.
    """
    if sensitivity is None or module not in sensitivity["modules"]:
        return None
    loss = float(sensitivity["modules"][module][str(group_size)]["loss"])
    if story is None or story.get("loss") is None or not story.get("diagonal_loss"):
        return loss
    return loss * float(story["loss"]) / float(story["diagonal_loss"])


def linear_rows(
    specs: Mapping[str, LinearSpec],
    found: Mapping[str, Mapping[str, Any]],
    errors: Mapping[str, ModuleError],
    sensitivity: Mapping[str, Any] | None,
) -> tuple[LinearRow, ...]:
    """A row for each quantised Linear, in the order of the checkpoint.

    Args:
        found: what the journal says of each.
    """
    return tuple(
        LinearRow(
            module=module,
            bits_per_weight=spec.bits_per_weight,
            weight_error=errors[module].relative,
            relative_loss=(found[module].get("calibration") or {}).get("loss"),
            expected_loss=expected_loss(
                module, spec.group_size, sensitivity=sensitivity, story=found[module].get("calibration")
            ),
        )
        for module, spec in specs.items()
    )


def block_rows(linears: tuple[LinearRow, ...], errors: Sequence[float | None] | None) -> tuple[BlockRow, ...]:
    """A row for each block that has a quantised Linear, in the order of the model.

    Args:
        errors: of the blocks' outputs in that order; None without calibration.
    """
    sums: dict[str, list[float]] = {}
    for row in linears:
        block = block_of(names.tensor(row.module, "weight"))
        if block:
            sums.setdefault(block, []).extend([] if row.expected_loss is None else [row.expected_loss])
    blocks = sorted(sums, key=lambda block: int(block.rstrip(".").rpartition(".")[2]))
    known = errors if errors is not None and len(errors) == len(blocks) else [None] * len(blocks)
    return tuple(
        BlockRow(
            block=block.rstrip("."),
            output_error=error,
            expected_loss=math.fsum(sums[block]) if sums[block] else None,
        )
        for block, error in zip(blocks, known, strict=True)
    )
