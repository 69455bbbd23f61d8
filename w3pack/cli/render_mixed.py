"""Lines and tables of what each Linear's error costs, and of mixed precision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from w3pack.pipeline.report import Report


def facts(sensitivity: Mapping[str, Any] | None) -> tuple[tuple[str, str], ...]:
    """The most sensitive Linears, and what mixing costs and is expected to buy."""
    if sensitivity is None:
        return ()
    unit, lines = sensitivity["unit"], []
    size = str(sensitivity["group_size"])
    modules, worst = sensitivity["modules"], sensitivity["most_sensitive_first"][:3]
    named = ", ".join(f"{name} ({modules[name][size]['loss']:.3g})" for name in worst)
    text = f", on {sensitivity['tokens']} tokens" if sensitivity["tokens"] else ""
    lines.append(("Costliest errors", f"{named}: {unit} at group size {size}{text}"))
    mixed = sensitivity.get("mixed")
    if mixed is not None:
        sizes = "".join(f", {count} at group size {size}" for size, count in mixed["group_sizes"].items())
        more = mixed["bytes"] - mixed["bytes_without"]
        lines += [
            ("Mixed precision", f"{mixed['asked']}: {len(mixed['kept'])} Linears kept as in the source{sizes}"),
            (
                "It costs",
                f"{mixed['bits_per_weight_without']:.3f} -> {mixed['bits_per_weight']:.3f} bits per weight of all Linears, "
                f"{more / 1e6:+,.1f} MB",
            ),
            ("It is to buy", f"{mixed['loss_without']:.4g} -> {mixed['loss']:.4g} {unit}, summed over Linears"),
        ]
    return tuple(lines)


def total(done: Report) -> tuple[tuple[str, str], ...]:
    """What the errors that the run left are expected to cost."""
    known = [row.expected_loss for row in done.linears if row.expected_loss is not None]
    if done.sensitivity is None or not known:
        return ()
    return (("Expected loss", f"{sum(known):.4g} {done.sensitivity['unit']} from the errors that are left, summed"),)


def layers(console: Console, done: Report) -> None:
    """A line for each Linear, the costliest first, and one for each block."""
    shown = _table("Linear", "bits/weight", "weight error", "relative loss of outputs", "expected loss", "share")
    total = sum(row.expected_loss or 0.0 for row in done.linears)
    for row in sorted(done.linears, key=lambda row: (-(row.expected_loss or 0.0), -(row.relative_loss or 0.0))):
        share = "-" if row.expected_loss is None or not total else f"{row.expected_loss / total:.1%}"
        shown.add_row(
            escape(row.module),
            f"{row.bits_per_weight:.3f}",
            f"{row.weight_error:.4f}",
            _figure(row.relative_loss),
            _figure(row.expected_loss),
            share,
        )
    console.print(shown)
    blocks = _table("block", "error of what it adds", "expected loss of its Linears")
    for block in done.blocks:
        blocks.add_row(escape(block.block), _figure(block.output_error), _figure(block.expected_loss))
    console.print()
    console.print(blocks)
    console.print()


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right", overflow="fold")
    return table
