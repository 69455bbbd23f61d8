"""`MergedLinears`: Linears that read the same x, as one W3Linear whose product each takes its rows of.

The members stay where they were and own nothing: each looks at the merged tensors when it is asked, so that moving, copying,
saving or reloading the model cannot part them, and no byte is held twice.

How members share a product. The parent module's own calls open and close a shared call (two hooks). Inside it the first
member called with a tensor computes the merged product, the others called with the very same tensor object take their rows,
and the last of them lets go of it. Each thread has shared calls of its own. Outside of the parent's call, and wherever
gradients are recorded, each member computes its own rows: gradient checkpointing may stop between two members.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from w3pack.errors import UnsupportedError
from w3pack.format.layout import TILE
from w3pack.format.linear import LinearSpec
from w3pack.runtime.linear import STORED, W3Linear


class _SharedCall:
    """One call of the parent: the tensor that members were called with, the merged product, and who has yet to take rows."""

    def __init__(self) -> None:
        self.x: torch.Tensor | None = None
        self.version: int | None = None
        self.product: torch.Tensor | None = None
        self.waiting: list[int] = []


def merged_spec(specs: Sequence[LinearSpec]) -> LinearSpec:
    """The spec of Linears laid one below the other, their padded rows included, except for those of the last.

    Raises:
        UnsupportedError: fewer than two, or other columns, group sizes, layouts or kinds of map.
    """
    shared = {(s.columns, s.group_size, s.layout, s.qmap_dtype, s.rows_per_map == 1) for s in specs}
    if len(specs) < 2 or len(shared) > 1:
        raise UnsupportedError(
            f"expected at least two Linears of equal columns, group size, layout and kind of map, got {list(specs)}; "
            "leave them as they are"
        )
    padded = sum(spec.padded_rows for spec in specs)
    return LinearSpec(
        rows=padded - specs[-1].padded_rows + specs[-1].rows,
        columns=specs[0].columns,
        group_size=specs[0].group_size,
        layout=specs[0].layout,
        maps=padded // math.gcd(*(spec.rows_per_map for spec in specs)),
        qmap_dtype=specs[0].qmap_dtype,
        bias=any(spec.bias for spec in specs),
    )


class MergedLinears(W3Linear):
    """The rows of several W3Linears, one below the other; a child of their parent that adds nothing to the state dict."""

    def __init__(self, parent: nn.Module, members: Mapping[str, W3Linear]) -> None:
        """Take over the tensors of `members`, children of `parent` by name; at most their codes are held twice on the way.

        Raises:
            UnsupportedError: as `merged_spec`.
        """
        linears = list(members.values())
        biases = [linear.bias for linear in linears if linear.bias is not None]
        super().__init__(
            merged_spec([linear.spec for linear in linears]),
            dtype=biases[0].dtype if biases else None,
            device=linears[0].codes.device,
        )
        self.train(parent.training)
        self.names = tuple(members)
        self.specs = tuple(linear.spec for linear in linears)
        self._first_rows = tuple(sum(s.padded_rows for s in self.specs[:n]) for n in range(len(self.specs)))
        self._traced: _SharedCall | None = None
        self._calls: dict[int, _SharedCall] = {}
        if self.bias is not None:
            with torch.no_grad():
                self.bias.zero_()
        for number, linear in enumerate(linears):
            for part in STORED if linear.bias is None else (*STORED, "bias"):
                self.put(number, part, getattr(linear, part))
                delattr(linear, part)
            linear.join(self, number)
        self._handles = (
            parent.register_forward_pre_hook(self._open),
            parent.register_forward_hook(self._close, always_call=True),
        )

    def dissolve(self, parent: nn.Module) -> None:
        """Give each member tensors of its own again; this module is of no use afterwards."""
        for handle in self._handles:
            handle.remove()
        for name in self.names:
            linear = parent.get_submodule(name)
            if isinstance(linear, W3Linear):
                linear.leave()

    # what members look at

    def part_of(self, number: int, part: str) -> torch.Tensor:
        """The view of a member's `codes`, `scales`, `qmap` or `bias`."""
        stored: torch.Tensor = getattr(self, part)
        rows, step = self._rows_of(number, part)
        return stored[rows] if step == 1 else stored[rows][::step]

    def put(self, number: int, part: str, values: torch.Tensor) -> None:
        """Write a member's `codes`, `scales`, `qmap` or `bias`."""
        stored: torch.Tensor = getattr(self, part)
        rows, step = self._rows_of(number, part)
        with torch.no_grad():
            stored[rows].copy_(values if step == 1 else values.repeat_interleave(step, dim=0))
        self.drop_dense()

    def _rows_of(self, number: int, part: str) -> tuple[slice, int]:
        """Where a member's part lies along the first axis, and how often each of its maps stands there."""
        first, spec = self._first_rows[number], self.specs[number]
        if part == "bias":
            return slice(first, first + spec.rows), 1
        unit = self.spec.rows_per_map if part == "qmap" else TILE
        step = spec.rows_per_map // self.spec.rows_per_map if part == "qmap" else 1
        return slice(first // unit, (first + spec.padded_rows) // unit), step

    # sharing a product

    def _open(self, parent: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled():
            return
        if torch.compiler.is_compiling():  # traced as part of the parent's graph: no other thread sees it
            self._traced = _SharedCall()
        else:
            self._calls[threading.get_ident()] = _SharedCall()

    def _close(self, parent: nn.Module, args: Any, output: Any) -> None:
        if self._traced is not None:  # after a graph break this may run uncompiled
            self._traced = None
        if not torch.compiler.is_compiling():
            self._calls.pop(threading.get_ident(), None)

    def rows_of_product(self, number: int, x: torch.Tensor) -> torch.Tensor | None:
        """A member's rows of the merged product, [..., rows], a view; None where the member is to compute them itself."""
        if torch.is_grad_enabled():
            return None
        call = self._traced if torch.compiler.is_compiling() else self._calls.get(threading.get_ident())
        if call is None:
            return None
        version = _version(x)
        if call.product is not None and call.x is x and call.version == version and number in call.waiting:
            product = call.product
            call.waiting = [other for other in call.waiting if other != number]
        else:
            product = self(x)
            call.waiting = [other for other in range(len(self.specs)) if other != number]
            call.x, call.version, call.product = x, version, product
        if not call.waiting:
            call.x = call.product = None
        first = self._first_rows[number]
        return product[..., first : first + self.specs[number].rows]

    # being part of a model

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Nothing: the members give their views."""

    def _load_from_state_dict(self, *args: Any) -> None:
        """Nothing: the members write to their views."""

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_calls": {}, "_traced": None}

    def extra_repr(self) -> str:
        """Members and shape, for print(model)."""
        return f"{' + '.join(self.names)}, {super().extra_repr()}"


def _version(x: torch.Tensor) -> int | None:
    """How often a tensor was changed in place; None where torch does not say, and what `merge` saw of the parent has to do."""
    return None if torch.compiler.is_compiling() or x.is_inference() else x._version
