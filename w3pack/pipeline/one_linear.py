"""One weight of a source: read, quantised, packed, measured."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from w3pack.checkpoint.source import Source
from w3pack.errors import CheckpointError
from w3pack.format import names
from w3pack.format.linear import LinearSpec
from w3pack.pack.words import pack_codes, pack_scales, pad_qmap
from w3pack.pipeline.plan import PlannedTensor
from w3pack.pipeline.report import ModuleError
from w3pack.quantize import QuantizedLinear, QuantizeSettings, quantize_data_free
from w3pack.quantize.fp8_blocks import dequantize_blocks
from w3pack.reference import w3

#: `codes`, `scales` and `qmap` of a Linear as they are stored.
Packed = dict[str, torch.Tensor]

_ROWS_AT_ONCE = 1 << 22


def read_float(
    source: Source, tensor: PlannedTensor, *, block: tuple[int, int] | None, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """A source weight as float32 on a device; FP8 blocks multiplied by their scales.

    Raises:
        CheckpointError: NaN or infinite weights.
    """
    data = source.read(tensor.source.name)
    if tensor.scales is not None and block is not None:
        data = dequantize_blocks(data, source.read(tensor.scales), block=block)
    data = data.to(device).to(torch.float32)  # moved as it is stored, widened there
    check_finite(data, tensor.source.name)
    return data


def check_finite(data: torch.Tensor, name: str) -> None:
    """CheckpointError naming the tensor when a float in it is NaN or infinite."""
    if not (data.is_floating_point() or data.is_complex()):
        return
    for part in data.reshape(-1).split(_ROWS_AT_ONCE):
        finite = torch.isfinite(part.to(torch.float32) if part.dtype.itemsize == 1 else part)
        if not bool(finite.all()):
            raise CheckpointError(
                f"expected finite weights in {name}, got {int((~finite).sum())} NaN or infinite ones or more; "
                "the checkpoint is damaged, download it again"
            )


def quantize_weight(
    weight: torch.Tensor,
    spec: LinearSpec,
    *,
    module: str,
    qmap: torch.Tensor | None = None,
    seed: int = 0,
    workers: int | None = None,
) -> QuantizedLinear:
    """Codes, map and scales of one Linear, on its device.

    Without data; `w3pack.pipeline.calibrate` has the solver that knows the inputs.

    Args:
        weight: float32 [rows, columns], any device.
        spec: shape, group size and map form wanted.
        module: name for messages.
        qmap: float32 [8] to keep, or None to learn one.
    """
    settings = settings_for(spec, seed=seed)
    try:
        return quantize_data_free(weight, settings, qmap=qmap, workers=workers or torch.get_num_threads())
    except CheckpointError as error:
        raise CheckpointError(f"{module}: {error}") from error


def settings_for(spec: LinearSpec, *, seed: int) -> QuantizeSettings:
    """What the solvers are told of the form that a Linear is stored in."""
    return QuantizeSettings(
        group_size=spec.group_size,
        qmap_dtype=torch.int8 if spec.qmap_dtype == "int8" else torch.float16,
        qmap_per="tensor" if spec.maps == 1 else "row",
        seed=seed,
    )


def moved(packed: Mapping[str, torch.Tensor], device: torch.device | str) -> Packed:
    """The same on a device."""
    return {part: data.to(device) for part, data in packed.items()}


def pack(result: QuantizedLinear, spec: LinearSpec) -> Packed:
    """The stored tensors of a Linear, by part, on the device of `result`."""
    return {
        names.CODES: pack_codes(result.codes, spec),
        names.SCALES: pack_scales(result.scales, spec),
        names.QMAP: pad_qmap(result.qmap, spec),
    }


def dequantized(packed: Packed, spec: LinearSpec) -> torch.Tensor:
    """What the stored tensors stand for: float32 [rows, columns], on their device."""
    return w3.dequantize(packed[names.CODES], packed[names.SCALES], packed[names.QMAP], spec=spec, dtype=torch.float32)


def measure_error(weight: torch.Tensor, packed: Mapping[str, torch.Tensor], *, spec: LinearSpec) -> ModuleError:
    """Squared sums of error and weight, of the packed tensors as they are stored.

    Sums run over one row at a time in float64 and then over the list of rows, so that not even the last bit depends on
    the number of threads.

    Args:
        weight: float32 [rows, columns], on the device that is to do this.
        packed: `codes`, `scales` and `qmap` of the Linear, on any.
    """
    squared_error = squared_weight = 0.0
    there = moved({part: packed[part] for part in names.PACKED}, weight.device)
    blocks = w3.dequantized_blocks(there[names.CODES], there[names.SCALES], there[names.QMAP], spec=spec)
    for rows, block in blocks:
        squared_error += sum((block - weight[rows]).square_().sum(dim=1, dtype=torch.float64).tolist())
        squared_weight += sum(weight[rows].square().sum(dim=1, dtype=torch.float64).tolist())
    return ModuleError(squared_error=squared_error, squared_weight=squared_weight)
