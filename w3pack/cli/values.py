"""Option values that more than one command parses."""

from __future__ import annotations

import re
import shlex
import sys
from enum import StrEnum

from w3pack.errors import UsageError

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


class Layout(StrEnum):
    """Values of --layout."""

    dense = "dense"
    nibble = "nibble"


class QmapDtype(StrEnum):
    """Values of --qmap-dtype."""

    int8 = "int8"
    float16 = "float16"


class Effort(StrEnum):
    """Values of --effort."""

    none = "none"
    diagonal = "diagonal"
    fast = "fast"
    default = "default"
    best = "best"


class XDtype(StrEnum):
    """Values of --dtype."""

    float16 = "float16"
    bfloat16 = "bfloat16"


class MapKind(StrEnum):
    """Values of --map."""

    linear = "linear"
    tile = "tile"
    row = "row"


class QmapPer(StrEnum):
    """Values of --qmap-per."""

    tensor = "tensor"
    row = "row"


def parse_bytes(text: str) -> int:
    """ "5GB", "200MiB" or a plain number of bytes."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKmMgGtT]?i?[bB]?)\s*", text)
    unit = match[2].upper() if match else ""
    if unit and not unit.endswith("B"):
        unit += "B"
    size = float(match[1]) * _UNITS[unit] if match is not None and unit in _UNITS else 0.0
    if not 1 <= size < 2**63:
        raise UsageError(f"expected a size such as 5GB or 200MB, got {text[:80]!r}; write a number and a unit")
    return int(size)


def pick_device(choice: str) -> str:
    """ "auto" -> "cuda" when there is a GPU, else "cpu"; UsageError for a device that is not there."""
    import torch

    if choice == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    match = re.fullmatch(r"cuda(?::(\d{1,3}))?", choice)
    if choice == "cpu" or (match and int(match[1] or 0) < torch.cuda.device_count()):
        return choice
    raise UsageError(
        f"expected --device auto, cpu or cuda (with a GPU that torch sees), got {choice!r}; pass --device cpu"
    )


def command_line() -> str:
    """What was typed, for the provenance of a result."""
    return shlex.join(["w3pack", *sys.argv[1:]])
