"""What every test shares: options, markers, and one torch thread so that tests can run side by side."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests that take minutes")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    skip_slow = pytest.mark.skip(reason="slow: pass --slow")
    no_gpu = pytest.mark.skip(reason="no CUDA device")
    gpu_required = os.environ.get("W3PACK_REQUIRE_GPU") == "1"
    for item in items:
        if "slow" in item.keywords and not config.getoption("--slow"):
            item.add_marker(skip_slow)
        if "gpu" in item.keywords and not torch.cuda.is_available() and not gpu_required:
            item.add_marker(no_gpu)


@pytest.fixture(scope="session")
def golden() -> Path:
    """Folder of the byte-exact vectors."""
    return Path(__file__).parent / "golden"
