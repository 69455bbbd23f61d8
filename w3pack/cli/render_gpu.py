"""What `bench`, `tune` and `doctor` found, as tables for people or JSON for programs, on stdout."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from w3pack.cli.render import _console, _facts, _json, _plain, _table


def benchmark(found: dict[str, Any], *, as_json: bool) -> None:
    """A benchmark's figures."""
    if as_json:
        _json(found)
        return
    console = _console()
    if found["entries"]:
        _entries(console, found)
    if found["prefill"]:
        if found["entries"]:
            console.print()
        _prefill(console, found["prefill"])
    source = found["provenance"]
    _facts(
        console,
        ("Device", f"{source['device']}, driver {source['driver']}, {source['clocks']['sm_mhz']} MHz"),
        ("Versions", f"torch {source['torch']}, CUDA {source['cuda']}, NVRTC {source['nvrtc']}"),
        ("Empty kernel", f"{found['empty_kernel_microseconds']:.2f} us"),
        ("Ceiling", found["ceiling_kind"] or "not measured"),
        notes=["Times are medians in a replayed CUDA graph over weights that the L2 cache has forgotten."],
    )


def _form(entry: dict[str, Any]) -> str:
    return f"{entry['layout']} {entry['qmap_dtype']} {entry['x_dtype']}"


def _entries(console: Console, found: dict[str, Any]) -> None:
    table = _table("rows x columns", "tokens", "form", "us", "spread", "of ceiling", "torch us", "x torch", "error")
    for entry in found["entries"]:
        table.add_row(
            f"{entry['rows']} x {entry['columns']}",
            str(entry["tokens"]),
            _plain(_form(entry)),
            f"{entry['microseconds']:.2f}",
            f"{100 * entry['spread']:.1f} %",
            f"{100 * entry['share_of_ceiling']:.0f} %",
            f"{entry['torch_microseconds']:.2f}",
            f"{entry['speed_against_torch']:.2f}",
            f"{entry['relative_error']:.1e}",
        )
    console.print(table)


def _prefill(console: Console, entries: list[dict[str, Any]]) -> None:
    ways = ("mainloop us", "without it us")
    table = _table("rows x columns", "tokens", "form", "operator us", "torch us", "time / torch's", "error", *ways)
    for entry in entries:
        times = (entry.get("mainloop_microseconds"), entry.get("without_mainloop_microseconds"))
        table.add_row(
            f"{entry['rows']} x {entry['columns']}",
            str(entry["tokens"]),
            _plain(_form(entry)),
            f"{entry['microseconds']:.1f}",
            f"{entry['torch_microseconds']:.1f}",
            f"{1 / entry['speed_against_torch']:.2f}",
            f"{entry['relative_error']:.1e}",
            *("-" if time is None else f"{time:.1f}" for time in times),
        )
    console.print(table)


def tuning(found: dict[str, Any], *, as_json: bool) -> None:
    """What the tuner chose."""
    if as_json:
        _json(found)
        return
    console = _console()
    table = _table("rows x columns", "tokens", "form", "us", "before", "tried", "refused", "config")
    for entry in found["tuned"]:
        before = entry["microseconds_before"]
        config = entry["config"]
        table.add_row(
            f"{entry['rows']} x {entry['columns']}",
            str(entry["tokens"]),
            _plain(_form(entry)),
            f"{entry['microseconds']:.2f}",
            "-" if before is None else f"{before:.2f}",
            str(entry["tried"]),
            str(sum(entry["refused"].values())),
            _plain(_short(config)),
        )
    console.print(table)
    _facts(console, ("Table", found["table"]), ("Device", found["provenance"]["device"]), notes=found["failed"])


def prefill_tuning(found: dict[str, Any], *, as_json: bool) -> None:
    """Where the tuner found the prefill kernel faster."""
    if as_json:
        _json(found)
        return
    console = _console()
    table = _table("rows x columns", "tokens", "form", "mainloop us", "without it us", "error", "config", "")
    for entry in found["compared"]:
        config, time = entry["config"], entry["microseconds"]
        table.add_row(
            f"{entry['rows']} x {entry['columns']}",
            str(entry["tokens"]),
            _plain(_form(entry)),
            "-" if time is None else f"{time:.1f}",
            f"{entry['microseconds_without']:.1f}",
            f"{entry['relative_error']:.1e}",
            f"tokens {config['tokens']}, slots {config['slots']}, cluster {config['cluster']}",
            _plain(entry["fault"] or ""),
        )
    console.print(table)
    chosen = [f"{shape}: {first} to {last} tokens" for shape, (first, last) in found["mainloop_tokens"].items()]
    _facts(console, ("Table", found["table"]), ("Device", found["provenance"]["device"]), notes=chosen)


def _short(config: dict[str, Any]) -> str:
    warps = "x".join(str(config[name]) for name in ("row_warps", "split_warps", "token_warps"))
    parts = [warps, f"tiles {config['token_tiles']}", f"slots {config['slots']}", f"ring {config['ring']}"]
    return ", ".join([*parts, f"blocks {config['blocks']}", *(["warpgroups"] if config["warpgroups"] else [])])


def diagnosis(found: dict[str, Any], *, as_json: bool) -> None:
    """What `doctor` found."""
    if as_json:
        _json(found)
        return
    console = _console()
    tools = found["toolchain"]
    for gpu in found["gpus"]:
        if gpu["kernels"]:
            table = _table("Linear", "kernel", "GPU", "origin", "built in", "registers")
            for row in gpu["kernels"]:
                seconds = f"{row['build_seconds']:.2f} s"
                table.add_row(
                    row["linear"],
                    row["kernel"],
                    str(gpu["index"]),
                    row["origin"],
                    seconds,
                    str(row["registers"] or "-"),
                )
            console.print(table)
    _facts(
        console,
        ("Linears run on", found["path"]),
        ("Python, w3pack", f"{found['python']}, {found['w3pack']}"),
        ("torch", f"{found['torch']}, CUDA {found['torch_cuda'] or 'none'}"),
        *[(f"GPU {gpu['index']}", _gpu(gpu)) for gpu in found["gpus"]],
        ("cuda-core, bindings", f"{tools['cuda_core'] or 'none'}, {tools['cuda_bindings'] or 'none'}"),
        ("NVRTC", tools["nvrtc"] or "none"),
        (
            "Kernel cache",
            f"{tools['cache_folder'] or 'none'}: {tools['cache_entries']} kernels, {tools['cache_bytes'] / 1e6:.1f} MB; "
            f"{tools['seeded_entries']} came with the package",
        ),
        notes=found["notes"],
    )
    for problem in found["problems"]:
        console.print(f"{'Problem:':<22}{_plain(problem)}", soft_wrap=True)
    if found["ok"]:
        console.print("OK: everything that this machine needs is there")


def _gpu(gpu: dict[str, Any]) -> str:
    error = gpu["relative_error"]
    return (
        f"{gpu['name']}, capability {gpu['capability']}, {gpu['multiprocessors']} multiprocessors, "
        f"{gpu['memory_bytes'] / 1e9:.0f} GB, driver {gpu['driver'] or 'unknown'}; w3_linear "
        f"{'did not run' if error is None else f'errs {error:.1e} against the reference'}"
    )
