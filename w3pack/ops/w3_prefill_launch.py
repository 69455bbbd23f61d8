"""Launch a plan of the prefill kernel: map the activations, pack parameters, run."""

from __future__ import annotations

import struct
from typing import Any

import torch

from w3pack.format.linear import LinearSpec
from w3pack.jit import load
from w3pack.jit.tensor_map import encode_bytes
from w3pack.ops import device as devices
from w3pack.ops.w3_config import W3Desc, XDtype
from w3pack.ops.w3_launch import map_tiles
from w3pack.ops.w3_prefill import PrefillPlan, prefill_plan

_MAP, _POINTER, _INT = "128s", "Q", "i"

#: kernels/w3_prefill_params.cuh, struct Params, which is declared alignas(64).
FIELDS = {
    "x_map": _MAP,
    "codes": _POINTER,
    "scales": _POINTER,
    "qmap": _POINTER,
    "bias": _POINTER,
    "y": _POINTER,
    "tokens": _INT,
    "rows": _INT,
    "row_tiles": _INT,
    "column_tiles": _INT,
    "groups": _INT,
    "tiles_per_group": _INT,
    "map_tiles": _INT,
    "steps": _INT,
    "token_tiles": _INT,
    "tiles": _INT,
    "y_aligned": _INT,
}
_ALIGNMENT = 64
_UNPADDED = "<" + "".join(FIELDS.values())
_PARAMS = struct.Struct(f"{_UNPADDED}{-struct.calcsize(_UNPADDED) % _ALIGNMENT}x")
PARAMS_BYTES = _PARAMS.size

#: Bytes of a row of activations in a box.
_BOX_BYTES = 128
#: Bytes that the second-level cache reads at once for a box.
_PROMOTION = 256
#: Maps kept; activations come and go, and lie where others have lain.
_MAPS_KEPT = 4096
_maps: dict[tuple[int, ...], bytes] = {}


class Prefiller:
    """The prefill kernels of a Linear on a device, whatever the number of tokens."""

    def __init__(self, spec: LinearSpec, x_dtype: XDtype, device_index: int) -> None:
        """Nothing is built or loaded yet."""
        self._spec = spec
        self._x_dtype: XDtype = x_dtype
        self._device_index = device_index
        self._limits = devices.limits(device_index)

    def plan(self, tokens: int) -> PrefillPlan:
        """The plan for a number of tokens; UnsupportedError where there is no kernel."""
        return prefill_plan(
            W3Desc.of(self._spec, tokens=tokens, x_dtype=self._x_dtype, device=self._limits)
        )  # kept: a plan is asked for in every call

    def linear(
        self,
        x: torch.Tensor,
        codes: torch.Tensor,
        scales: torch.Tensor,
        qmap: torch.Tensor,
        bias: torch.Tensor | None,
        y: torch.Tensor,
    ) -> None:
        """Write y = x W^T + bias on the current stream; tensors and errors as `run_prefill`."""
        run_prefill(self.plan(x.shape[0]), x, codes, scales, qmap, bias, y)


def mappable(x: torch.Tensor) -> bool:
    """Whether the copy engine can take x [tokens, columns], unit column stride, as it lies."""
    stride = x.stride(0) if x.shape[0] > 1 else x.shape[1]
    return x.data_ptr() % 16 == 0 and x.element_size() * stride % 16 == 0 and stride >= x.shape[1]


def run_prefill(
    plan: PrefillPlan,
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    qmap: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
) -> None:
    """Run a plan once on the current stream. The device is the current one, and all tensors lie on it.

    Args:
        plan: for exactly x's tokens.
        x: [tokens, columns] of the plan's x dtype, `mappable`.
        codes, scales, qmap: as stored, contiguous, 16-byte aligned.
        bias: [rows] of x's dtype, contiguous, or None.
        y: [tokens, rows] of x's dtype, contiguous.

    Raises:
        ToolchainError: cuda-core, the driver or (if something must be built) NVRTC is missing.
        UsageError: a CUDA graph is being captured and the kernel is not loaded yet.
        LaunchError: the driver refuses.
    """
    index = x.get_device()
    load(plan.text, index).launch(
        stream=devices.current_stream(index),
        grid=plan.grid,
        block=plan.block,
        shared_bytes=plan.shared_bytes,
        params=pack(values_of(plan, x, codes, scales, qmap, bias, y)),
        programmatic=True,
        cluster=plan.config.cluster,
    )


def values_of(
    plan: PrefillPlan,
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    qmap: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
) -> dict[str, Any]:
    """The kernel's parameters by name."""
    desc = plan.desc
    return {
        "x_map": _map_of(x, box_rows=plan.config.tokens // plan.config.cluster),
        "codes": codes.data_ptr(),
        "scales": scales.data_ptr(),
        "qmap": qmap.data_ptr(),
        "bias": 0 if bias is None else bias.data_ptr(),
        "y": y.data_ptr(),
        "tokens": desc.tokens,
        "rows": desc.rows,
        "row_tiles": desc.row_tiles,
        "column_tiles": desc.column_tiles,
        "groups": desc.column_tiles * 64 // desc.group_size,
        "tiles_per_group": desc.group_size // 64,
        "map_tiles": map_tiles(desc.row_tiles, qmap.shape[0]),
        "steps": plan.steps,
        "token_tiles": plan.token_tiles,
        "tiles": plan.tiles,
        "y_aligned": desc.rows % 8 == 0 and y.data_ptr() % 16 == 0,
    }


def pack(values: dict[str, Any]) -> bytes:
    """The struct's bytes; KeyError for a field without a value."""
    return _PARAMS.pack(*[values[name] for name in FIELDS])


def _map_of(x: torch.Tensor, *, box_rows: int) -> bytes:
    """An address, a shape: whatever tensor lies there now, its map is the same."""
    tokens, columns = x.shape
    itemsize = x.element_size()
    row_bytes = itemsize * (x.stride(0) if tokens > 1 else -(-columns // 8) * 8)
    key = (x.data_ptr(), tokens, columns, row_bytes, box_rows, x.get_device())
    found = _maps.get(key)
    if found is None:
        if len(_maps) >= _MAPS_KEPT:
            _maps.clear()
        found = _maps[key] = encode_bytes(
            x.data_ptr(),
            rows=tokens,
            columns=itemsize * columns,
            row_bytes=row_bytes,
            box_rows=box_rows,
            box_columns=_BOX_BYTES,
            promotion=_PROMOTION,
        )
    return found
