"""The data-free quantizer keeps what the format promises and picks the nearest codes for what it stores."""

from __future__ import annotations

import pytest
import torch

from w3pack.errors import CheckpointError, UnsupportedError, UsageError
from w3pack.quantize import QuantizedLinear, QuantizeSettings, map_names, named_map, quantize_data_free


def heavy_tailed(rows: int, columns: int, *, seed: int = 1) -> torch.Tensor:
    """A weight with rows of different size, skew and a few outliers; float32 [rows, columns]."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator) * torch.linspace(0.005, 0.05, rows).unsqueeze(1)
    outliers = torch.rand(rows, columns, generator=generator) < 0.01
    return torch.where(outliers, weight * 4, weight)


def map_of(result: QuantizedLinear) -> torch.Tensor:
    """float64 [maps, 8]."""
    values = result.qmap.to(torch.float64)
    return values / 127 if result.qmap.dtype == torch.int8 else values


def dequantize_slowly(result: QuantizedLinear) -> torch.Tensor:
    """One weight at a time, float64; the twin of QuantizedLinear.dequantize."""
    rows, columns = result.codes.shape
    values = map_of(result)
    out = torch.empty(rows, columns, dtype=torch.float64)
    for n in range(rows):
        for k in range(columns):
            entry = values[n if values.shape[0] > 1 else 0, int(result.codes[n, k])]
            out[n, k] = entry * result.scales[n, k // result.group_size].to(torch.float64)
    return out


def relative_error(result: QuantizedLinear, weight: torch.Tensor) -> float:
    return float(((result.dequantize() - weight) ** 2).sum() / (weight**2).sum())


@pytest.mark.parametrize("columns", [64, 192, 576])
@pytest.mark.parametrize("per", ["tensor", "row"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float16])
def test_codes_are_nearest_for_what_is_stored(columns: int, per: str, dtype: torch.dtype) -> None:
    weight = heavy_tailed(48, columns)
    result = quantize_data_free(weight, QuantizeSettings(qmap_dtype=dtype, qmap_per=per))
    values = map_of(result).expand(48, 8)
    spread = result.scales.to(torch.float64).repeat_interleave(128, dim=1)[:, :columns]
    every = (values[:, None, :] * spread[:, :, None] - weight.to(torch.float64)[:, :, None]).abs()  # [rows, columns, 8]
    chosen = every.gather(2, result.codes.to(torch.int64)[:, :, None])[:, :, 0]
    # Ties and the float32 division may move a weight that lies on a threshold: a part in a million of the scale.
    assert bool((chosen <= every.amin(dim=2) + 1e-6 * spread.abs()).all())


def test_shapes_dtypes_and_content_can_fail_a_kernel() -> None:
    weight = heavy_tailed(48, 576)
    result = quantize_data_free(weight.to(torch.bfloat16), QuantizeSettings())
    assert result.codes.shape == (48, 576)
    assert result.codes.dtype == torch.uint8
    assert result.scales.shape == (48, 5)
    assert result.scales.dtype == torch.float16
    assert result.qmap.shape == (1, 8)
    assert result.qmap.dtype == torch.int8
    assert set(result.codes.unique().tolist()) == set(range(8))
    assert bool((result.scales < 0).any())
    assert bool((result.scales > 0).any())
    entries = result.qmap[0].tolist()
    assert entries == sorted(entries)
    assert 0 in entries
    assert max(abs(entry) for entry in entries) == 127


@pytest.mark.parametrize("per", ["tensor", "row"])
def test_dequantize_matches_its_slow_twin(per: str) -> None:
    result = quantize_data_free(heavy_tailed(5, 192), QuantizeSettings(qmap_per=per))
    torch.testing.assert_close(result.dequantize().to(torch.float64), dequantize_slowly(result), rtol=1e-6, atol=0)


@pytest.mark.parametrize("per", ["tensor", "row"])
def test_result_does_not_depend_on_threads_or_workers(per: str) -> None:
    weight = heavy_tailed(400, 832)  # several chunks, the last one short; ragged groups
    before = torch.get_num_threads()
    results = []
    try:
        for threads, workers in ((1, 1), (2, 1), (1, 2), (2, 3)):
            torch.set_num_threads(threads)
            results.append(quantize_data_free(weight, QuantizeSettings(qmap_per=per), workers=workers))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert torch.equal(results[0].codes, other.codes)
        assert torch.equal(results[0].qmap, other.qmap)
        assert torch.equal(results[0].scales, other.scales)


def test_row_maps_differ_and_fit_better() -> None:
    weight = heavy_tailed(16, 1024)
    weight[::2] = torch.sign(weight[::2])  # half of the rows hold two values only: no shared map suits both halves
    weight[::2, ::3] *= 0.4
    shared = quantize_data_free(weight, QuantizeSettings())
    own = quantize_data_free(weight, QuantizeSettings(qmap_per="row"))
    assert own.qmap.shape == (16, 8)
    assert len({tuple(row) for row in own.qmap.tolist()}) > 8
    assert bool((own.qmap.diff(dim=1) >= 0).all())
    assert bool((own.qmap == 0).any(dim=1).all())
    assert relative_error(own, weight) < relative_error(shared, weight)


def test_better_than_nf3_absmax() -> None:
    weight = heavy_tailed(64, 512)
    groups = weight.view(64, 4, 128)
    scale = groups.abs().amax(dim=2, keepdim=True)
    table = named_map("nf3")
    nf3 = table[torch.bucketize(groups / scale, (table[1:] + table[:-1]) / 2)] * scale
    nf3_error = float(((nf3 - groups) ** 2).sum() / (groups**2).sum())
    assert relative_error(quantize_data_free(weight, QuantizeSettings()), weight) < 0.85 * nf3_error


def test_zero_groups_and_tiny_groups() -> None:
    weight = heavy_tailed(4, 320)
    weight[1] = 0.0
    weight[2, :128] = 0.0
    weight[3, 256:] = 1e-9  # below float16: the scale is floored, not lost
    result = quantize_data_free(weight, QuantizeSettings())
    back = result.dequantize()
    assert torch.equal(back[1], torch.zeros(320))
    assert torch.equal(back[2, :128], torch.zeros(128))
    assert result.scales[1].tolist() == [0.0, 0.0, 0.0]
    assert float(result.scales[2, 0]) == 0.0
    assert abs(float(result.scales[3, 2])) == 2.0**-24
    assert bool(torch.isfinite(back).all())
    assert bool((quantize_data_free(torch.zeros(3, 64), QuantizeSettings(group_size=64)).scales == 0).all())


def test_ragged_last_group_is_not_diluted_by_padding() -> None:
    weight = heavy_tailed(8, 192)
    whole = quantize_data_free(weight[:, 128:], QuantizeSettings(group_size=64), qmap=named_map("nf3"))
    ragged = quantize_data_free(weight, QuantizeSettings(group_size=128), qmap=named_map("nf3"))
    torch.testing.assert_close(ragged.scales[:, 1:], whole.scales, rtol=2e-3, atol=0)
    no_zero = quantize_data_free(weight, QuantizeSettings(group_size=128), qmap=named_map("gaussian"))
    narrow = quantize_data_free(weight[:, 128:], QuantizeSettings(group_size=64), qmap=named_map("gaussian"))
    torch.testing.assert_close(no_zero.scales[:, 1:].abs(), narrow.scales.abs(), rtol=2e-3, atol=0)


def test_non_finite_weights_are_refused_with_their_count() -> None:
    weight = heavy_tailed(8, 256)
    weight[3, 7] = float("nan")
    weight[5, 200] = float("inf")
    weight[5, 201] = float("-inf")
    with pytest.raises(CheckpointError, match="got 3 that"):
        quantize_data_free(weight, QuantizeSettings())


def test_scales_beyond_float16_are_refused() -> None:
    weight = heavy_tailed(8, 128) * 1e9
    with pytest.raises(UnsupportedError, match="float16"):
        quantize_data_free(weight, QuantizeSettings())


def test_huge_and_small_weights_do_not_overflow_inside() -> None:
    weight = heavy_tailed(8, 128)
    plain = quantize_data_free(weight, QuantizeSettings())
    for power in (-6, 12):
        scaled = quantize_data_free(weight * 2.0**power, QuantizeSettings())
        assert torch.equal(scaled.qmap, plain.qmap)
        torch.testing.assert_close(scaled.dequantize(), plain.dequantize() * 2.0**power, rtol=2e-2, atol=0)


@pytest.mark.parametrize("name", map_names())
@pytest.mark.parametrize("maps", [1, 8])
def test_float16_map_is_kept_exactly(name: str, maps: int) -> None:
    generator = torch.Generator().manual_seed(3)
    qmap = named_map(name).to(torch.float16).repeat(maps, 1)
    if maps > 1:
        qmap = (qmap * (0.5 + 0.5 * torch.rand(maps, 1, generator=generator))).to(torch.float16)
    result = quantize_data_free(heavy_tailed(8, 256), QuantizeSettings(qmap_dtype=torch.float16), qmap=qmap)
    assert result.qmap.dtype == torch.float16
    assert torch.equal(result.qmap, qmap)
    assert relative_error(result, heavy_tailed(8, 256)) < 0.1


def test_fixed_map_is_rounded_to_the_int8_grid() -> None:
    result = quantize_data_free(heavy_tailed(8, 256), QuantizeSettings(), qmap=named_map("nf3"))
    assert result.qmap.tolist() == [[-127, -68, -31, 0, 23, 49, 79, 127]]
    again = quantize_data_free(heavy_tailed(8, 256), QuantizeSettings(), qmap=result.qmap)
    assert torch.equal(again.qmap, result.qmap)
    assert torch.equal(again.codes, result.codes)


def test_named_maps_are_canonical_and_unknown_names_are_listed() -> None:
    for name in map_names():
        table = named_map(name)
        assert table.dtype == torch.float32
        assert table.shape == (8,)
        assert bool((table.diff() > 0).all())
        assert float(table.abs().max()) == 1.0
    assert {"nf3", "uniform", "gaussian"} <= set(map_names())
    with pytest.raises(UsageError, match="nf3"):
        named_map("nf5")


@pytest.mark.parametrize(
    "qmap",
    [
        torch.zeros(7),
        torch.zeros(3, 8),
        torch.tensor([0.0, 0.1, 0.3, 0.2, 0.5, 0.6, 0.7, 1.0]),
        torch.linspace(-1, 2, 8),
        torch.tensor([float("nan")] * 8),
        torch.arange(8),
    ],
)
def test_bad_maps_are_refused(qmap: torch.Tensor) -> None:
    with pytest.raises(UsageError):
        quantize_data_free(heavy_tailed(8, 128), QuantizeSettings(), qmap=qmap)


def test_bad_settings_and_weights_are_refused() -> None:
    for group_size in (0, 32, 100):
        with pytest.raises(UsageError):
            QuantizeSettings(group_size=group_size)
    with pytest.raises(UsageError):
        QuantizeSettings(qmap_dtype=torch.float32)
    with pytest.raises(UsageError):
        QuantizeSettings(qmap_per="column")
    for weight in (torch.zeros(4), torch.zeros(4, 64, dtype=torch.int32), torch.zeros(0, 64)):
        with pytest.raises(UsageError):
            quantize_data_free(weight, QuantizeSettings())
    with pytest.raises(UsageError):
        quantize_data_free(torch.zeros(4, 64), QuantizeSettings(), workers=0)


def test_the_weight_is_not_modified_and_the_seed_matters_little() -> None:
    weight = heavy_tailed(512, 512)
    copy = weight.clone()
    first = quantize_data_free(weight, QuantizeSettings(seed=0))
    second = quantize_data_free(weight, QuantizeSettings(seed=1))
    assert torch.equal(weight, copy)
    assert abs(relative_error(first, weight) / relative_error(second, weight) - 1) < 0.1


def test_group_size_must_fit_the_scales() -> None:
    with pytest.raises(UsageError):
        QuantizedLinear(
            torch.zeros(2, 256, dtype=torch.uint8), torch.zeros(1, 8, dtype=torch.int8), torch.zeros(2, 4).half()
        )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_any_floating_dtype(dtype: torch.dtype) -> None:
    weight = heavy_tailed(8, 192).to(dtype)
    narrow = quantize_data_free(weight, QuantizeSettings())
    wide = quantize_data_free(weight.to(torch.float32), QuantizeSettings())
    assert torch.equal(narrow.codes, wide.codes)
    assert torch.equal(narrow.scales, wide.scales)
