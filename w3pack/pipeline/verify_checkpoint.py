"""Is a packed checkpoint what it says it is, and what it was made from?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from w3pack.checkpoint.source import Source
from w3pack.checkpoint.tensor_file import digest
from w3pack.errors import CheckpointError, UsageError, VerificationError
from w3pack.format import names
from w3pack.format.linear import LinearSpec
from w3pack.pack.words import unpack_codes, unpack_padded
from w3pack.pipeline.packed import PackedCheckpoint, open_packed
from w3pack.pipeline.plan import QuantizeOptions, make_plan
from w3pack.pipeline.quantize_model import check_finite, measure_error, read_float

#: How far the error of a layer, measured again, may be from the manifest's figure: rounding of the sums only.
_ERROR_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Verification:
    """What was checked. `errors` holds each layer's relative error against the source, when a source was given."""

    tensors: int
    digests: int
    modules: int
    errors: dict[str, float]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return asdict(self)


def verify_checkpoint(
    folder: Path, *, against: Source | None = None, progress: Callable[[str], None] | None = None
) -> Verification:
    """Check structure, digests, values and, with `against`, every layer's error.

    Raises:
        CheckpointError: structure does not hold (missing or truncated tensors, wrong shapes).
        VerificationError: a digest, a value or an error figure is not what it should be; names the tensor.
    """
    packed = open_packed(folder)
    digests = check_digests(packed.source, packed.manifest, progress)
    for module, spec in packed.config.modules.items():
        _check_values(packed, module, spec)
    errors = {} if against is None else _check_errors(packed, against, progress)
    notes = () if packed.manifest else (f"no {names.MANIFEST}: digests could not be checked",)
    return Verification(
        tensors=len(packed.source.tensors),
        digests=digests,
        modules=len(packed.config.modules),
        errors=errors,
        notes=notes,
    )


def check_digests(source: Source, manifest: Mapping[str, Any], progress: Callable[[str], None] | None) -> int:
    """Compare every tensor with the manifest, if there is one, and check its values; returns the digests compared.

    Raises:
        VerificationError: naming a tensor that is not listed, not there, changed, or not finite.
    """
    recorded = manifest.get("tensors", {})
    found = source.tensors
    missing = [name for name in recorded if name not in found]
    strange = [name for name in found if manifest and name not in recorded]
    if missing or strange:
        raise VerificationError(
            f"expected the tensors that the manifest lists, got {len(missing)} missing and {len(strange)} more, "
            f"such as {(missing + strange)[0]}; copy the checkpoint again"
        )
    for name in found:
        data = source.read(name)
        if recorded and (recorded[name].get("dtype"), recorded[name].get("shape")) != _form(data):
            raise VerificationError(
                f"expected {name} of {recorded[name].get('dtype')} {recorded[name].get('shape')} as the manifest says, "
                f"got {' '.join(map(str, _form(data)))}; copy the checkpoint again"
            )
        if recorded and digest(data) != recorded[name].get("sha256"):
            raise VerificationError(
                f"expected {name} to have the digest in the manifest, got other bytes; copy the checkpoint again"
            )
        try:
            check_finite(data, name)
        except CheckpointError as error:
            raise VerificationError(str(error)) from error
        if progress is not None:
            progress(name)
    return len(recorded)


def _form(data: torch.Tensor) -> tuple[str, list[int]]:
    return str(data.dtype).removeprefix("torch."), list(data.shape)


def _check_values(packed: PackedCheckpoint, module: str, spec: LinearSpec) -> None:
    qmap = packed.read(module, names.QMAP).to(torch.float32)
    if bool((qmap[:, 1:] < qmap[:, :-1]).any()):
        raise VerificationError(
            f"expected an ascending map in {module}.qmap, got {qmap[0].tolist()}; quantize the model again"
        )
    if spec.qmap_dtype == "int8" and bool((qmap < -127).any()):
        raise VerificationError(
            f"expected map entries of at least -127 in {module}.qmap, got -128; quantize the model again"
        )
    words = packed.read(module, names.CODES)
    unpack_codes(words, spec)
    full = unpack_padded(words, spec)
    if bool(full[spec.rows :].any()) or bool(full[:, spec.columns :].any()):
        raise VerificationError(
            f"expected the padding of {module}.codes to be 0, got other codes; quantize the model again"
        )
    scales = packed.read(module, names.SCALES).permute(0, 3, 2, 1).reshape(spec.padded_rows, spec.groups)
    if bool(scales[spec.rows :].any()):
        raise VerificationError(
            f"expected scales of padded rows to be 0 in {module}.scales, got others; quantize the model again"
        )


def _check_errors(packed: PackedCheckpoint, source: Source, progress: Callable[[str], None] | None) -> dict[str, float]:
    modules = packed.config.modules
    only = tuple(modules)
    first = next(iter(modules.values()))
    options = QuantizeOptions(
        group_size=first.group_size, layout=first.layout, qmap_dtype=first.qmap_dtype, qmap_per="tensor", only=only,
        min_coverage=0.0, lm_head=any(name.endswith("lm_head") for name in modules),
    )  # fmt: skip
    try:
        plan = make_plan(source, options)
    except UsageError as error:  # the names given to it are ours, not the user's
        strange = [
            name
            for name, spec in modules.items()
            if (info := source.tensors.get(names.tensor(name, "weight"))) is None
            or info.shape != (spec.rows, spec.columns)
        ]
        raise VerificationError(
            f"expected {(strange or list(modules))[0]} to be a Linear of {source.location} as it was of the model "
            "that was quantised, got none of that name and shape; this is another model"
        ) from error
    errors: dict[str, float] = {}
    for tensor in plan.quantized:
        spec = modules[tensor.module]
        if tensor.source.shape != (spec.rows, spec.columns):
            raise VerificationError(
                f"expected {tensor.module} of {spec.rows} x {spec.columns} in the source, got {list(tensor.source.shape)}; "
                "this is not the model that was quantised"
            )
        stored = {part: packed.read(tensor.module, part) for part in names.PACKED}
        errors[tensor.module] = measure_error(read_float(source, tensor, block=plan.block), stored, spec=spec).relative
        recorded = packed.relative_error(tensor.module)
        if recorded is not None and abs(errors[tensor.module] - recorded) > _ERROR_TOLERANCE * max(recorded, 1e-3):
            raise VerificationError(
                f"expected a relative error of {recorded:.6f} in {tensor.module} as recorded, got {errors[tensor.module]:.6f}; "
                "this is not the model that was quantised, or the packed weights were changed"
            )
        if progress is not None:
            progress(tensor.module)
    unchecked = [name for name in modules if name not in errors]
    if unchecked:
        raise VerificationError(
            f"expected {unchecked[0]} to be a Linear in the source {source.location}, got something else; "
            "this is not the model that was quantised"
        )
    return errors
