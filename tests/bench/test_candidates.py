"""Candidates are pure: each fits the call and the device, for every architecture."""

from __future__ import annotations

import pytest

from w3pack.bench.candidates import candidates
from w3pack.bench.shapes import MODELS, Case
from w3pack.ops.w3_config import MAX_OWN_TOKENS, DeviceLimits, make_plan

H200 = DeviceLimits(arch="sm_90a", multiprocessors=132, shared_bytes=232448)
A100 = DeviceLimits(arch="sm_80", multiprocessors=108, shared_bytes=166912)
SMALL = DeviceLimits(arch="sm_120a", multiprocessors=24, shared_bytes=101376)


@pytest.mark.parametrize("device", [H200, A100, SMALL], ids=lambda device: device.arch)
@pytest.mark.parametrize("tokens", [1, 8, 9, 16, 17, 33, 64])
@pytest.mark.parametrize("layout", ["dense", "nibble"])
def test_every_shape_has_candidates_that_can_be_planned(device: DeviceLimits, tokens: int, layout: str) -> None:
    for shape in (*MODELS["limits"], *MODELS["smollm2-135m"]):
        case = Case(shape.rows, shape.columns, tokens, layout=layout)  # type: ignore[arg-type]
        desc = case.desc(device)
        found = candidates(desc)
        assert 1 <= len(found) <= 40
        assert len(set(found)) == len(found)
        for config in found:
            plan = make_plan(desc, config)
            assert plan.config == config
            assert 8 * config.all_token_tiles >= tokens
            assert 4 <= config.warps <= 16
            assert config.split_warps % config.slot_steps == 0
            assert config.slots * config.slot_steps % config.split_warps == 0
            assert config.ring != 0 or tokens <= MAX_OWN_TOKENS
            assert config.blocks % config.cluster == 0
            assert config.cluster == 1 or device.bulk
            assert not config.beside or (tokens <= 4 and config.token_tiles == 1)
            assert config.ring <= 0 or (device.bulk and config.split_warps == 1)
            if config.warpgroups:
                assert device.arch == "sm_90a"
                assert config.row_warps % 4 == 0


def test_the_families_come_before_their_second_members() -> None:
    desc = Case(4096, 4096, 8).desc(H200)
    found = candidates(desc, limit=12)
    assert found == candidates(desc, limit=40)[:12]
    divisions = {
        (c.row_warps, c.split_warps, c.token_warps, c.ring, c.warpgroups, c.slot_steps, c.cluster) for c in found
    }
    assert len(divisions) == 12


def test_more_tokens_than_a_kernel_takes_have_none() -> None:
    assert candidates(Case(4096, 4096, 65).desc(H200)) == []


def test_the_order_is_always_the_same() -> None:
    desc = Case(14336, 4096, 16).desc(H200)
    assert candidates(desc) == candidates(desc)
