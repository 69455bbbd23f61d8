"""Calibration whose tokens count by gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from w3pack.checkpoint.safetensors_source import SafetensorsSource
from w3pack.integrations.backward_walk import BackwardWalk, draw
from w3pack.integrations.decoder_walk import DecoderWalk
from w3pack.integrations.loadable import loadable_for
from w3pack.pipeline import calibrate, guiding
from w3pack.pipeline.calibrate import Calibration
from w3pack.pipeline.plan import QuantizeOptions
from w3pack.pipeline.quantize_model import prepare_job, run
from w3pack.pipeline.report import Report
from w3pack.pipeline.sensitivity import Gradients
from w3pack.pipeline.verify_checkpoint import verify_checkpoint
from w3pack.quantize import named_map, quantize_data_free
from w3pack.quantize.calibrated import CalibratedLinear, Stage


@pytest.fixture
def windows(lab: Any, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """Three batches of two samples."""
    monkeypatch.setattr("w3pack.integrations.decoder_walk._BATCH_TOKENS", {"cpu": 22})
    found: torch.Tensor = lab.tokens(batch=6, length=11)
    return found


def calibration_on(windows: torch.Tensor, *, guided: bool = True, effort: Any = "fast") -> Calibration:
    def opener(kind: type[DecoderWalk]) -> Any:
        @contextmanager
        def start(job: Any, scratch: Path, device: str, workers: int) -> Iterator[Any]:
            walk = kind(job.source, job.plan, windows, scratch=scratch, device=device, workers=workers)
            try:
                yield walk
            finally:
                walk.close()

        return start

    samples, length = windows.shape
    facts = {"texts": [], "samples": samples, "length": length, "tokens": windows.numel(), "sha256": "test"}
    guide = Gradients(facts=facts, open=opener(BackwardWalk)) if guided else None
    return Calibration(effort=effort, facts=facts, open=opener(DecoderWalk), guide=guide)


def calibrated(source: Path, output: Path, calibration: Calibration, *, workers: int = 1, **options: Any) -> Report:
    opened = SafetensorsSource(source)
    job = prepare_job(opened, QuantizeOptions(**options), loadable=loadable_for(opened))
    return run(job, output, calibration=calibration, workers=workers)


def test_moments_are_weighted_by_the_gradients_of_the_source(
    lab: Any, tmp_path: Path, windows: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of q, k and v of the first block, whose inputs are those of the source."""
    told: list[tuple[torch.Tensor, torch.Tensor]] = []

    def stand_in(weight: torch.Tensor, moment: Any, settings: Any, **_: Any) -> CalibratedLinear:
        told.append((weight, moment))
        linear = quantize_data_free(weight, settings, qmap=named_map("nf3"))
        return CalibratedLinear(linear=linear, stages=(Stage("data-free", 1.0, 0.5),), damping=0.0)

    monkeypatch.setattr(calibrate, "quantize_calibrated", stand_in)
    monkeypatch.setattr(calibrate, "factorize", lambda moment, damping: moment)
    source = lab.source("llama")
    calibrated(source, tmp_path / "out", calibration_on(windows))
    wanted = _weighted(lab, source, windows)
    weights = lab.read(source)
    found = 0
    for kind in "qkv":
        name = f"model.layers.0.self_attn.{kind}_proj"
        moment = next(moment for weight, moment in told if torch.equal(weight, weights[f"{name}.weight"]))
        assert lab.distance(moment, wanted[name]) < 1e-3
        found += 1
    assert found == 3
    assert lab.distance(wanted["model.layers.0.self_attn.q_proj"], wanted["model.layers.0.self_attn.v_proj"]) > 0.05


def _weighted(lab: Any, source: Path, windows: torch.Tensor) -> dict[str, torch.Tensor]:
    model = lab.load(source, dtype=torch.float32)
    inputs: dict[str, torch.Tensor] = {}
    squares: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and "layers.0.self_attn" in name:

            def hook(_: Any, args: Any, output: torch.Tensor, name: str = name) -> None:
                inputs[name] = args[0].detach().flatten(0, -2).double()

                def note(gradient: torch.Tensor, name: str = name) -> None:
                    squares[name] = gradient.flatten(0, -2).double().square().mean(dim=1)

                output.register_hook(note)

            module.register_forward_hook(hook)
    likely = model(input_ids=windows, use_cache=False).logits.float().log_softmax(dim=-1)
    drawn = torch.stack([draw(one.detach(), seed=0, window=index) for index, one in enumerate(likely)])
    (-likely.gather(2, drawn.unsqueeze(2)).sum()).backward()
    return {
        name: (x.t() * (squares[name] / squares[name].mean())) @ x / len(x) for name, x in inputs.items()
    }  # fmt: skip


def test_tokens_that_count_alike_change_nothing(
    lab: Any, tmp_path: Path, windows: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, only = lab.source("qwen2"), ("re:.*layers.0.self_attn.*",)
    calibrated(source, tmp_path / "plain", calibration_on(windows, guided=False), only=only)
    monkeypatch.setattr(guiding, "token_weights", lambda gradients: torch.ones(1, len(gradients)))
    calibrated(source, tmp_path / "guided", calibration_on(windows), only=only)
    one, other = lab.read(tmp_path / "plain"), lab.read(tmp_path / "guided")
    assert all(lab.same(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.parametrize("effort", ["diagonal", "fast"])
def test_threads_change_no_byte_and_the_result_is_sound(
    lab: Any, tmp_path: Path, windows: torch.Tensor, effort: str
) -> None:
    source, only = lab.source("llama_tied"), ("re:.*layers.1.*",)
    for name, workers in (("one", 1), ("three", 3)):
        report = calibrated(source, tmp_path / name, calibration_on(windows, effort=effort), workers=workers, only=only)
    assert report.calibration is not None
    assert report.calibration["guided"] == 7
    files = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("one", "three")]
    assert files[0] == files[1]
    verify_checkpoint(tmp_path / "one", against=SafetensorsSource(source))


def test_experts_are_calibrated_as_without(lab: Any, tmp_path: Path, windows: torch.Tensor) -> None:
    source, only = lab.source("qwen3_moe"), ("re:.*layers.0.(mlp.experts.*|self_attn.q_proj)",)
    report = calibrated(source, tmp_path / "out", calibration_on(windows, effort="diagonal"), only=only)
    assert report.calibration is not None
    assert report.calibration["guided"] == 1
    verify_checkpoint(tmp_path / "out", against=SafetensorsSource(source))


def test_it_is_part_of_what_a_run_is_resumed_by(windows: torch.Tensor) -> None:
    guided = calibration_on(windows)
    assert guided.fingerprint() != replace(guided, guide=None).fingerprint()
