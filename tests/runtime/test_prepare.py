"""`prepare` where there is nothing to do, and what it refuses; the rest is in tests/ops/test_w3_linear_cuda.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from w3pack.errors import UsageError
from w3pack.format.gateup import GateUpSpec
from w3pack.format.linear import LinearSpec
from w3pack.runtime.fp8_linear import Fp8Linear
from w3pack.runtime.gateup import FusedGateUp, FusedMLP
from w3pack.runtime.linear import W3Linear
from w3pack.runtime.prepare import _activation_dtypes, prepare

SPEC = LinearSpec(rows=64, columns=64, group_size=64, layout="dense", maps=1, qmap_dtype="int8", bias=False)


@pytest.mark.parametrize("model", [nn.Linear(3, 3), nn.Sequential(W3Linear(SPEC)), W3Linear(SPEC)])
def test_nothing_is_to_be_done_on_a_cpu(model: nn.Module) -> None:
    report = prepare(model, (1, 8, 512))
    assert (report.kernels, report.built, report.workspace_bytes) == (0, 0, 0)
    assert report.seconds >= 0


def test_wrong_arguments_are_refused_with_a_sentence() -> None:
    with pytest.raises(UsageError, match=r"expected batch sizes of at least 1, got \[1, 0\]"):
        prepare(W3Linear(SPEC), (1, 0))
    with pytest.raises(
        UsageError, match=r"expected gateup to be one of auto, kernel, fused, separate, dequantize, got 'best'"
    ):
        prepare(W3Linear(SPEC), gateup="best")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"expected probe to be one of auto, fresh, memory, got 'never'"):
        prepare(W3Linear(SPEC), probe="never")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"expected activations of float16 or bfloat16, got torch.float32"):
        prepare(W3Linear(SPEC), dtype=torch.float32)


def fp8_mlp() -> FusedMLP:
    fused = FusedGateUp(GateUpSpec(256, 128), nn.functional.silu, block=(128, 128))
    return FusedMLP(fused, Fp8Linear(128, 256, block=(128, 128)), down_name="down_proj")


def test_fp8_modules_on_a_cpu_need_nothing() -> None:
    report = prepare(fp8_mlp(), (1, 8), gateup="fused")
    assert (report.kernels, report.gateup) == (0, ())
    assert str(report).startswith("0 kernels, 0 built, ")


def test_activations_have_the_dtype_of_what_is_not_packed() -> None:
    mlp = fp8_mlp()
    assert _activation_dtypes(mlp) == [torch.float16, torch.bfloat16]
    assert _activation_dtypes(nn.Sequential(mlp, nn.LayerNorm(128, dtype=torch.bfloat16))) == [torch.bfloat16]
