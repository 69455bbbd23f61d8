"""Which kernel a call of FP8 weights gets, what is built for every architecture, and the bytes of the parameter structs."""

from __future__ import annotations

import itertools
import re
import struct
from dataclasses import replace

import pytest

from w3pack.errors import UnsupportedError
from w3pack.jit import ARCHS, kernels_folder
from w3pack.ops import gateup_params
from w3pack.ops.configs import CONVERTS_E4M3, DEVICES, all_kernel_texts
from w3pack.ops.gateup_config import MAX_TOKENS, GateUpConfig, GateUpDesc, candidates, make_plan, plan_of, why_not
from w3pack.ops.w3_config import XDtype

H200 = DEVICES["sm_90a"]
SHAPES = (
    (768, 2048),
    (6144, 2048),
    (12288, 4096),
    (14336, 4096),
    (18944, 3584),
    (2048, 7168),
    (28672, 8192),
    (17408, 5120),
)


def desc(
    tokens: int = 8, shape: tuple[int, int] = (17408, 5120), *, paired: bool = True, x_dtype: XDtype = "float16"
) -> GateUpDesc:
    return GateUpDesc(tokens, *shape, paired, x_dtype, H200)


@pytest.mark.parametrize("arch", sorted(CONVERTS_E4M3 - {"sm_89"}))
@pytest.mark.parametrize("shape", [*SHAPES, (1, 16), (130, 1040), (10944, 2048), (5120, 17408)])
def test_every_call_finds_a_kernel_that_fits_and_is_built(arch: str, shape: tuple[int, int]) -> None:
    built = set(all_kernel_texts(arch))
    for tokens, paired, x_dtype in itertools.product((1, 8, 9, 16, 17, 32), (True, False), ("float16", "bfloat16")):
        plan = plan_of(
            GateUpDesc(tokens, *shape, paired, "bfloat16" if x_dtype == "bfloat16" else "float16", DEVICES[arch])
        )
        assert plan.shared_bytes <= DEVICES[arch].shared_bytes
        assert plan.config.token_tiles * 8 >= tokens
        assert plan.text in built


@pytest.mark.parametrize("arch", ARCHS)
def test_few_kernels_are_built(arch: str) -> None:
    files = [text.file for text in all_kernel_texts(arch) if text.file.startswith("gateup")]
    assert len(files) <= 100
    assert ("gateup_between.cu" in files) == (arch in CONVERTS_E4M3)
    assert ("gateup_decode.cu" in files) == DEVICES[arch].bulk


@pytest.mark.parametrize("shape", [*SHAPES, (1, 16), (300, 3600), (5120, 17408)])
@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize("tokens", [1, 16, 32])
def test_runs_of_thread_blocks_cover_every_unit_once(shape: tuple[int, int], paired: bool, tokens: int) -> None:
    rows, columns = shape
    for config in candidates(desc(tokens, shape, paired=paired)):
        plan = make_plan(desc(tokens, shape, paired=paired), config)
        units = plan.row_blocks * plan.pieces
        assert plan.run_units >= 1
        assert plan.grid * plan.run_units + plan.longer_runs == units
        assert 0 <= plan.longer_runs < plan.grid
        assert plan.row_blocks * config.half_rows * (1 if paired else 2) >= rows
        assert plan.pieces * config.piece >= columns > (plan.pieces - 1) * config.piece
        reciprocal = ((1 << 32) - 1) // plan.pieces
        for unit in {0, plan.pieces - 1, plan.pieces, units // 2, units - 1} & set(range(units)):
            assert (unit + 1) * reciprocal >> 32 == unit // plan.pieces
        # what the device code asserts about a warp's share
        tiles = config.half_rows // 8 // config.row_warps
        assert config.half_rows % (8 * config.row_warps) == 0
        assert 128 % (8 * tiles) == 0
        assert config.piece // 128 % config.split_warps == 0


def test_large_pairs_get_what_was_fastest() -> None:
    forms = {
        (tokens, paired): plan_of(desc(tokens, (17408, 5120) if paired else (5120, 17408), paired=paired)).config
        for tokens in (1, 8, 16)
        for paired in (True, False)
    }
    few = GateUpConfig(1, half_rows=64, piece=256, slots=4, row_warps=4, split_warps=2, blocks=132)
    assert {forms[1, False], forms[8, False]} == {few}
    assert {forms[1, True], forms[8, True]} == {replace(few, piece=512, slots=3)}
    assert forms[16, False] == replace(few, token_tiles=2)
    assert forms[16, True] == replace(forms[16, False], half_rows=128, slots=3, row_warps=8, split_warps=1)


def test_small_matrices_keep_more_multiprocessors_busy() -> None:
    small, large = (plan_of(desc(8, shape)) for shape in ((768, 2048), (17408, 5120)))
    assert small.config.half_rows < large.config.half_rows
    assert small.grid == 132
    down = plan_of(desc(8, (2048, 6144), paired=False))
    assert (down.config.half_rows, down.config.piece, down.grid) == (32, 512, 132)
    assert plan_of(desc(16, (6144, 2048))).config.half_rows == 64


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"columns": 5121}, "16 does not divide 5121 columns"),
        ({"tokens": 0}, "0 tokens are not 1 to 32"),
        ({"tokens": MAX_TOKENS + 1}, "33 tokens are not 1 to 32"),
        ({"rows": 1 << 30, "columns": 1 << 20}, "too large to count through"),
        ({"device": DEVICES["sm_80"]}, "sm_80 has no bulk copies"),
    ],
)
def test_what_the_kernel_does_not_take(change: dict[str, int], why: str) -> None:
    call = replace(desc(), **change)  # type: ignore[arg-type]
    assert why in (why_not(call) or "")
    with pytest.raises(
        UnsupportedError, match=r"expected a call that the FP8 kernel takes, got one where .*; dequantise it"
    ):
        plan_of(call)


@pytest.mark.parametrize("tokens", [1, 8, 9, 16, 32])
@pytest.mark.parametrize("shape", [(17408, 5120), (6144, 2048)])
def test_warps_that_convert_share_the_work_equally(tokens: int, shape: tuple[int, int]) -> None:
    """None for float16; for bfloat16 no more than there are tiles of 8 tokens and 128 columns in a slot."""
    for config in candidates(desc(tokens, shape)):
        plain = make_plan(desc(tokens, shape), config)
        assert dict(plain.text.defines)["GU_CONVERTERS"] == 0
        assert plain.block == 32 * (config.warps + 2)
        for most in (1, 2, 4):
            plan = make_plan(desc(tokens, shape, x_dtype="bfloat16"), replace(config, converters=most))
            count, work = dict(plan.text.defines)["GU_CONVERTERS"], config.token_tiles * config.piece // 128
            assert count == min(most, work)
            assert work % count == 0
            assert plan.block == plain.block + 32 * count


def test_a_config_that_does_not_fit_is_refused() -> None:
    config = plan_of(desc()).config
    with pytest.raises(UnsupportedError, match=r"takes 8 tokens, not 9"):
        make_plan(desc(9), config)
    with pytest.raises(UnsupportedError, match=r"bytes of shared memory, got .*; choose fewer slots"):
        make_plan(desc(), replace(config, slots=9))


LETTERS = {"int": "i", "u32": "I", "i64": "q"}


def declared(file: str) -> dict[str, str]:
    """Fields of `struct alignas(...) Params`, as letters of module struct."""
    found = re.search(r"struct alignas\(\d+\) Params \{(.*?)\n\};", (kernels_folder() / file).read_text(), re.S)
    assert found
    fields: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in re.sub(r"//.*", "", found[1]).split(";"))):
        if "*" in part:
            fields[part.rpartition("*")[2].strip()] = "Q"
            continue
        kind, _, names = part.partition(" ")
        for name in names.split(","):
            array = re.fullmatch(r"(\w+)\[(\d+)\]", name.strip())
            letter = "128s" if kind == "TensorMap" else LETTERS[kind]
            if array:
                fields[array[1]] = f"{4 * int(array[2])}s"
            else:
                fields[name.strip()] = letter
    return fields


def test_decode_parameters_are_those_of_the_struct() -> None:
    fields = declared("gateup_params.cuh")
    assert list(gateup_params.DECODE_FIELDS.items()) == list(fields.items())
    assert struct.calcsize("".join(fields.values())) == gateup_params.DECODE_BYTES
    assert gateup_params.DECODE_BYTES % 64 == 0


def test_between_parameters_are_those_of_the_struct() -> None:
    fields = declared("gateup_between.cu")
    names = list(fields)
    data = gateup_params.pack_between(**{name: number + 1 for number, name in enumerate(names)})
    assert struct.unpack("<" + "".join(fields.values()), data) == tuple(range(1, len(names) + 1))
    assert len(data) % 16 == 0
