"""Sensitivities on text, and models of mixed precision: chosen, written, verified, loaded, run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from w3pack.checkpoint.safetensors_source import SafetensorsSource
from w3pack.errors import CheckpointError, UsageError
from w3pack.integrations.backward_walk import BackwardWalk
from w3pack.integrations.decoder_walk import DecoderWalk
from w3pack.integrations.loadable import loadable_for
from w3pack.pipeline import sensitivity
from w3pack.pipeline.calibrate import Calibration
from w3pack.pipeline.inspect_checkpoint import inspect_checkpoint
from w3pack.pipeline.mixing import MixRequest, mix_job
from w3pack.pipeline.plan import QuantizeOptions
from w3pack.pipeline.quantize_model import Job, prepare_job, run
from w3pack.pipeline.sensitivity import Gradients, measure
from w3pack.pipeline.verify_checkpoint import verify_checkpoint

WINDOWS = (6, 11)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    monkeypatch.setenv("W3PACK_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def gradients_on(windows: torch.Tensor) -> Gradients:
    @contextmanager
    def start(job: Any, scratch: Path, device: str, workers: int) -> Iterator[BackwardWalk]:
        walk = BackwardWalk(job.source, job.plan, windows, scratch=scratch, device=device, workers=workers)
        try:
            yield walk
        finally:
            walk.close()

    return Gradients(facts={"windows": windows.tolist()}, open=start)


def calibration_on(windows: torch.Tensor) -> Calibration:
    @contextmanager
    def start(job: Any, scratch: Path, device: str, workers: int) -> Iterator[DecoderWalk]:
        walk = DecoderWalk(job.source, job.plan, windows, scratch=scratch, device=device, workers=workers)
        try:
            yield walk
        finally:
            walk.close()

    samples, length = windows.shape
    facts = {"texts": [], "samples": samples, "length": length, "tokens": windows.numel(), "sha256": "test"}
    return Calibration(effort="fast", facts=facts, open=start)


def planned(source: Path, request: MixRequest, gradients: Gradients | None, *, workers: int = 1, **options: Any) -> Job:
    opened = SafetensorsSource(source)
    job = prepare_job(opened, QuantizeOptions(**options), loadable=loadable_for(opened))
    return mix_job(job, request, gradients=gradients, workers=workers, device="cpu")


@pytest.fixture
def windows(lab: Any) -> torch.Tensor:
    found: torch.Tensor = lab.tokens(batch=WINDOWS[0], length=WINDOWS[1])
    return found


def divergence(lab: Any, source: Path, packed: Path, windows: torch.Tensor) -> float:
    with torch.no_grad():
        wanted, got = (
            lab.load(folder, dtype=torch.float32)(input_ids=windows).logits.log_softmax(-1)
            for folder in (source, packed)
        )
    return float((wanted.exp() * (wanted - got)).sum(-1).mean())


def test_expected_loss_is_near_the_measured_one(lab: Any, tmp_path: Path) -> None:
    """One Linear at a time: the divergence of the whole model, on the text of the measurement."""
    source, windows = lab.source("llama_tied"), lab.tokens(batch=24, length=16)
    found = measure(planned(source, MixRequest(), None), (128,), gradients_on(windows), workers=1, device="cpu")
    ratios = []
    for number, module in enumerate(("model.layers.0.mlp.up_proj", "model.layers.1.mlp.down_proj")):
        job = planned(source, MixRequest(), None, only=(module,))
        run(job, tmp_path / str(number), calibration=replace(calibration_on(windows), effort="diagonal"))
        ratios.append(divergence(lab, source, tmp_path / str(number), windows) / found.losses[module][128])
    assert all(0.4 < ratio < 2.5 for ratio in ratios), ratios


def test_mixed_model_costs_and_buys_what_the_report_says(lab: Any, tmp_path: Path, windows: torch.Tensor) -> None:
    source, calibration = lab.source("qwen2", dtype=torch.bfloat16), calibration_on(windows)
    reports, losses = {}, {}
    for name, request in (
        ("plain", MixRequest(sensitivity=True)),
        ("top", MixRequest(keep_top="3")),
        ("bits", MixRequest(target_bits=5.0)),
    ):
        job = planned(source, request, gradients_on(windows))
        reports[name] = run(job, tmp_path / name, calibration=calibration)
        losses[name] = divergence(lab, source, tmp_path / name, windows)
        verify_checkpoint(tmp_path / name, against=SafetensorsSource(source))
    plain, top, bits = (reports[name] for name in ("plain", "top", "bits"))
    assert plain.sensitivity is not None
    assert plain.sensitivity["mixed"] is None
    assert losses["top"] < losses["plain"]
    assert losses["bits"] < losses["plain"]
    order = plain.sensitivity["most_sensitive_first"]
    assert len(order) == len(plain.linears) == 14
    assert top.sensitivity is not None
    kept = top.sensitivity["mixed"]["kept"]
    assert set(kept) == set(order[:3])
    assert top.sensitivity["mixed"]["loss"] < top.sensitivity["mixed"]["loss_without"]
    manifest = json.loads((tmp_path / "top" / "w3pack.json").read_text())
    assert all(manifest["kept"][f"{name}.weight"] == "copy: --keep-top 3" for name in kept)
    assert manifest["settings"]["mix"] == "--keep-top 3"
    stored, originals = lab.read(tmp_path / "top"), lab.read(source)
    assert all(lab.same(stored[f"{name}.weight"], originals[f"{name}.weight"]) for name in kept)
    # what is said to be taken is taken: codes, scales and maps of what is packed, and the matrices that are kept
    assert bits.sensitivity is not None
    mixed = bits.sensitivity["mixed"]
    parts = (".codes", ".scales", ".qmap", *(f"{name}.weight" for name in mixed["kept"]))
    sizes = sum(t.nbytes for name, t in lab.read(tmp_path / "bits").items() if name.endswith(parts))
    weights = sum(t.numel() for name, t in originals.items() if f"{name.removesuffix('.weight')}" in order)
    assert mixed["bytes"] == sizes
    assert mixed["bits_per_weight"] == 8 * sizes / weights <= 5.0
    assert {entry["group_size"] for entry in inspect_checkpoint(tmp_path / "bits")["modules"].values()} == {64, 128}
    assert inspect_checkpoint(tmp_path / "bits")["sensitivity"]["mixed"] == mixed


def test_report_holds_each_linear_and_block(lab: Any, tmp_path: Path, windows: torch.Tensor) -> None:
    job = planned(lab.source("llama"), MixRequest(sensitivity=True), gradients_on(windows))
    report = run(job, tmp_path / "out", calibration=calibration_on(windows))
    modules = json.loads((tmp_path / "out" / "w3pack.json").read_text())["modules"]
    for row in report.linears:
        story = modules[row.module]["calibration"]
        measured = job.sensitivity["modules"][row.module]["128"]["loss"] if job.sensitivity else 0
        assert row.relative_loss == story["loss"] < story["diagonal_loss"]
        assert row.expected_loss == pytest.approx(measured * story["loss"] / story["diagonal_loss"])
        assert modules[row.module]["expected_loss"] == row.expected_loss
    assert [row.block for row in report.blocks] == ["model.layers.0", "model.layers.1"]
    assert report.calibration is not None
    assert [row.output_error for row in report.blocks] == report.calibration["block_errors"]
    total = sum(row.expected_loss or 0 for row in report.linears)
    assert sum(row.expected_loss or 0 for row in report.blocks) == pytest.approx(total)


def test_experts_may_differ_in_form(lab: Any, tmp_path: Path, windows: torch.Tensor) -> None:
    job = planned(lab.source("qwen3_moe"), MixRequest(target_bits=9.0), gradients_on(windows), only=("re:.*experts.*",))
    run(job, tmp_path / "out")
    inspected = inspect_checkpoint(tmp_path / "out")
    mixed = inspected["sensitivity"]["mixed"]
    assert mixed["kept"]
    assert inspected["modules"]
    assert any(".experts." in name for name in mixed["kept"])
    lab.logits(lab.load(tmp_path / "out"))
    verify_checkpoint(tmp_path / "out", against=SafetensorsSource(lab.source("qwen3_moe")))


def test_saved_again_it_is_the_same_model(lab: Any, tmp_path: Path) -> None:
    job = planned(lab.source("llama"), MixRequest(target_bits=6.0), None)
    run(job, tmp_path / "out")
    model = lab.load(tmp_path / "out")
    model.save_pretrained(tmp_path / "again")
    assert torch.equal(lab.logits(lab.load(tmp_path / "again")), lab.logits(model))


def test_an_interrupted_mixed_run_resumes_to_the_same_bytes(
    lab: Any, tmp_path: Path, cache: Path, windows: torch.Tensor
) -> None:
    source, request, gradients = lab.source("llama"), MixRequest(keep_top="20%"), gradients_on(windows)
    run(planned(source, request, gradients), tmp_path / "whole", calibration=calibration_on(windows))

    def stop(module: str, _: int) -> None:
        if "layers.1" in module:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(planned(source, request, gradients), tmp_path / "cut", calibration=calibration_on(windows), progress=stop)
    for path in (cache / "sensitivity").iterdir():  # measured again, with the same result
        path.unlink()
    job = planned(source, request, gradients, workers=3)
    run(job, tmp_path / "cut", calibration=calibration_on(windows), resume=True)
    files = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("whole", "cut")]
    assert files[0] == files[1]
    other = planned(source, MixRequest(keep_top="2"), gradients)
    with pytest.raises(KeyboardInterrupt):
        run(other, tmp_path / "cut2", calibration=calibration_on(windows), progress=stop)
    with pytest.raises(UsageError, match="expected the same source, arguments"):
        run(job, tmp_path / "cut2", calibration=calibration_on(windows), resume=True)


def test_what_was_measured_is_found_again(
    lab: Any, cache: Path, windows: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, request = lab.source("llama"), MixRequest(keep_top="1")
    first = planned(source, request, gradients_on(windows))
    calls: list[Any] = []
    original = sensitivity._from_answers
    monkeypatch.setattr(sensitivity, "_from_answers", lambda *a, **k: calls.append(a) or original(*a, **k))
    assert planned(source, request, gradients_on(windows)) == replace(first, source=first.source) or not calls
    assert not calls
    planned(source, request, gradients_on(windows[:3]))
    planned(source, request, gradients_on(windows), seed=1)
    assert len(calls) == 2
    for path in (cache / "sensitivity").iterdir():
        path.write_text("{")
    assert planned(source, request, gradients_on(windows)).options == first.options
    assert len(calls) == 3


def test_a_cache_that_cannot_be_written_does_no_harm(lab: Any, cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    assert planned(lab.source("llama"), MixRequest(keep_top="1"), None).options.mix is not None


def test_bad_requests_are_sentences(lab: Any) -> None:
    source = lab.source("llama")
    asked: tuple[tuple[dict[str, Any], str], ...] = (
        ({"keep_top": "1", "target_bits": 4}, "either --keep-top or --target-bits"),
        ({"target_bits": 2.9}, "above 3 and below 16"),
        ({"target_bits": float("nan")}, "above 3 and below 16"),
        ({"target_bits": 3.01}, "at least 3."),
        ({"keep_top": "99"}, "got 99 of 14"),
        ({"keep_top": "0.1%"}, "the smallest of which holds"),
    )
    for values, match in asked:
        with pytest.raises(UsageError, match=match):
            planned(source, MixRequest(**values), None)


def test_a_manifest_of_other_sensitivities_is_refused(lab: Any, tmp_path: Path) -> None:
    run(planned(lab.source("llama"), MixRequest(keep_top="1"), None), tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "w3pack.json").read_text())
    for damage in ({"mixed": 3}, {"modules": []}, {"unit": None}, {"most_sensitive_first": ["x"]}):
        broken = {**manifest, "sensitivity": {**manifest["sensitivity"], **damage}}
        (tmp_path / "out" / "w3pack.json").write_text(json.dumps(broken))
        with pytest.raises(CheckpointError, match="to record sensitivities"):
            inspect_checkpoint(tmp_path / "out")
