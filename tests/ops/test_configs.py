"""What is built for every architecture is enough, and not more than can be built in a few minutes."""

from __future__ import annotations

import itertools

import pytest

from w3pack.errors import UnsupportedError
from w3pack.jit import ARCHS
from w3pack.ops.configs import DEVICES, all_kernel_texts
from w3pack.ops.w3_config import W3Desc
from w3pack.ops.w3_decide import BUCKETS, plan_of


@pytest.mark.parametrize("arch", ARCHS)
def test_kernels_of_usual_models_are_among_them(arch: str) -> None:
    texts = set(all_kernel_texts(arch))
    shapes = [(64, 128), (1024, 4096), (4096, 4096), (8192, 8192), (28672, 8192), (8192, 28672)]
    for (rows, columns), tokens, layout, qmap_dtype in itertools.product(
        shapes, BUCKETS, ("dense", "nibble"), ("int8", "float16")
    ):
        desc = W3Desc(
            tokens=tokens,
            rows=rows,
            columns=columns,
            group_size=128,
            layout="dense" if layout == "dense" else "nibble",
            qmap_dtype="int8" if qmap_dtype == "int8" else "float16",
            map_kind="linear",
            x_dtype="bfloat16",
            device=DEVICES[arch],
        )
        plan = plan_of(desc)
        if plan.config.slots % 3:  # of these, two forms stand for all
            assert plan.decode in texts
        assert plan.stage is None or plan.stage in texts


@pytest.mark.parametrize("arch", ARCHS)
def test_every_define_takes_all_its_values(arch: str) -> None:
    texts = [text for text in all_kernel_texts(arch) if not text.file.startswith("gateup")]
    assert len(set(texts)) == len(texts)
    decode = [dict(text.defines) for text in texts if text.entry == "w3_decode"]
    for name in ("W3_BF16", "W3_DENSE", "W3_INT8_MAP", "W3_ROW_MAPS", "W3_HALF_STEP"):
        assert {defines[name] for defines in decode} == {0, 1}
    assert {defines["W3_SCALE_SETS"] for defines in decode} == {1, 2}
    assert {text.entry for text in texts} >= {"w3_decode", "w3_stage", "w3_dequantize"}
    measured = 0 if arch != "sm_90a" else len(texts)
    assert len(texts) <= 250 + measured


def test_another_architecture_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"expected an architecture out of .*, got 'sm_70'"):
        all_kernel_texts("sm_70")
