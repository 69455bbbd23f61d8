"""`w3pack quantize --dataset` and `--effort`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

Cli = Callable[..., Any]
UP = "model.layers.0.mlp.up_proj"
SMALL = ("--only", UP, "--qmap", "nf3", "--nsamples", "3", "--seqlen", "16", "-q")


@pytest.fixture
def source(pristine: Path, tmp_path: Path) -> Path:
    """The checkpoint with a tokenizer of one token for each byte."""
    folder = tmp_path / "model"
    shutil.copytree(pristine, folder)
    alphabet = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    inner = Tokenizer(models.BPE(vocab={sign: number for number, sign in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


def test_a_dataset_calibrates_and_the_report_says_so(cli: Cli, source: Path, tmp_path: Path) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("It was a bright cold day in April. " * 9)
    planned = cli("quantize", source, "-o", out, "--dataset", text, *SMALL, "--dry-run", "--json").json
    assert planned["calibration"]["effort"] == "default"
    assert planned["memory_bytes"] > 0
    assert not out.exists()
    done = cli("quantize", source, "-o", out, "--dataset", text, "--effort", "diagonal", *SMALL, "--json").json
    found = done["calibration"]
    assert found["effort"] == "diagonal"
    assert [fact["name"] for fact in found["texts"]] == ["text.txt"]
    assert found["tokens"] == 3 * 16
    assert found["most_sensitive_first"] == [UP]
    assert cli("verify", out, "--against", source).code == 0
    shown = cli("quantize", source, "-o", tmp_path / "two", "--dataset", text, "--effort", "diagonal", *SMALL)
    assert "effort diagonal, 3 x 16 tokens of text.txt" in shown.out
    assert f"{UP} (" in shown.out


def test_effort_without_a_dataset_uses_the_text_of_python(cli: Cli, source: Path, tmp_path: Path) -> None:
    done = cli("quantize", source, "-o", tmp_path / "out", "--effort", "diagonal", *SMALL)
    assert done.code == 0, done.err
    assert "no --dataset was given: calibrated on the help topics of Python" in done.out
    plain = cli("quantize", source, "-o", tmp_path / "plain", *SMALL, "--json")
    assert plain.json["calibration"] is None


def test_contradictions_and_bad_text_are_sentences(refused: Cli, pristine: Path, source: Path, tmp_path: Path) -> None:
    out, text = tmp_path / "out", tmp_path / "text.txt"
    text.write_text("short")
    refused(2, "quantize", source, "-o", out, "--dataset", text, "--effort", "none", says="either --dataset or")
    refused(2, "quantize", source, "-o", out, "--dataset", text, *SMALL, says="expected at least 16 tokens in text.txt")
    refused(2, "quantize", source, "-o", out, "--dataset", tmp_path / "no.txt", says="which is not there")
    refused(4, "quantize", pristine, "-o", out, "--effort", "fast", says="expected a tokenizer beside")
    refused(2, "quantize", source, "-o", out, "--effort", "most")
    assert not out.exists()


def test_best_tunes_and_says_what_it_gained(cli: Cli, source: Path, tmp_path: Path) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("It was a bright cold day in April. " * 9 + "Call me Ishmael. Some years ago " * 9)
    options = ("--dataset", text, "--effort", "best", *SMALL)
    planned = cli("quantize", source, "-o", out, *options, "--dry-run", "--json").json
    assert planned["calibration"]["effort"] == "best"
    plain = cli("quantize", source, "-o", out, "--dataset", text, *SMALL, "--dry-run", "--json").json
    assert planned["memory_bytes"] >= plain["memory_bytes"]
    done = cli("quantize", source, "-o", out, *options)
    assert done.code == 0, done.err
    assert "end to end: KL to the source " in done.out
    assert "effort best, 3 x 16 tokens of text.txt" in done.out
    assert cli("verify", out, "--against", source).code == 0
