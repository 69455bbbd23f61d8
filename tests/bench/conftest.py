"""A result document as the suite makes it, without a GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def document() -> dict[str, Any]:
    """Two forms of one published shape at 8 and 64 tokens, an unpublished shape, and one of many tokens."""
    found: dict[str, Any] = json.loads((Path(__file__).parent / "sample.json").read_text())
    return found
