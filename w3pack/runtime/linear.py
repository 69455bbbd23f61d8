"""`W3Linear`: a Linear whose weight is codes, scales and a map."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from w3pack.errors import UnsupportedError
from w3pack.format.linear import LinearSpec
from w3pack.ops.w3_linear import check_input, w3_linear
from w3pack.reference import w3
from w3pack.runtime import dense_cache

_STORED = ("codes", "scales", "qmap")


class W3Linear(nn.Module):
    """y = x W^T + bias, with W of `spec.rows` x `spec.columns` held in 3 bits.

    Parameters, all frozen: `codes` int32, `scales` float16, `qmap` int8 or float16, `bias` (or None). Their dtypes never
    change, whatever dtype the module is moved to; only `bias` follows.

    On a CPU the unpacked matrix may be kept between calls (`dense_cache`): a matmul on it is as fast as a stock Linear.
    """

    def __init__(
        self, spec: LinearSpec, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> None:
        """Uninitialised parameters of the shapes that `spec` gives; `dtype` is the bias's."""
        super().__init__()
        self.spec = spec
        self.in_features = spec.columns
        self.out_features = spec.rows
        qmap_dtype = torch.int8 if spec.qmap_dtype == "int8" else torch.float16
        self.codes = _frozen(torch.empty(spec.codes_shape, dtype=torch.int32, device=device))
        self.scales = _frozen(torch.empty(spec.scales_shape, dtype=torch.float16, device=device))
        self.qmap = _frozen(torch.empty(spec.qmap_shape, dtype=qmap_dtype, device=device))
        self.bias = _frozen(torch.empty(spec.rows, dtype=dtype, device=device)) if spec.bias else None
        self._dense: torch.Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "weight":  # refused: there is no float weight to share or to edit
            raise AttributeError(
                "a W3Linear has no float weight (its parameters are codes, scales and qmap); "
                "call dequantized_weight() for a copy of the matrix they stand for"
            )
        return super().__getattr__(name)

    def dequantized_weight(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The matrix that the parameters stand for, [rows, columns], a new tensor."""
        return w3.dequantize(self.codes, self.scales, self.qmap, spec=self.spec, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x floating [..., columns] -> [..., rows] in x's dtype, or under autocast, as a stock Linear, in autocast's."""
        if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
            # here and not inside the op, whose fake implementation promises x's dtype to torch.compile
            x = x.to(torch.get_autocast_dtype(x.device.type))
        if not torch.compiler.is_compiling() and x.device.type == "cpu" and self.codes.device.type == "cpu":
            check_input(x, self.spec.columns)
            dense = self._dense_weight(x.dtype)
            if dense is not None:
                return nn.functional.linear(x, dense, None if self.bias is None else self.bias.to(x.dtype))
        return w3_linear(
            x,
            self.codes,
            self.scales,
            self.qmap,
            self.bias,
            rows=self.spec.rows,
            columns=self.spec.columns,
            group_size=self.spec.group_size,
        )

    def _dense_weight(self, dtype: torch.dtype) -> torch.Tensor | None:
        """The unpacked matrix in `dtype`, kept if the budget lets it be; None when it does not."""
        dense = self._dense  # read once: another thread may drop or replace it meanwhile
        if dense is not None and dense.dtype == dtype:
            return dense
        del dense
        self.drop_dense()
        nbytes = self.spec.weights * dtype.itemsize
        if not dense_cache.admit(nbytes):
            return None
        try:
            # outside of inference mode: a later call may want a gradient of x
            with torch.inference_mode(False), torch.no_grad():
                fresh = self.dequantized_weight(dtype)
            # bound to the matrix, not to the module: whatever lets go of it gives its bytes back
            weakref.finalize(fresh, dense_cache.release, nbytes).atexit = False
        except BaseException:  # an interruption too: nothing is kept, so nothing may stay counted
            dense_cache.release(nbytes)
            raise
        self._dense = fresh
        return fresh

    def drop_dense(self) -> None:
        """Forget the unpacked matrix and give its memory back."""
        self._dense = None

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> W3Linear:
        self.drop_dense()
        before = {name: getattr(self, name).data for name in _STORED}  # .data: a cast happens inside the parameter
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, stored in before.items():
            moved = getattr(self, name)
            if moved.dtype != stored.dtype:  # a cast to another float dtype: only the device may follow
                exact = stored if stored.device == moved.device else stored.to(moved.device)
                setattr(self, name, _frozen(exact))
        return self

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, torch.Tensor],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        self.drop_dense()  # it stands for the parameters that are about to change
        for part in _STORED:  # torch would cast: a float map to int8, say, which is another map
            name, have = prefix + part, getattr(self, part).dtype
            if name in state_dict and state_dict[name].dtype != have:
                error_msgs.append(
                    f"expected {name} to be {have}, got {state_dict[name].dtype}; load the checkpoint anew"
                )
                return
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_dense": None}

    def extra_repr(self) -> str:
        """Shape and form, for print(model)."""
        s = self.spec
        return (
            f"in_features={s.columns}, out_features={s.rows}, bias={s.bias}, group_size={s.group_size}, "
            f"layout={s.layout}, maps={s.maps}, qmap={s.qmap_dtype}"
        )

    def check(self, name: str, *, offloaded: bool = False) -> None:
        """UnsupportedError naming the tensor when one is not of the spec's shape and dtype, or on meta unless `offloaded`."""
        shapes = {"codes": self.spec.codes_shape, "scales": self.spec.scales_shape, "qmap": self.spec.qmap_shape}
        dtypes = {"codes": torch.int32, "scales": torch.float16}
        dtypes["qmap"] = torch.int8 if self.spec.qmap_dtype == "int8" else torch.float16
        for part in _STORED:
            tensor = getattr(self, part)
            if tensor.is_meta and not offloaded:
                raise UnsupportedError(
                    f"expected {name}.{part} to be loaded, got a tensor without data; load the checkpoint anew"
                )
            if tuple(tensor.shape) != shapes[part] or tensor.dtype != dtypes[part]:
                raise UnsupportedError(
                    f"expected {name}.{part} to be {dtypes[part]} {shapes[part]}, got {tensor.dtype} {tuple(tensor.shape)}; "
                    "load the checkpoint anew"
                )
        if self.bias is not None and (tuple(self.bias.shape) != (self.spec.rows,) or not self.bias.is_floating_point()):
            raise UnsupportedError(
                f"expected {name}.bias to be floats of shape {(self.spec.rows,)}, got {self.bias.dtype} {tuple(self.bias.shape)}; "
                "load the checkpoint anew"
            )


def _frozen(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
