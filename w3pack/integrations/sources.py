"""MODEL as the user wrote it -> an open `Source`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from w3pack.checkpoint.resolve import resolve
from w3pack.checkpoint.safetensors_source import SafetensorsSource
from w3pack.checkpoint.source import Source


@contextmanager
def open_source(model: str) -> Iterator[Source]:
    """Open a hub id, a checkpoint folder or a GGUF file; what a GGUF file needs beside it lives as long as the context.

    Raises:
        UsageError, CheckpointError, UnsupportedError, ResourceError: see `resolve`, `SafetensorsSource`, `open_gguf`.
    """
    path = resolve(model)
    if path.is_dir():
        yield SafetensorsSource(path, location=model)
        return
    from w3pack.integrations.gguf_assets import open_gguf

    with tempfile.TemporaryDirectory(prefix="w3pack-gguf-") as scratch:
        yield open_gguf(path, Path(scratch))
