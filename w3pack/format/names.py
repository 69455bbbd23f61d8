"""Names of tensors and files in a w3pack checkpoint."""

from __future__ import annotations

import re

CODES = "codes"
SCALES = "scales"
QMAP = "qmap"
BIAS = "bias"
PACKED = (CODES, SCALES, QMAP)

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.([\w.]+)")

MANIFEST = "w3pack.json"
CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

#: Bytes of the guard tensor: whoever looks at it learns why it is there.
GUARD_TEXT = b"packed by w3pack: pip install w3pack, then load again"


def tensor(module: str, part: str) -> str:
    """Name of one stored tensor of a module."""
    return f"{module}.{part}"


def guard_tensor(module: str) -> str:
    """Stock name under which the guard lies: a loader that expects the float matrix there stops on its shape."""
    return f"{module}.weight"


def shard_file(number: int, total: int) -> str:
    """File name of shard `number` (from 1) of `total`, as Hugging Face writes it."""
    return SINGLE_FILE if total == 1 else f"model-{number:05d}-of-{total:05d}.safetensors"


def expert_of(module: str) -> tuple[str, int, str] | None:
    """(experts module, number, projection) of one expert's Linear, or None."""
    match = _EXPERT.fullmatch(module)
    return (match[1], int(match[2]), match[3]) if match else None
