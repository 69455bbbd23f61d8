"""Deciding is pure: every shape gets a plan that fits, and measurements are used where they speak for the call."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from w3pack.errors import UnsupportedError
from w3pack.ops.configs import DEVICES
from w3pack.ops.w3_config import MAX_OWN_TOKENS, W3Config, W3Desc, make_plan, shared_bytes
from w3pack.ops.w3_decide import BUCKETS, bucket_of, decide, dense_from, plan_of
from w3pack.ops.w3_table import Entry, Table

H200 = DEVICES["sm_90a"]


def desc(rows: int = 4096, columns: int = 4096, tokens: int = 8, **changes: object) -> W3Desc:
    base = W3Desc(
        tokens=tokens,
        rows=rows,
        columns=columns,
        group_size=128,
        layout="dense",
        qmap_dtype="int8",
        map_kind="linear",
        x_dtype="float16",
        device=H200,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def entry(rows: int, columns: int, tokens: int, slots: int, **changes: object) -> Entry:
    tiles = 1 if tokens <= 8 else 2
    config = W3Config(
        token_tiles=tiles, row_warps=4, split_warps=2, token_warps=1, slots=slots, ring=0, blocks=99, slot_steps=2
    )
    if tokens > 16:
        config = replace(config, token_tiles=4, row_warps=4, split_warps=1, token_warps=2, ring=4, slot_steps=1)
    made = Entry(rows, columns, tokens, "dense", "int8", "linear", 1, None, config, 1.0)
    return replace(made, **changes)  # type: ignore[arg-type]


def table(*entries: Entry, prefill: tuple[tuple[int, int, int], ...] = ()) -> Table:
    return Table("NVIDIA H200", entries, prefill)


@settings(max_examples=600, deadline=None)
@given(
    arch=st.sampled_from(sorted(DEVICES)),
    rows=st.integers(1, 300_000) | st.sampled_from([1, 64, 4096, 8192, 14336, 28672, 152_064]),
    columns=st.integers(1, 40_000) | st.sampled_from([64, 4096, 8192, 14336, 28672, 53_248]),
    tokens=st.integers(1, 64),
    group_size=st.sampled_from([64, 128, 192, 256, 4096]),
    layout=st.sampled_from(["dense", "nibble"]),
    qmap_dtype=st.sampled_from(["int8", "float16"]),
    map_kind=st.sampled_from(["linear", "tile", "row"]),
    x_dtype=st.sampled_from(["float16", "bfloat16"]),
    with_table=st.booleans(),
)
def test_every_shape_gets_a_plan_that_fits(
    arch: str, rows: int, columns: int, tokens: int, with_table: bool, **form: object
) -> None:
    device = DEVICES[arch]
    call = desc(rows, columns, tokens, device=device, **form)
    measured = table(entry(4096, 4096, 8, 12), entry(4096, 4096, 64, 12), entry(8192, 8192, 16, 5))
    plan = plan_of(call, measured if with_table else None)
    config = plan.config
    assert tokens <= 8 * config.all_token_tiles
    assert plan.shared_bytes == shared_bytes(call, config) <= device.shared_bytes
    assert 1 <= plan.grid <= -(-call.row_tiles // config.row_warps) * call.steps
    assert plan.run_units >= 1
    assert config.slots >= 2
    assert config.warps <= 8
    assert config.ring <= 0 or (device.bulk and config.split_warps == 1)
    assert config.ring != 0 or tokens <= MAX_OWN_TOKENS
    assert not config.warpgroups or (arch == "sm_90a" and config.row_warps % 4 == 0 and config.ring != -1)
    assert plan.run_units * plan.grid + plan.longer_runs == plan.row_blocks * call.steps
    assert plan.row_blocks * call.steps * call.steps < 1 << 32
    assert decide(call, measured if with_table else None) == config


@pytest.mark.parametrize(
    ("rows", "columns", "tokens", "expected"),
    [
        (4096, 4096, 1, (1, 1, 8, 1, 0, False)),
        (8192, 8192, 8, (1, 4, 2, 1, 0, False)),
        (28672, 8192, 8, (1, 8, 1, 1, 0, False)),
        (28672, 8192, 16, (2, 8, 1, 1, -2, False)),
        (4096, 4096, 9, (2, 1, 8, 1, -2, False)),
        (4096, 4096, 17, (4, 8, 1, 1, 4, True)),
        (4096, 4096, 33, (4, 4, 1, 2, 4, True)),
    ],
)
def test_rule_of_thumb_on_the_h200(rows: int, columns: int, tokens: int, expected: tuple[int, ...]) -> None:
    c = decide(desc(rows, columns, tokens))
    assert (c.token_tiles, c.row_warps, c.split_warps, c.token_warps, c.ring, c.warpgroups) == expected
    assert c.blocks == 132


def test_older_devices_get_no_ring_and_others_no_warpgroups() -> None:
    assert decide(desc(tokens=64, device=DEVICES["sm_80"])).ring == -1
    assert decide(desc(tokens=64, device=DEVICES["sm_100a"])).ring == 4
    assert not decide(desc(tokens=64, device=DEVICES["sm_100a"])).warpgroups


def test_forms_that_need_many_registers_get_no_warpgroups() -> None:
    for changes in ({"layout": "nibble"}, {"qmap_dtype": "float16"}, {"map_kind": "row"}, {"group_size": 64}):
        config = decide(desc(tokens=64, **changes))
        assert (config.token_tiles, config.token_warps, config.row_warps, config.warpgroups) == (2, 4, 2, False)
    narrow = decide(desc(tokens=64, map_kind="row", group_size=64))
    assert (narrow.token_tiles, narrow.token_warps, narrow.row_warps) == (1, 8, 1)


def test_buckets() -> None:
    assert [bucket_of(tokens) for tokens in (1, 8, 9, 16, 17, 32, 33, 64)] == [8, 8, 16, 16, 32, 32, 64, 64]
    assert BUCKETS == (8, 16, 32, 64)


@pytest.mark.parametrize("tokens", [0, 65])
def test_other_numbers_of_tokens_are_refused(tokens: int) -> None:
    with pytest.raises(UnsupportedError, match=r"expected 1 to 64 tokens, got"):
        decide(desc(tokens=tokens))


def test_the_nearest_measured_shape_decides() -> None:
    measured = table(entry(4096, 4096, 8, 3), entry(8192, 8192, 8, 4), entry(28672, 8192, 8, 2))
    assert decide(desc(4096, 5000), measured).slots == 3
    assert decide(desc(8192, 7168), measured).slots == 4
    assert decide(desc(20000, 8192), measured).slots == 2
    assert decide(desc(4096, 4096, tokens=1), measured).slots == 3


def test_measurements_of_other_forms_and_buckets_do_not_count() -> None:
    plain = decide(desc())
    for other in (
        entry(4096, 4096, 16, 3),
        entry(4096, 4096, 8, 3, layout="nibble"),
        entry(4096, 4096, 8, 3, qmap_dtype="float16"),
        entry(4096, 4096, 8, 3, map_kind="row"),
        entry(4096, 4096, 8, 3, scale_sets=2),
        entry(4096, 4096, 8, 3, x_dtype="bfloat16"),
        entry(64, 64, 8, 3),  # too far away
    ):
        assert decide(desc(), table(other)) == plain
    assert decide(desc(map_kind="tile"), table(entry(4096, 4096, 8, 3))).slots == 3
    assert decide(desc(), table(entry(4096, 4096, 8, 3, x_dtype="float16"))).slots == 3


def test_a_measured_config_that_does_not_fit_gives_way_to_the_next() -> None:
    measured = table(entry(4096, 4096, 8, 16), entry(8192, 8192, 8, 3))
    assert decide(desc(), measured).slots == 3
    with pytest.raises(UnsupportedError):
        make_plan(desc(), measured.entries[0].config)


def test_dense_from() -> None:
    assert dense_from(desc()) == 129
    measured = table(prefill=((4096, 4096, 200), (28672, 8192, 90)))
    assert dense_from(desc(5000, 4096), measured) == 200
    assert dense_from(desc(28672, 8192), measured) == 90
    assert dense_from(desc(28672, 8192), table()) == 129
    assert dense_from(desc(64, 64), measured) == 129  # too far away


def test_matrices_beyond_the_kernels_arithmetic_are_dense() -> None:
    huge = desc(1 << 24, 1 << 24)
    assert dense_from(huge) == 1
    with pytest.raises(UnsupportedError, match=r"dequantise it"):
        decide(huge)
    assert dense_from(desc(64, 1 << 24, group_size=1 << 24)) == 1


def test_clusters_share_whole_row_blocks() -> None:
    config = W3Config(token_tiles=1, row_warps=2, split_warps=4, token_warps=1, slots=8, ring=-2, blocks=132, cluster=8)
    plan = make_plan(desc(rows=4096, columns=4096), config)
    assert (plan.grid, plan.resident_steps) == (128, 4)  # 16 clusters over 32 row blocks, 32 steps in eight parts
    assert make_plan(desc(rows=300, columns=4096), config).grid == 24  # no cluster without a row block
    with pytest.raises(UnsupportedError, match="choose smaller clusters"):
        make_plan(desc(columns=512), config)
    with pytest.raises(UnsupportedError, match="expected clusters on sm_90 or later"):
        make_plan(desc(device=DEVICES["sm_80"]), replace(config, ring=0, slot_steps=4))


def test_planes_beside_each_other_take_four_tokens_of_an_int8_map() -> None:
    config = W3Config(
        token_tiles=1, row_warps=2, split_warps=4, token_warps=1, slots=8, ring=-2, blocks=132, beside=True
    )
    assert make_plan(desc(tokens=4), config).staged_bytes == 32 * 1024
    for changes in ({"tokens": 5}, {"tokens": 4, "qmap_dtype": "float16"}):
        with pytest.raises(UnsupportedError, match="expected"):
            make_plan(desc(**changes), config)
