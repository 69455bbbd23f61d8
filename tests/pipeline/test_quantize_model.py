"""From files to files: what happens to every tensor, and that the bytes depend on nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import w3pack
from w3pack.checkpoint.safetensors_source import SafetensorsSource
from w3pack.errors import CheckpointError, UnsupportedError, UsageError
from w3pack.pipeline import quantize_model
from w3pack.pipeline.inspect_checkpoint import inspect_checkpoint
from w3pack.pipeline.packed import open_packed
from w3pack.pipeline.plan import QuantizeOptions
from w3pack.pipeline.quantize_model import prepare_job
from w3pack.pipeline.verify_checkpoint import verify_checkpoint
from w3pack.reference import w3

AT = "model.layers.0"
UP, DOWN, Q = f"{AT}.mlp.up_proj", f"{AT}.mlp.down_proj", f"{AT}.self_attn.q_proj"


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Whether two sets of tensors have the same names, dtypes and bytes."""
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype
        and torch.equal(a[name].flatten().view(torch.uint8), b[name].flatten().view(torch.uint8))
        for name in a
    )


def decoded(folder: Path, module: str) -> torch.Tensor:
    """What a packed Linear means, by the slow reference."""
    packed = open_packed(folder)
    spec = packed.config.modules[module]
    return w3.dequantize(
        *(packed.read(module, part) for part in ("codes", "scales", "qmap")), spec=spec, dtype=torch.float32
    )


# --- determinism -----------------------------------------------------------------------------------------------------


def test_bytes_depend_on_source_and_options_alone(lab: Any) -> None:
    source = lab.source(lab.layers())
    lab.quantize(source, qmap=None, name="first", workers=1)
    for name, workers in (("again", 1), ("two", 2), ("five", 5)):
        lab.quantize(source, qmap=None, name=name, workers=workers)
        for path in (lab.root / "first").iterdir():
            assert (lab.root / name / path.name).read_bytes() == path.read_bytes(), (name, path.name)
    sharded = lab.quantize(source, qmap=None, name="sharded", max_shard_bytes=20_000)
    assert len(list((lab.root / "sharded").glob("*.safetensors"))) == 3
    assert same(sharded, lab.read("first"))


def test_torchs_threads_do_not_matter(lab: Any) -> None:
    source = lab.source(lab.layers(count=1))
    first = lab.quantize(source, qmap=None, name="first")
    try:
        torch.set_num_threads(2)
        assert same(lab.quantize(source, qmap=None, name="second"), first)
        assert lab.manifest("first") == lab.manifest("second")
    finally:
        torch.set_num_threads(1)


def test_source_shards_do_not_matter(lab: Any) -> None:
    tensors = lab.layers()
    first = lab.quantize(lab.source(tensors))
    folder = lab.root / "cut"
    (folder / "deep").mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    names, weight_map = sorted(tensors, reverse=True), {}
    # two files of one name in two folders: which is which must not be forgotten
    for number, file in enumerate(("part.safetensors", "deep/part.safetensors", "c.safetensors")):
        save_file({name: tensors[name] for name in names[number::3]}, folder / file)
        weight_map.update(dict.fromkeys(names[number::3], file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert same(lab.quantize(SafetensorsSource(folder), name="second"), first)


# --- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"qmap": None}, {}, {"qmap": None, "qmap_per": "row"}, {"group_size": 64}])
@pytest.mark.parametrize("layout", ["dense", "nibble"])
def test_zeros_stay_zeros(lab: Any, options: dict[str, Any], layout: str) -> None:
    tensors = lab.layers(count=1)
    tensors[f"{UP}.weight"].zero_()
    tensors[f"{DOWN}.weight"][:, :64] = 0  # whole groups of 64 and parts of groups of 128
    tensors[f"{Q}.weight"][5] = 0
    lab.quantize(lab.source(tensors), layout=layout, **options)
    assert not decoded(lab.root / "out", UP).any()
    assert not decoded(lab.root / "out", Q)[5].any()
    if options.get("group_size") == 64:
        assert not decoded(lab.root / "out", DOWN)[:, :64].any()
    found = inspect_checkpoint(lab.root / "out")
    assert found["modules"][UP]["relative_error"] == 0.0
    assert found["modules"][UP]["snr_db"] is None
    verify_checkpoint(lab.root / "out")


def test_reported_error_is_the_error(lab: Any) -> None:
    tensors = lab.layers(count=1)
    lab.quantize(lab.source(tensors), qmap=None)
    for module, entry in lab.manifest()["modules"].items():
        weight = tensors[f"{module}.weight"].double()
        error = (decoded(lab.root / "out", module).double() - weight).norm() / weight.norm()
        assert entry["relative_error"] == pytest.approx(float(error), rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_every_float_dtype(lab: Any, dtype: torch.dtype) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in lab.layers(count=1).items()}
    found = lab.quantize(lab.source(tensors))
    assert found[f"{Q}.bias"].dtype == dtype
    assert torch.equal(found[f"{Q}.bias"], tensors[f"{Q}.bias"])
    verify_checkpoint(lab.root / "out", against=lab.source(tensors, name="again"))


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float16, torch.float64, torch.complex64])
def test_no_number_in_a_kept_tensor_of_any_dtype(lab: Any, dtype: torch.dtype) -> None:
    tensors = {**lab.layers(count=1), "model.extra.table": torch.tensor([1.0, float("inf")]).to(dtype)}
    with pytest.raises(CheckpointError, match=r"model\.extra\.table"):
        lab.quantize(lab.source(tensors))


# --- what is kept ----------------------------------------------------------------------------------------------------


def test_tensors_that_no_model_class_knows_survive(lab: Any) -> None:
    """The layer of a multi-token predictor, for instance, which transformers never instantiates."""
    extra = {
        "model.layers.9.eh_proj.weight": lab.random(72, 144, seed=50),
        "model.layers.9.enorm.weight": lab.random(72, seed=51),
        "model.layers.9.shared_head.norm.weight": lab.random(72, seed=52),
        "model.rotary.inv_freq": lab.random(8, seed=53),
        "model.steps": torch.tensor(7, dtype=torch.int64),
        "model.mask": torch.tensor([True, False]),
        "mtp.fc.weight": lab.random(4, 4, seed=54),
        "model.empty": torch.empty(0, 3),
    }
    tensors = {**lab.layers(), **extra}

    def class_says(modules: Any) -> dict[str, str]:
        return {name: "the model class has no such module" for name in modules if ".9." in name}

    job = prepare_job(lab.source(tensors), QuantizeOptions(qmap="nf3", min_coverage=0.0), loadable=class_says)
    reasons = {tensor.source.name: (tensor.action, tensor.reason) for tensor in job.plan.tensors}
    assert reasons["model.layers.9.eh_proj.weight"] == ("copy", "the model class has no such module")
    assert reasons["mtp.fc.weight"] == ("copy", "outside the decoder's layers")
    assert set(reasons) == set(tensors)
    quantize_model.run(job, lab.root / "out")
    found = lab.read("out")
    assert all(torch.equal(found[name], tensor) for name, tensor in extra.items())
    kept = lab.manifest()["kept"]
    assert set(extra) <= set(kept)
    assert kept["model.layers.9.eh_proj.weight"] == "copy: the model class has no such module"


@pytest.mark.parametrize(
    "prefix", ["model.", "model.language_model.", "language_model.model.", "", "transformer.text."]
)
def test_names_are_those_of_the_source(lab: Any, prefix: str) -> None:
    tensors = lab.layers(prefix=prefix)
    tower = {f"{side}.layers.0.mlp.fc1.weight": lab.random(72, 72, seed=60) for side in ("vision_tower", "audio_tower")}
    found = lab.quantize(lab.source({**tensors, **tower, "multi_modal_projector.mm.weight": lab.random(8, 8)}))
    config = open_packed(lab.root / "out").config
    assert set(config.modules) == {
        f"{prefix}layers.{layer}.{name}"
        for layer in (0, 1)
        for name in ("self_attn.q_proj", "mlp.up_proj", "mlp.down_proj")
    }
    assert all(torch.equal(found[name], tensor) for name, tensor in tower.items())
    assert config.modules[f"{prefix}layers.0.self_attn.q_proj"].bias
    assert not config.modules[f"{prefix}layers.0.mlp.up_proj"].bias


def test_coverage_floor(lab: Any) -> None:
    tensors = {**lab.layers(), f"{AT}.mlp.experts.gate_up_proj": lab.random(4, 144, 72)}
    source = lab.source(tensors)
    with pytest.raises(UnsupportedError, match=r"at least 90%.*experts\.gate_up_proj.*3-dimensional"):
        prepare_job(source, QuantizeOptions())
    plan = prepare_job(source, QuantizeOptions(min_coverage=0.3)).plan
    done = 2 * (72 * 72 + 2 * 100 * 72)
    assert plan.coverage == pytest.approx(done / (done + 4 * 144 * 72))
    assert prepare_job(source, QuantizeOptions(skip=(UP,))).plan.coverage < plan.coverage
    with pytest.raises(UnsupportedError, match="at least 99%"):
        prepare_job(source, QuantizeOptions(skip=(UP,), min_coverage=0.99))


def test_linear_that_has_more_than_a_weight(lab: Any) -> None:
    """A packed Linear has no place for the scale of a quantised cache: kept, and said so."""
    tensors = {**lab.layers(), f"{UP}.k_scale": torch.ones(1)}
    found = lab.quantize(lab.source(tensors), min_coverage=0.5)
    assert torch.equal(found[f"{UP}.weight"], tensors[f"{UP}.weight"])
    assert "k_scale" in lab.manifest()["kept"][f"{UP}.weight"]
    verify_checkpoint(lab.root / "out")


@pytest.mark.parametrize("shape", [(0, 72), (72, 0), (1 << 24, 2)])
def test_impossible_shape_is_named(lab: Any, shape: tuple[int, int]) -> None:
    source = lab.source({**lab.layers(), "model.layers.1.mlp.odd_proj.weight": torch.zeros(shape, dtype=torch.float16)})
    if 0 in shape:
        with pytest.raises(UnsupportedError, match=r"odd_proj\.weight.*--skip model\.layers\.1\.mlp\.odd_proj"):
            prepare_job(source, QuantizeOptions())
        source = SafetensorsSource(source.folder)
        prepare_job(source, QuantizeOptions(skip=("model.layers.1.mlp.odd_proj",)))
    else:
        assert prepare_job(source, QuantizeOptions()).plan.modules["model.layers.1.mlp.odd_proj"].rows == 1 << 24


# --- the head --------------------------------------------------------------------------------------------------------


def test_tied_head_is_written_once(lab: Any) -> None:
    tensors = lab.layers()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    for number, config in enumerate(({"tie_word_embeddings": True}, {"text_config": {"tie_word_embeddings": True}})):
        source = lab.source(tensors, config, name=f"source-{number}")
        found = lab.quantize(source, name=f"out-{number}")
        assert "lm_head.weight" not in found
        assert open_packed(lab.root / f"out-{number}").source.config.get("text_config", config) == config.get(
            "text_config", config
        )
        with pytest.raises(UsageError, match="tied"):
            prepare_job(source, QuantizeOptions(lm_head=True))
    tensors["lm_head.weight"][0, 0] += 1  # says tied, is not: both are kept
    found = lab.quantize(lab.source(tensors, {"tie_word_embeddings": True}, name="other"), name="out-other")
    assert torch.equal(found["lm_head.weight"], tensors["lm_head.weight"])


def test_odd_heads_do_not_crash(lab: Any) -> None:
    for number, head in enumerate((torch.ones(5), torch.ones(2, 3, 4), torch.ones(4, 4, dtype=torch.int8))):
        source = lab.source({**lab.layers(), "lm_head.weight": head}, name=str(number))
        plan = prepare_job(source, QuantizeOptions(lm_head=True)).plan
        assert "lm_head" not in plan.modules


# --- the plan, the report and inspect --------------------------------------------------------------------------------


def test_a_plan_of_many_tensors_is_quick(lab: Any) -> None:
    """8,000 experts: anything that looks at every tensor for every tensor would take minutes."""
    tensors = {f"model.layers.0.mlp.experts.{n}.up_proj.weight": torch.ones(1, 2) for n in range(8_000)}
    source = lab.source(tensors)
    plan = prepare_job(source, QuantizeOptions(qmap="nf3")).plan
    only = tuple(plan.modules)
    assert len(prepare_job(source, QuantizeOptions(qmap="nf3", only=only)).plan.modules) == 8_000


def test_inspect_says_which_tensor_parallel_degrees_divide(lab: Any) -> None:
    tensors = {
        f"{AT}.mlp.up_proj.weight": lab.random(512, 256),
        f"{AT}.mlp.down_proj.weight": lab.random(256, 512),
        f"{AT}.mlp.gate_proj.weight": lab.random(384, 256),
    }
    lab.quantize(lab.source(tensors))
    found = inspect_checkpoint(lab.root / "out")
    modules = found["modules"]
    assert modules[UP]["cut_rows_by"] == [1, 2, 4, 8]  # whole tiles of 64 rows
    assert modules[DOWN]["cut_columns_by"] == [1, 2, 4]  # whole groups of 128 columns
    assert modules[f"{AT}.mlp.gate_proj"]["cut_rows_by"] == [1, 2, 3, 6]
    assert found["tensor_parallel_degrees"] == [1, 2]
    assert found["settings"]["group_size"] == 128
    assert found["kinds"]["mlp.up_proj"]["weights"] == 512 * 256


def test_half_of_29568_columns_is_no_whole_number_of_groups(lab: Any) -> None:
    lab.quantize(lab.source({f"{AT}.mlp.down_proj.weight": lab.random(8, 29568)}))
    assert inspect_checkpoint(lab.root / "out")["tensor_parallel_degrees"] == [1, 3, 7, 11]
    lab.quantize(
        lab.source({f"{AT}.mlp.down_proj.weight": lab.random(8, 29568)}, name="s64"), name="o64", group_size=64
    )
    assert 2 in inspect_checkpoint(lab.root / "o64")["tensor_parallel_degrees"]


def test_manifest_is_no_place_for_paths(lab: Any) -> None:
    """It travels with the checkpoint: names yes, the folders of this machine no."""
    lab.quantize(lab.source(lab.layers()))
    for name in ("w3pack.json", "config.json"):
        assert str(lab.root) not in (lab.root / "out" / name).read_text()


def test_half_a_surrogate_pair_in_the_config_survives(lab: Any) -> None:
    lab.quantize(lab.source(lab.layers(count=1), {"odd": "\ud800", "e": "é"}))
    config = json.loads((lab.root / "out" / "config.json").read_text())
    assert (config["odd"], config["e"]) == ("\ud800", "é")


# --- memory ----------------------------------------------------------------------------------------------------------


def test_one_tensor_at_a_time(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor of the source is alive any more when the next one is read (but an FP8 weight's own scales)."""
    import gc
    import weakref

    alive: list[tuple[str, weakref.ref[torch.Tensor]]] = []
    real = SafetensorsSource.read

    def read(self: SafetensorsSource, name: str) -> torch.Tensor:
        gc.collect()
        held = [other for other, reference in alive if reference() is not None]
        assert not held, f"{held} still held while {name} is read"
        data = real(self, name)
        alive.append((name, weakref.ref(data)))
        return data

    monkeypatch.setattr(SafetensorsSource, "read", read)
    lab.quantize(lab.source({name: tensor.bfloat16() for name, tensor in lab.layers().items()}))
    assert len(alive) == len(lab.layers())


def write_large(folder: Path, *, copied: int, copied_mb: int, linear: tuple[int, int]) -> int:
    """A sharded bf16 checkpoint with a few large Linears in layer 0; returns the bytes of its largest tensor."""
    folder.mkdir()
    block = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight_map, largest = {}, 0
    for number in range(copied + 2):
        if number < copied:
            name, tensor = f"model.layers.{number + 1}.mlp.up_proj.weight", block.repeat(copied_mb // 2).view(1024, -1)
        else:
            name = f"{AT}.mlp.{'up' if number == copied else 'gate'}_proj.weight"
            tensor = block.repeat(-(-linear[0] * linear[1] // len(block)))[: linear[0] * linear[1]].view(linear)
        file = f"part-{number:03d}.safetensors"
        save_file({name: tensor}, folder / file)
        weight_map[name] = file
        largest = max(largest, tensor.nbytes)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return largest


def peak_of_a_run(source: Path, output: Path, *, workers: int) -> int:
    """Peak resident bytes of a process that quantises layer 0 and copies the rest, as the command does."""
    program = (
        "import re, sys\n"
        "from pathlib import Path\n"
        "from w3pack.checkpoint.safetensors_source import SafetensorsSource\n"
        "from w3pack.pipeline.plan import QuantizeOptions\n"
        "from w3pack.pipeline.quantize_model import prepare_job, run\n"
        "options = QuantizeOptions(qmap='nf3', only=('re:.*layers[.]0[.].*',))\n"
        "job = prepare_job(SafetensorsSource(Path(sys.argv[1])), options)\n"
        f"run(job, Path(sys.argv[2]), workers={workers})\n"
        # not getrusage: its maximum survives exec, so it may be that of the process that started this one
        "peak = re.search(r'VmHWM:\\s*(\\d+) kB', Path('/proc/self/status').read_text())[1]\n"
        "print(peak, job.plan.memory_bytes)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(w3pack.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", program, source, output], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    peak, promised = map(int, done.stdout.split())
    assert 1024 * peak <= promised  # what --dry-run says
    return 1024 * peak


def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path) -> None:
    """300 MB in tensors of 32 and 2 MB: the peak is that of the libraries and a few copies of one tensor."""
    largest = write_large(tmp_path / "source", copied=9, copied_mb=32, linear=(1024, 1024))
    peak = peak_of_a_run(tmp_path / "source", tmp_path / "out", workers=1)
    assert peak < (500 << 20) + 3 * largest, f"{peak >> 20} MiB"


@pytest.mark.slow
def test_memory_of_a_large_checkpoint(tmp_path: Path) -> None:
    """8.5 GB. One layer of two Linears of 128 MB is quantised, the rest, in tensors of 128 MB, is copied.

    Quantising it all would take a quarter of an hour and show the same: memory follows the largest tensor alone.
    """
    largest = write_large(tmp_path / "source", copied=64, copied_mb=128, linear=(8192, 8192))
    assert sum(path.stat().st_size for path in (tmp_path / "source").iterdir()) >= 8_000_000_000
    peak = peak_of_a_run(tmp_path / "source", tmp_path / "out", workers=2)
    assert peak < (1 << 30) + 6 * largest, f"{peak >> 20} MiB"


def test_code_of_its_own_is_never_run_and_said_so(lab: Any) -> None:
    source = lab.source(lab.layers(), config={"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}})
    job = prepare_job(source, QuantizeOptions())
    assert any("auto_map" in note for note in job.plan.notes)
