"""Does a packed checkpoint have the tensors that its config says it has? Headers only, nothing is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from w3pack.checkpoint.source import TensorInfo
from w3pack.checkpoint.tensor_file import read_header
from w3pack.errors import CheckpointError
from w3pack.format import names
from w3pack.format.config import W3Config

_FLOATS = ("F64", "F32", "F16", "BF16")


def check_files(files: list[Path], config: W3Config) -> None:
    """`check_tensors` on the headers of a checkpoint's files; also CheckpointError for a truncated file."""
    check_tensors({name: stored.info for file in files for name, stored in read_header(file).items()}, config)


def check_tensors(found: Mapping[str, TensorInfo], config: W3Config) -> None:
    """Compare the tensors of a checkpoint with its config.

    Raises:
        CheckpointError: naming a tensor of a quantised module that is missing, of the wrong dtype or shape, or a packed
            tensor that no module of the config owns.
    """
    for module, spec in config.modules.items():
        expected: dict[str, tuple[str, tuple[int, ...]]] = {
            names.CODES: ("I32", spec.codes_shape),
            names.SCALES: ("F16", spec.scales_shape),
            names.QMAP: ("I8" if spec.qmap_dtype == "int8" else "F16", spec.qmap_shape),
        }
        for part, (dtype, shape) in expected.items():
            name = names.tensor(module, part)
            info = found.get(name)
            if info is None:
                raise CheckpointError(
                    f"expected tensor {name} in the checkpoint, got none; copy the checkpoint completely"
                )
            if info.dtype != dtype or info.shape != shape:
                raise CheckpointError(
                    f"expected {name} to be {dtype} {list(shape)}, got {info.dtype} {list(info.shape)}; "
                    "config.json and the weights do not belong together"
                )
        bias = names.tensor(module, names.BIAS)
        if spec.bias != (bias in found):
            raise CheckpointError(
                f"expected {'a' if spec.bias else 'no'} tensor {bias}, got {'none' if spec.bias else 'one'}; "
                "config.json and the weights do not belong together"
            )
        if spec.bias and (found[bias].shape != (spec.rows,) or found[bias].dtype not in _FLOATS):
            raise CheckpointError(
                f"expected {bias} to be floats of shape {[spec.rows]}, got {found[bias].dtype} {list(found[bias].shape)}; "
                "config.json and the weights do not belong together"
            )
    for name, info in found.items():
        module, _, part = name.rpartition(".")
        if module in config.modules and part not in (*names.PACKED, names.BIAS):
            if part == "weight" and module == config.guard:
                continue
            raise CheckpointError(
                f"expected only packed tensors for {module}, got {name}; config.json and the weights do not belong together"
            )
        tiled = part == names.SCALES and info.dtype == "F16" and len(info.shape) == 4 and info.shape[2:] == (8, 8)
        if (part in (names.CODES, names.QMAP) or tiled) and module not in config.modules:
            raise CheckpointError(
                f"expected every packed tensor to belong to a module of quantization_config, got {name}; "
                "config.json and the weights do not belong together"
            )
