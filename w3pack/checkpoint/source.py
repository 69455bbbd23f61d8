"""What the offline pipeline needs from a model on disk, whatever its file format.

A source names tensors and reads them one at a time; nothing here instantiates a module, so tensors that no loader would
ever look at survive like all the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch


@dataclass(frozen=True)
class TensorInfo:
    """One tensor as its file describes it.

    `dtype` is the safetensors name ("BF16", "F32", "F8_E4M3", "I32", ...); `nbytes` is the size on
    disk, which for block-quantised formats is less than dtype and shape say; `file` is the
    name of the file that holds it, for messages.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: str


class Source(Protocol):
    """A checkpoint that can be read tensor by tensor."""

    @property
    def location(self) -> str:
        """Where it came from, as the user wrote it."""
        ...

    @property
    def config(self) -> dict[str, Any]:
        """The contents of config.json."""
        ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor, by its name in the checkpoint, in the order in which the files hold them."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences the report should repeat, such as that the source was itself quantised."""
        ...

    def read(self, name: str) -> torch.Tensor:
        """The tensor, in the dtype of its file, on the CPU."""
        ...

    def companion_files(self) -> Mapping[str, Path]:
        """Relative name -> path of every file that is not weights (config, tokenizer, generation config, ...)."""
        ...

    def fingerprint(self) -> str:
        """A digest that changes when the source changes; used to decide whether work can be resumed."""
        ...
