"""Logits of a model that is no longer in memory, in a temporary file, bit for bit as the model gave them."""

from __future__ import annotations

import errno
import shutil
import tempfile
from types import TracebackType
from typing import IO

import torch

from w3pack.errors import ResourceError


class LogitStore:
    """Written window by window by the one model, read window by window beside the other.

    The values stay in the dtype in which they came (two bytes each from a 16-bit model), so nothing is rounded: what
    is compared later is what would have been compared at once. The file is in the system's folder for temporary files
    (TMPDIR) and has no name where the system allows that, so that it goes whatever happens to the process.
    """

    def __init__(self) -> None:
        self._file: IO[bytes] = tempfile.TemporaryFile(prefix="w3pack-logits-")  # noqa: SIM115 - closed by `close`
        self._places: list[tuple[int, torch.Size, torch.dtype]] = []
        self._end = 0

    def __enter__(self) -> LogitStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._places)

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self._end

    def reserve(self, nbytes: int) -> None:
        """ResourceError unless the file may grow by `nbytes`."""
        free = shutil.disk_usage(tempfile.gettempdir()).free
        if nbytes > free:
            raise _full(nbytes, free)

    def append(self, logits: torch.Tensor) -> None:
        """Keep the logits of one window, [positions, vocabulary]."""
        data = logits.detach().cpu().contiguous()
        try:
            self._file.seek(self._end)
            self._file.write(data.view(torch.uint8).numpy().data)
            self._file.flush()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise _full(data.nbytes, shutil.disk_usage(tempfile.gettempdir()).free) from error
        self._places.append((self._end, data.shape, data.dtype))
        self._end += data.nbytes

    def read(self, index: int) -> torch.Tensor:
        """The logits of window `index`, on the CPU."""
        start, shape, dtype = self._places[index]
        data = torch.empty(shape, dtype=dtype)
        self._file.seek(start)
        read = self._file.readinto(data.view(torch.uint8).numpy().data)  # type: ignore[attr-defined]
        if read != data.nbytes:
            raise ResourceError(
                f"expected {data.nbytes} bytes of logits in the temporary file, got {read}; free disk space and run again"
            )
        return data

    def close(self) -> None:
        """Give the space back."""
        self._file.close()


def _full(needed: int, free: int) -> ResourceError:
    return ResourceError(
        f"expected {needed / 1e9:.1f} GB for logits in {tempfile.gettempdir()}, got {free / 1e9:.1f} GB free; free some, "
        "set TMPDIR to a larger disk, or use fewer --tokens"
    )
