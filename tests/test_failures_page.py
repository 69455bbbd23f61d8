"""docs/failures.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path


def test_every_named_test_exists() -> None:
    root = Path(__file__).resolve().parent
    named = set(re.findall(r"test_\w+", (root.parent / "docs" / "failures.md").read_text()))
    defined = {name for path in root.rglob("test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text())} | {
        path.stem for path in root.rglob("test_*.py")
    }
    assert len(named) > 40
    assert named <= defined, sorted(named - defined)
