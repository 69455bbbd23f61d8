"""What an import does to every tensor: packed Linears become w3pack's, all others are copied."""

from __future__ import annotations

import math

from w3pack.checkpoint.import_source import ImportSource
from w3pack.checkpoint.imported import PackedShape
from w3pack.checkpoint.source import TensorInfo
from w3pack.checkpoint.tensor_file import DTYPES
from w3pack.errors import UnsupportedError
from w3pack.format import names
from w3pack.format.layout import Layout
from w3pack.format.linear import LinearSpec
from w3pack.pipeline.plan import Loadable, Plan, PlannedTensor
from w3pack.pipeline.selection import is_matrix


def make_import_plan(
    source: ImportSource, *, layout: Layout, max_shard_bytes: int, loadable: Loadable | None = None
) -> Plan:
    """Decide for every tensor of `source`.

    Args:
        source: the checkpoint, its packed Linears as float matrices.
        layout: of the codes.
        max_shard_bytes: largest output file.
        loadable: what the model class says of the packed modules; None trusts their names.

    Raises:
        UnsupportedError: a packed module that is no Linear of the model class, or a shape or name w3pack cannot hold.
        CheckpointError: from `loadable`: config and tensors do not belong together.
    """
    shapes = source.importer.shapes
    for module, why in (loadable(list(shapes)) if loadable is not None else {}).items():
        raise UnsupportedError(
            f"expected every packed module to be a Linear of the model, got {module}: {why}; "
            "w3pack cannot hold this model, start from the unquantised one"
        )
    tensors = tuple(_planned(source, info, layout=layout) for info in source.tensors.values())
    guard = _guard([tensor.module for tensor in tensors if tensor.spec is not None])
    return Plan(
        tensors=tensors,
        shards=_shards(tensors, first=guard.nbytes, limit=max_shard_bytes),
        guard=guard,
        block=None,
        coverage=_coverage(tensors),
        notes=source.notes,
    )


def _planned(source: ImportSource, info: TensorInfo, *, layout: Layout) -> PlannedTensor:
    module, _, part = info.name.rpartition(".")
    shape = source.importer.shapes.get(module)
    if shape is not None and part == "weight":
        spec = _spec(module, shape, layout=layout, bias=names.tensor(module, names.BIAS) in source.tensors)
        outputs = (
            _info(names.tensor(module, names.CODES), "I32", spec.codes_shape),
            _info(names.tensor(module, names.SCALES), "F16", spec.scales_shape),
            _info(names.tensor(module, names.QMAP), "F16", spec.qmap_shape),
        )
        reason = f"imported from {source.importer.format}"
        return PlannedTensor(source=info, action="quantize", reason=reason, outputs=outputs, spec=spec)
    if part in (names.CODES, names.QMAP):
        raise UnsupportedError(
            f"expected no tensor whose name ends as those of packed Linears do, got {info.name}; "
            "w3pack cannot hold this model"
        )
    return PlannedTensor(
        source=info,
        action="copy",
        reason="not packed in the source",
        outputs=(_info(info.name, info.dtype, info.shape),),
    )


def _spec(module: str, shape: PackedShape, *, layout: Layout, bias: bool) -> LinearSpec:
    padded_rows = LinearSpec(
        rows=shape.rows, columns=shape.columns, group_size=shape.group_size, layout=layout, maps=1,
        qmap_dtype="float16", bias=bias,
    ).padded_rows  # fmt: skip
    return LinearSpec(
        rows=shape.rows,
        columns=shape.columns,
        group_size=shape.group_size,
        layout=layout,
        maps=1 if shape.maps == 1 else padded_rows,
        qmap_dtype="float16",
        bias=bias,
    )


def _info(name: str, dtype: str, shape: tuple[int, ...]) -> TensorInfo:
    return TensorInfo(name=name, dtype=dtype, shape=shape, nbytes=DTYPES[dtype].itemsize * math.prod(shape), file="")


def _guard(modules: list[str]) -> TensorInfo:
    """Under a plain Linear's stock name where there is one: every loader checks the shape of those."""
    plain = next((module for module in modules if ".experts." not in module), modules[0])
    return _info(names.guard_tensor(plain), "U8", (len(names.GUARD_TEXT),))


def _shards(tensors: tuple[PlannedTensor, ...], *, first: int, limit: int) -> dict[str, tuple[PlannedTensor, ...]]:
    """Cut the tensors, in order, into files of at most `limit` bytes; `first` bytes of the first file are taken."""
    groups: list[list[PlannedTensor]] = [[]]
    filled = first
    for tensor in tensors:
        size = sum(info.nbytes for info in tensor.outputs)
        if groups[-1] and filled + size > limit:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += size
    return {names.shard_file(n + 1, len(groups)): tuple(group) for n, group in enumerate(groups)}


def _coverage(tensors: tuple[PlannedTensor, ...]) -> float:
    matrices = [tensor for tensor in tensors if is_matrix(tensor.source)]
    total = sum(math.prod(tensor.source.shape) for tensor in matrices)
    packed = sum(math.prod(tensor.source.shape) for tensor in matrices if tensor.spec is not None)
    return packed / total if total else 1.0
