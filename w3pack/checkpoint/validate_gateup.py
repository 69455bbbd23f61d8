"""Does a checkpoint of fused FP8 pairs have the tensors that its config says it has? Headers only, nothing is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from w3pack.checkpoint.source import TensorInfo
from w3pack.checkpoint.tensor_file import read_header
from w3pack.errors import CheckpointError
from w3pack.format import names
from w3pack.format.gateup import SCALES, WEIGHT, GateUpConfig, halves_of

_APART = "config.json and the weights do not belong together"


def check_fused_files(files: list[Path], config: GateUpConfig) -> None:
    """`check_fused` on the headers of a checkpoint's files; also CheckpointError for a truncated file."""
    check_fused({name: stored.info for file in files for name, stored in read_header(file).items()}, config)


def check_fused(found: Mapping[str, TensorInfo], config: GateUpConfig) -> None:
    """Compare the tensors of a checkpoint with its config.

    Raises:
        CheckpointError: naming a tensor of a pair or FP8 Linear that is missing, of the wrong dtype or shape; half of a pair that
            is still there; or an FP8 tensor that the config does not know, which a loader would take for floats.
    """
    expected: dict[str, tuple[str, tuple[int, ...]]] = {}
    for module, spec in config.pairs.items():
        expected[names.tensor(module, WEIGHT)] = ("F8_E4M3", spec.weight_shape)
        expected[names.tensor(module, SCALES)] = ("F32", spec.grid_shape(config.block))
        for half in halves_of(module, spec):
            left = [names.tensor(half, part) for part in (WEIGHT, SCALES) if names.tensor(half, part) in found]
            if left and not (half == config.guard and left == [names.guard_tensor(half)]):
                raise CheckpointError(f"expected no {left[0]} beside the fused {module}, got one; {_APART}")
    for module, fp8 in config.fp8.items():
        expected[names.tensor(module, WEIGHT)] = ("F8_E4M3", (fp8.rows, fp8.columns))
        expected[names.tensor(module, SCALES)] = (fp8.scales, fp8.grid_shape(config.block))
        bias = names.tensor(module, names.BIAS)
        if fp8.bias != (bias in found):
            raise CheckpointError(
                f"expected {'a' if fp8.bias else 'no'} tensor {bias}, got {'none' if fp8.bias else 'one'}; {_APART}"
            )
    for name, (dtype, shape) in expected.items():
        info = found.get(name)
        if info is None:
            raise CheckpointError(f"expected tensor {name} in the checkpoint, got none; copy the checkpoint completely")
        if (info.dtype, info.shape) != (dtype, shape):
            raise CheckpointError(
                f"expected {name} to be {dtype} {list(shape)}, got {info.dtype} {list(info.shape)}; {_APART}"
            )
    stray = [name for name, info in found.items() if info.dtype.startswith("F8_E4M3") and name not in expected]
    if stray:
        raise CheckpointError(f"expected every FP8 tensor to be in quantization_config, got {stray[0]}; {_APART}")
