"""Random packed Linears, made on the GPU, that can show a fault: all eight codes, distinct map entries, scales of both signs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from w3pack.bench.shapes import Case
from w3pack.format.linear import LinearSpec, QmapDtype
from w3pack.ops.w3_config import XDtype
from w3pack.pack.words import pack_codes, pack_scales
from w3pack.reference.w3 import dequantize, dequantized_blocks

X_DTYPES: dict[XDtype, torch.dtype] = {"float16": torch.float16, "bfloat16": torch.bfloat16}
_INT8_MAP = (-127, -83, -49, -20, 13, 41, 77, 119)
_ROWS_AT_ONCE = 4096


@dataclass(frozen=True)
class Weights:
    """A packed Linear: codes int32 `spec.codes_shape`, scales float16 `spec.scales_shape`, qmap `spec.qmap_shape`."""

    spec: LinearSpec
    codes: torch.Tensor
    scales: torch.Tensor
    qmap: torch.Tensor

    def copies(self, count: int) -> list[Weights]:
        """This one and `count` - 1 like it elsewhere in memory."""
        more = [
            Weights(self.spec, self.codes.clone(), self.scales.clone(), self.qmap.clone()) for _ in range(count - 1)
        ]
        return [self, *more]

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """The matrix [rows, columns]."""
        return dequantize(self.codes, self.scales, self.qmap, spec=self.spec, dtype=dtype)

    def exact(self, x: torch.Tensor) -> torch.Tensor:
        """x W^T in float64, the matrix unpacked block by block: [tokens, rows]."""
        y = torch.empty(x.shape[0], self.spec.rows, dtype=torch.float64, device=x.device)
        wide = x.double()
        for rows, block in dequantized_blocks(self.codes, self.scales, self.qmap, spec=self.spec, exact=True):
            y[:, rows] = wide @ block.t()
        return y


def random_weights(spec: LinearSpec, *, device: torch.device, seed: int = 0) -> Weights:
    """A Linear of that spec. Scales are as distinct as float16 lets them be; products stay far from overflow."""
    generator = torch.Generator(device=device).manual_seed(seed)
    codes = torch.empty(spec.rows, spec.columns, dtype=torch.uint8, device=device)
    for first in range(0, spec.rows, _ROWS_AT_ONCE):
        codes[first : first + _ROWS_AT_ONCE].random_(0, 8, generator=generator)
    magnitude = torch.rand(spec.rows, spec.groups, device=device, generator=generator) * 0.9 + 0.1
    sign = torch.randint(0, 2, magnitude.shape, device=device, generator=generator) * 2 - 1
    scales = (magnitude * sign * 2 * spec.columns**-0.5).half()
    return Weights(spec, pack_codes(codes, spec), pack_scales(scales, spec), _maps(spec, device, generator))


def _maps(spec: LinearSpec, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    base = torch.tensor(_INT8_MAP, device=device).expand(spec.maps, 8)
    shift = torch.randint(-5, 6, (spec.maps, 8), device=device, generator=generator) if spec.maps > 1 else 0
    whole = (base + shift).clamp(-127, 127)  # entries lie further apart than they move
    dtype: QmapDtype = spec.qmap_dtype
    return (whole.to(torch.int8) if dtype == "int8" else (whole / 127.5).half()).contiguous()


def random_x(case: Case, *, device: torch.device, seed: int = 1) -> torch.Tensor:
    """Activations [tokens, columns] of the case's dtype: normal numbers, some columns larger, as models have them."""
    generator = torch.Generator(device=device).manual_seed(seed)
    x = torch.randn(case.tokens, case.columns, device=device, generator=generator)
    x[:, :: max(1, case.columns // 7)] *= 8
    return x.to(X_DTYPES[case.x_dtype])


def relative_error(found: torch.Tensor, truth: torch.Tensor) -> float:
    """Frobenius norm of the difference over that of `truth` (float64); NaN where `found` has one."""
    return float((found.double() - truth).norm() / truth.norm())
