"""The prefill kernel on an H100 or H200: no worse than torch on the dequantised matrix, and the same bits each time."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from w3pack.format.layout import LAYOUTS
from w3pack.format.linear import QMAP_DTYPES
from w3pack.jit import load
from w3pack.ops import w3_cuda
from w3pack.ops.device import limits
from w3pack.ops.w3_config import W3Desc
from w3pack.ops.w3_prefill import ARCH, DIVISIONS, PrefillConfig, config_of, make_plan, prefill_plan
from w3pack.ops.w3_prefill_launch import run_prefill
from w3pack.reference import w3

pytestmark = pytest.mark.gpu

HALVES = [torch.float16, torch.bfloat16]
TOKENS = (65, 100, 128, 129, 255, 256, 257, 513, 1000)
#: rows, columns, group size, maps (of the padded rows)
SHAPES = (
    (64, 64, 64, 1),
    (1, 64, 64, 1),
    (60, 200, 64, 1),
    (130, 256, 256, 1),
    (192, 384, 128, 3),
    (60, 1000, 192, 64),
    (320, 1088, 64, 1),
    (256, 4096, 4096, 1),
    (1000, 3000, 128, 1024),
    (520, 7168, 128, 9),
    (4096, 4096, 128, 1),
)
#: conftest.py's Packed: spec, codes, scales, qmap, weight; called with x and a bias.
Make = Callable[..., Any]


@pytest.fixture(autouse=True)
def device() -> None:
    if limits(0).arch != ARCH:
        pytest.skip("no prefill kernel for this GPU")


def random_x(tokens: int, columns: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(tokens)
    return torch.randn(tokens, columns, generator=generator, device="cuda").to(dtype)


def relative(found: torch.Tensor, truth: torch.Tensor) -> float:
    return float((found.double() - truth).norm() / truth.norm())


def desc_of(packed: Any, x: torch.Tensor) -> W3Desc:
    x_dtype: Any = str(x.dtype).removeprefix("torch.")
    return W3Desc.of(packed.spec, tokens=x.shape[0], x_dtype=x_dtype, device=limits(0))


def run(
    packed: Any, x: torch.Tensor, bias: torch.Tensor | None = None, config: PrefillConfig | None = None
) -> torch.Tensor:
    """The kernel's product, NaN in and after it before: what is not written shows, and so does what is written beyond."""
    desc = desc_of(packed, x)
    plan = prefill_plan(desc) if config is None else make_plan(desc, config)
    tokens, rows = x.shape[0], packed.spec.rows
    room = torch.full((tokens * rows + 64,), float("nan"), dtype=x.dtype, device="cuda")
    y = room[: tokens * rows].view(tokens, rows)
    run_prefill(plan, x, *packed.tensors, bias, y)
    assert bool(room[tokens * rows :].isnan().all())
    return y


def assert_right(packed: Any, x: torch.Tensor, bias: torch.Tensor | None = None, **given: Any) -> None:
    found = run(packed, x, bias, **given)
    truth = torch.nn.functional.linear(x.double(), packed.weight, None if bias is None else bias.double())
    matrix = w3.dequantize(*packed.tensors, spec=packed.spec, dtype=x.dtype)
    torchs = relative(torch.nn.functional.linear(x, matrix, bias), truth)
    few = torch.finfo(x.dtype).eps if truth.numel() < 1000 else 1e-5
    assert relative(found, truth) <= 1.05 * torchs + few, (tuple(x.shape), relative(found, truth), torchs)


def load_all(plans: Any) -> None:
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda text: load(text, 0), {plan.text for plan in plans}))


@pytest.mark.parametrize(("tile", "cluster", "split"), DIVISIONS)
def test_identity_activations_read_the_matrix_back(make: Make, tile: int, cluster: int, split: bool) -> None:
    """Exact: every weight in its place, and nothing else in the sum."""
    for shape, dtype in itertools.product(((320, 1088, 64, 1), (192, 384, 128, 3)), HALVES):
        packed = make(shape, "dense", "int8")
        x = torch.eye(shape[1], device="cuda", dtype=dtype)
        config = config_of(desc_of(packed, x), tokens=tile, cluster=cluster, split=split)
        truth = w3.dequantize(*packed.tensors, spec=packed.spec, dtype=dtype).t()
        assert torch.equal(run(packed, x, config=config), truth)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("qmap_dtype", QMAP_DTYPES)
@pytest.mark.parametrize("dtype", HALVES)
def test_errs_no_more_than_torch(
    make: Make, shape: tuple[int, int, int, int], layout: Any, qmap_dtype: Any, dtype: torch.dtype
) -> None:
    packed = make(shape, layout, qmap_dtype)
    bias = torch.linspace(-1, 1, shape[0], device="cuda", dtype=dtype)
    xs = [random_x(tokens, shape[1], dtype) for tokens in TOKENS]
    load_all(prefill_plan(desc_of(packed, x)) for x in xs)
    for x in xs:
        assert_right(packed, x)
        assert_right(packed, x, bias)


@pytest.mark.parametrize(("tile", "cluster", "split"), DIVISIONS)
@pytest.mark.parametrize("fewest", [True, False])
def test_every_config(make: Make, tile: int, cluster: int, split: bool, fewest: bool) -> None:
    packed = make((1000, 3000, 128, 1024), "nibble", "float16")
    for tokens in (65, 257, 1000):
        x = random_x(tokens, 3000)
        config = config_of(desc_of(packed, x), tokens=tile, cluster=cluster, split=split)
        config = replace(config, slots=config.fewest_slots if fewest else config.slots)
        assert_right(packed, x, config=config)


@pytest.mark.parametrize(("cluster", "split"), [(1, False), (2, False), (1, True), (2, True)])
@pytest.mark.parametrize("tokens", [100, 513])
def test_launches_agree_in_every_bit(make: Make, tokens: int, cluster: int, split: bool) -> None:
    """Also back to back, where a launch begins while the one before ends, and with the fewest slots."""
    packed = make((4096, 4096, 128, 1))
    x = random_x(tokens, 4096)
    desc = desc_of(packed, x)
    wide = config_of(desc, tokens=256, cluster=cluster, split=split)
    for config in (
        config_of(desc, tokens=128, cluster=cluster, split=split),
        replace(wide, slots=wide.fewest_slots),
    ):
        plan = make_plan(desc, config)
        found = [torch.full((tokens, 4096), float("nan"), dtype=x.dtype, device="cuda") for _ in range(50)]
        for y in found:
            run_prefill(plan, x, *packed.tensors, None, y)
        assert all(torch.equal(y, found[0]) for y in found)
        assert relative(found[0], torch.nn.functional.linear(x.double(), packed.weight)) <= 3.2e-4


def test_chained_launches_see_each_others_results(make: Make) -> None:
    """The output of one is the input of the next: nothing is read before it is there."""
    packed = make((4096, 4096, 128, 1))
    x = random_x(300, 4096)
    plan = prefill_plan(desc_of(packed, x))
    for _ in range(20):
        buffers = [x, *(torch.full_like(x, float("nan")) for _ in range(4))]
        for source, target in itertools.pairwise(buffers):
            run_prefill(plan, source, *packed.tensors, None, target)
        expected = x
        for _ in range(4):
            following = torch.empty_like(x)
            run_prefill(plan, expected, *packed.tensors, None, following)
            torch.cuda.synchronize()
            expected = following
        assert torch.equal(buffers[-1], expected)


def test_it_runs_in_a_graph(make: Make) -> None:
    packed = make((4096, 4096, 128, 1))
    x, y = random_x(257, 4096), torch.empty(257, 4096, dtype=torch.float16, device="cuda")
    plan = prefill_plan(desc_of(packed, x))
    run_prefill(plan, x, *packed.tensors, None, y)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_prefill(plan, x, *packed.tensors, None, y)
    for seed in (1, 2):
        x.copy_(random_x(257 + seed, 4096)[:257])
        y.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, run(packed, x))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", HALVES)
def test_what_is_not_finite_stays_in_its_token(make: Make, value: float, dtype: torch.dtype) -> None:
    packed = make((520, 7168, 128, 9))
    x = random_x(130, 7168, dtype)
    clean = run(packed, x)
    x[70, 4000] = value
    found = run(packed, x)
    others = [token for token in range(130) if token != 70]
    assert torch.equal(found[others], clean[others])
    assert not bool(found[70].isfinite().any())


def test_rows_of_x_may_lie_apart(make: Make) -> None:
    packed = make((60, 200, 64, 1))
    wide = torch.full((100, 240), float("nan"), dtype=torch.float16, device="cuda")
    x = wide[:, 16:216]
    x.copy_(random_x(100, 200))
    assert torch.equal(run(packed, x), run(packed, x.contiguous()))


def test_the_operator_takes_it_where_it_may(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the op, with a bias; an x that no tensor map can describe goes the other way."""
    packed = make((1000, 3000, 128, 1024), "dense", "int8")
    form = packed.form(torch.float16)
    x, bias = random_x(257, 3000), torch.linspace(-1, 1, 1000, device="cuda", dtype=torch.float16)
    expected = run(packed, x, bias)
    other = packed(x, bias)
    calls: list[int] = []
    way = w3_cuda.without_mainloop
    monkeypatch.setattr(w3_cuda, "without_mainloop", lambda *given: (calls.append(1), way(*given))[1])
    monkeypatch.setattr(form, "mainloop", range(65, 1000))
    assert torch.equal(packed(x, bias), expected)
    assert torch.equal(packed(x.view(1, 257, 3000), bias)[0], expected)
    assert not calls
    odd = torch.empty(257, 3001, dtype=torch.float16, device="cuda")[:, 1:]
    odd.copy_(x)
    assert relative(packed(odd, bias), other.double()) <= 1e-3  # torch may take another kernel for such rows
    assert calls == [1]
