"""Launch a plan: pack parameters, stage activations where the plan says so, run the decode kernel."""

from __future__ import annotations

import functools

import torch

from w3pack.jit import load
from w3pack.ops import device as devices
from w3pack.ops import w3_params, workspace
from w3pack.ops.w3_config import W3Plan

_ONES = (1 << 32) - 1


class Decoder:
    """A plan with its kernels loaded on a device, for a Linear of `maps` maps."""

    def __init__(self, plan: W3Plan, *, maps: int, device_index: int) -> None:
        """Load, and build what is not built yet.

        Raises:
            ToolchainError: cuda-core, the driver or (if something must be built) NVRTC is missing.
            UsageError: a CUDA graph is being captured and a kernel is not loaded yet.
        """
        desc = plan.desc
        self.plan = plan
        self.capacity = plan.config.tokens
        self._device_index = device_index
        self._decode = load(plan.decode, device_index)
        self._stage = load(plan.stage, device_index) if plan.stage else None
        self._programmatic = desc.device.bulk
        self._constants = {
            "rows": desc.rows,
            "columns": desc.columns,
            "row_tiles": desc.row_tiles,
            "column_tiles": desc.column_tiles,
            "groups": desc.column_tiles * 64 // desc.group_size,
            "group_reciprocal": _ONES // (desc.group_size // 64),
            "map_tiles": map_tiles(desc.row_tiles, maps),
            "steps": desc.steps,
            "step_reciprocal": _ONES // desc.steps,
            "row_blocks": plan.row_blocks,
            "resident_steps": plan.resident_steps,
            "run_units": plan.run_units,
            "longer_runs": plan.longer_runs,
            "first_chunk": plan.first_chunk,
            "chunk_steps": plan.chunk_steps,
            "chunk_reciprocal": _ONES // plan.chunk_steps,
            "chunks": plan.chunks,
            "clusters": plan.grid // plan.config.cluster,
            "unused": 0,
        }

    def run(
        self,
        x: torch.Tensor,
        codes: torch.Tensor,
        scales: torch.Tensor,
        qmap: torch.Tensor,
        bias: torch.Tensor | None,
        y: torch.Tensor,
    ) -> None:
        """Write y = x W^T + bias on the current stream. The device is the current one, and all tensors lie on it.

        Args:
            x: [tokens, columns], 1 to `capacity` tokens of the plan's x dtype, any row stride, unit column stride.
            codes, scales, qmap: as stored, contiguous, 16-byte aligned.
            bias: [rows] of x's dtype, contiguous, or None.
            y: [tokens, rows] of x's dtype, contiguous.
        """
        plan, index = self.plan, self._device_index
        stream = devices.current_stream(index)
        tokens, x_stride, x_at = x.shape[0], x.stride(0), x.data_ptr()
        if tokens == 1:
            x_stride = 0  # of an axis of one it may be anything
        partials = workspace.acquire(index, stream, plan.partial_bytes)
        values = {
            **self._constants,
            "x": x_at,
            "x_stride": x_stride,
            "tokens": tokens,
            "token_reciprocal": _ONES // tokens,
            "x_aligned": x_at % 16 == 0 and x_stride % 8 == 0,
            "codes": codes.data_ptr(),
            "scales": scales.data_ptr(),
            "qmap": qmap.data_ptr(),
            "bias": 0 if bias is None else bias.data_ptr(),
            "y": y.data_ptr(),
            "partials": partials.data_ptr(),
            "staged": 0,
            "staged_scales": 0,
        }
        if self._stage is not None:
            staged = torch.empty(plan.staged_bytes + plan.staged_scale_bytes, dtype=torch.uint8, device=x.device)
            values["staged"] = staged.data_ptr()
            values["staged_scales"] = values["staged"] + plan.staged_bytes
            self._stage.launch(
                stream=stream,
                grid=plan.desc.steps * plan.config.all_token_tiles,
                block=64,
                shared_bytes=0,
                params=w3_params.STAGE.pack({**values, "scales": values["staged_scales"]}),
                programmatic=self._programmatic,
            )
        self._decode.launch(
            stream=stream,
            grid=plan.grid,
            block=plan.block,
            shared_bytes=plan.shared_bytes,
            params=w3_params.DECODE.pack(values),
            programmatic=self._programmatic,
            cluster=plan.config.cluster,
        )


def map_tiles(row_tiles: int, maps: int) -> int:
    """Row tiles that share a map, as kernels want it: 0 for one map, and where each row has its own."""
    return 0 if maps in (1, 64 * row_tiles) else row_tiles // maps


def run_decode(
    plan: W3Plan,
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    qmap: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
) -> None:
    """Run a plan once, with tensors as `Decoder.run` takes them; for tests and tuners. The op keeps its decoders."""
    _decoder(plan, qmap.shape[0], x.get_device()).run(x, codes, scales, qmap, bias, y)


@functools.lru_cache(maxsize=1024)
def _decoder(plan: W3Plan, maps: int, device_index: int) -> Decoder:
    return Decoder(plan, maps=maps, device_index=device_index)
