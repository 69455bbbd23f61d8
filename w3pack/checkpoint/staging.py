"""A checkpoint folder that appears whole or not at all, and can be continued after an interruption.

Shards are written into a hidden sibling of the output. Each finished shard is fsynced, renamed into its final name there
and entered in a journal. Index, config and manifest come last; then one rename makes the folder appear.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from w3pack.checkpoint.paths import inside, read_json, sync_folder, write_durably, write_json
from w3pack.checkpoint.source import TensorInfo
from w3pack.checkpoint.tensor_file import ShardWriter, disk_error
from w3pack.errors import CheckpointError, ResourceError, UsageError
from w3pack.format import names

_JOURNAL = "journal.json"


def free_bytes(path: Path) -> int:
    """Free space, in bytes, of the file system on which `path` (which need not exist yet) would lie."""
    existing = path.absolute()
    while not existing.exists():
        existing = existing.parent
    return shutil.disk_usage(existing).free


class Staging:
    """The unfinished output. `record` entries of finished shards survive an interruption and come back on resume."""

    def __init__(self, output: Path, *, fingerprint: str, overwrite: bool, resume: bool) -> None:
        """Claim `output`.

        Raises:
            UsageError: the output exists (and not `overwrite`), is not w3pack's to overwrite, or unfinished work lies
                there that the arguments do not fit.
            ResourceError: the folder cannot be created.
        """
        self.output = output
        self.folder = output.parent / f".{output.name}.w3pack-unfinished"
        self._fingerprint = fingerprint
        self._check_output(overwrite=overwrite)
        self.records: dict[str, Any] = {}
        if self.folder.exists():
            if resume:
                self.records = self._read_journal()
            elif overwrite:
                shutil.rmtree(self.folder)
            else:
                raise UsageError(
                    f"expected no unfinished work for {output}, got {self.folder}; "
                    "pass --resume to continue it or --overwrite to start anew"
                )
        elif resume:
            raise UsageError(f"expected unfinished work for {output} to resume, got none; run again without --resume")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise disk_error(error, self.folder) from error
        if not self.records:
            self._write_journal()

    def _check_output(self, *, overwrite: bool) -> None:
        output = self.output
        if not output.exists():
            return
        if not output.is_dir():
            raise UsageError(f"expected a folder to write to, got the file {output}; choose another place with -o")
        try:
            entries = [entry.name for entry in output.iterdir()]
        except OSError as error:
            raise ResourceError(f"expected to read {output}, got: {error.strerror}; check its permissions") from error
        if not entries:
            return
        if not overwrite:
            raise UsageError(
                f"expected {output} to be absent or empty, got {len(entries)} files; pass --overwrite to replace it"
            )
        if names.MANIFEST not in entries:
            raise UsageError(
                f"expected a w3pack checkpoint at {output} to overwrite, got a folder without {names.MANIFEST}; "
                "choose another place with -o or remove it yourself"
            )

    def _read_journal(self) -> dict[str, Any]:
        try:
            journal = read_json(self.folder / _JOURNAL)
        except CheckpointError as error:
            raise UsageError(
                f"expected a journal in {self.folder}, got none that is readable; pass --overwrite to start anew"
            ) from error
        if journal.get("fingerprint") != self._fingerprint:
            raise UsageError(
                f"expected the same source, arguments and w3pack version as the unfinished work in {self.folder}, got others; "
                "repeat the first command with --resume, or pass --overwrite to start anew"
            )
        shards = journal.get("shards")
        if not isinstance(shards, dict) or not all(inside(self.folder, file).exists() for file in shards):
            raise UsageError(
                f"expected the finished shards of {self.folder}, some are gone; pass --overwrite to start anew"
            )
        return shards

    def _write_journal(self) -> None:
        write_json(self.folder / _JOURNAL, {"fingerprint": self._fingerprint, "shards": self.records})

    def open_shard(self, file: str, tensors: Iterable[TensorInfo]) -> ShardWriter:
        """A writer for one shard, under a name that no loader looks for until `finish_shard`."""
        try:
            return ShardWriter(self.folder / f"{file}.partial", tensors)
        except OSError as error:
            raise disk_error(error, self.folder / file) from error

    def finish_shard(self, file: str, record: Any) -> None:
        """Give a closed shard its name and enter `record` (JSON) in the journal."""
        try:
            (self.folder / f"{file}.partial").replace(self.folder / file)
            sync_folder(self.folder)
        except OSError as error:
            raise disk_error(error, self.folder / file) from error
        self.records[file] = record
        self._write_journal()

    def copy(self, companions: Mapping[str, Path]) -> None:
        """Copy the source's other files byte for byte."""
        for relative, path in companions.items():
            target = inside(self.folder, relative)
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                write_durably(target, path.read_bytes())
            except OSError as error:
                raise disk_error(error, target) from error

    def publish(self, documents: Mapping[str, Any]) -> None:
        """Write the last files (index, manifest, config) in the order given and make the folder appear at `output`."""
        for name, document in documents.items():
            write_json(self.folder / name, document)
        (self.folder / _JOURNAL).unlink()
        previous = self.output.parent / f".{self.output.name}.w3pack-replaced"
        try:
            sync_folder(self.folder)
            if previous.exists():
                shutil.rmtree(previous)
            if self.output.exists():
                self.output.rename(previous)
            self.folder.rename(self.output)
            sync_folder(self.output.parent)
            if previous.exists():
                shutil.rmtree(previous)
        except OSError as error:
            raise disk_error(error, self.output) from error
