"""`w3pack eval`: what it prints, its exit codes, and a real model against its source."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from w3pack.cli import app as app_module

Cli = Callable[..., Any]
ROOT = Path(app_module.__file__).parents[2]
SHORT = ("--tokens", "128", "--window", "32", "--device", "cpu")


def give_tokenizer(folder: Path, *, reverse: bool = False) -> Path:
    """A token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=reverse)
    tokenizer = Tokenizer(models.BPE(vocab={sign: number for number, sign in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


@pytest.fixture(scope="session")
def source(pristine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer. Read it, never write to it."""
    return give_tokenizer(Path(shutil.copytree(pristine, tmp_path_factory.mktemp("eval") / "source")))


@pytest.fixture(scope="session")
def packed(source: Path) -> Path:
    """The same, packed. Read it, never write to it."""
    output = source.parent / "packed"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["w3pack", "quantize", str(source), "-o", str(output), "--qmap", "nf3", "-q"])
        with pytest.raises(SystemExit) as stop:
            app_module.main()
    assert stop.value.code == 0
    return output


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text("Call me Ishmael. Some years ago - never mind how long precisely. " * 4)
    return path


def test_table(cli: Cli, packed: Path, source: Path, book: Path) -> None:
    rows = book.with_name("rows.jsonl")
    rows.write_text("".join(json.dumps({"body": word * 40}) + "\n" for word in ("one ", "two ")))
    result = cli("eval", packed, "--reference", source, "--dataset", book, "--dataset", rows, "--field", "body", *SHORT)
    assert result.code == 0, result.err
    assert result.err == ""
    lines = result.out.splitlines()
    assert sum(line.startswith("book.txt") for line in lines) == 2
    assert sum(line.startswith("rows.jsonl") for line in lines) == 2
    for word in ("perplexity", "bits/byte", "KL nats", "noise floor", "same top 1", "w3pack", "bfloat16", "context"):
        assert word in result.out


def test_without_a_reference_or_a_text(cli: Cli, packed: Path) -> None:
    result = cli("eval", packed, *SHORT, "-q")
    assert result.code == 0, result.err
    assert "help topics of Python" in result.out
    assert "KL" not in result.out
    assert "pass --reference" in result.out


def test_json(cli: Cli, packed: Path, source: Path, book: Path) -> None:
    found = cli("eval", packed, "--reference", source, "--dataset", book, *SHORT, "--json").json
    assert set(found) == {
        "model", "reference", "tokenizer", "tokens", "window", "first_token", "windows_at_once", "reference_logits",
        "noise_floor", "device", "threads", "seed", "versions", "notes", "texts",
    }  # fmt: skip
    assert set(found["model"]) == {"name", "kind", "bytes", "manifest_sha256", "class", "dtype"}
    assert set(found["reference"]) == {"name", "kind", "bytes", "files", "class", "dtype"}
    (text,) = found["texts"]
    assert set(text) == {
        "name", "sha256", "ids_sha256", "windows", "positions", "nbytes", "model", "reference", "log_ratio",
        "log_ratio_se", "kl", "top1_agreement", "top10_overlap", "rms_change", "non_finite_model",
        "non_finite_reference", "noise_floor",
    }  # fmt: skip
    assert set(text["model"]) == {"nll", "perplexity", "bits_per_byte"}
    assert set(text["kl"]) == set(text["noise_floor"]["kl"]) == {"mean", "se", "median", "p99", "p999", "largest"}
    assert text["nbytes"] == text["positions"] == 4 * 31
    assert found == cli("eval", packed, "--reference", source, "--dataset", book, *SHORT, "--json").json


def test_itself(cli: Cli, packed: Path, book: Path) -> None:
    (text,) = cli("eval", packed, "--reference", packed, "--dataset", book, *SHORT, "--json").json["texts"]
    assert (text["kl"]["largest"], text["top1_agreement"], text["log_ratio"]) == (0, 1, 0)


@pytest.mark.parametrize(
    ("code", "arguments", "says"),
    [
        (2, ("{packed}", "--dataset", "{tmp}/no-such.txt"), "no-such.txt"),
        (2, ("{tmp}/no-such-model",), "no-such-model"),
        (2, ("{packed}", "--reference", "{tmp}/no-such-model"), "no-such-model"),
        (2, ("{packed}", "--window", "100"), "at most 64 tokens"),
        (2, ("{packed}", "--tokens", "16"), "--tokens"),
        (2, ("{packed}", "--device", "tpu"), "--device"),
        (2, ("{packed}", "--reference", "{reversed}"), "same tokens"),
        (2, ("{packed}", "--window", "1"), "--window"),
        (3, ("{packed}", "--dataset", "{tmp}/table.csv"), ".parquet"),
        (3, ("{packed}", "--dataset", "{tmp}/table.parquet"), "pyarrow"),
        (3, ("{packed}", "--tasks", "arc_easy"), "lm_eval"),
        (3, ("{packed}", "--reference", "{strange}"), "model_type"),
        (4, ("{pristine}",), "tokenizer"),
        (4, ("{packed}", "--reference", "{tmp}"), "config.json"),
        (4, ("{packed}", "--reference", "{truncated}"), "model.safetensors"),
        (4, ("{incomplete}",), "up_proj"),
    ],
)
def test_exit_codes(
    refused: Cli,
    packed: Path,
    source: Path,
    pristine: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    arguments: tuple[str, ...],
    says: str,
) -> None:
    for name in ("pyarrow", "lm_eval"):
        monkeypatch.setitem(sys.modules, name, None)
    (tmp_path / "table.csv").write_text("a,b")
    (tmp_path / "table.parquet").write_text("PAR1")
    places = {"packed": packed, "pristine": pristine, "tmp": tmp_path}
    if any(argument.startswith("{") and argument.strip("{}") not in places for argument in arguments):
        places |= damaged(source, packed, tmp_path)
    filled = [argument.format(**places) for argument in arguments]
    defaults = [one for pair in zip(SHORT[::2], SHORT[1::2], strict=True) if pair[0] not in filled for one in pair]
    refused(code, "eval", *filled, *defaults, says=says)


def damaged(source: Path, packed: Path, root: Path) -> dict[str, Path]:
    """Models that are not what they should be."""
    places = {name: Path(shutil.copytree(source, root / name)) for name in ("reversed", "strange", "truncated")}
    give_tokenizer(places["reversed"], reverse=True)
    config = json.loads((source / "config.json").read_text())
    (places["strange"] / "config.json").write_text(json.dumps(config | {"model_type": "no-such-model"}))
    weights = places["truncated"] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    places["incomplete"] = Path(shutil.copytree(packed, root / "incomplete"))
    file = places["incomplete"] / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.scales"]
    save_file(tensors, file, metadata={"format": "pt"})
    return places


@pytest.mark.parametrize(
    ("error", "code"),
    [(KeyboardInterrupt(), 130), (torch.OutOfMemoryError("CUDA out of memory."), 5), (OSError(28, "No space left"), 5)],
)
def test_exit_code_of_what_happens_on_the_way(
    refused: Cli, packed: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("w3pack.pipeline.agreement.Tally.add", fail)
    refused(code, "eval", packed, *SHORT)


def test_bar_only_where_somebody_looks(cli: Cli, packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(sys.stderr), "isatty", lambda _: True, raising=False)
    assert "window" in cli("eval", packed, *SHORT).err
    assert "window" not in cli("eval", packed, *SHORT, "-q").err


def test_help_has_an_example(cli: Cli) -> None:
    assert "w3pack eval" in " ".join(cli("eval", "--help").out.split()).split("Example:")[1]


# --- a real model ----------------------------------------------------------------------------------------------------


def fetched(name: str) -> Path:
    """A model or a folder of texts from scripts/fetch.py; skips where it cannot be had."""
    done = subprocess.run([sys.executable, ROOT / "scripts" / "fetch.py", name], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"{name} cannot be fetched: {done.stderr.strip()[-200:]}")
    return Path(done.stdout.strip().splitlines()[-1])


@pytest.mark.slow
def test_smollm2_against_its_gguf_source(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Divergence of SmolLM2 packed without data is about one nat, a hundred thousand times the noise floor."""
    model, speeches = fetched("smollm2-135m"), fetched("sotu")
    text = tmp_path / "sotu.txt"
    files = sorted(speeches.glob("*.txt"))[-31:]
    text.write_text("\n\n".join(file.read_text(encoding="utf-8") for file in files)[:60_000], encoding="utf-8")
    threads = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    try:
        assert cli("quantize", model, "-o", tmp_path / "packed", "-q").code == 0
        found = cli(
            "eval", tmp_path / "packed", "--reference", model, "--dataset", text, "--tokens", "4096", "--json"
        ).json
    finally:
        torch.set_num_threads(threads)
    (row,) = found["texts"]
    assert row["positions"] == 8 * 511
    assert 0.8 < row["kl"]["mean"] < 1.2
    assert row["kl"]["mean"] > 1e4 * row["noise_floor"]["kl"]["mean"]
    assert 0.4 < row["top1_agreement"] < 0.65
    assert 0.6 < row["log_ratio"] < 1.1
    assert row["non_finite_model"] == row["non_finite_reference"] == 0
