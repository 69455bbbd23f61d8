"""Where a figure comes from: device, driver, clocks, versions, commit and command line."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import torch

import w3pack
from w3pack.errors import UnsupportedError, UsageError, W3PackError
from w3pack.jit import kernels_folder, toolchain
from w3pack.jit.source import folder_digest

_QUERIES = {
    "driver": "driver_version",
    "sm_mhz": "clocks.sm",
    "memory_mhz": "clocks.mem",
    "sm_max_mhz": "clocks.max.sm",
    "power_limit_watts": "power.limit",
    "temperature": "temperature.gpu",
}
_CHECKOUT = Path(w3pack.__file__).resolve().parents[1]


def need_gpu(what: str, device_index: int) -> None:
    """UnsupportedError unless torch sees a GPU, UsageError unless it sees this one."""
    if not torch.cuda.is_available():
        raise UnsupportedError(
            f"expected an NVIDIA GPU that torch sees for {what}, got none; run it on a machine with one, "
            "`w3pack doctor` says what is missing"
        )
    if not 0 <= device_index < torch.cuda.device_count():
        raise UsageError(
            f"expected a device below {torch.cuda.device_count()}, got {device_index}; choose one with --device"
        )


def provenance(device_index: int, command: str) -> dict[str, Any]:
    """All that a result file says about its making; what cannot be found out is None."""
    properties = torch.cuda.get_device_properties(device_index)
    smi = query_smi(device_index)
    return {
        "command": without_folders(command),
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": int(properties.L2_cache_size),
        "driver": smi.get("driver"),
        "clocks": {name: _number(smi.get(name)) for name in _QUERIES if name != "driver"},
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nvrtc": toolchain().nvrtc,
        "w3pack": w3pack.__version__,
        **_commit(),
        "kernels_sha256": _kernels_digest(),
    }


def without_folders(command: str) -> str:
    """The command with absolute paths cut to their last part: where files lay is no part of what was done."""
    return re.sub(r"(?<![^\s='\"])/(?:[^\s'\"/]+/)*([^\s'\"/]+)", r"\1", command)


def query_smi(device_index: int) -> dict[str, str]:
    """What nvidia-smi says of a torch device, by the names of `_QUERIES`; empty where it says nothing."""
    uuid = getattr(torch.cuda.get_device_properties(device_index), "uuid", None)
    if uuid is None:
        return {}
    name = str(uuid)
    line = _output(
        "nvidia-smi",
        f"--id={name if name.startswith('GPU-') else f'GPU-{name}'}",
        f"--query-gpu={','.join(_QUERIES.values())}",
        "--format=csv,noheader,nounits",
    )
    values = [value.strip() for value in (line or "").splitlines()[0].split(",")] if line else []
    return dict(zip(_QUERIES, values, strict=True)) if len(values) == len(_QUERIES) else {}


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text is not None else None
    except ValueError:
        return None


def _commit() -> dict[str, Any]:
    if not (_CHECKOUT / ".git").exists():
        return {"commit": None, "dirty": None}
    others = (".", ":(exclude)docs/results")  # a result that is being written there makes no other result of it
    status = _output("git", "-C", str(_CHECKOUT), "status", "--porcelain", "--", *others)
    return {
        "commit": _output("git", "-C", str(_CHECKOUT), "rev-parse", "HEAD") or None,
        "dirty": None if status is None else bool(status),
    }


def _kernels_digest() -> str | None:
    try:
        return folder_digest(kernels_folder())
    except W3PackError:
        return None


def _output(*command: str) -> str | None:
    """stdout of a program, stripped; None where it is missing, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
