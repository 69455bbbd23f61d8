"""`W3Linear`: a Linear whose weight is codes, scales and a map."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from w3pack.errors import UnsupportedError
from w3pack.format.linear import LinearSpec
from w3pack.ops.w3_linear import check_input, w3_linear
from w3pack.reference import w3
from w3pack.runtime import dense_cache

if TYPE_CHECKING:
    from w3pack.runtime.merged import MergedLinears

#: Parameters that stand for the matrix.
STORED = ("codes", "scales", "qmap")


class W3Linear(nn.Module):
    """y = x W^T + bias, with W of `spec.rows` x `spec.columns` held in 3 bits.

    Parameters, all frozen: `codes` int32, `scales` float16, `qmap` int8 or float16, `bias` (or None). Their dtypes never
    change, whatever dtype the module is moved to; only `bias` follows.

    On a CPU the unpacked matrix may be kept between calls (`dense_cache`): a matmul on it is as fast as a stock Linear.

    A member of `MergedLinears` owns none of them: its attributes and its state dict are views of the merged tensors, and only
    its parent moves or casts it.
    """

    #: The merged tensors that this Linear is a part of, and its number there. A tuple, so that they are no child of it.
    _place: tuple[MergedLinears, int] | None = None

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
        if name in STORED or name == "bias":  # asked here only when it is no parameter of this module
            place = self.__dict__.get("_place")
            if place is not None:
                return place[0].part_of(place[1], name)
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
        """x floating [..., columns] -> [..., rows] in x's dtype, or under autocast, as a stock Linear, in autocast's.

        A member of merged Linears may return a view of rows of a larger product.
        """
        if self._place is not None:
            shared = self._place[0].rows_of_product(self._place[1], x)
            if shared is not None:
                return shared
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

    @property
    def is_member(self) -> bool:
        """Whether the parameters are views of merged ones."""
        return self._place is not None

    def join(self, merged: MergedLinears, number: int) -> None:
        """Become a member: the parameters, already removed, are looked for in `merged` from now on."""
        self.drop_dense()
        self._place = (merged, number)

    def leave(self) -> None:
        """Own copies of the tensors again, where this is a member."""
        if self._place is None:
            return
        self.drop_dense()
        copies = {
            part: _frozen(getattr(self, part).detach().clone(memory_format=torch.contiguous_format))
            for part in self._parts()
        }
        self._place = None
        for part, tensor in copies.items():
            setattr(self, part, tensor)

    def _parts(self) -> tuple[str, ...]:
        return (*STORED, "bias") if self.spec.bias else STORED

    def to(self, *args: Any, **kwargs: Any) -> W3Linear:
        """As every module's; UnsupportedError for a member of merged Linears."""
        self._refuse_to_move()
        return super().to(*args, **kwargs)

    def cuda(self, device: int | torch.device | None = None) -> W3Linear:
        """As every module's; UnsupportedError for a member of merged Linears."""
        self._refuse_to_move()
        return super().cuda(device)

    def cpu(self) -> W3Linear:
        """As every module's; UnsupportedError for a member of merged Linears."""
        self._refuse_to_move()
        return super().cpu()

    def _refuse_to_move(self) -> None:
        if self._place is not None:
            raise UnsupportedError(
                f"expected the whole model or layer to be moved, got a Linear that shares its tensors ({self._place[0].names}); "
                "move the module that holds them, or call unmerge first"
            )

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> W3Linear:
        self.drop_dense()
        if self._place is not None:  # the parent moves the merged tensors
            return self
        before = {name: getattr(self, name).data for name in STORED}  # .data: a cast happens inside the parameter
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
        if self._place is not None:
            self._load_views(state_dict, prefix, strict, missing_keys, error_msgs)
            return
        for part in STORED:  # torch would cast: a float map to int8, say, which is another map
            name, have = prefix + part, getattr(self, part).dtype
            if name in state_dict and state_dict[name].dtype != have:
                error_msgs.append(
                    f"expected {name} to be {have}, got {state_dict[name].dtype}; load the checkpoint anew"
                )
                return
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def _load_views(
        self, state_dict: Mapping[str, torch.Tensor], prefix: str, strict: bool, missing: list[str], errors: list[str]
    ) -> None:
        """Write a member's tensors into the merged ones."""
        assert self._place is not None
        for part in self._parts():
            name, have = prefix + part, getattr(self, part)
            given = state_dict.get(name)
            if given is None:
                missing.extend([name] * strict)
            elif given.shape != have.shape or (part in STORED and given.dtype != have.dtype):
                errors.append(
                    f"expected {name} to be {have.dtype} {tuple(have.shape)}, got {given.dtype} {tuple(given.shape)}; "
                    "load the checkpoint anew"
                )
            else:
                self._place[0].put(self._place[1], part, given)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._place is not None:
            destination.update({prefix + part: getattr(self, part) for part in self._parts()})

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
        for part in STORED:
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
