"""The steps that devices take choose the codes that the column-by-column ones do, and a replayed graph does what was recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from w3pack.quantize import QuantizeSettings, gptq, lnq
from w3pack.quantize.block_steps import DescentSteps, FeedSteps
from w3pack.quantize.calibrated import CalibratedLinear, quantize_calibrated
from w3pack.quantize.moments import SecondMoment
from w3pack.quantize.replay import Replayed

Make = Callable[..., Any]


@pytest.mark.parametrize(
    ("rows", "columns", "group_size"),
    [(96, 576, 128), (20, 200, 64), (1, 130, 128), (7, 64, 64), (9, 50, 64), (5, 65, 256)],
)
def test_blocks_choose_what_columns_choose(
    make_layer: Make, rows: int, columns: int, group_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = make_layer(rows, columns, tokens=700, massive=10.0)
    layer.weight[0, :64] = 0  # a scale of 0
    kind = QuantizeSettings(group_size=group_size)

    def both() -> list[CalibratedLinear]:
        return [quantize_calibrated(layer.weight, layer.moment, kind, effort=e) for e in ("fast", "default")]

    expected = both()
    runs = dict.fromkeys((FeedSteps, DescentSteps), 0)
    for steps in runs:

        def counted(self: Any, *args: Any, kind: Any = steps, run: Any = steps.run) -> torch.Tensor:
            runs[kind] += 1
            found: torch.Tensor = run(self, *args)
            return found

        monkeypatch.setattr(steps, "run", counted)
    monkeypatch.setattr(gptq, "_sweep", gptq._sweep_in_blocks)
    monkeypatch.setattr(lnq._Refinement, "descend", lnq._Refinement.descend_in_blocks)
    for one, other in zip(both(), expected, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-3)
        differ = one.linear.codes != other.linear.codes
        assert float(differ.float().mean()) < 0.01  # ties, and what follows from them
    blocks = -(-columns // 64)
    assert runs[FeedSteps] == 2 * blocks
    assert runs[DescentSteps] == lnq.ALTERNATIONS * lnq.SWEEPS * blocks


def test_elsewhere_than_on_cuda_work_is_done_each_time() -> None:
    done: list[int] = []
    replayed = Replayed(torch.device("cpu"))
    for _ in range(4):
        replayed(lambda: done.append(1))
    assert len(done) == 4


@pytest.mark.gpu
def test_a_graph_does_what_was_recorded() -> None:
    x, y = torch.zeros(1000, device="cuda"), torch.zeros(1000, device="cuda")
    replayed, calls = Replayed(x.device), []

    def work() -> None:
        calls.append(1)
        y.addcmul_(x, x)

    expected = torch.zeros(1000)
    for n in range(6):
        x.fill_(n)
        replayed(work)
        expected += n * n
        assert torch.equal(y.cpu(), expected)
    assert len(calls) == 2  # as it is, and to be recorded


@pytest.mark.gpu
@pytest.mark.parametrize("per", ["tensor", "row"])
def test_a_gpu_leaves_what_a_cpu_leaves(make_layer: Make, per: str) -> None:
    layer = make_layer(300, 1000, tokens=3000, massive=10.0)
    kind = QuantizeSettings(group_size=128, qmap_per=per)
    expected = quantize_calibrated(layer.weight, layer.moment, kind)
    found = quantize_calibrated(layer.weight.cuda(), layer.moment.cuda(), kind)
    assert found.linear.codes.is_cuda
    assert [stage.after for stage in found.stages] == pytest.approx(
        [stage.after for stage in expected.stages], rel=2e-2
    )
    again = quantize_calibrated(layer.weight.cuda(), layer.moment.cuda(), kind)
    assert torch.equal(found.linear.codes, again.linear.codes)


@pytest.mark.gpu
def test_moments_on_a_gpu() -> None:
    x = torch.randn(5000, 2100, dtype=torch.bfloat16)
    here, there = SecondMoment(2100), SecondMoment(2100, device="cuda", dtype=torch.float32)
    here.add(x)
    there.add(x.cuda())
    torch.testing.assert_close(there.matrix().cpu(), here.matrix(), rtol=1e-4, atol=1e-4)
