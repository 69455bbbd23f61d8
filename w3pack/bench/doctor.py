"""What this machine can do with w3pack's GPU kernels, found out by doing it: for `w3pack doctor`.

A machine without a GPU is fine, the CPU path needs nothing more. Each problem is a sentence with its remedy.
"""

from __future__ import annotations

import platform
import shutil
import subprocess
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

import w3pack
from w3pack.bench.operands import random_weights, random_x, relative_error
from w3pack.bench.provenance import query_smi
from w3pack.bench.shapes import Case
from w3pack.errors import UnsupportedError, W3PackError
from w3pack.jit import Toolchain, default_store, toolchain
from w3pack.ops.device import device_name, limits
from w3pack.ops.w3_config import DeviceLimits
from w3pack.ops.w3_decide import plan_of
from w3pack.ops.w3_linear import w3_linear
from w3pack.ops.w3_table import table_of
from w3pack.reference import w3

SMALL, BIG = Case(rows=576, columns=576, tokens=1, group_size=64), Case(rows=28672, columns=8192, tokens=1)
_TINY = Case(rows=192, columns=256, tokens=3)


@dataclass
class Diagnosis:
    """Findings; `ok` is whether everything that this machine needs is there and right."""

    python: str
    w3pack: str
    torch: str
    torch_cuda: str | None
    path: str
    toolchain: Toolchain
    gpus: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """No problems."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        tools = {**asdict(self.toolchain), "cache_folder": _text(self.toolchain.cache_folder)}
        return {
            "ok": self.ok,
            "python": self.python,
            "w3pack": self.w3pack,
            "torch": self.torch,
            "torch_cuda": self.torch_cuda,
            "path": self.path,
            "toolchain": {**tools, "problems": list(self.toolchain.problems)},
            "gpus": self.gpus,
            "notes": self.notes,
            "problems": self.problems,
        }


def diagnose() -> Diagnosis:
    """Look at everything; kernels that are not built yet are built, a tiny product runs on each GPU."""
    has_gpu = torch.cuda.is_available()
    found = Diagnosis(
        python=platform.python_version(),
        w3pack=w3pack.__version__,
        torch=torch.__version__,
        torch_cuda=torch.version.cuda,
        path="GPU kernels" if has_gpu else "CPU",
        toolchain=toolchain(),
    )
    if not has_gpu:
        found.notes.append("No GPU that torch sees: packed Linears run on the CPU path, which needs no kernels.")
        if driver_lists_gpus():
            found.problems.append(_torch_misses_gpu())
        return found
    for index in range(torch.cuda.device_count()):
        found.gpus.append(_gpu(index, found))
    if all(not gpu["supported"] for gpu in found.gpus):
        found.path = "torch on the GPU"
    elif found.toolchain.problems:
        found.problems.extend(found.toolchain.problems)
    if found.toolchain.cache_folder is not None and not found.toolchain.cache_writable:
        found.problems.append(
            f"expected to keep built kernels in {found.toolchain.cache_folder}, got a folder that cannot be written; "
            "set W3PACK_CACHE_DIR to one that can"
        )
    return found


def driver_lists_gpus() -> bool:
    """Whether nvidia-smi names a GPU, whatever torch sees."""
    if shutil.which("nvidia-smi") is None:
        return False
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and "GPU " in done.stdout


def _torch_misses_gpu() -> str:
    if torch.version.cuda is None:
        return (
            f"expected a torch with CUDA beside this GPU, got {torch.__version__}, which has none; "
            "install a CUDA build of torch"
        )
    return (
        f"expected torch {torch.__version__} (CUDA {torch.version.cuda}) to see the GPU that nvidia-smi lists, got none; "
        "check CUDA_VISIBLE_DEVICES and update the driver"
    )


def _gpu(index: int, found: Diagnosis) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    gpu: dict[str, Any] = {
        "index": index,
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "driver": query_smi(index).get("driver"),
        "supported": True,
        "kernels": [],
    }
    with torch.cuda.device(index):
        try:
            found_limits = limits(index)
        except UnsupportedError as error:
            gpu["supported"] = False
            found.notes.append(f"GPU {index}: {error}; packed Linears are unpacked by torch for each call")
        except W3PackError as error:
            found.problems.append(f"GPU {index}: {error}")
        else:
            gpu["kernels"] = _kernels(found_limits, index, found)
        gpu["relative_error"] = _tiny(index, found)
    return gpu


def _kernels(device: DeviceLimits, index: int, found: Diagnosis) -> list[dict[str, Any]]:
    """Where the kernels of a small and of a big Linear come from, and how long building them took."""
    rows: list[dict[str, Any]] = []
    for case in (SMALL, BIG):
        plan = plan_of(case.desc(device), table_of(device_name(index), device.arch))
        for text in (plan.decode, plan.stage):
            if text is None:
                continue
            try:
                built = default_store().find(text, device.arch)
            except W3PackError as error:
                if not found.toolchain.problems:  # otherwise they say why
                    found.problems.append(f"GPU {index}: {error}")
                continue
            rows.append(
                {
                    "linear": f"{case.rows}x{case.columns}",
                    "kernel": text.entry,
                    "arch": device.arch,
                    "origin": built.origin,
                    "build_seconds": round(built.compiled.seconds, 2),
                    "registers": built.compiled.registers,
                }
            )
    return rows


def _tiny(index: int, found: Diagnosis) -> float | None:
    """Relative error of a tiny product against the reference on the CPU; a problem where it is not small."""
    on = torch.device("cuda", index)
    weights, x = random_weights(_TINY.spec, device=on), random_x(_TINY, device=on)
    sizes = {"rows": _TINY.rows, "columns": _TINY.columns, "group_size": _TINY.group_size}
    try:
        y = w3_linear(x, weights.codes, weights.scales, weights.qmap, None, **sizes)
    except W3PackError as error:
        found.problems.append(f"GPU {index}: {error}")
        return None
    codes, scales, qmap = weights.codes.cpu(), weights.scales.cpu(), weights.qmap.cpu()
    truth = w3.linear(x.cpu().double(), codes, scales, qmap, None, spec=_TINY.spec)
    error_found = relative_error(y.cpu(), truth)
    if not error_found < 1e-3:
        found.problems.append(
            f"expected w3_linear on GPU {index} to equal the reference, got a relative error of {error_found:.2g}; "
            "report it with the output of `w3pack doctor --json`"
        )
    return float(f"{error_found:.3g}")


def _text(value: object) -> str | None:
    return None if value is None else str(value)
