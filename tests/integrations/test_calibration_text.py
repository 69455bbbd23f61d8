"""From --dataset to windows of token ids."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from w3pack.checkpoint.safetensors_source import SafetensorsSource
from w3pack.errors import CheckpointError, UnsupportedError, UsageError, W3PackError
from w3pack.integrations.calibration import prepare_calibration
from w3pack.integrations.calibration_text import calibration_text
from w3pack.integrations.loadable import loadable_for
from w3pack.pipeline.plan import QuantizeOptions
from w3pack.pipeline.quantize_model import prepare_job


def byte_tokenizer(*, bos: bool = False, template: str | None = None) -> PreTrainedTokenizerFast:
    """One token for each byte, after two special ones."""
    alphabet = ["<bos>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    inner = Tokenizer(models.BPE(vocab={sign: number for number, sign in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if bos:
        inner.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    found = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<bos>", eos_token="<eos>")
    if template is not None:
        found.chat_template = template
    return found


TEMPLATE = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"


def take(*paths: Path | str, tokenizer: Any = None, samples: int = 4, length: int = 16, seed: int = 0) -> Any:
    return calibration_text(
        [str(path) for path in paths], tokenizer or byte_tokenizer(), samples=samples, length=length, seed=seed
    )


def ids(text: str) -> list[int]:
    found: list[int] = byte_tokenizer()(text)["input_ids"]
    return found


def text_file(folder: Path, name: str = "a.txt", size: int = 1000, sign: str = "") -> Path:
    path = folder / name
    path.write_text("".join(sign or chr(97 + n * n % 23) for n in range(size)))
    return path


def test_windows_are_pieces_of_the_text_and_the_seed_decides(tmp_path: Path) -> None:
    path = text_file(tmp_path)
    found = take(path)
    assert found.windows.shape == (4, 16)
    pieces = {tuple(ids(path.read_text())[n : n + 16]) for n in range(0, 1000 - 15, 16)}
    assert all(tuple(window.tolist()) in pieces for window in found.windows)
    assert torch.equal(take(path).windows, found.windows)
    assert take(path).facts == found.facts
    assert not torch.equal(take(path, seed=1).windows, found.windows)
    assert found.facts["tokens"] == 64
    assert found.facts["texts"][0]["name"] == "a.txt"
    assert not found.notes


def test_each_window_begins_with_bos(tmp_path: Path) -> None:
    found = take(text_file(tmp_path), tokenizer=byte_tokenizer(bos=True))
    assert found.windows.shape == (4, 16)
    assert found.windows[:, 0].tolist() == [0] * 4
    assert not (found.windows[:, 1:] == 0).any()


def test_texts_get_equal_shares_and_short_ones_give_what_they_have(tmp_path: Path) -> None:
    long, short = text_file(tmp_path, "b.txt", sign="b"), text_file(tmp_path, "c.txt", 20, sign="c")
    found = take(long, text_file(tmp_path, "d.txt", sign="d"))
    assert [fact["windows"] for fact in found.facts["texts"]] == [2, 2]
    assert {tuple(window.unique().tolist()) for window in found.windows} == {tuple(set(ids("b"))), tuple(set(ids("d")))}
    assert [fact["windows"] for fact in take(long, short).facts["texts"]] == [3, 1]
    found = take(short)
    assert len(found.windows) == 1
    assert "holds 1 windows" in found.notes[0]


def test_records_hold_text_or_messages(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    chat = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "good day"}]
    path.write_text(json.dumps({"text": "abc"}) + "\n\n" + json.dumps({"messages": chat}) + "\n")
    found = take(path, tokenizer=byte_tokenizer(template=TEMPLATE), samples=1, length=30)
    assert found.windows[0].tolist() == ids("abc\n\n[user]hello[assistant]good day")[:30]
    with pytest.raises(UsageError, match=r"line 3 of a\.jsonl, since this tokenizer has no chat template"):
        take(path)


def test_a_long_text_is_read_all_over(tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_text("a" * 5000 + "b" * 5000)
    found = take(path, samples=8, length=16)  # 4,096 characters are enough
    assert {tuple(window.unique().tolist()) for window in found.windows} >= {tuple(ids("a")), tuple(ids("b"))}


@pytest.mark.skipif(importlib.util.find_spec("pyarrow") is not None, reason="pyarrow is installed")
def test_parquet_without_pyarrow(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1")
    with pytest.raises(UnsupportedError, match="pip install pyarrow"):
        take(path)


@pytest.mark.skipif(importlib.util.find_spec("datasets") is not None, reason="datasets is installed")
def test_hub_id_without_datasets() -> None:
    with pytest.raises(UnsupportedError, match="pip install datasets"):
        take("someone/texts")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", b"", "expected text in empty.txt, got none"),
        ("blank.jsonl", b"\n\n", "expected text in blank.jsonl, got none"),
        ("short.txt", b"abc", "expected at least 16 tokens in short.txt for one window, got 3"),
        ("other.jsonl", b'{"body": "abc"}', "a field `text` or `messages` in line 1 of other.jsonl, got body"),
        ("list.jsonl", b"[1]", "line 1 of list.jsonl, got list"),
        ("number.jsonl", b'{"text": 3}', "line 1 of number.jsonl, got text"),
        ("bad.jsonl", b'{"text": "a"}\n{"te', "JSON object in line 2 of bad.jsonl"),
        ("latin.txt", b"caf\xe9" * 20, "expected UTF-8 in latin.txt"),
        ("a.csv", b"a,b", "expected a .txt, .jsonl or .parquet file, got a.csv"),
    ],
)
def test_bad_files_are_sentences(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(W3PackError) as caught:
        take(tmp_path / name)
    assert message in str(caught.value)


def test_paths_that_are_not_there(tmp_path: Path) -> None:
    for path in (tmp_path / "none.txt", "none.jsonl", tmp_path, "./none"):
        with pytest.raises(UsageError, match="expected --dataset to be"):
            take(path)


def test_windows_too_small_for_anything(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="raise --nsamples or --seqlen"):
        take(text_file(tmp_path), tokenizer=byte_tokenizer(bos=True), length=2)


def test_without_a_dataset_the_text_of_python_is_used_and_named(lab: Any, tmp_path: Path) -> None:
    source = SafetensorsSource(lab.source("llama"))
    job = prepare_job(source, QuantizeOptions(), loadable=loadable_for(source))
    assert prepare_calibration(job, effort=None) is None
    assert prepare_calibration(job, effort="none") is None
    found = prepare_calibration(job, effort="fast", samples=2, length=16, tokenizer=byte_tokenizer())
    assert found is not None
    assert "no --dataset was given: calibrated on the help topics of Python" in found.notes[0]
    with pytest.raises(UsageError, match="either --dataset or --effort none"):
        prepare_calibration(job, effort="none", datasets=["a.txt"])
    by_default = prepare_calibration(
        job, effort=None, datasets=[str(text_file(tmp_path))], length=16, tokenizer=byte_tokenizer()
    )
    assert by_default is not None
    assert by_default.effort == "default"
    with pytest.raises(CheckpointError, match="expected a tokenizer beside"):
        prepare_calibration(job, effort="fast")
