"""`--dataset` -> windows of token ids to calibrate on.

A data set is a local .txt, .jsonl or .parquet file or a hub id. Records hold plain text in the field `text`, or a
conversation in the field `messages`, which goes through the tokenizer's chat template.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from w3pack.checkpoint.source import Source
from w3pack.errors import CheckpointError, ResourceError, UnsupportedError, UsageError
from w3pack.integrations.passages import prefix_ids
from w3pack.pipeline.texts import default_text

_FILES = (".txt", ".jsonl", ".json", ".parquet")
_BETWEEN = "\n\n"
#: Characters tokenised for each token wanted: of a longer .txt file, pieces from all over it; of records, the first.
_CHARACTERS_PER_TOKEN = 32
_PIECES = 64
#: Tokens in a row that two windows apart from each other do not share.
_RUN = 16


@dataclass(frozen=True)
class CalibrationText:
    """What a model is calibrated on.

    Attributes:
        windows: int64 [samples, length]; each begins with what the tokenizer puts before a text, such as bos.
        facts: for the manifest: names, number of tokens, digests.
        notes: sentences for the report.
    """

    windows: torch.Tensor
    facts: dict[str, Any]
    notes: tuple[str, ...]


def tokenizer_of(source: Source) -> Any:
    """transformers' tokenizer of a source.

    Raises:
        CheckpointError: the source has none that loads.
    """
    from transformers import AutoTokenizer

    files = source.companion_files()
    found = next(
        (files[name] for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model") if name in files), None
    )
    if found is None:
        raise CheckpointError(
            f"expected a tokenizer beside {source.location} to calibrate with, got none; copy its files there, "
            "or pass --effort none"
        )
    try:
        return AutoTokenizer.from_pretrained(found.parent)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise CheckpointError(
            f"expected a tokenizer beside {source.location} that loads, got: {str(error).splitlines()[0][:160]}; "
            "mend its files, or pass --effort none"
        ) from error


def calibration_text(
    datasets: Sequence[str], tokenizer: Any, *, samples: int, length: int, seed: int
) -> CalibrationText:
    """Sample windows from all data sets alike.

    Args:
        datasets: paths or hub ids; none: the help topics that come with Python.
        tokenizer: transformers' tokenizer.
        samples: windows wanted; fewer, with a note, where the texts are short.
        length: tokens of a window, its prefix included.
        seed: of the sample; the same seed and texts give the same windows.

    Raises:
        UsageError: a data set that is not there, empty, too short or without the fields.
        UnsupportedError: a format, or a package that is missing.
    """
    prefix = prefix_ids(tokenizer)
    own = length - len(prefix)
    if samples < 1 or own < 2:
        raise UsageError(
            f"expected at least 1 sample of at least {len(prefix) + 2} tokens, got {samples} of {length}; "
            "raise --nsamples or --seqlen"
        )
    characters = samples * length * _CHARACTERS_PER_TOKEN
    texts = [_read(name, tokenizer, characters=characters) for name in datasets] or [_built_in(characters)]
    generator = torch.Generator().manual_seed(seed)
    pools: list[torch.Tensor] = []
    facts: list[dict[str, Any]] = []
    for name, text, sha256 in texts:
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        count = len(ids) // own
        if count == 0:
            raise UsageError(
                f"expected at least {own} tokens in {name} for one window, got {len(ids)}; "
                "give a longer text or lower --seqlen"
            )
        windows = torch.tensor(ids[: count * own], dtype=torch.int64).view(count, own)
        pools.append(windows[torch.randperm(count, generator=generator)])
        facts.append({"name": name, "sha256": sha256, "tokens_read": len(ids)})
    taken = _shares([len(pool) for pool in pools], samples)
    body = torch.cat([pool[:count] for pool, count in zip(pools, taken, strict=True)])
    head = torch.tensor(prefix, dtype=torch.int64).expand(len(body), len(prefix))
    windows = torch.cat([head, body], dim=1)
    for fact, count in zip(facts, taken, strict=True):
        fact["windows"] = count
    notes = [] if datasets else [f"no --dataset was given: calibrated on the {texts[0][0]}, English technical prose"]
    if len(windows) < samples:
        notes.append(
            f"the calibration text holds {len(windows)} windows of {length} tokens, not the {samples} asked for"
        )
    return CalibrationText(
        windows=windows,
        facts={
            "texts": facts,
            "samples": len(windows),
            "length": length,
            "tokens": windows.numel(),
            "sha256": hashlib.sha256(windows.numpy().astype("<i8").tobytes()).hexdigest(),
        },
        notes=tuple(notes),
    )


def apart_from(windows: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Those windows that have no run of 16 tokens in common with any of the others.

    Args:
        windows: int64 [n, length].
        others: int64 [m, length].

    Returns:
        int64 [at most n, length], in their order.
    """
    run = min(_RUN, windows.shape[1])
    known = {tuple(piece) for window in others.tolist() for piece in _runs(window, run)}
    keep = [not any(tuple(piece) in known for piece in _runs(window, run)) for window in windows.tolist()]
    return windows[torch.tensor(keep, dtype=torch.bool)]


def _runs(window: list[int], length: int) -> Iterator[list[int]]:
    return (window[first : first + length] for first in range(len(window) - length + 1))


def _shares(available: Sequence[int], wanted: int) -> list[int]:
    """How many windows to take of each text: alike, and more of the others where one is short."""
    taken = [0] * len(available)
    while sum(taken) < min(wanted, sum(available)):
        for index, most in enumerate(available):
            if taken[index] < most and sum(taken) < wanted:
                taken[index] += 1
    return taken


def _built_in(characters: int) -> tuple[str, str, str]:
    text = default_text(characters)
    return text.name, text.text, text.sha256


def _read(name: str, tokenizer: Any, *, characters: int) -> tuple[str, str, str]:
    """Name, text and digest of one data set."""
    path = Path(name).expanduser()
    if path.is_dir() or (not path.exists() and (path.suffix.lower() in _FILES or name.startswith((".", "/", "~")))):
        raise UsageError(
            f"expected --dataset to be a .txt, .jsonl or .parquet file or a hub id, got {name}, "
            f"{'a folder' if path.is_dir() else 'which is not there'}; check the path"
        )
    label = path.name if path.exists() else name
    parts: list[str] = []
    length = 0
    try:
        for where, record in _records(path, label) if path.exists() else _hub(name):
            part = _text_of(record, tokenizer, where)
            parts.append(part)
            length += len(part) + len(_BETWEEN)
            if length >= characters:
                break
        text = _spread(_BETWEEN.join(parts), characters)
        if path.exists():
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        else:
            digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
    except UnicodeDecodeError as error:
        raise UsageError(f"expected UTF-8 in {label}, got other bytes; convert the file to UTF-8") from error
    except OSError as error:
        raise ResourceError(
            f"expected to read {label}, got: {error.strerror or error}; check the path and its permissions"
        ) from error
    if not text.strip():
        raise UsageError(f"expected text in {label}, got none; give a file with text")
    return label, text.encode(errors="replace").decode(), digest


def _spread(text: str, characters: int) -> str:
    """The text, or where it is longer, as many characters in pieces from all over it."""
    if len(text) <= characters:
        return text
    piece = -(-characters // _PIECES)
    step = (len(text) - piece) / (_PIECES - 1)
    return _BETWEEN.join(text[int(n * step) : int(n * step) + piece] for n in range(_PIECES))


def _records(path: Path, label: str) -> Iterator[tuple[str, Any]]:
    kind = path.suffix.lower()
    if kind == ".txt":
        yield label, {"text": path.read_text(encoding="utf-8")}
    elif kind in (".jsonl", ".json"):
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise UsageError(
                        f"expected a JSON object in line {number} of {label}, got something else; write one object a line"
                    ) from error
                yield f"line {number} of {label}", record
    elif kind == ".parquet":
        yield from _parquet(path, label)
    else:
        raise UnsupportedError(
            f"expected a .txt, .jsonl or .parquet file, got {label}; convert it, or rename plain text to .txt"
        )


def _parquet(path: Path, label: str) -> Iterator[tuple[str, Any]]:
    try:
        pyarrow: Any = import_module("pyarrow")
        parquet: Any = import_module("pyarrow.parquet")
    except ImportError as error:
        raise UnsupportedError(
            f"expected pyarrow to read {label}, which is not installed; pip install pyarrow, or give a .jsonl file"
        ) from error
    try:
        with parquet.ParquetFile(path) as table:
            row = 0
            for batch in table.iter_batches(batch_size=256):
                for record in batch.to_pylist():
                    row += 1
                    yield f"row {row} of {label}", record
    except pyarrow.ArrowException as error:
        raise UsageError(f"expected a Parquet file, got {label}, which is none; check the file") from error


def _hub(name: str) -> Iterator[tuple[str, Any]]:
    try:
        library: Any = import_module("datasets")
    except ImportError as error:
        raise UnsupportedError(
            f"expected a local file, or the package `datasets` to fetch {name} from the hub, got neither; "
            "pip install datasets, or give a .txt, .jsonl or .parquet file"
        ) from error
    try:
        for row, record in enumerate(library.load_dataset(name, split="train", streaming=True), start=1):
            yield f"row {row} of {name}", record
    except (OSError, ValueError, RuntimeError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:160]
        raise UsageError(
            f"expected a data set called {name} with a split `train` on the hub, got: {reason}; check the name, or give a local file"
        ) from error


def _text_of(record: object, tokenizer: Any, where: str) -> str:
    text = record.get("text") if isinstance(record, dict) else None
    if isinstance(text, str):
        return text
    messages = record.get("messages") if isinstance(record, dict) else None
    if not isinstance(messages, list) or not messages:
        got = ", ".join(sorted(map(str, record))[:8]) if isinstance(record, dict) else type(record).__name__
        raise UsageError(f"expected a field `text` or `messages` in {where}, got {got or 'no field'}; rename the field")
    if not getattr(tokenizer, "chat_template", None):
        raise UsageError(
            f"expected plain text in {where}, since this tokenizer has no chat template, got messages; give a field `text`"
        )
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False))
    except Exception as error:  # a template is a program of its own and fails in whatever way it likes
        reason = (str(error).splitlines() or [type(error).__name__])[0][:120]
        raise UsageError(
            f"expected messages that the chat template takes in {where}, got: {reason}; mend the record"
        ) from error
