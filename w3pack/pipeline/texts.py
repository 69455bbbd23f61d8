"""Texts to evaluate on: local .txt, .jsonl and .parquet files, or one that every Python has."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from w3pack.errors import ResourceError, UnsupportedError, UsageError

#: Between the records of one file.
_BETWEEN = "\n\n"
_HINT = "check the file or pass --field"


@dataclass(frozen=True)
class Text:
    """The beginning of a text.

    Attributes:
        name: the file's own name.
        text: as much of it as was asked for.
        sha256: digest of the whole file (for the built-in text: of the text as UTF-8).
    """

    name: str
    text: str
    sha256: str


def default_text(characters: int) -> Text:
    """English technical prose: the help topics that CPython carries for `help()`.

    Raises:
        UsageError: a Python without them.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise UsageError(
            "expected the text pydoc_data.topics in this Python, got none; pass a text with --dataset"
        ) from error
    whole = _BETWEEN.join(topics[name] for name in sorted(topics))
    digest = hashlib.sha256(whole.encode()).hexdigest()
    return Text(name=f"help topics of Python {platform.python_version()}", text=whole[:characters], sha256=digest)


def read_text(path: Path, *, field: str = "text", characters: int) -> Text:
    """The first `characters` of a file; records of .jsonl and .parquet are joined by an empty line.

    Args:
        path: .txt (UTF-8), .jsonl (an object a line) or .parquet (needs pyarrow).
        field: where a record holds its text.

    Raises:
        UsageError: no such file, or not what its name says.
        UnsupportedError: another format, or pyarrow is missing.
        ResourceError: the file cannot be read.
    """
    readers = {".txt": _plain, ".jsonl": _json_lines, ".parquet": _parquet}
    if not path.is_file():
        raise UsageError(
            f"expected a text file at {path}, got {'no file' if path.exists() else 'nothing'}; check the path"
        )
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise UnsupportedError(
            f"expected a .txt, .jsonl or .parquet file, got {path.name}; convert it, or rename plain text to .txt"
        )
    parts: list[str] = []
    length = 0
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        for part in reader(path, field):
            parts.append(part)
            length += len(part) + len(_BETWEEN)
            if length >= characters:
                break
    except UnicodeDecodeError as error:
        raise UsageError(
            f"expected UTF-8 in {path.name}, got the byte {error.object[error.start]:#04x}; convert the file to UTF-8"
        ) from error
    except OSError as error:
        raise ResourceError(
            f"expected to read {path}, got: {error.strerror or error}; check its permissions"
        ) from error
    text = ("" if path.suffix.lower() == ".txt" else _BETWEEN).join(parts)[:characters]
    if not text.isascii() and any("\ud800" <= sign <= "\udfff" for sign in text):  # JSON can spell half a character
        raise UsageError(f"expected whole characters in {path.name}, got half a surrogate pair; write the file again")
    return Text(name=path.name, text=text, sha256=digest)


def _plain(path: Path, field: str) -> Iterator[str]:
    with path.open(encoding="utf-8", newline="") as file:
        while part := file.read(1 << 20):
            yield part


def _json_lines(path: Path, field: str) -> Iterator[str]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                if isinstance(error, UnicodeDecodeError):
                    raise
                raise UsageError(
                    f"expected JSON in line {number} of {path.name}, got something else; {_HINT}"
                ) from error
            yield _field_of(record, field, f"line {number} of {path.name}")


def _parquet(path: Path, field: str) -> Iterator[str]:
    try:
        pyarrow: Any = import_module("pyarrow")
        parquet: Any = import_module("pyarrow.parquet")
    except ImportError as error:
        raise UnsupportedError(
            f"expected pyarrow to read {path.name}, which is not installed; pip install pyarrow, or give a .jsonl file"
        ) from error
    try:
        table = parquet.ParquetFile(path)
    except pyarrow.ArrowException as error:
        raise UsageError(f"expected a Parquet file, got {path.name}, which is none; {_HINT}") from error
    with table:
        if field not in table.schema_arrow.names:
            raise UsageError(
                f"expected a column {field!r} in {path.name}, got {', '.join(table.schema_arrow.names)[:200]}; {_HINT}"
            )
        row = 0
        for batch in table.iter_batches(batch_size=256, columns=[field]):
            for value in batch.column(0).to_pylist():
                row += 1
                yield _field_of({field: value}, field, f"row {row} of {path.name}")


def _field_of(record: object, field: str, where: str) -> str:
    value = record.get(field) if isinstance(record, dict) else None
    if not isinstance(value, str):
        got = sorted(record)[:8] if isinstance(record, dict) else type(record).__name__
        raise UsageError(f"expected text in the field {field!r} of {where}, got {got}; {_HINT}")
    return value
