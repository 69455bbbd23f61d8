"""Build every kernel configuration of the project for every architecture, with no GPU; fail on errors and on spills.

    python scripts/compile_all.py [--arch sm_90a ...] [--jobs 2] [--quiet] [--use-cache] [--seed FOLDER] [--json OUT.json]

Without --use-cache everything is built, whatever the cache holds. --seed also writes each kernel into FOLDER, in the form
and under the name in which a wheel carries it in w3pack/cubins.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import w3pack
from w3pack.errors import W3PackError
from w3pack.jit import ARCHS, Compiled, KernelText, Store, compile_text, toolchain

Texts = Callable[[str], Iterable[KernelText]]


@dataclass(frozen=True)
class Row:
    """One configuration for one architecture; `fault` is the sentence for which it fails, if it does."""

    text: KernelText
    arch: str
    compiled: Compiled | None
    fault: str | None

    def cells(self) -> tuple[str, ...]:
        """The table's columns."""
        numbers = ["-"] * 4
        if (built := self.compiled) is not None:
            values = (built.registers, built.shared_bytes, built.spill_bytes)
            numbers = [*("?" if value is None else str(value) for value in values), f"{built.seconds:.2f}"]
        defines = " ".join(f"{name}={value}" for name, value in self.text.defines)
        return (self.text.entry, defines, self.arch, *numbers, "FAIL" if self.fault else "")

    def document(self) -> dict[str, object]:
        """The row as JSON."""
        built = self.compiled
        return {
            "file": self.text.file,
            "entry": self.text.entry,
            "defines": dict(self.text.defines),
            "arch": self.arch,
            "registers": built and built.registers,
            "shared_bytes": built and built.shared_bytes,
            "spill_bytes": built and built.spill_bytes,
            "stack_bytes": built and built.stack_bytes,
            "seconds": built and round(built.seconds, 3),
            "warnings": list(built.warnings) if built else [],
            "fault": self.fault,
        }


HEADINGS = ("kernel", "defines", "arch", "registers", "shared", "spill", "seconds", "")


def project_texts(arch: str) -> Iterable[KernelText]:
    """Every configuration that the operators can choose on `arch`."""
    from w3pack.ops.configs import all_kernel_texts

    texts: Iterable[KernelText] = all_kernel_texts(arch)
    return texts


def build(text: KernelText, arch: str, folder: Path | None, use_cache: bool) -> Row:
    """Build in this process; a failure is a row too."""
    try:
        compiled = Store(kernels=folder).find(text, arch).compiled if use_cache else compile_text(text, arch, folder)
    except W3PackError as error:
        return Row(text, arch, None, str(error))
    fault = None
    if compiled.spill_bytes is None:
        fault = f"expected ptxas to tell the spills of {text} for {arch}, got no such line; read the log by hand"
    elif compiled.spill_bytes > 0:
        fault = (
            f"expected no spills of {text} for {arch}, got {compiled.spill_bytes} bytes with {compiled.registers} "
            "registers; give it fewer accumulators or more registers"
        )
    return Row(text, arch, compiled, fault)


def build_all(jobs: int, work: Sequence[tuple[KernelText, str]], folder: Path | None, use_cache: bool) -> Iterator[Row]:
    """Rows in the order of `work`, each as soon as it and those before it are built."""
    if jobs == 1:
        yield from (build(text, arch, folder, use_cache) for text, arch in work)
        return
    spawn = multiprocessing.get_context("spawn")  # a fork would copy whatever threads and locks this process holds
    with ProcessPoolExecutor(jobs, mp_context=spawn) as pool:
        rows: list[Future[Row]] = [pool.submit(build, text, arch, folder, use_cache) for text, arch in work]
        yield from (row.result() for row in rows)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Build every kernel for every architecture; fail on errors and spills."
    )
    parser.add_argument("--arch", nargs="+", choices=ARCHS, default=list(ARCHS))
    parser.add_argument("--quiet", action="store_true", help="only faults, warnings and the last line")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--use-cache", action="store_true", help="take what the store has")
    parser.add_argument("--seed", type=Path, metavar="FOLDER", help="write the kernels for a wheel to carry")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table there too")
    parser.add_argument("--kernels", type=Path, metavar="FOLDER", help="stands in for the kernels folder")
    options = parser.parse_args(argv)
    if options.jobs < 1:
        parser.error(f"expected at least one job, got {options.jobs}")
    return options


def main(argv: Sequence[str] | None = None, texts: Texts = project_texts) -> int:
    """Build, print, write; 1 if anything failed or spilled, or if there was nothing to build."""
    options = arguments(argv)
    tools = toolchain()
    if tools.nvrtc is None:
        print(*tools.problems, sep="\n", file=sys.stderr)
        return 1
    work = [(text, arch) for arch in options.arch for text in texts(arch)]
    if not work:
        print(f"expected kernels to build for {' '.join(options.arch)}, got none", file=sys.stderr)
        return 1
    wide = [[text.entry for text, _ in work], [" ".join(f"{n}={v}" for n, v in text.defines) for text, _ in work]]
    widths = [max(map(len, column)) for column in wide] + [7, 9, 7, 6, 7, 4]
    widths = [max(width, len(heading)) for width, heading in zip(widths, HEADINGS, strict=True)]

    def show(cells: Sequence[str]) -> None:
        if not options.quiet:
            print("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip(), flush=True)

    begin = time.perf_counter()
    show(HEADINGS)
    rows = []
    for row in build_all(min(options.jobs, len(work)), work, options.kernels, options.use_cache):
        rows.append(row)
        show(row.cells())
        if options.seed and row.compiled and not row.fault:
            Store(kernels=options.kernels).seed(row.text, row.arch, row.compiled, options.seed)
    seconds = time.perf_counter() - begin
    for row in rows:
        for warning in row.compiled.warnings if row.compiled else ():
            print(f"{row.text} {row.arch}: {warning}")
    faults = [row.fault for row in rows if row.fault]
    print(*faults, sep="\n", end="\n" if faults else "")
    print(
        f"{len(rows) - len(faults)} of {len(rows)} are sound; NVRTC {tools.nvrtc}, {seconds:.1f} s, {options.jobs} jobs"
    )
    if options.json:
        document = {"w3pack": w3pack.__version__, "nvrtc": tools.nvrtc, "seconds": round(seconds, 1)}
        options.json.write_text(json.dumps(document | {"kernels": [row.document() for row in rows]}, indent=1) + "\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
