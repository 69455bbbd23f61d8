"""How much memory the CPU path may spend on unpacked matrices.

Unpacking costs far more than a matmul with one token, so a CPU user wants each matrix unpacked once; but the point of
3 bits may be that the model does not fit otherwise. Policy: matrices are kept, first come first kept, while their sum
stays within a budget; later ones are unpacked for each call. The budget is half of the memory that was available when the
first matrix asked, and never more than leaves 1 GiB free; `set_budget` overrides it (0 keeps nothing).
"""

from __future__ import annotations

import threading
from pathlib import Path

_GIB = 1 << 30
#: Reentrant: the garbage collector may free a matrix, and so call `release`, while this thread is inside `admit`.
_lock = threading.RLock()
_budget: int | None = None
_used = 0


def available_bytes() -> int:
    """Memory that can be taken without swapping and within the container's limit, in bytes; 0 where nothing says."""
    found = [value for value in (_machine_bytes(), _container_bytes(Path("/sys/fs/cgroup"))) if value is not None]
    return min(found, default=0)


def _machine_bytes() -> int | None:
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            return next((1024 * int(line.split()[1]) for line in file if line.startswith("MemAvailable:")), None)
    except OSError:
        return None


def _container_bytes(cgroup: Path) -> int | None:
    """What a cgroup (version 2) still allows; page cache counts as free. None without a limit."""
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
        statistics = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return None if limit == "max" else max(0, int(limit) - used + int(statistics.get("inactive_file", 0)))


def set_budget(nbytes: int | None) -> None:
    """Bytes that unpacked matrices may take in this process from now on; None returns to the policy above.

    Matrices kept already stay: `W3Linear.drop_dense` lets go of one.
    """
    global _budget
    with _lock:
        _budget = nbytes


def admit(nbytes: int) -> bool:
    """Whether another matrix of `nbytes` may be kept; if so it is counted."""
    global _budget, _used
    with _lock:
        if _budget is None:
            free = available_bytes()
            _budget = max(0, min(free // 2, free - _GIB))
        if _used + nbytes > _budget:
            return False
        _used += nbytes
        return True


def release(nbytes: int) -> None:
    """Give back what `admit` counted."""
    global _used
    with _lock:
        _used -= nbytes


def used_bytes() -> int:
    """Bytes that unpacked matrices take now."""
    return _used
