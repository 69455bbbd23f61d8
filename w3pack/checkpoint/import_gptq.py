"""GPTQ (AutoGPTQ, GPTQModel) and AutoRound checkpoints of 3 bits.

A Linear has `qweight` int32 [3K/32, N] (packed along K), `qzeros` int32 [G, 3N/32] (packed along N), `scales` [G, N] and
mostly `g_idx` int32 [K], the group of each column:

    W[n, k] = scales[g_idx[k], n] * (code[k, n] - zero[g_idx[k], n])

Zero points are the trouble. Three ways of storing them are in use for 3 bits:

    v2     the zero point itself ("gptq_v2", and AutoRound's own format)
    v1     the zero point less one ("gptq", and AutoRound's auto_gptq format)
    words  GPTQModel before its fix of the 3-bit conversion wrote v1 by subtracting three constants from the packed words,
           of which the first and the third had changed places

No zero point that is the same everywhere has one form as v1 and as words, so that such a checkpoint tells by itself.

A w3pack Linear has a table of its own (or one for each row), not zero points for each group. A zero point that is the same
for a whole Linear, or for each whole row, becomes part of the table; others are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch

from w3pack.checkpoint.imported import (
    ImportedLinear,
    PackedShape,
    check_bits,
    check_group_size,
    check_parts,
    check_tensor,
    parts_of,
    row_group_size,
    unpack_triples,
)
from w3pack.checkpoint.source import Source, TensorInfo
from w3pack.errors import CheckpointError, UnsupportedError
from w3pack.format.layout import CODES_PER_MAP

Zeros = Literal["v1", "v2"]

_SYMMETRIC_ZERO = 4
_FLOATS = ("F16", "BF16", "F32")
#: What GPTQModel subtracted from words 0, 1, 2 of each three; one less for each code would be the third, second, first.
_WORDS = (0x24924924, 0x92492492 - (1 << 32), 0x49249249)
_START_OVER = "run `w3pack quantize` on the unquantised model"


class GptqImporter:
    """`Importer` of GPTQ and AutoRound."""

    def __init__(self, source: Source, config: Mapping[str, Any], *, autoround: bool = False) -> None:
        """Check config, headers, group indices and zero points.

        Raises:
            UnsupportedError: other bits, group size or packing, columns in another order, zero points that differ.
            CheckpointError: tensors that are missing or do not fit each other or the config.
        """
        self.format = "AutoRound" if autoround else "GPTQ"
        check_bits(config.get("bits"), format_name=self.format)
        self._zeros = _autoround_zeros(config) if autoround else _gptq_zeros(config)
        self._group_size = check_group_size(config.get("group_size"), format_name=self.format)
        self._symmetric = config.get("sym") is True
        meta = config.get("meta")
        self._by_gptqmodel = "gptqmodel" in str(meta.get("quantizer") if isinstance(meta, dict) else "").lower()
        self._source = source
        self.shapes: dict[str, PackedShape] = {
            module: self._shape(module, parts) for module, parts in parts_of(source, "qweight").items()
        }

    def _shape(self, module: str, parts: Mapping[str, TensorInfo]) -> PackedShape:
        check_parts(
            module, parts, needed=("qweight", "qzeros", "scales"), allowed=("g_idx", "bias"), format_name=self.format
        )
        qweight = parts["qweight"]
        if len(qweight.shape) != 2 or not all(qweight.shape) or qweight.shape[0] % 3 or qweight.shape[1] % 32:
            raise CheckpointError(
                f"expected {qweight.name} of [3K/32, N] with 32 dividing K and N, got {list(qweight.shape)}; "
                "this Linear is not of 3 bits, or the file is damaged"
            )
        rows, columns = qweight.shape[1], qweight.shape[0] // 3 * 32
        groups = 1 if self._group_size == -1 else -(-columns // self._group_size)
        check_tensor(qweight, dtypes=("I32",), shape=qweight.shape)
        check_tensor(parts["qzeros"], dtypes=("I32",), shape=(groups, 3 * rows // 32))
        check_tensor(parts["scales"], dtypes=_FLOATS, shape=(groups, rows))
        if "g_idx" in parts:
            check_tensor(parts["g_idx"], dtypes=("I32", "I64"), shape=(columns,))
            self._check_order(parts["g_idx"].name, columns)
        zeros = self._zero_points(module)
        return PackedShape(
            rows=rows,
            columns=columns,
            group_size=self._result_group(columns),
            maps=zeros.shape[0],
            parts=tuple(info.name for part, info in parts.items() if part != "bias"),
        )

    def _result_group(self, columns: int) -> int:
        return row_group_size(columns) if self._group_size == -1 else self._group_size

    def _check_order(self, name: str, columns: int) -> None:
        """UnsupportedError unless each group is a run of neighbouring columns."""
        size = columns if self._group_size == -1 else self._group_size
        if not torch.equal(self._source.read(name).long(), torch.arange(columns) // size):
            raise UnsupportedError(
                f"expected {name} to put each {size} neighbouring columns in one group, got another order (act-order, "
                "desc_act), which a w3pack Linear cannot hold; quantise the model with desc_act false, or with static groups"
            )

    def _zero_points(self, module: str) -> torch.Tensor:
        """int64 [1] or [rows]: the zero point of the Linear, or of each row."""
        name = f"{module}.qzeros"
        zeros = self._decode(self._source.read(name), name=name)  # [groups, rows]
        if bool((zeros != zeros[:1]).any()):
            raise UnsupportedError(
                f"expected zero points of {name} that are the same in all groups of a row, got others (asymmetric "
                "quantisation), while a w3pack Linear has a table for each row at most; quantise the model with sym true, or "
                f"{_START_OVER}"
            )
        if bool((zeros > 7).any()):
            raise UnsupportedError(
                f"expected zero points from 1 to 7 in {name}, which stores them less one, got 0 or 8, which are stored "
                f"alike; write the checkpoint in the gptq_v2 format, or {_START_OVER}"
            )
        row = zeros[0]
        uniform = bool((row == row[0]).all())
        if self._symmetric and not (uniform and int(row[0]) == _SYMMETRIC_ZERO):
            raise CheckpointError(
                f"expected zero points of {_SYMMETRIC_ZERO} in {name} since the config says sym true, got {int(row[0])} "
                f"stored as {self._zeros}; config.json and the weights do not belong together"
            )
        return row[:1] if uniform else row

    def _decode(self, qzeros: torch.Tensor, *, name: str) -> torch.Tensor:
        """int32 [groups, 3 * rows / 32] -> int64 [groups, rows]; up to 8 for a stored 7 of v1."""
        stored = _unpack_zeros(qzeros)
        if self._zeros == "v2":
            return stored
        if bool((stored == stored[0, 0]).all()):
            return stored + 1
        words = _unpack_zeros(qzeros + torch.tensor(_WORDS, dtype=torch.int32).repeat(qzeros.shape[1] // 3))
        if bool((words == words[0, 0]).all()):
            return words
        if self._by_gptqmodel:
            raise UnsupportedError(
                f"expected one zero point in {name}, got several, which releases of GPTQModel store in two ways under one name; "
                f"write the checkpoint in the gptq_v2 format, or {_START_OVER}"
            )
        return stored + 1

    def read(self, module: str) -> ImportedLinear:
        """One Linear; its table is code less zero point."""
        codes = unpack_triples(self._source.read(f"{module}.qweight")).T.contiguous()
        table = (torch.arange(CODES_PER_MAP) - self._zero_points(module)[:, None]).float()
        scales = self._source.read(f"{module}.scales").float().T.contiguous()
        group_size = self._result_group(codes.shape[1])
        if self._group_size == -1:
            scales = scales.expand(-1, -(-codes.shape[1] // group_size)).contiguous()
        return ImportedLinear(codes=codes, table=table, scales=scales, group_size=group_size)


def _unpack_zeros(qzeros: torch.Tensor) -> torch.Tensor:
    return unpack_triples(qzeros.T.contiguous()).T.long()


def _gptq_zeros(config: Mapping[str, Any]) -> Zeros:
    packing = config.get("checkpoint_format") or config.get("format") or "gptq"
    word = config.get("pack_dtype") or "int32"
    if packing not in ("gptq", "gptq_v2") or word != "int32":
        what = f"pack_dtype {str(word)[:40]!r}" if word != "int32" else f"{str(packing)[:40]!r}"
        raise UnsupportedError(
            f"expected a GPTQ checkpoint of format 'gptq' or 'gptq_v2' in int32 words, got {what}; save the model in one of these "
            "formats"
        )
    return "v2" if packing == "gptq_v2" else "v1"


def _autoround_zeros(config: Mapping[str, Any]) -> Zeros:
    packing = str(config.get("packing_format") or config.get("backend") or "auto_round")
    kinds = ("auto_gptq", "gptq", "gptqmodel", "auto_round", "tritonv2", "triton", "exllamav2")
    known = all(part in kinds for part in packing.replace("autoround", "auto_round").split(":"))
    activations, data_type = config.get("act_bits"), config.get("data_type", "int")
    if not known or activations not in (None, 16, 32) or data_type != "int":
        raise UnsupportedError(
            "expected an AutoRound checkpoint of integer weights in its auto_round or auto_gptq format, with activations of 16 "
            f"bits, got packing_format {packing[:40]!r}, data_type {str(data_type)[:40]!r}, act_bits {str(activations)[:40]}; "
            "export the model with format auto_round"
        )
    return "v1" if "gptq" in packing and "gptqmodel" not in packing else "v2"
