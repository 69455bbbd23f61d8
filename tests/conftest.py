"""What every test shares: options, markers, and one torch thread so that tests can run side by side."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

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


@pytest.fixture(scope="session")
def foreign() -> ModuleType:
    """The slow packers of other 3-bit formats (`foreign_packers.py`)."""
    spec = importlib.util.spec_from_file_location("foreign_packers", Path(__file__).parent / "foreign_packers.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
