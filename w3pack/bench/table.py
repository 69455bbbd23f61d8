"""Writing tables of tuned choices, ops/tables/<device>.json: merged by key, in one order, whole or not at all.

What a table holds, and reading one, is w3pack/ops/w3_table.py's.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from w3pack.errors import ResourceError
from w3pack.ops.w3_config import DeviceLimits
from w3pack.ops.w3_table import Entry, Table, read_table, to_json


def table_at(path: Path, *, device: str, limits: DeviceLimits) -> Table:
    """The table of a file, or an empty one for `device` while there is no file; what the device is comes from `limits`.

    Raises:
        ResourceError: a file that cannot be read or is no table.
    """
    table = read_table(path) if path.exists() else Table(device=device, entries=(), prefill_from=())
    return replace(table, arch=limits.arch, multiprocessors=limits.multiprocessors)


def merged(table: Table, entries: Iterable[Entry]) -> Table:
    """`table` with `entries` put in, each in place of the one for the same call; sorted."""
    by_key = {_key(entry): entry for entry in (*table.entries, *entries)}
    return replace(table, entries=tuple(by_key[key] for key in sorted(by_key)))


def write_table(path: Path, table: Table, *, provenance: Mapping[str, Any] | None = None) -> None:
    """Write by rename, one entry a line; the same table gives the same bytes. `provenance` is that of the latest entries.

    Raises:
        ResourceError: the folder cannot be written.
    """
    document = to_json(table)
    head = {name: value for name, value in document.items() if name != "entries"}
    if provenance is not None:
        head["provenance"] = dict(provenance)
    fields = "".join(f" {json.dumps(name)}: {json.dumps(value)},\n" for name, value in head.items())
    lines = ",\n".join(f"  {json.dumps(entry)}" for entry in document["entries"])
    text = "{\n" + fields + ' "entries": [\n' + lines + ("\n" if lines else "") + " ]\n}\n"
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=".partial")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        raise ResourceError(
            f"expected to write {path}, got: {error.strerror}; name another file with --output"
        ) from error
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)


def _key(entry: Entry) -> tuple[Any, ...]:
    """What decides a call's config; an entry for one dtype of x comes before the one that stands for both."""
    return (
        entry.rows,
        entry.columns,
        entry.tokens,
        entry.layout,
        entry.qmap_dtype,
        entry.map_kind,
        entry.scale_sets,
        entry.x_dtype or "~",
    )
