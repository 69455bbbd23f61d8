"""What the FP8 measuring script needs of the kernels is there."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from w3pack.jit import ToolchainError, bindings, compile_text
from w3pack.ops.configs import DEVICES
from w3pack.ops.gateup_config import GateUpDesc, kernel_text, plan_of

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.delitem(sys.modules, "measure_gateup_gpu", raising=False)
    return importlib.import_module("measure_gateup_gpu")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_kernels_without_a_part_build(script: Any, tmp_path: Path, dtype: Any) -> None:
    try:
        bindings.nvrtc()
    except ToolchainError as error:
        pytest.skip(str(error))
    plan = plan_of(GateUpDesc(8, 17408, 5120, True, dtype, DEVICES["sm_90a"]))
    for left_out in script.VARIANTS:
        folder = script.edited_kernels(left_out, tmp_path)
        assert compile_text(plan.text, "sm_90a", folder).spill_bytes == 0


def test_configs_to_try_are_many_and_differ(script: Any) -> None:
    for tokens in (1, 8, 16):
        for rows, columns, paired in ((17408, 5120, True), (5120, 17408, False), (768, 2048, True)):
            desc = GateUpDesc(tokens, rows, columns, paired, "float16", DEVICES["sm_90a"])
            texts = [kernel_text(desc, config) for config in script.configs_for(desc)]
            assert len(set(texts)) == len(texts) >= 15
            assert plan_of(desc).text in texts
