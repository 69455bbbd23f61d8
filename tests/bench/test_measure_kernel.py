"""The copies of a kernel with parts left out: their texts still fit the kernels, and they compile."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from w3pack.bench.shapes import Case
from w3pack.jit import KernelText, compile_text
from w3pack.ops.configs import DEVICES
from w3pack.ops.w3_decide import plan_of

pytest.importorskip("cuda.bindings.nvrtc")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = Path(__file__).parents[2] / "scripts" / "measure_kernel.py"
    spec = importlib.util.spec_from_file_location("measure_kernel", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("tokens", [8, 16, 64])
def test_every_copy_without_a_part_compiles(script: ModuleType, tmp_path: Path, tokens: int) -> None:
    text = plan_of(Case(4096, 4096, tokens).desc(DEVICES["sm_90a"])).decode
    cubins = {}
    for left_out in script.VARIANTS:
        folder = script.edited_kernels(left_out, tmp_path)
        cubins[left_out] = compile_text(text, "sm_90a", folder=folder).cubin
    assert len(cubins["products",]) < len(cubins[()])
    same = {"activations"} if tokens > 16 else set()  # they stream, and there is no wait to leave out
    for part in script.EDITS:
        assert (cubins[part,] == cubins[()]) == (part in same), part


def test_a_text_that_is_gone_is_told_of(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(script.EDITS, "sums", [("w3_decode.cu", "not in there", "")])
    with pytest.raises(
        ValueError, match=r"expected 'not in there' in w3_decode\.cu, for leaving out sums; adapt EDITS"
    ):
        script.edited_kernels(("sums",), tmp_path)


def test_every_mix_of_instructions_compiles(script: ModuleType, tmp_path: Path) -> None:
    for number, (first, second) in enumerate(script.MIXES.values()):
        source = script.INSTRUCTIONS.replace("FIRST", first + ";").replace("SECOND", second + ";")
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "instructions.cu").write_text(source)
        assert compile_text(KernelText("instructions.cu", "instructions"), "sm_90a", folder=folder).spill_bytes == 0
