"""Launch a plan of the FP8 kernel: map the weights once, pack parameters, run."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from w3pack.jit import load
from w3pack.jit.tensor_map import encode_bytes
from w3pack.ops import device as devices
from w3pack.ops import workspace
from w3pack.ops.gateup_config import BLOCK, GateUpPlan
from w3pack.ops.gateup_params import pack_decode

_ONES = (1 << 32) - 1
#: Maps kept for one plan; each layer of a model has its own.
_MAPS_KEPT = 4096
#: Bytes that the second-level cache reads at once for a box: the fastest of those that there are.
_PROMOTION = 256


@dataclass(frozen=True)
class Matrix:
    """E4M3 [rows, columns], contiguous, 16-byte aligned, and its float32 scales [ceil(rows/128), ceil(columns/128)]."""

    weight: torch.Tensor
    scales: torch.Tensor


class GateUpDecoder:
    """A plan with its kernel loaded on a device."""

    def __init__(self, plan: GateUpPlan, *, device_index: int) -> None:
        """Load, and build what is not built yet.

        Raises:
            ToolchainError: cuda-core, the driver or (if something must be built) NVRTC is missing.
            UsageError: a CUDA graph is being captured and the kernel is not loaded yet.
        """
        desc = plan.desc
        self.plan = plan
        self._device_index = device_index
        self._kernel = load(plan.text, device_index)
        self._maps: dict[int, bytes] = {}
        self._constants = {
            "rows": desc.rows,
            "columns": desc.columns,
            "scale_columns": -(-desc.columns // BLOCK),
            "pieces": plan.pieces,
            "piece_reciprocal": _ONES // plan.pieces,
            "run_units": plan.run_units,
            "longer_runs": plan.longer_runs,
            "tokens": desc.tokens,
            "unused": b"",
        }

    def run(self, x: torch.Tensor, first: Matrix, second: Matrix, y: torch.Tensor) -> None:
        """Write the plan's product on the current stream. The device is the current one, and all tensors lie on it.

        Args:
            x: [tokens, columns], exactly the plan's tokens and dtype, unit column stride, rows at multiples of 16 bytes.
            first, second: gate and up where the plan is paired; otherwise the same matrix twice.
            y: [tokens, rows] of x's dtype, contiguous.
        """
        plan, index = self.plan, self._device_index
        stream = devices.current_stream(index)
        partials = workspace.acquire(index, stream, plan.partial_bytes)
        self._kernel.launch(
            stream=stream,
            grid=plan.grid,
            block=plan.block,
            shared_bytes=plan.shared_bytes,
            params=pack_decode(
                {
                    **self._constants,
                    "first_map": self._map(first.weight.data_ptr()),
                    "second_map": self._map(second.weight.data_ptr()),
                    "x": x.data_ptr(),
                    "x_stride": x.stride(0) if plan.desc.tokens > 1 else 0,
                    "first_scales": first.scales.data_ptr(),
                    "second_scales": second.scales.data_ptr(),
                    "y": y.data_ptr(),
                    "partials": partials.data_ptr(),
                }
            ),
            programmatic=True,
        )

    def _map(self, pointer: int) -> bytes:
        """An address, a shape: whatever tensor lies there now, its map is the same."""
        found = self._maps.get(pointer)
        if found is None:
            if len(self._maps) >= _MAPS_KEPT:
                self._maps.clear()
            desc, config = self.plan.desc, self.plan.config
            found = self._maps[pointer] = encode_bytes(
                pointer,
                rows=desc.rows,
                columns=desc.columns,
                row_bytes=desc.columns,
                box_rows=config.half_rows,
                box_columns=BLOCK,
                promotion=_PROMOTION,
            )
        return found
