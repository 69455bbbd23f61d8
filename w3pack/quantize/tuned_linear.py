"""A Linear whose codes are settled while its map and scales are still learned, by the gradient of any loss.

    W[n, k] = value(map[codes[n, k]]) * scale[n, k // group_size]

    dL/dscale[n, g] = sum over the group of dL/dW * value        dL/dmap[q] = sum over the codes q of dL/dW * scale

Map and scale are used rounded as the file holds them, int8 grid and float16, and the gradient passes through the rounding as if it were
not there (straight-through estimator, Bengio et al., arXiv 1308.3432): what is judged is what will be stored. Training
scales and map with the codes fixed is the end-to-end stage of EfficientQAT (arXiv 2407.11062) and the continuous half of
PV-tuning (arXiv 2405.14852).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from w3pack.quantize.diagonal import stored_scales
from w3pack.quantize.linear import LARGEST_SCALE, QuantizedLinear
from w3pack.quantize.maps import ENTRIES, map_values, round_map

# Learning rates at the peak. Scales move in units of themselves, map entries in units of the largest entry, vectors in
# units of their mean magnitude.
SCALE_RATE = 0.004
MAP_RATE = 0.002
VECTOR_RATE = 0.002
_PIECE_ELEMENTS = 1 << 17  # of the masked sums: buffers that stay in the cache


@dataclass(frozen=True)
class TunedLinear:
    """Codes, and where map and scales start. What is learned are `size` latents: relative changes of the scales, then map entries.

    Attributes:
        start: codes uint8 [rows, columns], map and scales to begin with.
        fit_map: whether the map moves; off for an imported or chosen one.
    """

    start: QuantizedLinear
    fit_map: bool = True

    @property
    def size(self) -> int:
        """Latents."""
        return self.start.scales.numel() + self.start.qmap.numel()

    def initial(self) -> torch.Tensor:
        """Latents that stand for the start, float32 [size]."""
        return torch.cat([torch.zeros_like(self.start.scales, dtype=torch.float32).view(-1), self._table0().view(-1)])

    def rates(self) -> torch.Tensor:
        """Learning rate of each latent at the peak, float32 [size]; 0 where the scale is 0 and for a map that stays."""
        scales = (self.start.scales != 0).to(torch.float32).view(-1) * SCALE_RATE
        return torch.cat([scales, torch.full_like(self._table0(), MAP_RATE if self.fit_map else 0.0).view(-1)])

    def project(self, latents: torch.Tensor) -> None:
        """Bring latents back, in place, to where a legal file is: ascending maps in -1..1, scales that keep their sign."""
        relative, table = self._split(latents)
        relative.clamp_(-0.95, 20.0)
        table.copy_(table.clamp(-1.0, 1.0).cummax(dim=1).values)

    def stored(self, latents: torch.Tensor) -> QuantizedLinear:
        """Map and scales as the file holds them."""
        relative, table = self._split(latents)
        scales = self.start.scales.to(torch.float32) * (1.0 + relative)
        return QuantizedLinear(
            codes=self.start.codes,
            qmap=round_map(table, self.start.qmap.dtype),
            scales=stored_scales(scales.clamp(-LARGEST_SCALE, LARGEST_SCALE)).to(torch.float16),
            group_size=self.start.group_size,
        )

    def write(self, latents: torch.Tensor, weight: torch.Tensor) -> None:
        """W at these latents, rounded to the dtype of `weight`, [rows, columns], which it fills."""
        now = self.stored(latents)
        rows, columns = now.codes.shape
        table = map_values(now.qmap)
        step = max(1, _PIECE_ELEMENTS // columns) if weight.device.type == "cpu" else rows
        for first in range(0, rows, step):
            here = slice(first, first + step)
            keys = now.codes[here].to(torch.int32)
            if table.shape[0] == 1:
                values = table[0].index_select(0, keys.view(-1)).view(keys.shape)
            else:
                values = torch.gather(table[here], 1, keys.to(torch.int64))
            scales = now.scales[here].to(torch.float32).repeat_interleave(now.group_size, dim=1)
            weight[here] = values.mul_(scales[:, :columns])

    def gradient(self, latents: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """dL/dlatents, float32 [size]; float64 where `gradient` is.

        Args:
            latents: [size].
            weight: W at these latents, [rows, columns], any floating dtype.
            gradient: dL/dW, [rows, columns], any floating dtype.
        """
        relative, _ = self._split(latents)
        now = self.stored(latents)
        by_scale, by_map = weight_sums(gradient, weight, now)
        return torch.cat([(by_scale / (1.0 + relative)).view(-1), by_map.view(-1)])

    def _table0(self) -> torch.Tensor:
        return map_values(self.start.qmap)

    def _split(self, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        count = self.start.scales.numel()
        return latents[:count].view(self.start.scales.shape), latents[count:].view(-1, ENTRIES)


@dataclass(frozen=True)
class TunedVector:
    """A norm's gains or a bias: latents are its changes in units of its mean magnitude.

    Attributes:
        start: [n], any floating dtype, which is also that of the result.
    """

    start: torch.Tensor

    @property
    def size(self) -> int:
        """Latents."""
        return self.start.numel()

    def initial(self) -> torch.Tensor:
        """float32 [n] zeros."""
        return torch.zeros(self.size, dtype=torch.float32, device=self.start.device)

    def rates(self) -> torch.Tensor:
        """Learning rate of each latent at the peak, float32 [n]."""
        return torch.full_like(self.initial(), VECTOR_RATE)

    def project(self, latents: torch.Tensor) -> None:
        """Any vector is legal."""

    def stored(self, latents: torch.Tensor) -> torch.Tensor:
        """The vector in its own dtype, [n]."""
        start = self.start.to(torch.float32)
        return (start + latents.view(start.shape) * self._unit()).to(self.start.dtype)

    def gradient(self, latents: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """dL/dlatents, float32 [n], of dL/dvector."""
        return gradient.to(torch.float32).view(-1) * self._unit()

    def _unit(self) -> torch.Tensor:
        return self.start.to(torch.float32).abs().mean().clamp_min(1e-6)


def weight_sums(
    gradient: torch.Tensor, weight: torch.Tensor, linear: QuantizedLinear
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums of dL/dW * W over each group, and of dL/dW * scale over the weights of each code; in a fixed order.

    Args:
        gradient: floating [rows, columns].
        weight: W, floating [rows, columns].
        linear: what W was made from.

    Returns:
        float32 (float64 of a float64 gradient) [rows, groups] and [maps, 8].
    """
    (rows, columns), size = linear.codes.shape, linear.group_size
    dtype = torch.float64 if gradient.dtype == torch.float64 else torch.float32
    by_scale = torch.empty(linear.scales.shape, dtype=dtype, device=gradient.device)
    by_map = torch.zeros(linear.qmap.shape, dtype=torch.float64, device=gradient.device)
    step = max(1, _PIECE_ELEMENTS // columns) if gradient.device.type == "cpu" else rows
    for first in range(0, rows, step):
        here = slice(first, first + step)
        wide = gradient[here].to(dtype)
        parts = (wide * weight[here].to(dtype)).split(size, dim=1)  # the last group of a row may be short
        by_scale[here] = torch.stack([part.sum(dim=1) for part in parts], dim=1)
        scales = linear.scales[here].to(dtype).repeat_interleave(size, dim=1)[:, :columns]
        by_code = _sums_by_code(wide * scales, linear.codes[here], each_row=by_map.shape[0] > 1)
        if by_map.shape[0] == 1:
            by_map += by_code
        else:
            by_map[here] = by_code
    return by_scale, by_map.to(dtype)


def _sums_by_code(values: torch.Tensor, codes: torch.Tensor, *, each_row: bool) -> torch.Tensor:
    """float64 [1, 8] or [rows, 8]: sums of values [rows, columns] over the places of each code."""
    if values.device.type == "cpu":  # on other devices bincount adds up in any order
        rows = values.shape[0] if each_row else 1
        keys = codes
        if each_row:
            keys = codes.to(torch.int64) + ENTRIES * torch.arange(rows).unsqueeze(1)
        found = torch.bincount(keys.reshape(-1), weights=values.reshape(-1), minlength=ENTRIES * rows)
        return found.to(torch.float64).view(rows, ENTRIES)
    by_row = torch.stack([(values * (codes == q)).sum(dim=1, dtype=torch.float64) for q in range(ENTRIES)], dim=1)
    return by_row if each_row else by_row.sum(dim=0, keepdim=True)


#: Told of dL/dW, [rows, columns], of a product that is differentiated.
Told = Callable[[torch.Tensor], None]


class _Product(torch.autograd.Function):
    """y = x W^T in W's dtype; dL/dW goes to a callback instead of into a leaf that threads would share."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, anchor: torch.Tensor, weight: torch.Tensor, told: Told) -> torch.Tensor:
        narrow = x.to(weight.dtype)
        ctx.save_for_backward(narrow)
        ctx.weight, ctx.told, ctx.dtype = weight, told, x.dtype
        return (narrow @ weight.t()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        gradient = gradients[0].to(ctx.weight.dtype)
        ctx.told(gradient.reshape(-1, gradient.shape[-1]).t() @ x.reshape(-1, x.shape[-1]))
        return (gradient @ ctx.weight).to(ctx.dtype), None, None, None


def product(x: torch.Tensor, weight: torch.Tensor, *, anchor: torch.Tensor, told: Told) -> torch.Tensor:
    """x W^T, differentiable by x, whose dL/dW is handed to `told` during the backward pass.

    Args:
        x: floating [..., columns].
        weight: [rows, columns]; its dtype is that of the products, whatever x's.
        anchor: any tensor that requires a gradient, so that there is a backward pass even if x needs none.
        told: called in the thread of the backward pass.

    Returns:
        [..., rows] in x's dtype.
    """
    result: torch.Tensor = _Product.apply(x, anchor, weight, told)  # type: ignore[no-untyped-call]
    return result
