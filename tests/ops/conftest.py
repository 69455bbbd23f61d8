"""Linears on a CUDA device, and the check that kernels leave their workspace clean."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch

from w3pack.format.layout import Layout
from w3pack.format.linear import LinearSpec, QmapDtype
from w3pack.ops import w3_cuda, workspace
from w3pack.ops.w3_linear import form_of, w3_linear
from w3pack.pack.words import pack_codes, pack_scales


@dataclass(frozen=True)
class Packed:
    """A Linear on the device, with its matrix worked out without the package's decoder."""

    spec: LinearSpec
    codes: torch.Tensor
    scales: torch.Tensor
    qmap: torch.Tensor
    weight: torch.Tensor  # float64 [rows, columns]

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.codes, self.scales, self.qmap

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        s = self.spec
        return w3_linear(x, *self.tensors, bias, rows=s.rows, columns=s.columns, group_size=s.group_size)

    def form(self, dtype: torch.dtype) -> w3_cuda.Form:
        s = self.spec
        return form_of(dtype, *self.tensors, rows=s.rows, columns=s.columns, group_size=s.group_size)


@functools.cache
def _make(
    shape: tuple[int, int, int, int] = (4096, 4096, 128, 1), layout: Layout = "dense", qmap_dtype: QmapDtype = "int8"
) -> Packed:
    rows, columns, group_size, maps = shape
    generator = torch.Generator("cuda").manual_seed(rows + columns)
    spec = LinearSpec(
        rows=rows,
        columns=columns,
        group_size=group_size,
        layout=layout,
        maps=maps,
        qmap_dtype=qmap_dtype,
        bias=False,
    )
    codes = torch.randint(0, 8, (rows, columns), generator=generator, device="cuda", dtype=torch.uint8)
    scales = torch.rand(rows, spec.groups, generator=generator, device="cuda") + 0.5
    signs = torch.randint(0, 2, scales.shape, generator=generator, device="cuda") * 2 - 1
    scales = (scales * signs / columns**0.5).half()
    if qmap_dtype == "int8":
        ranks = torch.rand(maps, 255, generator=generator, device="cuda").argsort(dim=1)
        qmap = (ranks[:, :8].sort(dim=1).values - 127).to(torch.int8)
        values = qmap.double() / 127
    else:
        qmap = torch.rand(maps, 8, generator=generator, device="cuda").mul(2).sub(1).sort(dim=1).values.half()
        values = qmap.double()
    map_of = torch.arange(rows, device="cuda") // spec.rows_per_map
    weight = values[map_of].gather(1, codes.long()) * scales.double().repeat_interleave(group_size, dim=1)[:, :columns]
    return Packed(spec, pack_codes(codes, spec), pack_scales(scales, spec), qmap, weight)


@pytest.fixture(scope="session")
def make() -> Callable[..., Packed]:
    """`make(shape, layout, qmap_dtype)`, the same object each time; a shape is (rows, columns, group size, maps)."""
    return _make


@pytest.fixture
def workspace_is_clean() -> Iterator[None]:
    """Every kernel leaves every buffer as it found it."""
    yield
    torch.cuda.synchronize()
    held = workspace._WORKSPACES[0]
    for buffer in [*held.eager.values(), *held.spares, *(b for bound in held.bound.values() for b in bound)]:
        assert bool((buffer == 255).all())
