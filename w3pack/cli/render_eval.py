"""What `eval` found, as tables for people or JSON for programs, on stdout."""

from __future__ import annotations

from typing import Any

from w3pack.cli.render import _console, _facts, _json, _megabytes, _plain, _table


def evaluation(found: dict[str, Any], *, as_json: bool) -> None:
    """The figures of each text, then what they were taken with."""
    if as_json:
        _json(found)
        return
    console = _console()
    fits = _table("text", "tokens", "perplexity", "reference", "log ratio", "bits/byte", "reference", "not finite")
    for row in found["texts"]:
        model, reference = row["model"], row["reference"] or {}
        fits.add_row(
            _plain(row["name"]),
            str(row["positions"]),
            _number(model["perplexity"], 3),
            _number(reference.get("perplexity"), 3),
            f"{_number(row['log_ratio'], 4)} +- {_number(row['log_ratio_se'], 4)}" if reference else "-",
            _number(model["bits_per_byte"], 4),
            _number(reference.get("bits_per_byte"), 4),
            f"{row['non_finite_model']} / {row['non_finite_reference']}" if reference else str(row["non_finite_model"]),
        )
    console.print(fits)
    if found["reference"] is not None:
        console.print()
        console.print(_distances(found))
    if found.get("tasks"):
        console.print()
        console.print(_tasks(found["tasks"]))
    unnamed = found["noise_floor"] or "not measured: no reference"
    _facts(
        console,
        ("Model", _who(found["model"])),
        (
            "Reference",
            _who(found["reference"]) if found["reference"] else "none: pass --reference for the distance to it",
        ),
        ("Windows", f"{found['window']} tokens; {found['first_token']}"),
        ("Noise floor", unnamed),
        ("Device", f"{found['device']}, torch {found['versions']['torch']}"),
        notes=found["notes"],
    )


def _distances(found: dict[str, Any]) -> Any:
    table = _table(
        "text", "KL nats", "median", "p99", "p99.9", "noise floor", "same top 1", "of top 10", "RMS change of p"
    )
    for row in found["texts"]:
        kl, floor = row["kl"] or {}, row["noise_floor"]
        table.add_row(
            _plain(row["name"]),
            f"{_number(kl.get('mean'), 5)} +- {_number(kl.get('se'), 5)}",
            _number(kl.get("median"), 5),
            _number(kl.get("p99"), 3),
            _number(kl.get("p999"), 3),
            f"{floor['kl']['mean']:.1e}" if floor else "-",
            _percent(row["top1_agreement"]),
            _percent(row["top10_overlap"]),
            _percent(row["rms_change"]),
        )
    return table


def _tasks(tasks: dict[str, Any]) -> Any:
    roles = [role for role in ("model", "reference") if role in tasks]
    table = _table("task", "measure", *roles)
    for task, measures in tasks["model"]["results"].items():
        for name, value in measures.items():
            if isinstance(value, float) and "_stderr" not in name:
                cells = [_with_error(tasks[role]["results"].get(task, {}), name) for role in roles]
                table.add_row(_plain(task), _plain(name.partition(",")[0]), *cells)
    return table


def _with_error(measures: dict[str, Any], name: str) -> str:
    stem, comma, rest = name.partition(",")
    value, error = measures.get(name), measures.get(f"{stem}_stderr{comma}{rest}")
    text = _number(value if isinstance(value, float) else None, 4)
    return f"{text} +- {error:.4f}" if isinstance(error, float) else text


def _who(one: dict[str, Any]) -> str:
    return f"{one['name']} ({one['kind']}, {one['class']}, {one['dtype']}, {_megabytes(one['bytes'])} of weights)"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.2%}"
