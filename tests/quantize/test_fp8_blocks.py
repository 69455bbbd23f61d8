"""Block-scaled FP8: partial blocks, stacks, every scale dtype, and grids that contradict the config."""

from __future__ import annotations

import pytest
import torch

from w3pack.errors import CheckpointError
from w3pack.quantize.fp8_blocks import decode_scales, dequantize_blocks

E4M3 = torch.float8_e4m3fn


def ceil(size: int, block: int) -> int:
    return -(-size // block)


def fp8_weight(*shape: int, seed: int = 0) -> torch.Tensor:
    """float8 of `shape` in which every finite byte occurs when there is room."""
    count = torch.Size(shape).numel()
    raw = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).remainder(256).to(torch.uint8)
    raw[(raw & 0x7F) == 0x7F] = 0x3A  # the two NaN bytes
    return raw.view(shape).view(E4M3)


def distinct_scales(*shape: int) -> torch.Tensor:
    """float32 of `shape`, all distinct."""
    count = torch.Size(shape).numel()
    return (1 + torch.randperm(count, generator=torch.Generator().manual_seed(count)).float()).div(64).view(shape)


def slow(weight: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """The definition, one block at a time, for one matrix."""
    result = torch.full(weight.shape, float("nan"))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            rows = slice(i * block[0], min((i + 1) * block[0], weight.shape[0]))
            columns = slice(j * block[1], min((j + 1) * block[1], weight.shape[1]))
            result[rows, columns] = weight[rows, columns].float() * float(scales[i, j])
    assert not result.isnan().any()
    return result


@pytest.mark.parametrize(("rows", "columns"), [(4544, 130), (576, 256), (128, 576), (1, 1), (127, 129), (256, 128)])
def test_case_01_partial_blocks_keep_the_shape(rows: int, columns: int) -> None:
    weight, scales = fp8_weight(rows, columns), distinct_scales(ceil(rows, 128), ceil(columns, 128))
    result = dequantize_blocks(weight, scales, block=(128, 128))
    assert result.dtype == torch.float32
    assert result.shape == weight.shape
    assert torch.equal(result, slow(weight, scales, (128, 128)))


@pytest.mark.parametrize(("rows", "grid_rows"), [(1000, 8), (192, 2)])
def test_case_02_block_size_is_not_inferred(rows: int, grid_rows: int) -> None:
    """1000 rows with 8 scale rows are blocks of 128, not of 125; 192 with 2 are not blocks of 96."""
    weight, scales = fp8_weight(rows, 256), distinct_scales(grid_rows, 2)
    result = dequantize_blocks(weight, scales, block=(128, 128))
    assert torch.equal(result, slow(weight, scales, (128, 128)))
    inferred = slow(weight, scales, (rows // grid_rows, 128))
    assert not torch.equal(result, inferred)


@pytest.mark.parametrize("grid", [(7, 2), (9, 2), (8, 1), (8, 3), (2, 8), (1, 1), (8, 2, 1), (1, 8, 2), (16,), ()])
def test_case_02_wrong_grid_is_refused(grid: tuple[int, ...]) -> None:
    weight = fp8_weight(1000, 256)
    scales = torch.ones(grid)
    with pytest.raises(CheckpointError, match=r"expected a scale grid of \(8, 2\).*got"):
        dequantize_blocks(weight, scales, block=(128, 128))


def test_case_02_the_grid_of_another_block_size_is_refused() -> None:
    weight = fp8_weight(1024, 256)
    with pytest.raises(CheckpointError, match="config"):
        dequantize_blocks(weight, torch.ones(16, 4), block=(128, 128))
    assert dequantize_blocks(weight, torch.ones(16, 4), block=(64, 64)).shape == (1024, 256)


@pytest.mark.parametrize("rows", [192, 576, 64, 256])
def test_case_03_stacks_are_blocked_expert_by_expert(rows: int) -> None:
    weight = fp8_weight(3, rows, 200)
    scales = distinct_scales(3, ceil(rows, 128), 2)
    result = dequantize_blocks(weight, scales, block=(128, 128))
    assert result.shape == weight.shape
    for expert in range(3):
        assert torch.equal(result[expert], slow(weight[expert], scales[expert], (128, 128)))


def test_case_03_the_grid_of_the_flattened_stack_is_refused() -> None:
    """3 x 192 rows flattened are 576, five rows of blocks; expert by expert they are six."""
    weight = fp8_weight(3, 192, 256)
    for grid in ((5, 2), (6, 2), (3, 5, 2), (2, 2, 2)):
        with pytest.raises(CheckpointError, match=r"\(3, 2, 2\)"):
            dequantize_blocks(weight, torch.ones(grid), block=(128, 128))


def test_stacks_of_stacks() -> None:
    weight, scales = fp8_weight(2, 3, 130, 140), distinct_scales(2, 3, 2, 2)
    result = dequantize_blocks(weight, scales, block=(128, 128))
    for i in range(2):
        for j in range(3):
            assert torch.equal(result[i, j], slow(weight[i, j], scales[i, j], (128, 128)))


@pytest.mark.parametrize("block", [(128, 128), (64, 256), (1, 128), (128, 1), (576, 1000), (1000, 1000)])
def test_block_sides_are_not_confused(block: tuple[int, int]) -> None:
    weight = fp8_weight(300, 260)
    scales = distinct_scales(ceil(300, block[0]), ceil(260, block[1]))
    assert torch.equal(dequantize_blocks(weight, scales, block=block), slow(weight, scales, block))


def test_e5m2_weights_and_weights_of_any_strides() -> None:
    raw = fp8_weight(300, 260).view(torch.uint8) & 0x7B  # never an exponent of all ones
    weight, scales = raw.view(torch.float8_e5m2), distinct_scales(3, 3)
    assert torch.equal(dequantize_blocks(weight, scales, block=(128, 128)), slow(weight, scales, (128, 128)))
    turned = weight.view(torch.uint8).t().contiguous().view(torch.float8_e5m2).t()
    assert not turned.is_contiguous()
    assert torch.equal(dequantize_blocks(turned, scales, block=(128, 128)), slow(weight, scales, (128, 128)))
    flipped = scales.t().contiguous().t()
    assert torch.equal(dequantize_blocks(weight, flipped, block=(128, 128)), slow(weight, scales, (128, 128)))


def test_inputs_are_left_alone() -> None:
    weight, scales = fp8_weight(200, 200), distinct_scales(2, 2)
    before = weight.view(torch.uint8).clone(), scales.clone()
    dequantize_blocks(weight, scales, block=(128, 128)).fill_(7)
    assert torch.equal(weight.view(torch.uint8), before[0])
    assert torch.equal(scales, before[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_case_12_float_scales_are_values(dtype: torch.dtype) -> None:
    scales = torch.tensor([[0.5, -3.0, 1.5], [2.0**-14, 448.0, 0.0]]).to(dtype)
    decoded = decode_scales(scales)
    assert decoded.dtype == torch.float32
    assert torch.equal(decoded, scales.float())


@pytest.mark.parametrize("stored", ["uint8", "float8_e8m0fnu"])
def test_case_12_e8m0_bytes_are_powers_of_two(stored: str) -> None:
    """2^(byte - 127), exactly, for every byte that is a number; 255 is e8m0's NaN and must not pass for one."""
    raw = torch.arange(256, dtype=torch.uint8).view(16, 16)
    decoded = decode_scales(raw.view(getattr(torch, stored)))
    assert decoded.dtype == torch.float32
    assert decoded.shape == raw.shape
    assert decoded.flatten()[:255].tolist() == [2.0 ** (byte - 127) for byte in range(255)]
    assert not bool(decoded[15, 15].isfinite())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.float8_e8m0fnu])
def test_case_12_every_scale_dtype_gives_the_same_matrix(dtype: torch.dtype) -> None:
    weight = fp8_weight(576, 200)
    exponents = torch.tensor([[120, 131], [125, 128], [127, 119], [126, 133], [121, 130]], dtype=torch.uint8)
    values = torch.exp2(exponents.float() - 127)
    if dtype == torch.uint8:
        scales = exponents
    elif dtype == torch.float8_e8m0fnu:
        scales = exponents.view(dtype)
    else:
        scales = values.to(dtype)
    result = dequantize_blocks(weight, scales, block=(128, 128))
    assert torch.equal(result, slow(weight, values, (128, 128)))


def test_nan_and_infinity_are_not_hidden() -> None:
    weight = fp8_weight(130, 130)
    weight.view(torch.uint8)[129, 129] = 0x7F
    assert bool(dequantize_blocks(weight, torch.ones(2, 2), block=(128, 128))[129, 129].isnan())
    scales = torch.tensor([[1.0, 1.0], [1.0, float("inf")]])
    assert not bool(dequantize_blocks(fp8_weight(130, 130), scales, block=(128, 128))[129, 128:].isfinite().all())
