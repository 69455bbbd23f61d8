"""What a plan must know of sources that are quantised themselves: block-scaled FP8 is read, everything else refused."""

from __future__ import annotations

from w3pack.checkpoint.source import Source, TensorInfo
from w3pack.errors import CheckpointError, UnsupportedError
from w3pack.format import names
from w3pack.pipeline.selection import FP8

SCALE_SUFFIX = "_scale_inv"
ACTIVATION_SCALES = ("input_scale", "activation_scale")


def block_size(source: Source) -> tuple[int, int] | None:
    """Block size of an FP8 source; UnsupportedError for any other quantised source."""
    config = source.config
    text = config.get("text_config")
    entry = config.get("quantization_config") or (text.get("quantization_config") if isinstance(text, dict) else None)
    fp8 = [info.name for info in source.tensors.values() if info.dtype in FP8]
    if entry is None:
        if fp8:
            raise CheckpointError(
                f"expected a quantization_config that explains the FP8 tensor {fp8[0]}, got none; use the original config.json"
            )
        packed = [
            name
            for name in source.tensors
            if name.endswith((".qweight", ".weight_packed", ".quant_state.bitsandbytes__nf4"))
        ]
        if packed:
            raise UnsupportedError(
                f"expected float weights, got packed ones such as {packed[0]}; start from the unquantised model"
            )
        return None
    method = entry.get("quant_method") if isinstance(entry, dict) else None
    if method == "w3pack":
        raise UnsupportedError(
            f"expected an unquantised checkpoint, got {source.location}, which w3pack has packed already"
        )
    if method != "fp8":
        raise UnsupportedError(
            f"expected a bf16, fp16, fp32, block-scaled FP8 or GGUF source, got quant_method {method!r}; "
            "start from the unquantised model"
        )
    block = entry.get("weight_block_size")
    if not (isinstance(block, list) and len(block) == 2 and all(type(side) is int and side > 0 for side in block)):
        raise UnsupportedError(
            f"expected an FP8 checkpoint with weight_block_size, got {block!r}; per-tensor FP8 scales are not supported, "
            "start from the unquantised model"
        )
    return block[0], block[1]


def check_grid(weight: TensorInfo, scales: TensorInfo, *, block: tuple[int, int]) -> None:
    """CheckpointError unless an FP8 weight is a matrix (or a stack) and its scales are the grid that its blocks need."""
    if len(weight.shape) < 2:
        raise CheckpointError(
            f"expected the FP8 tensor {weight.name} to be a matrix, got shape {weight.shape}; download the checkpoint again"
        )
    grid = (*weight.shape[:-2], -(-weight.shape[-2] // block[0]), -(-weight.shape[-1] // block[1]))
    if scales.shape != grid:
        raise CheckpointError(
            f"expected {scales.name} of shape {grid} for blocks of {block}, got {scales.shape}; "
            "the checkpoint contradicts its weight_block_size"
        )


def consumed_by_weight(source: Source, info: TensorInfo) -> str | None:
    """Why a tensor beside an FP8 weight has no place in the output; None for any other tensor."""
    owner = source.tensors.get(info.name.removesuffix(SCALE_SUFFIX))
    if owner is not None and owner.name != info.name and owner.dtype in FP8:
        return "multiplied into its FP8 weight"
    module, _, part = info.name.rpartition(".")
    weight = source.tensors.get(names.tensor(module, "weight"))
    if part in ACTIVATION_SCALES and weight is not None and weight.dtype in FP8:
        return "scale of FP8 activations"
    return None
