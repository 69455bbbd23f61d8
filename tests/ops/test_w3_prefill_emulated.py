"""The prefill kernel's own text, run on the host: which numbers it gives, what it writes, and that it comes to an end.

g++ compiles it with the headers of `emulation/` in place of kernels/ptx.cuh and kernels/wgmma.cuh; their heads say what is modelled and
what is not. Functions of the kernel's files that hold assembly are cut out, and defined there. It replaces no test on a GPU.
"""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from w3pack.format.layout import Layout
from w3pack.format.linear import LinearSpec, QmapDtype
from w3pack.jit import KernelText, kernels_folder
from w3pack.ops import w3_prefill_launch
from w3pack.ops.configs import DEVICES
from w3pack.ops.w3_config import W3Desc, XDtype
from w3pack.ops.w3_prefill import PrefillConfig, PrefillPlan, make_plan
from w3pack.pack.words import pack_codes, pack_scales
from w3pack.reference import w3

COMPILER = shutil.which("g++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++: the prefill kernel cannot be emulated")

EMULATION = Path(__file__).parent / "emulation"
#: Names of functions with assembly, which emulation/ptx.cuh defines, by file.
IN_ASSEMBLY = {
    "w3_prefill_decode.cuh": ["kept", "load_shared_word"],
    "w3_prefill_feed.cuh": ["copy_box_to_all"],
    "w3_prefill_finish.cuh": ["store_transposed"],
}
#: First and last line of the instructions in wgmma_wide.cuh.
INSTRUCTIONS = ("#define W3_NAMES_0 ", "#undef W3_WGMMA_WIDE\n")
_FUNCTION = re.compile(r"^W3_DEVICE \w+ (\w+)\([^{;]*\) \{\n(?:(?:  .*|#.*)?\n)*?\}\n", re.M)
#: NaN in float16 and bfloat16, a code 7 with its spare bit set: what lies between the tensors, and in y before.
FILLER = 0xFF


@dataclass(frozen=True)
class Case:
    """A call and its config. `maps` is 1, "tile" or "row"; `places` are clusters that run side by side, so the rest wait."""

    rows: int
    columns: int
    tokens: int
    config: PrefillConfig
    group_size: int = 64
    layout: Layout = "dense"
    maps: int | str = 1
    qmap_dtype: QmapDtype = "int8"
    x_dtype: XDtype = "float16"
    places: int = 1
    bias: bool = True
    seed: int = 0

    @property
    def spec(self) -> LinearSpec:
        row_tiles = -(-self.rows // 64)
        maps = {"tile": row_tiles, "row": 64 * row_tiles}.get(str(self.maps), self.maps)
        form = {"group_size": self.group_size, "layout": self.layout, "qmap_dtype": self.qmap_dtype, "maps": maps}
        return LinearSpec(rows=self.rows, columns=self.columns, bias=False, **form)  # type: ignore[arg-type]

    @property
    def plan(self) -> PrefillPlan:
        device = replace(DEVICES["sm_90a"], multiprocessors=self.places * self.config.cluster)
        return make_plan(W3Desc.of(self.spec, tokens=self.tokens, x_dtype=self.x_dtype, device=device), self.config)

    @property
    def dtype(self) -> torch.dtype:
        return {"float16": torch.float16, "bfloat16": torch.bfloat16}[self.x_dtype]


def host_text(name: str, text: str) -> str:
    """A kernel file without what a host compiler does not take; fails where that is not what it was."""
    if name == "wgmma_wide.cuh":
        first, last = INSTRUCTIONS
        assert text.count(first) == text.count(last) == 1, f"{name} has other first and last lines of its instructions"
        text = text[: text.index(first)] + text[text.index(last) + len(last) :]
    found = [match for match in _FUNCTION.finditer(text) if "asm" in match[0]]
    names = [match[1] for match in found]
    assert names == IN_ASSEMBLY.get(name, []), f"{name} has other functions in assembly: {names}"
    for match in reversed(found):
        text = text[: match.start()] + text[match.end() :]
    assert not re.search(r"\basm\b", text), f"{name} has assembly outside of functions that can be cut out"
    return text


def write_texts(file: str, folder: Path, faults: dict[str, tuple[str, str]]) -> None:
    """A kernel's files as a host compiler takes them, except those that the emulation replaces."""
    names, written = [file], set()
    while names:
        name = names.pop()
        if name in written or (EMULATION / name).exists():
            continue
        written.add(name)
        text = (kernels_folder() / name).read_text(encoding="utf-8")
        if name in faults:
            old, new = faults[name]
            assert text.count(old) == 1, f"{name} has no longer one place for the fault: {old}"
            text = text.replace(old, new)
        (folder / name).write_text(host_text(name, text), encoding="utf-8")
        names += re.findall(r'^#include "(.+)"$', text, re.M)
    assert {*IN_ASSEMBLY, *faults, "wgmma_wide.cuh"} <= written


def build(text: KernelText, folder: Path, faults: dict[str, tuple[str, str]]) -> Path:
    """The emulated kernel as a program."""
    folder.mkdir()
    write_texts(text.file, folder, faults)
    defines = [f"-D{name}={value}" for name, value in text.defines]
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-Wno-unknown-pragmas", f"-I{folder}", f"-I{EMULATION}"]
    command = [COMPILER or "g++", *flags, *defines, "-o", str(folder / "emulated"), str(EMULATION / "main.cpp")]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr[-4000:]
    return folder / "emulated"


class Arena:
    """One block of memory for all tensors of a call, filler between them, so that it can move to another process as a file."""

    def __init__(self, nbytes: int) -> None:
        room = torch.full((nbytes + 4096,), FILLER, dtype=torch.uint8)
        self.memory = room[-room.data_ptr() % 4096 :]
        self._used = 256

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor full of filler."""
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        first = self._used
        self._used = -(-(first + nbytes + 256) // 256) * 256
        assert self._used <= self.memory.numel()
        return self.memory[first : first + nbytes].view(dtype).view(shape)

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor."""
        return self.empty(tuple(tensor.shape), tensor.dtype).copy_(tensor)


@dataclass
class Call:
    """A case with its tensors in an arena."""

    case: Case
    arena: Arena
    x: torch.Tensor
    weights: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    bias: torch.Tensor | None
    y: torch.Tensor

    @classmethod
    def of(cls, case: Case, x: torch.Tensor | None = None) -> Call:
        """Random weights, all codes among them, each map and each scale different from the others."""
        generator = torch.Generator().manual_seed(case.rows + case.columns)
        spec = case.spec
        codes = torch.randint(0, 8, (case.rows, case.columns), generator=generator, dtype=torch.uint8)
        codes.view(-1)[:8] = torch.arange(8, dtype=torch.uint8)
        scales = torch.rand(case.rows, spec.groups, generator=generator) + 0.5
        scales = (scales * (torch.randint(0, 2, scales.shape, generator=generator) * 2 - 1)).half()
        steps = torch.rand(spec.maps, 255, generator=generator).argsort(1)[:, :8].sort(1).values - 127
        qmap = steps.to(torch.int8) if case.qmap_dtype == "int8" else (steps / 127).half()
        if x is None:
            x = torch.randn(case.tokens, case.columns, generator=generator)
        bias = torch.randn(case.rows, generator=generator) if case.bias else None
        stride = -(-case.columns // 8) * 8 + 8  # filler behind each row of x
        arena = Arena(8 * (case.tokens * (stride + case.rows) + spec.nbytes) + 8192)
        padded = arena.empty((case.tokens, stride), case.dtype)
        return cls(
            case,
            arena,
            padded[:, : case.columns].copy_(x),
            (arena.put(pack_codes(codes, spec)), arena.put(pack_scales(scales, spec)), arena.put(qmap)),
            None if bias is None else arena.put(bias.to(case.dtype)),
            arena.empty((case.tokens, case.rows), case.dtype),
        )

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        return w3.dequantize(*self.weights, spec=self.case.spec, dtype=dtype)

    def assert_right(self) -> None:
        """No worse than torch on the dequantised matrix, give or take; everything of y written, not one byte beside it."""
        bias = None if self.bias is None else self.bias.double()
        truth = torch.nn.functional.linear(self.x.double(), self.dense(torch.float64), bias)
        torchs = torch.nn.functional.linear(self.x, self.dense(self.case.dtype), self.bias)
        errors = [float((found.double() - truth).norm() / truth.norm()) for found in (self.y, torchs)]
        assert errors[0] <= 1.05 * errors[1] + 1e-5, errors


Emulate = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def emulate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Emulate:
    """emulate(call, faults={file: (old, new)}): runs a call on the host, as the launcher would on the device."""

    def encode(pointer: int, *, promotion: int, **given: int) -> bytes:
        names = ("rows", "columns", "row_bytes", "box_rows", "box_columns")
        return struct.pack("<6Q80x", pointer, *[given[name] for name in names])

    def run(call: Call, faults: dict[str, tuple[str, str]] | None = None) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(w3_prefill_launch, "encode_bytes", encode)
        monkeypatch.setattr(w3_prefill_launch, "_maps", {})
        plan = call.case.plan
        folder = tmp_path / "kernel"
        program = folder / "emulated" if folder.exists() else build(plan.text, folder, faults or {})
        values = w3_prefill_launch.values_of(plan, call.x, *call.weights, call.bias, call.y)
        (tmp_path / "params").write_bytes(w3_prefill_launch.pack(values))
        before = call.arena.memory.clone()
        before.numpy().tofile(tmp_path / "arena")
        numbers = (plan.grid, plan.shared_bytes, call.case.seed)
        files = (tmp_path / "arena", call.arena.memory.data_ptr(), tmp_path / "params")
        ran = subprocess.run(
            [str(argument) for argument in (program, *files, *numbers)],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        after = torch.frombuffer(bytearray((tmp_path / "arena").read_bytes()), dtype=torch.uint8)
        call.arena.memory.copy_(after)
        first = call.y.data_ptr() - call.arena.memory.data_ptr()
        after[first : first + call.y.nbytes] = FILLER
        assert torch.equal(after, before), "written outside of y"
        return ran

    return run


def assert_ran(ran: subprocess.CompletedProcess[str]) -> None:
    assert ran.returncode == 0, f"exit {ran.returncode}: {ran.stdout}{ran.stderr}"


BOTH = PrefillConfig(96, 3, 2)
CASES = {
    "whole tiles": Case(128, 192, 64, PrefillConfig(64, 3, 1), bias=False),
    "one row": Case(1, 64, 100, PrefillConfig(64, 5, 2), x_dtype="bfloat16", qmap_dtype="float16"),
    "partial everything": Case(60, 200, 65, PrefillConfig(64, 4, 2), qmap_dtype="float16"),
    "nibble, two tiles a block": Case(300, 320, 130, BOTH, 128, "nibble", qmap_dtype="float16", x_dtype="bfloat16"),
    "other orders": Case(300, 320, 130, BOTH, 128, "nibble", qmap_dtype="float16", x_dtype="bfloat16", seed=7),
    "map per tile": Case(192, 384, 100, PrefillConfig(64, 3, 1), 128, maps="tile", x_dtype="bfloat16", places=2),
    "map per row, int8": Case(260, 256, 129, PrefillConfig(128, 3, 2), 256, maps="row", places=2),
    "map per row, float16, whole row": Case(
        320, 448, 90, PrefillConfig(96, 5, 1), 448, "nibble", "row", "float16", places=2, bias=False
    ),
    "nibble, int8": Case(130, 640, 200, PrefillConfig(224, 4, 2), layout="nibble", x_dtype="bfloat16"),
    "widest": Case(129, 128, 257, PrefillConfig(256, 4, 2), 128),
    "shared rows": Case(60, 320, 70, PrefillConfig(64, 5, 1, split=True), bias=False),
    "shared rows, odd steps, two tiles a block": Case(200, 320, 200, PrefillConfig(128, 6, 2, split=True), seed=5),
    "shared rows, group of three steps": Case(
        130, 576, 65, PrefillConfig(64, 5, 2, split=True), 192, "nibble", 1, "float16", "bfloat16"
    ),
    "shared rows, two steps": Case(64, 128, 129, PrefillConfig(128, 5, 1, split=True), 128, maps="row", places=2),
    "shared rows, widest": Case(
        65, 448, 257, PrefillConfig(256, 5, 2, split=True), 448, maps="tile", qmap_dtype="float16"
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_it_gives_the_product_and_writes_nothing_else(emulate: Emulate, case: Case) -> None:
    call = Call.of(case)
    assert_ran(emulate(call))
    call.assert_right()


IDENTITIES = {
    "dense, int8": Case(300, 192, 192, PrefillConfig(64, 3, 2), bias=False),
    "nibble, float16, map per row": Case(
        128, 128, 128, PrefillConfig(128, 4, 1), 128, "nibble", "row", "float16", "bfloat16", bias=False
    ),
    "other orders": Case(192, 192, 192, PrefillConfig(160, 4, 2), maps="tile", bias=False, seed=3),
    "shared rows": Case(128, 192, 192, PrefillConfig(64, 8, 1, split=True), maps="tile", bias=False, seed=4),
}


@pytest.mark.parametrize("case", IDENTITIES.values(), ids=IDENTITIES.keys())
def test_identity_activations_read_the_matrix_back(emulate: Emulate, case: Case) -> None:
    """Exact: every weight in its place, and nothing else in the sum."""
    call = Call.of(case, torch.eye(case.columns))
    assert_ran(emulate(call))
    assert torch.equal(call.y, call.dense(case.dtype).t())


WRONG, RULE, HANG = 0, 2, 3  # how the program ends: with wrong numbers, at a broken rule, or since nobody can go on
KERNEL, FINISH, FEED = "w3_prefill.cu", "w3_prefill_finish.cuh", "w3_prefill_feed.cuh"
#: By what it does: file, text, the text in its place, blocks of a cluster, how it is found.
FAULTS: dict[str, tuple[str, str, str, int, int]] = {
    "reads finished sums from the wrong place": (FINISH, "((part ^ in_chunk % 8) * 16)", "(part * 16)", 1, WRONG),
    "names another swizzle": ("wgmma_wide.cuh", "static_cast<u64>(1) << 62", "static_cast<u64>(2) << 62", 1, RULE),
    "leaves a slot that is still read": (KERNEL, "wgmma_wait<1>();", "wgmma_wait<2>();", 1, WRONG),
    "changes an operand in flight": (
        KERNEL,
        "if (more) decoder.look(place);",
        "if (more) { decoder.look(place); decoder.decode(next); }",
        1,
        WRONG,
    ),
    "writes sums that are not finished": (KERNEL, "wgmma_wait<0>();", "", 1, RULE),
    "multiplies without a fence": (KERNEL, "wgmma_fence();", "", 1, RULE),
    "reads before others have written": (FINISH, "named_barrier(1 + group, 128);\n    const", "const", 1, WRONG),
    "decodes before the codes are there": (
        KERNEL,
        "barrier_wait(map.full + 8 * place.slot, place.parity);\n    raw",
        "raw",
        1,
        WRONG,
    ),
    "never leaves a slot": (KERNEL, "if (last_slot >= 0) leave(decoder.map, last_slot);", "", 1, HANG),
    "announces too few bytes": (
        FEED,
        "barrier_expect(full, kXBytes);",
        "barrier_expect(full, kXBytes - 128);",
        1,
        HANG,
    ),
    "fetches the other block's tokens": (FEED, "tile.token + rank * kPart", "tile.token", 2, WRONG),
    "waits for its own block alone": (FEED, "kArrivals * kCluster)", "kArrivals)", 2, HANG),
}
#: The same of kernels in which warpgroups share their rows.
SPLIT_FAULTS: dict[str, tuple[str, str, str, int, int]] = {
    "adds its own sums": (FINISH, "load_shared(theirs +", "load_shared(own +", 1, WRONG),
    "gives away what it finishes": (FINISH, "given[i] = group ? first : second;", "given[i] = mine[i];", 1, WRONG),
    "takes before it was given": (
        FINISH,
        "named_barrier(1 + kGroups, 128 * kGroups);  // both have given",
        "",
        1,
        WRONG,
    ),
    "keeps the map of a group that has ended": (
        KERNEL,
        "max(until + tiles_per_group, 1)",
        "max(until + tiles_per_group, 3)",
        1,
        WRONG,
    ),
    "begins the next tile at the wrong slot": (
        KERNEL,
        "tile_place.advance_far(p.steps);",
        "tile_place.advance_far(p.steps + 1);",
        2,
        HANG,
    ),
}


def assert_found(emulate: Emulate, case: Case, file: str, old: str, new: str, status: int) -> None:
    """The run ends with `status`, and numbers are wrong where it comes to its end."""
    call = Call.of(case)
    ran = emulate(call, {file: (old, new)})
    assert ran.returncode == status, ran.stdout
    if status == WRONG:
        with pytest.raises(AssertionError):
            call.assert_right()
    else:
        assert ran.stdout


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_planted_faults_are_found(emulate: Emulate, fault: tuple[str, str, str, int, int]) -> None:
    """So the tests above can fail."""
    file, old, new, cluster, status = fault
    assert_found(emulate, Case(128 * cluster, 384, 64, PrefillConfig(64, 3, cluster)), file, old, new, status)


@pytest.mark.parametrize("fault", SPLIT_FAULTS.values(), ids=SPLIT_FAULTS.keys())
def test_planted_faults_are_found_where_rows_are_shared(
    emulate: Emulate, fault: tuple[str, str, str, int, int]
) -> None:
    file, old, new, cluster, status = fault
    case = Case(128 * cluster, 384, 128, PrefillConfig(64, 5, cluster, split=True))
    assert_found(emulate, case, file, old, new, status)


def test_text_that_no_longer_matches_is_refused() -> None:
    text = (kernels_folder() / "w3_prefill_decode.cuh").read_text(encoding="utf-8")
    for changed in (
        text.replace("u32 kept(", "u32 held("),
        text + 'W3_DEVICE void more() {\n  asm volatile("");\n}\n',
        text + '#define W3_MORE asm volatile("")\n',
    ):
        with pytest.raises(AssertionError, match=r"w3_prefill_decode\.cuh has"):
            host_text("w3_prefill_decode.cuh", changed)
