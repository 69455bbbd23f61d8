"""The activations of all calibration samples between two blocks, in memory, on the device, or in a file."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path

import torch

from w3pack.checkpoint.tensor_file import disk_error

_FILE = ".w3pack-hidden-states"
_STEP = 1 << 24


class HiddenStates:
    """A tensor [samples, length, width] that each block overwrites batch by batch.

    In a file it is memory-mapped: the system writes to the disk what it has no memory for. The file has no name while it
    is in use (where the system allows that), so that nothing is left of it however the process ends.

    Attributes:
        tensor: [samples, length, width].
        on_disk: where it lies.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        *,
        dtype: torch.dtype,
        folder: Path | None,
        device: torch.device | str = "cpu",
    ) -> None:
        """Allocate it; `folder` is where a file goes, None keeps it in the memory of `device`.

        Raises:
            ResourceError: the disk is too small.
        """
        self.on_disk = folder is not None
        self._path = folder / _FILE if folder is not None else None
        if self._path is None:
            self.tensor = torch.zeros(shape, dtype=dtype, device=device)
            return
        elements = math.prod(shape)
        try:
            _reserve(self._path, elements * dtype.itemsize)
            self.tensor = torch.from_file(str(self._path), shared=True, size=elements, dtype=dtype).view(shape)
            if os.name == "posix":
                self._path.unlink()
        except OSError as error:
            self.close()
            raise disk_error(error, self._path) from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let go of memory and file."""
        self.tensor = torch.empty(0)
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)


def _reserve(path: Path, nbytes: int) -> None:
    """A file of zeros: one with holes would end the process, without a word, when the disk is full."""
    with path.open("wb", buffering=0) as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, nbytes)
            return
        zeros = bytes(min(_STEP, nbytes))
        left = nbytes
        while left:
            left -= file.write(zeros[:left])
