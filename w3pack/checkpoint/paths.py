"""Names from untrusted files -> paths that stay inside their folder, and writes that survive a crash."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from w3pack.checkpoint.tensor_file import disk_error
from w3pack.errors import CheckpointError, ResourceError

#: JSON files larger than this are not read; the largest index known is about 20 MB.
MAX_JSON_BYTES = 256 << 20


def inside(folder: Path, name: str) -> Path:
    """`folder / name`, refused unless `name` is a plain relative path that stays inside.

    A link inside the folder may point elsewhere (the hub's cache is made of links); the name itself may not.
    """
    path = Path(name)
    if not name or path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name:
        raise CheckpointError(
            f"expected a file name inside {folder}, got {name!r}; the index of this checkpoint is not safe to follow"
        )
    return folder / path


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        CheckpointError: missing, not JSON, not an object, or absurdly large.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a pipe would be waited for, forever
            raise CheckpointError(f"expected {path} to be a plain file, got something else; download it again")
        if path.stat().st_size > MAX_JSON_BYTES:
            raise CheckpointError(
                f"expected {path} to be at most {MAX_JSON_BYTES >> 20} MiB, got {path.stat().st_size >> 20} MiB"
            )
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(
            f"expected {path.name} in {path.parent}, got no such file; is this a checkpoint folder?"
        ) from error
    except OSError as error:
        raise ResourceError(f"expected to read {path}, got: {error.strerror}; check its permissions") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"expected {path} to hold JSON, got something else; download or copy the file again"
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(f"expected {path} to hold a JSON object, got {type(value).__name__}")
    return value


def write_durably(path: Path, data: bytes) -> None:
    """Write a whole file so that after a crash it is either absent or complete."""
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        raise disk_error(error, path) from error


def write_json(path: Path, value: Any) -> None:
    """`write_durably` of indented JSON."""
    try:
        data = json.dumps(value, indent=2, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # half a surrogate pair, which only an escape can hold
        data = json.dumps(value, indent=2).encode()
    write_durably(path, data + b"\n")


def sync_folder(folder: Path) -> None:
    """Make renames and new names in `folder` durable, where the system can."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
