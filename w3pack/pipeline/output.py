"""What every command that writes a packed checkpoint does the same way: check the place, write tensors and record them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from w3pack.checkpoint.source import Source, TensorInfo
from w3pack.checkpoint.staging import Staging, free_bytes
from w3pack.checkpoint.tensor_file import ShardWriter, digest
from w3pack.errors import ResourceError, UsageError
from w3pack.format import names
from w3pack.pipeline.plan import Plan

_SPARE_BYTES = 64 << 20


class Written(Protocol):
    """What becomes one or several tensors of the output."""

    @property
    def outputs(self) -> tuple[TensorInfo, ...]:
        """The tensors, as they will be announced."""
        ...


class Layout(Protocol):
    """What a plan says of the output's files."""

    @property
    def shards(self) -> Mapping[str, Sequence[Written]]:
        """What goes into each file."""
        ...

    @property
    def output_bytes(self) -> int:
        """Bytes of all tensors of the output."""
        ...


def check_place(source: Source, output: Path) -> None:
    """UsageError for an output that is the source, holds it or lies inside it."""
    location = os.path.expanduser(source.location)
    if os.path.exists(location):
        target, origin = Path(os.path.realpath(os.path.expanduser(output))), Path(os.path.realpath(location))
        if target == origin or target in origin.parents or (origin.is_dir() and origin in target.parents):
            raise UsageError(
                f"expected an output apart from the source, got {output} for {location}; choose another place with -o"
            )


def check_space(plan: Layout, staging: Staging, *, copied_bytes: int) -> None:
    """ResourceError unless what is still to be written fits on the disk."""
    finished = sum(
        info.nbytes for file in staging.records for tensor in plan.shards.get(file, ()) for info in tensor.outputs
    )
    needed = plan.output_bytes - finished + copied_bytes + _SPARE_BYTES
    free = free_bytes(staging.folder)
    if free < needed:
        raise ResourceError(
            f"expected {needed / 1e9:.2f} GB free at {staging.output.parent}, got {free / 1e9:.2f} GB; free space or choose "
            "another place with -o"
        )


def announced(plan: Plan, file: str) -> Iterator[TensorInfo]:
    """The tensors of one output file, in order; the guard is in the first."""
    if file == next(iter(plan.shards)):
        yield plan.guard
    for tensor in plan.shards[file]:
        yield from tensor.outputs


def write_guard(plan: Plan, file: str, *, writer: ShardWriter, record: dict[str, Any]) -> None:
    """Write the guard tensor if `file` is the one that holds it."""
    if file == next(iter(plan.shards)):
        text = torch.frombuffer(bytearray(names.GUARD_TEXT), dtype=torch.uint8)
        write_tensor(writer, record, name=plan.guard.name, data=text)


def write_tensor(writer: ShardWriter, record: dict[str, Any], *, name: str, data: torch.Tensor) -> None:
    """Write one tensor and enter its form and digest in the shard's record."""
    writer.write(name, data)
    record["tensors"][name] = {
        "dtype": str(data.dtype).removeprefix("torch."),
        "shape": list(data.shape),
        "sha256": digest(data),
    }
