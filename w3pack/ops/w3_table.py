"""Measured choices for one device: tables/<device>.json, written by the tuner, read here and trusted in nothing.

    {"format": 1, "device": "NVIDIA H200", "arch": "sm_90a", "multiprocessors": 132,
     "entries": [{"rows": 4096, "columns": 4096, "tokens": 8, "layout": "dense", "qmap_dtype": "int8", "map_kind": "linear",
                  "scale_sets": 1, "x_dtype": "float16" (may be left out: any), "config": {...}, "microseconds": 5.1}, ...],
     "prefill_from": {"4096x4096": 129, ...},
     "mainloop_tokens": {"4096x4096": [129, 1024], ...} (may be left out)}

`prefill_from` is, by shape (rows x columns), the number of tokens from which dequantising and a matmul is faster than decode
kernels. `mainloop_tokens` is, by shape, the first and the last number of tokens for which the prefill kernel is faster than both.
"""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, cast

from w3pack.errors import ResourceError
from w3pack.format.layout import LAYOUTS, Layout
from w3pack.format.linear import MAX_SIDE, QMAP_DTYPES, QmapDtype
from w3pack.ops.w3_config import FROM_GLOBAL, MAX_TOKENS, STREAMED, MapKind, W3Config, XDtype

_LOG = logging.getLogger(__name__)
FORMAT = 1
_MAX_BYTES = 8 << 20
_MAX_ENTRIES = 20_000
_SHAPE = re.compile(r"([1-9]\d{0,7})x([1-9]\d{0,7})")
#: Every number of a W3Config; whether it may be left out, the dataclass says.
_CONFIG_BOUNDS = {
    "token_tiles": (1, 8),
    "row_warps": (1, 16),
    "split_warps": (1, 16),
    "token_warps": (1, 8),
    "slots": (2, 32),
    "ring": (STREAMED, 16),
    "blocks": (1, 1 << 16),
    "slot_steps": (1, 16),
    "depth": (1, 2),
    "cluster": (1, 8),
}
_MAX_WARPS = 28  # four more feed them


@dataclass(frozen=True)
class Entry:
    """The fastest config that was found for one call; `x_dtype` None stands for both."""

    rows: int
    columns: int
    tokens: int
    layout: Layout
    qmap_dtype: QmapDtype
    map_kind: MapKind
    scale_sets: int
    x_dtype: XDtype | None
    config: W3Config
    microseconds: float


@dataclass(frozen=True)
class Table:
    """All that was measured on a device; `prefill_from` as (rows, columns, tokens), `mainloop_tokens` with first and last.

    `arch` and `multiprocessors` say what the device is, so that the table can serve others of its architecture; "" and 0 if it
    does not say.
    """

    device: str
    entries: tuple[Entry, ...]
    prefill_from: tuple[tuple[int, int, int], ...]
    arch: str = ""
    multiprocessors: int = 0
    mainloop_tokens: tuple[tuple[int, int, int, int], ...] = ()


def table_path(name: str) -> Path:
    """Where the table of a device of this name is, if there is one: "NVIDIA H200" -> tables/nvidia_h200.json."""
    stem = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
    return Path(__file__).parent / "tables" / f"{stem}.json"


@functools.cache
def table_of(name: str, arch: str = "") -> Table | None:
    """The device's own table, else one of another device of its architecture.

    None where there is neither, or (with one warning) where it is damaged.
    """
    path = table_path(name)
    try:
        if path.is_file():
            return read_table(path)
        others = (read_table(other) for other in sorted(path.parent.glob("*.json"))) if arch else iter(())
        return next((table for table in others if table.arch == arch), None)
    except ResourceError as error:
        _LOG.warning("%s; until then kernels are chosen without measurements", error)
        return None


def read_table(path: Path) -> Table:
    """Read and check a table.

    Raises:
        ResourceError: not readable, not JSON, or a value that is missing or out of its range.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise _damaged(path, f"at most {_MAX_BYTES} bytes", "more")
        document = json.loads(data)
    except (OSError, ValueError, RecursionError) as error:  # ValueError: neither UTF-8 nor JSON
        raise _damaged(path, "a readable table of kernel choices", str(error)) from error
    return from_json(document, path)


def from_json(document: Any, path: Path) -> Table:
    """The table that a JSON document stands for; `path` is named in errors.

    Raises:
        ResourceError: as `read_table`.
    """
    document = _mapping(document, path, "the table")
    if document.get("format") != FORMAT:
        raise _damaged(path, f"format {FORMAT}", repr(document.get("format")))
    entries, prefill = document.get("entries"), _mapping(document.get("prefill_from", {}), path, "prefill_from")
    mainloop = _mapping(document.get("mainloop_tokens", {}), path, "mainloop_tokens")
    if not isinstance(entries, list) or max(map(len, (entries, prefill, mainloop))) > _MAX_ENTRIES:
        raise _damaged(path, f"a list of at most {_MAX_ENTRIES} entries", type(entries).__name__)
    return Table(
        device=_text(document, "device", None, path),
        entries=tuple(_entry(_mapping(entry, path, "an entry"), path) for entry in entries),
        prefill_from=tuple(_crossover(shape, prefill, path) for shape in prefill),
        arch=_text(document, "arch", None, path) if "arch" in document else "",
        multiprocessors=_number(document, "multiprocessors", 1, 1 << 16, path) if "multiprocessors" in document else 0,
        mainloop_tokens=tuple(_token_range(shape, mainloop, path) for shape in mainloop),
    )


def to_json(table: Table) -> dict[str, Any]:
    """Inverse of `from_json`."""
    known = {"arch": table.arch, "multiprocessors": table.multiprocessors}
    mainloop = {f"{rows}x{columns}": [first, last] for rows, columns, first, last in table.mainloop_tokens}
    return {
        "format": FORMAT,
        "device": table.device,
        **{name: value for name, value in known.items() if value},
        "entries": [
            {name: value for name, value in asdict(entry).items() if value is not None} for entry in table.entries
        ],
        "prefill_from": {f"{rows}x{columns}": tokens for rows, columns, tokens in table.prefill_from},
        **({"mainloop_tokens": mainloop} if mainloop else {}),
    }


def config_to_json(config: W3Config) -> dict[str, Any]:
    """A config's fields by name."""
    return asdict(config)


def config_from_json(document: Any, path: Path) -> W3Config:
    """Inverse of `config_to_json`; fields with a default may be left out.

    Raises:
        ResourceError: a field is missing, unknown or out of its range, or two contradict each other.
    """
    document = _mapping(document, path, "a config")
    optional = {field.name for field in fields(W3Config) if field.default is not MISSING}
    unknown = sorted(set(document) - {field.name for field in fields(W3Config)})
    if unknown:
        raise _damaged(path, "known config fields", ", ".join(map(str, unknown))[:200])
    values: dict[str, Any] = {
        name: _number(document, name, low, high, path)
        for name, (low, high) in _CONFIG_BOUNDS.items()
        if name in document or name not in optional
    }
    warpgroups, beside = (_flag(document, name, path) for name in ("warpgroups", "beside"))
    config = W3Config(**values, warpgroups=warpgroups, beside=beside)
    sound = (
        config.warps <= _MAX_WARPS
        and config.all_token_tiles * 8 <= MAX_TOKENS
        and config.split_warps % config.slot_steps == 0
        and (config.ring <= 0 or config.split_warps == 1)
        and config.cluster in (1, 2, 4, 8)
        and (not beside or config.all_token_tiles == 1)
        and (not warpgroups or (config.row_warps % 4 == 0 and config.token_tiles <= 4 and config.ring != FROM_GLOBAL))
    )
    if not sound:
        raise _damaged(path, "a config whose fields go together", str(config))
    return config


def _flag(document: Mapping[str, Any], name: str, path: Path) -> bool:
    value = document.get(name, False)
    if not isinstance(value, bool):
        raise _damaged(path, f"{name} to be true or false", repr(value)[:200])
    return value


def _entry(entry: Mapping[str, Any], path: Path) -> Entry:
    microseconds = entry.get("microseconds")
    if isinstance(microseconds, bool) or not isinstance(microseconds, int | float) or not 0 < microseconds < 1e9:
        raise _damaged(path, "microseconds above 0", repr(microseconds)[:200])
    x_dtypes = ("float16", "bfloat16")
    return Entry(
        rows=_number(entry, "rows", 1, MAX_SIDE, path),
        columns=_number(entry, "columns", 1, MAX_SIDE, path),
        tokens=_number(entry, "tokens", 1, MAX_TOKENS, path),
        layout=cast("Layout", _text(entry, "layout", LAYOUTS, path)),
        qmap_dtype=cast("QmapDtype", _text(entry, "qmap_dtype", QMAP_DTYPES, path)),
        map_kind=cast("MapKind", _text(entry, "map_kind", ("linear", "tile", "row"), path)),
        scale_sets=_number(entry, "scale_sets", 1, 2, path),
        x_dtype=cast("XDtype", _text(entry, "x_dtype", x_dtypes, path)) if "x_dtype" in entry else None,
        config=config_from_json(entry.get("config"), path),
        microseconds=float(microseconds),
    )


def _crossover(shape: Any, prefill: Mapping[str, Any], path: Path) -> tuple[int, int, int]:
    return *_shape(shape, path), _number(prefill, shape, 1, MAX_SIDE, path)


def _token_range(shape: Any, mainloop: Mapping[str, Any], path: Path) -> tuple[int, int, int, int]:
    ends = mainloop[shape]
    if not isinstance(ends, list) or len(ends) != 2:
        raise _damaged(path, "the first and the last number of tokens in mainloop_tokens", repr(ends)[:200])
    first, last = (_number({"tokens": end}, "tokens", 1, MAX_SIDE, path) for end in ends)
    if first > last:
        raise _damaged(path, "numbers of tokens in rising order in mainloop_tokens", repr(ends)[:200])
    return *_shape(shape, path), first, last


def _shape(shape: Any, path: Path) -> tuple[int, int]:
    found = _SHAPE.fullmatch(str(shape))
    if not found:
        raise _damaged(path, 'shapes such as "4096x4096"', repr(shape)[:200])
    return int(found[1]), int(found[2])


def _mapping(value: Any, path: Path, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise _damaged(path, f"{what} to be an object", type(value).__name__)
    return value


def _number(values: Mapping[str, Any], name: str, low: int, high: int, path: Path) -> int:
    value = values.get(name)
    if type(value) is not int or not low <= value <= high:
        raise _damaged(path, f"{name} between {low} and {high}", repr(value)[:200])
    return value


def _text(values: Mapping[str, Any], name: str, among: tuple[str, ...] | None, path: Path) -> str:
    value = values.get(name)
    if not isinstance(value, str) or (among is not None and value not in among):
        raise _damaged(path, f"{name} out of {', '.join(among)}" if among else f"{name} as text", repr(value)[:200])
    return value


def _damaged(path: Path, expected: str, got: str) -> ResourceError:
    return ResourceError(f"expected {expected} in {path}, got {got}; write the table again or reinstall w3pack")
