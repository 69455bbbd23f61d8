"""A checkpoint folder that appears whole or not at all, and can be continued after an interruption.

Shards are written into a hidden sibling of the output. Each finished shard is fsynced, renamed into its final name there
and entered in a journal. Index, config and manifest come last; then one rename makes the folder appear.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import sys
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from w3pack.checkpoint.paths import inside, read_json, sync_folder, write_json
from w3pack.checkpoint.source import TensorInfo
from w3pack.checkpoint.tensor_file import ShardWriter, disk_error, read_header
from w3pack.errors import CheckpointError, ResourceError, UsageError, W3PackError
from w3pack.format import names

if sys.platform == "win32":
    fcntl = None
else:
    import fcntl

_LOG = logging.getLogger(__name__)

#: Hidden, so that no file of a source, all of which are copied beside it, can have its name.
_JOURNAL = ".w3pack-journal.json"
_COPY_BYTES = 1 << 22


def free_bytes(path: Path) -> int:
    """Free space, in bytes, of the file system on which `path` (which need not exist yet) would lie."""
    existing = path.absolute()
    while not os.path.exists(existing):  # unlike Path.exists, it answers for names that are too long
        existing = existing.parent
    return shutil.disk_usage(existing).free


class Staging:
    """The unfinished output.

    Attributes:
        records: an entry for each finished shard; they survive an interruption and come back on resume.
        work: the same for files that only the run itself needs (`finish_work`); they never reach the output.
    """

    def __init__(self, output: Path, *, fingerprint: str, overwrite: bool, resume: bool) -> None:
        """Claim `output`.

        Raises:
            UsageError: the output exists (and not `overwrite`), is not w3pack's to overwrite, or unfinished work lies
                there that the arguments do not fit.
            ResourceError: the folder cannot be created.
        """
        output = Path(os.path.realpath(output.expanduser()))  # through links: the folder must appear behind them
        if not output.name or output == Path.cwd():
            raise UsageError(f"expected a folder that can be created anew, got {output}; name another one with -o")
        self.output = output
        self.folder = output.parent / f".{output.name}.w3pack-unfinished"
        self._previous = output.parent / f".{output.name}.w3pack-replaced"
        self._fingerprint = fingerprint
        self._lock: weakref.finalize[[int], Staging] | None = None
        self.records: dict[str, Any] = {}
        self.work: dict[str, Any] = {}
        self._created = False
        try:
            if self._previous.exists() and not output.exists():  # stopped between the two renames of `publish`
                self._previous.rename(output)
            self._check_output(overwrite=overwrite)
            self._claim(overwrite=overwrite, resume=resume)
        except BaseException as error:
            self.let_go()
            if (
                self._created and not self.records and not self.work
            ):  # a disk that filled with the first journal leaves nothing behind
                shutil.rmtree(self.folder, ignore_errors=True)
            if isinstance(error, OSError):
                raise disk_error(error, self.output) from error
            raise

    def _claim(self, *, overwrite: bool, resume: bool) -> None:
        if self.folder.exists():
            self._lock_folder()
            if resume:
                self.records, self.work = self._read_journal()
                self._remove_all_but_records()
            elif overwrite:
                shutil.rmtree(self.folder)
                self.let_go()  # the lock went with the folder
            else:
                raise UsageError(
                    f"expected no unfinished work for {self.output}, got {self.folder}; "
                    "pass --resume to continue it or --overwrite to start anew"
                )
        elif resume:
            raise UsageError(
                f"expected unfinished work for {self.output} to resume, got none; run again without --resume"
            )
        self._created = not self.folder.exists()
        self.folder.mkdir(parents=True, exist_ok=True)
        if self._lock is None:
            self._lock_folder()
        if not self.records and not self.work:
            self._write_journal()

    def _lock_folder(self) -> None:
        """Take the folder for this process until it ends or lets go; where the system has no such locks, do nothing."""
        if fcntl is None:
            return
        handle = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(handle)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise UsageError(
                    f"expected nobody else to write {self.output}, got another w3pack at work on it; "
                    "wait for it or choose another place with -o"
                ) from error
            return  # a file system without locks
        self._lock = weakref.finalize(self, os.close, handle)

    def let_go(self) -> None:
        """Let other processes have the unfinished folder; the end of the process, or of this object, does the same."""
        if self._lock is not None:
            self._lock()
            self._lock = None

    def _check_output(self, *, overwrite: bool) -> None:
        output = self.output
        if not output.exists():
            return
        if not output.is_dir():
            raise UsageError(f"expected a folder to write to, got the file {output}; choose another place with -o")
        if os.path.ismount(output):  # found out now, and not by the last rename, hours later
            raise UsageError(f"expected a folder that can be renamed, got the mount point {output}; name one inside it")
        entries = [entry.name for entry in output.iterdir()]
        if not entries:
            return
        if not overwrite:
            raise UsageError(
                f"expected {output} to be absent or empty, got {len(entries)} files; pass --overwrite to replace it"
            )
        if not _written_by_us(output):
            raise UsageError(
                f"expected a w3pack checkpoint at {output} to overwrite, got a folder without its {names.MANIFEST}; "
                "choose another place with -o or remove it yourself"
            )

    def _read_journal(self) -> tuple[dict[str, Any], dict[str, Any]]:
        try:
            journal = read_json(self.folder / _JOURNAL)
        except CheckpointError as error:
            raise UsageError(
                f"expected a journal in {self.folder}, got none that is readable; pass --overwrite to start anew"
            ) from error
        if journal.get("fingerprint") != self._fingerprint:
            raise UsageError(
                f"expected the same source, arguments and versions of w3pack and transformers as the unfinished work in {self.folder}, got others; "
                "repeat the first command with --resume, or pass --overwrite to start anew"
            )
        found: list[dict[str, Any]] = []
        for finished in (journal.get("shards"), journal.get("work", {})):
            if not isinstance(finished, dict) or not all(self._intact(*entry) for entry in finished.items()):
                raise UsageError(
                    f"expected the finished files of {self.folder}, got some that are gone or damaged; "
                    "pass --overwrite to start anew"
                )
            found.append(finished)
        return found[0], found[1]

    def _intact(self, file: str, record: Any) -> bool:
        try:
            return isinstance(record, dict) and set(read_header(inside(self.folder, file))) == set(record["tensors"])
        except (W3PackError, KeyError, TypeError):
            return False

    def _remove_all_but_records(self) -> None:
        for entry in self.folder.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            elif entry.name != _JOURNAL and entry.name not in self.records and entry.name not in self.work:
                entry.unlink()

    def abandon(self) -> None:
        """After a failure: remove what cannot be continued, which is everything when no shard was finished."""
        try:
            if self.folder.exists():
                if self.records or self.work:
                    self._remove_all_but_records()
                else:
                    shutil.rmtree(self.folder)
            self.let_go()
        except OSError as error:
            _LOG.warning("could not remove all of %s: %s", self.folder, error)

    def _write_journal(self) -> None:
        journal = {"fingerprint": self._fingerprint, "shards": self.records}
        write_json(self.folder / _JOURNAL, {**journal, "work": self.work} if self.work else journal)

    def open_shard(
        self, file: str, tensors: Iterable[TensorInfo], *, metadata: Mapping[str, str] | None = None
    ) -> ShardWriter:
        """A writer for one shard, under a name that no loader looks for until `finish_shard`."""
        return ShardWriter(self.folder / f"{file}.partial", tensors, metadata=metadata)

    def finish_shard(self, file: str, record: Any) -> None:
        """Give a closed shard its name and enter `record` (JSON) in the journal."""
        self._finish(file, record, self.records)

    def finish_work(self, file: str, record: Any) -> None:
        """`finish_shard` for a file that `publish` removes; its name should begin with a dot."""
        self._finish(file, record, self.work)

    def _finish(self, file: str, record: Any, records: dict[str, Any]) -> None:
        try:
            (self.folder / f"{file}.partial").replace(self.folder / file)
            sync_folder(self.folder)
        except OSError as error:
            raise disk_error(error, self.folder / file) from error
        records[file] = record
        self._write_journal()

    def copy(self, companions: Mapping[str, Path]) -> None:
        """Copy the source's other files byte for byte."""
        for relative, path in companions.items():
            if Path(relative).is_absolute() or ".." in Path(relative).parts:
                raise CheckpointError(f"expected a file name inside {self.folder}, got {relative!r}")
            target = self.folder / relative
            try:
                source = path.open("rb")
            except OSError as error:
                raise ResourceError(
                    f"expected to read {path}, got: {error.strerror}; check its permissions, or move the file away"
                ) from error
            with source:
                try:
                    target.parent.mkdir(parents=True, exist_ok=True)
                    with target.open("wb") as copy:
                        shutil.copyfileobj(source, copy, _COPY_BYTES)
                        copy.flush()
                        os.fsync(copy.fileno())
                except OSError as error:
                    raise disk_error(error, target) from error

    def publish(self, documents: Mapping[str, Any]) -> None:
        """Write the last files (index, manifest, config) in the order given and make the folder appear at `output`."""
        for name, document in documents.items():
            write_json(self.folder / name, document)
        try:
            sync_folder(self.folder)
            if self._previous.exists():
                shutil.rmtree(self._previous)
            if self.output.exists():
                self.output.rename(self._previous)
            try:
                self.folder.rename(self.output)
            except BaseException:  # an interruption too: the earlier output goes back to its place
                if self._previous.exists() and not self.output.exists():
                    self._previous.rename(self.output)
                raise
            for file in (*self.work, _JOURNAL):
                (self.output / file).unlink()
            sync_folder(self.output.parent)
            if self._previous.exists():
                shutil.rmtree(self._previous)
        except OSError as error:
            raise disk_error(error, self.output) from error
        self.let_go()


def _written_by_us(folder: Path) -> bool:
    try:
        return read_json(folder / names.MANIFEST).get("producer") == "w3pack"
    except W3PackError:
        return False
