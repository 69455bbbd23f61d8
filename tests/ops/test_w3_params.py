"""The packed structs are those that the device code declares."""

from __future__ import annotations

import re
import struct

import pytest

from w3pack.jit import kernels_folder
from w3pack.ops import w3_params
from w3pack.ops.w3_params import Packing

LETTERS = {"int": "i", "u32": "I", "i64": "q"}
PACKINGS = [w3_params.DECODE, w3_params.STAGE, w3_params.DEQUANTIZE]


def declared(file: str) -> dict[str, str]:
    """Fields of `struct alignas(16) Params` in a file of the kernels folder."""
    text = (kernels_folder() / file).read_text()
    found = re.search(r"struct alignas\(16\) Params \{(.*?)\n\};", text, re.S)
    assert found
    body = re.sub(r"//.*", "", found[1])
    fields: dict[str, str] = {}
    for line in filter(None, (part.strip() for part in body.split(";"))):
        if "*" in line:
            fields[line.rpartition("*")[2].strip()] = "Q"
        else:
            kind, _, names = line.partition(" ")
            fields |= {name.strip(): LETTERS[kind] for name in names.split(",")}
    return fields


@pytest.mark.parametrize("packing", PACKINGS, ids=lambda packing: packing.file)
def test_fields_are_those_of_the_struct(packing: Packing) -> None:
    assert list(packing.fields.items()) == list(declared(packing.file).items())


@pytest.mark.parametrize("packing", PACKINGS, ids=lambda packing: packing.file)
def test_size_is_that_of_the_struct(packing: Packing) -> None:
    native = struct.calcsize("".join(packing.fields.values()))  # with C's own alignment
    assert packing.size == -(-native // 16) * 16


def test_values_land_in_their_places() -> None:
    packing = Packing("x.cu", {"first": "Q", "second": "i", "third": "I"})
    data = packing.pack({"third": (1 << 32) - 1, "second": -2, "first": 1 << 63, "other": 9})
    assert data == struct.pack("<QiI", 1 << 63, -2, (1 << 32) - 1)
    with pytest.raises(KeyError):
        packing.pack({"first": 1, "second": 2})
