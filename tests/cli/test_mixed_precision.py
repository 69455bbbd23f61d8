"""`w3pack quantize --sensitivity`, `--keep-top` and `--target-bits`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from w3pack.format.names import GUARD_TEXT

Cli = Callable[..., Any]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    monkeypatch.setenv("W3PACK_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


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


def test_plan_run_inspect_and_verify_agree(cli: Cli, source: Path, tmp_path: Path, cache: Path) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text("It was a bright cold day in April. " * 9)
    arguments = ("quantize", source, "-o", out, "--dataset", text, "--nsamples", "3", "--seqlen", "16", "-q",
                 "--effort", "diagonal", "--target-bits", "5.5")  # fmt: skip
    planned = cli(*arguments, "--dry-run", "--json").json
    assert not out.exists()
    assert len(list((cache / "sensitivity").iterdir())) == 1
    mixed = planned["sensitivity"]["mixed"]
    assert mixed["bits_per_weight"] <= 5.5
    kept = [tensor["name"] for tensor in planned["tensors"] if tensor["why"] == "--target-bits 5.5"]
    assert sorted(kept) == sorted(f"{name}.weight" for name in mixed["kept"])
    assert kept
    shown = cli(*arguments, "--dry-run").out
    assert "--target-bits 5.5: " in shown
    assert f"-> {mixed['bits_per_weight']:.3f} bits per weight of all Linears" in shown
    done = cli(*arguments, "--json").json
    assert done["sensitivity"] == planned["sensitivity"]
    assert done["output_bytes"] == sum(tensor["output_bytes"] for tensor in planned["tensors"]) + len(GUARD_TEXT)
    assert {row["module"] for row in done["linears"]}.isdisjoint(mixed["kept"])
    assert all(row["expected_loss"] > 0 for row in done["linears"])
    assert len(done["blocks"]) == 2
    found = cli("inspect", out, "--json").json
    assert found["sensitivity"] == planned["sensitivity"]
    assert "It is to buy" in cli("inspect", out).out
    assert cli("verify", out, "--against", source).code == 0


def test_layers_lists_linears_and_blocks(cli: Cli, source: Path, tmp_path: Path) -> None:
    shown = cli("quantize", source, "-o", tmp_path / "out", "-q", "--sensitivity", "--layers").out
    lines = [line.split() for line in shown.splitlines()]
    rows = [line for line in lines if line and line[0].startswith("model.layers.") and len(line) == 6]
    assert len(rows) == 14
    losses = [float(line[4]) for line in rows]
    assert losses == sorted(losses, reverse=True)
    assert ["model.layers.0", "-"] in [line[:2] for line in lines]
    assert "relative squared error of the weights at group size 128" in shown
    assert "Mixed precision" not in shown
    assert f"Expected loss:        {sum(losses):.3g}" in shown


def test_kept_ones_do_not_count_against_the_coverage_unless_asked(
    cli: Cli, refused: Cli, source: Path, tmp_path: Path
) -> None:
    done = cli("quantize", source, "-o", tmp_path / "out", "-q", "--keep-top", "30%", "--json").json
    assert done["coverage"] < 0.9
    assert done["sensitivity"]["mixed"]["weights_kept"] / (done["weights"] / done["coverage"]) <= 0.3
    refused(
        3, "quantize", source, "-o", tmp_path / "b", "--keep-top", "30%", "--min-coverage", "0.9", says="--keep-top 30%"
    )


def test_a_given_map_of_a_kept_linear_is_no_error(cli: Cli, source: Path, tmp_path: Path) -> None:
    """Which Linears are kept is not known when the file of maps is written."""
    maps = {f"model.layers.{n}.mlp.{kind}_proj": [-8, -5, -2, 0, 1, 3, 5, 8] for n in (0, 1) for kind in ("up", "down")}
    (tmp_path / "maps.json").write_text(json.dumps(maps))
    done = cli(
        "quantize", source, "-o", tmp_path / "out", "-q", "--qmap", tmp_path / "maps.json", "--keep-top", "5", "--json"
    )
    assert done.code == 0, done.err
    assert cli("verify", tmp_path / "out", "--against", source).code == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--keep-top", "5%", "--target-bits", "4"), "either --keep-top or --target-bits, got both"),
        (("--keep-top", "all"), "as a share above 0% and below 100%"),
        (("--keep-top", "14"), "to leave a Linear to quantise, got 14 of 14"),
        (("--keep-top", "0.5%"), "the smallest of which holds"),
        (("--target-bits", "3"), "above 3 and below 16, got 3"),
        (("--target-bits", "16"), "above 3 and below 16, got 16"),
        (("--target-bits", "3.2"), "which the smallest forms take, got 3.2"),
        (("--target-bits", "nan"), "above 3 and below 16, got nan"),
        (("--target-bits", "few"), "should be a valid number"),
        (("--guided",), "expected --guided with a calibrated effort, got none"),
        (("--lm-head", "--only", "lm_head", "--keep-top", "1"), "expected Linears in the decoder's blocks to measure"),
    ],
)
def test_what_cannot_be_meant_is_a_usage_error(
    refused: Cli, source: Path, tmp_path: Path, arguments: tuple[str, ...], says: str
) -> None:
    refused(2, "quantize", source, "-o", tmp_path / "out", "-q", *arguments, says=says)
    assert not (tmp_path / "out").exists()
