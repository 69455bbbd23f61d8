"""Losses and gradients of a whole model against transformers' own, and `--effort best` on tiny models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from w3pack.checkpoint.safetensors_source import SafetensorsSource
from w3pack.errors import ResourceError
from w3pack.integrations.calibration import prepare_tuning
from w3pack.integrations.calibration_text import apart_from
from w3pack.integrations.loadable import loadable_for
from w3pack.integrations.whole_model import WholeModel, memory_bytes
from w3pack.pack.words import unpack_codes, unpack_scales
from w3pack.pipeline.calibrate import Calibration
from w3pack.pipeline.plan import QuantizeOptions
from w3pack.pipeline.quantize_model import prepare_job, run
from w3pack.pipeline.report import Report
from w3pack.pipeline.tune import STATE_FILE
from w3pack.pipeline.verify_checkpoint import verify_checkpoint
from w3pack.quantize import QuantizedLinear
from w3pack.quantize.tuned_linear import TunedLinear, TunedVector
from w3pack.quantize.tuning import Layout, Part

from .test_calibration import calibration_on, files, manifest

SHAPE = (10, 16)


def whole(lab: Any, family: str, scratch: Path, **options: Any) -> tuple[WholeModel, Layout]:
    """A model of a source beside the Linears of its data-free packed form."""
    packed = lab.packed(family)
    source = SafetensorsSource(packed.source)
    job = prepare_job(source, QuantizeOptions(), loadable=loadable_for(source))
    options.setdefault("dtype", torch.float32)
    model = WholeModel(source, job.plan, lab.tokens(batch=SHAPE[0], length=SHAPE[1]), scratch=scratch, **options)
    stored = lab.read(packed.folder)
    parts: dict[str, Part] = {}
    for name, spec in packed.config.modules.items():
        parts[name] = TunedLinear(
            QuantizedLinear(
                codes=unpack_codes(stored[f"{name}.codes"], spec),
                qmap=stored[f"{name}.qmap"],
                scales=unpack_scales(stored[f"{name}.scales"], spec),
                group_size=spec.group_size,
            )
        )
    parts.update({name: TunedVector(value) for name, value in model.vectors.items()})
    return model, Layout(parts)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "gemma3_text", "qwen3_moe"])
def test_loss_is_the_divergence_of_the_packed_model(lab: Any, tmp_path: Path, family: str) -> None:
    model, layout = whole(lab, family, tmp_path)
    assert set(model.modules) == set(lab.packed(family).config.modules)
    assert model.loss(range(4)) < 1e-5  # still the source
    model.put(layout, layout.initial())
    windows = lab.tokens(batch=SHAPE[0], length=SHAPE[1])
    with torch.no_grad():
        wanted = torch.log_softmax(lab.load(lab.packed(family).source)(windows).logits.double(), dim=-1)
        other = torch.log_softmax(lab.load(lab.packed(family).folder)(windows).logits.double(), dim=-1)
    divergence = (wanted.exp() * (wanted - other)).sum(dim=-1)
    assert model.loss(range(SHAPE[0])) == pytest.approx(float(divergence.mean()), rel=1e-3)
    assert model.loss([7, 2]) == pytest.approx(float(divergence[[7, 2]].mean()), rel=1e-3)
    model.close()


@pytest.mark.parametrize("family", ["qwen2", "gemma3_text"])
def test_gradient_is_that_of_autograd_through_the_stock_model(lab: Any, tmp_path: Path, family: str) -> None:
    model, layout = whole(lab, family, tmp_path)
    start = layout.initial()
    model.put(layout, start)
    samples = [3, 0, 8]
    found = model.gradient(layout, start, samples)
    windows = lab.tokens(batch=SHAPE[0], length=SHAPE[1])[samples]
    with torch.no_grad():
        wanted = torch.log_softmax(lab.load(lab.packed(family).source)(windows).logits, dim=-1)
    stock = lab.stock(lab.packed(family), dtype=torch.float32)
    stock.requires_grad_(True)
    logs = torch.log_softmax(stock(windows).logits, dim=-1)
    nn.functional.kl_div(logs.flatten(0, 1), wanted.flatten(0, 1), reduction="batchmean", log_target=True).backward()
    weights = {name: parameter.grad for name, parameter in stock.named_parameters() if parameter.grad is not None}
    moved = 0
    for name, here in layout.bounds().items():
        part = layout.parts[name]
        if isinstance(part, TunedLinear):
            weight = part.start.dequantize()
            expected = part.gradient(start[here], weight, weights[_stock_name(f"{name}.weight", weights)])
        else:
            assert isinstance(part, TunedVector)
            expected = part.gradient(start[here], weights[_stock_name(name, weights)])
        assert lab.distance(found[here], expected) < 1e-3, name
        moved += 1
    assert moved == len(layout.parts) > 14
    model.close()


def _stock_name(name: str, weights: dict[str, Any]) -> str:
    return name if name in weights else f"model.{name}"


@pytest.mark.parametrize("other", [{"workers": 3}, {"recompute": True}, {"workers": 2, "recompute": True}])
def test_neither_threads_nor_recomputing_change_a_bit(
    lab: Any, tmp_path: Path, other: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("w3pack.integrations.whole_model._BATCH_TOKENS", {"cpu": 2 * SHAPE[1]})
    monkeypatch.setattr("w3pack.integrations.whole_model._POSITIONS", {"cpu": 7})
    found = []
    for options in ({"workers": 1, "recompute": False}, other):
        model, layout = whole(lab, "llama", tmp_path, dtype=torch.bfloat16, **options)
        start = layout.initial()
        model.put(layout, start)
        found.append((model.loss(range(5)), model.gradient(layout, start, range(5))))
        model.close()
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])


def best_on(lab: Any, *, samples: int = 8, memory: int = 0, in_memory: bool | None = None) -> Calibration:
    """Calibration on random tokens with the last stage, whatever memory there is."""
    windows = lab.tokens(batch=samples + 4, length=SHAPE[1])
    plain = calibration_on(windows[:samples], effort="best")
    tuning = prepare_tuning(windows[:samples], windows[samples:], seed=0, in_memory=in_memory)
    object.__setattr__(tuning, "batch", 2)
    object.__setattr__(tuning, "free", lambda device: memory)
    object.__setattr__(plain, "tuning", tuning)
    return plain


def quantised(
    lab: Any, family: str, output: Path, calibration: Calibration, *, workers: int = 1, progress: Any = None, resume: bool = False,
    **options: Any,
) -> Report:  # fmt: skip
    source = SafetensorsSource(lab.source(family))
    job = prepare_job(source, QuantizeOptions(**options), loadable=loadable_for(source))
    return run(job, output, calibration=calibration, workers=workers, progress=progress, resume=resume)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The solver without its slow stages."""
    from w3pack.pipeline import calibrate

    monkeypatch.setattr(Calibration, "solver", property(lambda self: "diagonal"))
    assert calibrate.Calibration is Calibration


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_best_is_nearer_to_the_source_and_says_by_how_much(lab: Any, tmp_path: Path, quick: None, family: str) -> None:
    told: list[tuple[str, int]] = []
    report = quantised(
        lab, family, tmp_path / "best", best_on(lab), workers=2, progress=lambda *note: told.append(note)
    )  # fmt: skip
    quantised(lab, family, tmp_path / "plain", calibration_on(lab.tokens(batch=8, length=SHAPE[1]), effort="diagonal"))
    assert report.calibration is not None
    facts = report.calibration["tuning"]
    assert 0 < facts["after"] < 0.99 * facts["before"]
    assert manifest(tmp_path / "best")["calibration"]["tuning"] == facts
    assert sum(amount for _, amount in told) == 2 * report.weights
    verify_checkpoint(tmp_path / "best", against=SafetensorsSource(lab.source(family)))
    windows = lab.tokens(batch=12, length=SHAPE[1])[8:]
    with torch.no_grad():
        wanted = torch.log_softmax(lab.load(lab.source(family))(windows).logits, dim=-1)
        found = {}
        for name in ("best", "plain"):
            logs = torch.log_softmax(lab.load(tmp_path / name)(windows).logits, dim=-1)
            found[name] = float(nn.functional.kl_div(logs, wanted, reduction="sum", log_target=True)) / windows.numel()
    assert found["best"] == pytest.approx(facts["after"], rel=0.1)  # the products of tuning may be 16 bit
    assert found["best"] < 0.99 * found["plain"]
    source, best, plain = lab.read(lab.source(family)), lab.read(tmp_path / "best"), lab.read(tmp_path / "plain")
    assert set(best) == set(plain)
    for name, entry in manifest(tmp_path / "best")["modules"].items():
        assert torch.equal(best[f"{name}.codes"], plain[f"{name}.codes"])
        assert entry["scales_origin"].endswith(", then tuned")
    assert all(name in source and not torch.equal(best[name], source[name]) for name in facts["vectors"])
    assert all(
        why.endswith(", tuned") == (name in facts["vectors"])
        for name, why in manifest(tmp_path / "best")["kept"].items()
    )


def test_best_gives_the_same_bytes_again_and_when_resumed(lab: Any, tmp_path: Path, quick: None) -> None:
    calibration = best_on(lab)
    quantised(lab, "qwen2", tmp_path / "whole", calibration)
    quantised(lab, "qwen2", tmp_path / "again", calibration, workers=3)
    assert files(tmp_path / "again") == files(tmp_path / "whole")
    looks = 0

    def stop(name: str, _: int) -> None:
        nonlocal looks
        looks += name.startswith("tuning")
        if looks == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantised(lab, "qwen2", tmp_path / "cut", calibration, progress=stop)
    unfinished = tmp_path / ".cut.w3pack-unfinished"
    assert STATE_FILE in json.loads((unfinished / ".w3pack-journal.json").read_text())["work"]
    quantised(lab, "qwen2", tmp_path / "cut", calibration, resume=True)
    assert files(tmp_path / "cut") == files(tmp_path / "whole")
    assert not any(name.startswith(".") for name in files(tmp_path / "whole"))


def test_a_chosen_map_and_kept_linears_stay(lab: Any, tmp_path: Path, quick: None) -> None:
    quantised(lab, "qwen2", tmp_path / "out", best_on(lab, samples=2), qmap="nf3", skip=("re:.*down_proj",))
    stored, source = lab.read(tmp_path / "out"), lab.read(lab.source("qwen2"))
    maps = [tensor for name, tensor in stored.items() if name.endswith(".qmap")]
    assert len(maps) == 12
    assert all(torch.equal(one, maps[0]) for one in maps)
    kept = [name for name in stored if name.endswith("down_proj.weight")]
    assert kept
    assert all(torch.equal(stored[name], source[name]) for name in kept)


SMALL = 1 << 20  # bytes of memory, too few for any model


def test_what_does_not_fit_is_tuned_block_by_block(
    lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    # not the diagonal: alone, it looks at the source's hidden states
    monkeypatch.setattr(Calibration, "solver", property(lambda self: "fast"))
    told: list[tuple[str, int]] = []
    report = quantised(
        lab, "llama", tmp_path / "tuned", best_on(lab, memory=SMALL), progress=lambda *note: told.append(note)
    )  # fmt: skip
    plain = quantised(
        lab, "llama", tmp_path / "plain", calibration_on(lab.tokens(batch=8, length=SHAPE[1]), effort="fast")
    )
    assert report.calibration is not None
    assert plain.calibration is not None
    facts = report.calibration["tuning"]
    assert facts["kind"] == "block by block"
    assert len(facts["blocks"]) == 2
    assert all(gain["after"] < gain["before"] for gain in facts["blocks"])
    assert sum(amount for _, amount in told) == 2 * report.weights
    verify_checkpoint(tmp_path / "tuned", against=SafetensorsSource(lab.source("llama")))
    wanted = lab.logits(lab.load(lab.source("llama")))
    nearer = lab.distance(lab.logits(lab.load(tmp_path / "tuned")), wanted)
    assert nearer < lab.distance(lab.logits(lab.load(tmp_path / "plain")), wanted)
    before, after = lab.read(tmp_path / "plain"), lab.read(tmp_path / "tuned")
    first = [name for name in after if "layers.0." in name]
    assert all(torch.equal(before[name], after[name]) for name in first if name.endswith((".codes", "norm.weight")))
    assert not any(torch.equal(before[name], after[name]) for name in first if name.endswith(".scales"))


def test_error_of_a_block_is_measured_against_the_source_alone(lab: Any, tmp_path: Path, quick: None) -> None:
    """What tuning starts from is the distance of the hidden states that transformers' own models leave."""
    windows = lab.tokens(batch=8, length=SHAPE[1])
    report = quantised(lab, "qwen2", tmp_path / "out", best_on(lab, memory=SMALL))
    assert report.calibration is not None
    with torch.no_grad():
        states = [
            lab.load(folder)(windows, output_hidden_states=True).hidden_states[1]
            for folder in (lab.source("qwen2"), tmp_path / "out")
        ]
    error = (states[1] - states[0]).square().sum(-1) / states[0].square().sum(-1)
    assert report.calibration["tuning"]["blocks"][0]["after"] == pytest.approx(float(error.mean()), rel=0.05)


def test_blocks_give_the_same_bytes_again_and_when_resumed(
    lab: Any, tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("w3pack.integrations.decoder_walk._BATCH_TOKENS", {"cpu": 2 * SHAPE[1]})
    quantised(lab, "qwen2", tmp_path / "whole", best_on(lab, memory=SMALL))
    quantised(lab, "qwen2", tmp_path / "again", best_on(lab, memory=SMALL, in_memory=False), workers=3)
    assert files(tmp_path / "again") == files(tmp_path / "whole")

    def stop(name: str, _: int) -> None:
        if name.startswith("tuned") and "layers.1." in name:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantised(lab, "qwen2", tmp_path / "cut", best_on(lab, memory=SMALL), progress=stop)
    quantised(lab, "qwen2", tmp_path / "cut", best_on(lab, memory=1 << 50), resume=True)  # goes on as it began
    assert files(tmp_path / "cut") == files(tmp_path / "whole")


def test_what_was_begun_with_more_memory_says_so(lab: Any, tmp_path: Path, quick: None) -> None:
    def stop(name: str, _: int) -> None:
        if "layers.1." in name:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantised(lab, "qwen2", tmp_path / "out", best_on(lab), progress=stop)
    with pytest.raises(ResourceError, match=r"expected .* GB of memory to go on tuning .* got 0\.0 GB"):
        quantised(lab, "qwen2", tmp_path / "out", best_on(lab, memory=SMALL), resume=True)
    quantised(lab, "qwen2", tmp_path / "out", best_on(lab), resume=True)


def test_windows_to_learn_from_and_to_decide_are_apart() -> None:
    for samples, further in ((128, 264), (128, 100), (16, 0), (2, 0), (1, 0), (3, 5)):
        windows = torch.arange(samples + further).view(-1, 1).expand(-1, 512)
        tuning = prepare_tuning(windows[:samples], windows[samples:], seed=0)
        assert len(tuning.order) == 3 * samples
        assert tuning.held_out
        assert max((*tuning.order, *tuning.held_out)) < len(windows)
        if samples > 1:
            assert not set(tuning.order) & set(tuning.held_out)
        counts = torch.bincount(torch.tensor(tuning.order))
        assert int(counts.max()) - int(counts[counts > 0].min()) <= 1
        assert tuning.batch == 4
        assert (
            tuning.fingerprint() != prepare_tuning(windows[:samples], windows[samples:], seed=1).fingerprint()
            or samples < 3
        )


def test_estimate_grows_with_what_it_is_made_of(lab: Any) -> None:
    source = SafetensorsSource(lab.source("llama"))
    plan = prepare_job(source, QuantizeOptions(), loadable=loadable_for(source)).plan
    base = {"tokens": 1000, "length": 100, "width": 576, "vocabulary": 300, "workers": 1}
    least = memory_bytes(plan, **base)
    assert least > 4 * plan.weights
    for name, factor in (("tokens", 10), ("width", 4), ("vocabulary", 100), ("workers", 4)):
        assert memory_bytes(plan, **{**base, name: factor * base[name]}) > least


def test_windows_that_share_a_passage_are_left_out() -> None:
    others = torch.randint(0, 9000, (3, 40), generator=torch.Generator().manual_seed(0))
    windows = torch.randint(0, 9000, (4, 40), generator=torch.Generator().manual_seed(1))
    windows[1, 5:21] = others[2, 20:36]  # 16 in a row
    windows[2, 5:20] = others[0, 20:35]  # 15
    assert torch.equal(apart_from(windows, others), windows[[0, 2, 3]])
    assert len(apart_from(others, others)) == 0
    assert torch.equal(apart_from(windows, others[:0]), windows)
