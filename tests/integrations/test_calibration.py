"""Calibrated runs: what the solver is told, and that the bytes depend on nothing but source, options and text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from w3pack.checkpoint.safetensors_source import SafetensorsSource
from w3pack.errors import UnsupportedError, UsageError
from w3pack.format.config import W3Config
from w3pack.integrations.decoder_walk import DecoderWalk
from w3pack.integrations.loadable import loadable_for
from w3pack.pipeline import calibrate
from w3pack.pipeline.calibrate import Calibration
from w3pack.pipeline.plan import QuantizeOptions
from w3pack.pipeline.quantize_model import prepare_job, run
from w3pack.pipeline.report import Report
from w3pack.pipeline.verify_checkpoint import verify_checkpoint
from w3pack.quantize import named_map, quantize_data_free
from w3pack.quantize.calibrated import CalibratedLinear, Stage

WINDOWS = (6, 11)


def calibration_on(
    windows: torch.Tensor, *, effort: Any = "fast", in_memory: bool | None = None, dtype: torch.dtype | None = None
) -> Calibration:
    @contextmanager
    def start(job: Any, scratch: Path, device: str, workers: int) -> Iterator[DecoderWalk]:
        walk = DecoderWalk(
            job.source,
            job.plan,
            windows,
            scratch=scratch,
            device=device,
            workers=workers,
            in_memory=in_memory,
            dtype=dtype,
        )
        try:
            yield walk
        finally:
            walk.close()

    samples, length = windows.shape
    facts = {"texts": [], "samples": samples, "length": length, "tokens": windows.numel(), "sha256": "test"}
    return Calibration(effort=effort, facts=facts, open=start)


def calibrated(
    source: Path,
    output: Path,
    calibration: Calibration,
    *,
    workers: int = 1,
    progress: Callable[[str, int], None] | None = None,
    resume: bool = False,
    **options: Any,
) -> Report:
    opened = SafetensorsSource(source)
    job = prepare_job(opened, QuantizeOptions(**options), loadable=loadable_for(opened))
    return run(job, output, calibration=calibration, workers=workers, progress=progress, resume=resume)


def manifest(folder: Path) -> Any:
    return json.loads((folder / "w3pack.json").read_text())


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of two samples."""
    monkeypatch.setattr("w3pack.integrations.decoder_walk._BATCH_TOKENS", {"cpu": 2 * WINDOWS[1]})


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.Tensor, Any]]:
    """Weights and moments that the solver is given; in its place NF3 without data, which is quick."""
    seen: list[tuple[torch.Tensor, Any]] = []

    def stand_in(weight: torch.Tensor, moment: Any, settings: Any, **_: Any) -> CalibratedLinear:
        seen.append((weight, moment))
        linear = quantize_data_free(weight, settings, qmap=named_map("nf3"))
        return CalibratedLinear(linear=linear, stages=(Stage("data-free", 1.0, 0.5),), damping=0.0)

    monkeypatch.setattr(calibrate, "quantize_calibrated", stand_in)
    monkeypatch.setattr(calibrate, "factorize", lambda moment, damping: moment)
    return seen


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_each_linear_is_judged_by_inputs_from_quantised_ones(
    lab: Any, tmp_path: Path, told: list[tuple[torch.Tensor, Any]], small_batches: None, family: str
) -> None:
    """An input depends on what was computed before it only: in the finished model it must be the one that was used."""
    windows = lab.tokens(batch=WINDOWS[0], length=WINDOWS[1])
    calibrated(lab.source(family), tmp_path / "out", calibration_on(windows))
    packed = Packed(source=lab.source(family), folder=tmp_path / "out")
    quantised, plain = (
        _moments(lab.stock(packed, dtype=torch.float32), windows),
        _moments(lab.load(packed.source), windows),
    )
    sources = lab.read(packed.source)
    by_weight = {name: sources[f"{name}.weight"] for name in packed.config.modules}
    assert len(told) == len(by_weight)
    differ = 0
    for weight, moment in told:
        name = next(name for name, other in by_weight.items() if torch.equal(other, weight))
        assert lab.distance(moment, quantised[name]) < 1e-4
        differ += lab.distance(moment, plain[name]) > 1e-2
    assert differ >= len(told) - 3  # only the first q, k and v see what they see in the source


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_the_diagonal_is_that_of_the_source(
    lab: Any, tmp_path: Path, told: list[tuple[torch.Tensor, Any]], small_batches: None, family: str
) -> None:
    windows = lab.tokens(batch=WINDOWS[0], length=WINDOWS[1])
    report = calibrated(lab.source(family), tmp_path / "out", calibration_on(windows, effort="diagonal"))
    expected, sources = _moments(lab.load(lab.source(family)), windows), lab.read(lab.source(family))
    by_weight = {name: sources[f"{name}.weight"] for name in expected}
    assert len(told) == len(by_weight)
    for weight, moment in told:
        name = next(name for name, other in by_weight.items() if torch.equal(other, weight))
        assert lab.distance(moment, expected[name].diagonal()) < 1e-4
    assert report.calibration is not None
    assert all(0 < error < 1 for error in report.calibration["block_errors"])


@dataclass(frozen=True)
class Packed:
    """What `lab.stock` wants to know of a packed checkpoint."""

    source: Path
    folder: Path

    @property
    def config(self) -> W3Config:
        return W3Config.from_dict(json.loads((self.folder / "config.json").read_text())["quantization_config"])


@torch.no_grad()
def _moments(model: Any, windows: torch.Tensor) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    handles = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and "layers" in name:

            def hook(_: Any, args: Any, name: str = name) -> None:
                rows = args[0].flatten(0, -2).double()
                found[name] = rows.t() @ rows / len(rows)

            handles.append(module.register_forward_pre_hook(hook))
    model(input_ids=windows, use_cache=False)
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("effort", ["diagonal", "fast"])
def test_resumed_run_gives_the_same_bytes(
    lab: Any, tmp_path: Path, told: list[tuple[torch.Tensor, Any]], small_batches: None, effort: str
) -> None:
    windows = lab.tokens(batch=WINDOWS[0], length=WINDOWS[1])
    source, calibration = lab.source("llama"), calibration_on(windows, effort=effort)
    calibrated(source, tmp_path / "whole", calibration)
    assert len(told) == 14

    def stop(module: str, _: int) -> None:
        if "layers.1" in module and "down" in module:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrated(source, tmp_path / "cut", calibration, progress=stop)
    left = [path.name for path in (tmp_path / ".cut.w3pack-unfinished").iterdir()]
    assert sorted(left) == [".w3pack-block-00000", ".w3pack-journal.json"]
    told.clear()
    calibrated(source, tmp_path / "cut", calibration, resume=True)
    assert len(told) == 7  # the first block is not done again
    assert files(tmp_path / "cut") == files(tmp_path / "whole")
    assert not any(name.startswith(".") for name in files(tmp_path / "whole"))


def test_other_text_is_not_resumed(lab: Any, tmp_path: Path, told: list[tuple[torch.Tensor, Any]]) -> None:
    def stop(module: str, _: int) -> None:
        if "layers.1" in module:
            raise KeyboardInterrupt

    calibration = calibration_on(lab.tokens())
    with pytest.raises(KeyboardInterrupt):
        calibrated(lab.source("llama"), tmp_path / "out", calibration, progress=stop)
    for other in (calibration_on(lab.tokens(length=8)), calibration_on(lab.tokens(), effort="diagonal")):
        with pytest.raises(UsageError, match="expected the same source, arguments"):
            calibrated(lab.source("llama"), tmp_path / "out", other, resume=True)


@pytest.mark.parametrize("effort", ["diagonal", "default"])
def test_neither_disk_nor_threads_change_a_byte(lab: Any, tmp_path: Path, small_batches: None, effort: str) -> None:
    windows = lab.tokens(batch=WINDOWS[0], length=WINDOWS[1])
    only = ("re:.*layers.1.self_attn.[qo]_proj",)
    for name, in_memory, workers in (("ram", True, 1), ("disk", False, 3)):
        calibration = calibration_on(windows, effort=effort, in_memory=in_memory)
        calibrated(lab.source("qwen2"), tmp_path / name, calibration, workers=workers, only=only)
    assert files(tmp_path / "ram") == files(tmp_path / "disk")


def test_result_loads_verifies_and_is_better_than_without_data(lab: Any, tmp_path: Path) -> None:
    source = lab.source("qwen2")
    report = calibrated(source, tmp_path / "out", calibration_on(lab.tokens(), effort="fast"), workers=2)
    verify_checkpoint(tmp_path / "out", against=SafetensorsSource(source))
    wanted = lab.logits(lab.load(source))
    plain = lab.distance(lab.logits(lab.load(lab.packed("qwen2").folder)), wanted)
    assert lab.distance(lab.logits(lab.load(tmp_path / "out")), wanted) < 0.8 * plain
    facts = report.calibration
    assert facts is not None
    assert facts["tokens"] == lab.tokens().numel()
    assert len(facts["block_errors"]) == 2
    assert all(0 < error < 1 for error in facts["block_errors"])
    assert set(facts["most_sensitive_first"]) == set(manifest(tmp_path / "out")["modules"])
    for name, entry in manifest(tmp_path / "out")["modules"].items():
        assert entry["scales_origin"] == "calibrated, fast"
        before, after = facts["losses"][name]
        assert 0 < entry["calibration"]["loss"] == after < before


def test_expert_that_no_token_reached_falls_back_and_is_named(lab: Any, tmp_path: Path) -> None:
    """One token reaches two of the four experts."""
    report = calibrated(
        lab.source("qwen3_moe"), tmp_path / "out", calibration_on(lab.tokens(batch=1, length=1)),
        only=("re:.*layers.0.mlp.experts.*",),
    )  # fmt: skip
    facts = report.calibration
    assert facts is not None
    assert len(facts["without_tokens"]) == 2 * 3
    modules = manifest(tmp_path / "out")["modules"]
    for name, entry in modules.items():
        unseen = name in facts["without_tokens"]
        assert entry["scales_origin"] == ("calibrated, diagonal" if unseen else "calibrated, fast")
        assert (entry["calibration"]["tokens"] == 0) == unseen
    verify_checkpoint(tmp_path / "out", against=SafetensorsSource(lab.source("qwen3_moe")))
    lab.logits(lab.load(tmp_path / "out"))


def test_moment_of_a_rare_expert_shrinks_towards_the_layers() -> None:
    rows = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
    pool = calibrate.SecondMoment(8)
    pool.add(rows)
    for count, share in ((2, 0.25), (8, 1.0), (30, 1.0)):
        own = calibrate.SecondMoment(8)
        own.add(rows[:count])
        found = calibrate.expert_moment(own, pool, columns=8)
        assert found is not None
        wanted = share * own.matrix() + (1 - share) * pool.matrix()
        assert torch.allclose(found, wanted, atol=1e-6)
    never = calibrate.SecondMoment(8)
    diagonal = calibrate.expert_moment(never, pool, columns=8)
    assert diagonal is not None
    assert torch.equal(diagonal, pool.diagonal())
    assert calibrate.expert_moment(never, calibrate.SecondMoment(8), columns=8) is None
    assert calibrate.expert_moment(never, None, columns=8) is None


def test_moments_that_do_not_fit_are_collected_in_several_passes() -> None:
    stage = tuple(calibrate.Input(modules=(str(n),), columns=10, pool="p") for n in range(5))
    parts = list(calibrate.passes(stage, budget=2 * 4 * 100))
    assert [len(part) for part in parts] == [2, 2, 1]
    assert tuple(one for part in parts for one in part) == stage
    assert list(calibrate.passes(stage, budget=1)) == [(one,) for one in stage]
    assert list(calibrate.passes(stage, budget=None)) == [stage]


def test_experts_in_several_passes_give_the_same_bytes(
    lab: Any, tmp_path: Path, told: list[tuple[torch.Tensor, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    calibration, only = calibration_on(lab.tokens()), ("re:.*layers.0.mlp.experts.*",)
    calibrated(lab.source("qwen3_moe"), tmp_path / "one", calibration, only=only)
    first = [moment for _, moment in told]
    told.clear()
    monkeypatch.setattr(calibrate, "MOMENT_BYTES", 1)
    calibrated(lab.source("qwen3_moe"), tmp_path / "many", calibration, only=only)
    assert all(torch.equal(one, moment) for one, (_, moment) in zip(first, told, strict=True))
    assert files(tmp_path / "one") == files(tmp_path / "many")


def test_bfloat16_activations(lab: Any, tmp_path: Path, told: list[tuple[torch.Tensor, Any]]) -> None:
    calibrated(lab.source("llama"), tmp_path / "out", calibration_on(lab.tokens(), dtype=torch.bfloat16))
    assert {moment.dtype for _, moment in told} == {torch.float32}
    assert manifest(tmp_path / "out")["calibration"]["activations"] == "bfloat16"


def test_activations_that_overflow_are_an_error_that_names_the_block(lab: Any, tmp_path: Path) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    for path in lab.source("llama").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    lab.edit(folder, lambda tensors: tensors["model.layers.1.input_layernorm.weight"].mul_(1e38))
    with pytest.raises(UnsupportedError, match=r"layers\.1"):
        calibrated(
            folder, tmp_path / "out", calibration_on(lab.tokens(), effort="diagonal"), only=("re:.*layers.1.*o_proj",)
        )
    assert not (tmp_path / "out").exists()
