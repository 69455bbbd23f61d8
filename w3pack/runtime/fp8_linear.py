"""`Fp8Linear`: a Linear whose weight is E4M3 with one scale for each block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from w3pack.errors import CheckpointError
from w3pack.format.gateup import SCALES, WEIGHT
from w3pack.ops.gateup_cuda import widened
from w3pack.ops.gateup_linear import fp8_linear


class Fp8Module(nn.Module):
    """Holds `weight` float8_e4m3fn [rows, columns] and `weight_scale_inv`, both frozen and of dtypes that never change."""

    def __init__(
        self,
        shape: tuple[int, int],
        grid: tuple[int, int],
        *,
        block: tuple[int, int],
        scales: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.block = block
        self.weight = _frozen(torch.empty(shape, dtype=torch.float8_e4m3fn, device=device))
        self.weight_scale_inv = _frozen(torch.empty(grid, dtype=scales, device=device))
        self._wide: torch.Tensor | None = None  # float32 scales, where `widen` made them
        self._forms = {part: (getattr(self, part).dtype, tuple(getattr(self, part).shape)) for part in (WEIGHT, SCALES)}

    @property
    def scales(self) -> torch.Tensor:
        """The scales as calls take them: as they are stored, or float32 once `widen` was called."""
        return self.weight_scale_inv if self._wide is None else self._wide

    def widen(self) -> None:
        """Keep the scales in float32 beside those that are stored, so that calls on CUDA need not convert them. Moving or loading
        lets go of them."""
        if self.weight_scale_inv.dtype != torch.float32:
            self._wide = widened(self.weight_scale_inv.detach())

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Fp8Module:
        self._wide = None
        before = {part: getattr(self, part).data for part in self._forms}  # .data: a cast happens inside the parameter
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for part, stored in before.items():
            moved = getattr(self, part)
            if moved.dtype != stored.dtype:  # a cast to another float dtype: only the device may follow
                exact = stored if stored.device == moved.device else stored.to(moved.device)
                setattr(self, part, _frozen(exact))
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        errors = args[-1]
        self._wide = None
        for part, (dtype, _) in self._forms.items():  # torch would cast, which rounds
            given = state_dict.get(prefix + part)
            if given is not None and given.dtype != dtype:
                errors.append(f"expected {prefix}{part} to be {dtype}, got {given.dtype}; load the checkpoint anew")
                return
        super()._load_from_state_dict(state_dict, prefix, *args)

    def check(self, name: str, *, offloaded: bool = False) -> None:
        """CheckpointError naming the tensor when one has not its shape and dtype, no data, or scales that are not finite."""
        for part, (dtype, shape) in self._forms.items():
            tensor = getattr(self, part)
            if tensor.dtype != dtype or tuple(tensor.shape) != shape or (tensor.is_meta and not offloaded):
                raise CheckpointError(
                    f"expected {name}.{part} to be loaded as {dtype} {list(shape)}, got {tensor.dtype} "
                    f"{list(tensor.shape)}{' without data' if tensor.is_meta else ''}; load the checkpoint anew"
                )
        scales = self.weight_scale_inv
        if scales.dtype == torch.uint8:
            scales = scales.view(torch.float8_e8m0fnu)  # type: ignore[assignment]
        if not scales.is_meta and not bool(torch.isfinite(scales.to(torch.float32)).all()):
            raise CheckpointError(
                f"expected finite scales in {name}.{SCALES}, got NaN or infinity; the checkpoint is damaged"
            )


class Fp8Linear(Fp8Module):
    """y = x W^T + bias. On CUDA with few tokens the weights stay in 8 bits; else the matrix is dequantised for each call, in bands, and
    no float copy is kept."""

    def __init__(
        self,
        rows: int,
        columns: int,
        *,
        block: tuple[int, int],
        scales: torch.dtype = torch.float32,
        bias: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """Uninitialised parameters; `scales` is the dtype of the scales, `dtype` that of the bias."""
        grid = (-(-rows // block[0]), -(-columns // block[1]))
        super().__init__((rows, columns), grid, block=block, scales=scales, device=device)
        self.in_features, self.out_features = columns, rows
        self.bias = _frozen(torch.empty(rows, dtype=dtype, device=device)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x floating [..., columns] -> [..., rows] in x's dtype."""
        return fp8_linear(x, self.weight, self.scales, self.bias, block=self.block)

    def extra_repr(self) -> str:
        """Shape and form, for print(model)."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def _frozen(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
