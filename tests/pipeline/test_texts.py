"""Texts in each format, and what is said of files that are none."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import pytest

from w3pack.errors import UnsupportedError, UsageError, W3PackError
from w3pack.pipeline.texts import default_text, read_text


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_plain_text_is_taken_as_it_is(tmp_path: Path) -> None:
    content = "Zeile eins\r\nzwei \u00e4\u20ac\U0001f600\n\n" * 3
    path = write(tmp_path / "a.txt", content)
    found = read_text(path, characters=10_000)
    assert found.text == content
    assert found.name == "a.txt"
    assert found.sha256 == hashlib.sha256(content.encode()).hexdigest()
    cut = read_text(path, characters=17)
    assert cut.text == content[:17]
    assert cut.sha256 == found.sha256  # of the file, not of the part


def test_json_lines(tmp_path: Path) -> None:
    rows = [{"text": "one", "body": "1"}, {"text": "two \u20ac", "body": "2"}]
    path = write(tmp_path / "a.jsonl", "\n\n".join(json.dumps(row) for row in rows) + "\n")
    assert read_text(path, characters=100).text == "one\n\ntwo \u20ac"
    assert read_text(path, field="body", characters=100).text == "1\n\n2"
    assert read_text(path, characters=3).text == "one"


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": ["one", "two"], "n": [1, 2]}), path)
    assert read_text(path, characters=100).text == "one\n\ntwo"
    for field in ("n", "missing"):
        with pytest.raises(UsageError, match="--field"):
            read_text(path, field=field, characters=100)
    with pytest.raises(UsageError, match="Parquet"):
        read_text(write(tmp_path / "b.parquet", "no parquet"), characters=100)


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UnsupportedError, match="pip install pyarrow"):
        read_text(write(tmp_path / "a.parquet", "PAR1"), characters=100)


@pytest.mark.parametrize(
    ("name", "content", "error", "says"),
    [
        ("a.csv", "x", UnsupportedError, ".txt, .jsonl or .parquet"),
        ("a.txt", b"caf\xe9", UsageError, "0xe9"),
        ("a.jsonl", b'{"text": "caf\xe9"}', UsageError, "0xe9"),
        ("a.jsonl", '{"text": "a"}\nnot json\n', UsageError, "line 2"),
        ("a.jsonl", '{"body": "a"}\n', UsageError, "'text'"),
        ("a.jsonl", '["text"]\n', UsageError, "list"),
        ("a.jsonl", '{"text": 3}\n', UsageError, "line 1"),
        ("a.jsonl", '{"text": "\\ud800"}\n', UsageError, "surrogate"),
    ],
)
def test_bad_files(tmp_path: Path, name: str, content: str | bytes, error: type[W3PackError], says: str) -> None:
    with pytest.raises(error, match=says):
        read_text(write(tmp_path / name, content), characters=100)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nothing"):
        read_text(tmp_path / "a.txt", characters=100)
    with pytest.raises(UsageError, match="no file"):
        read_text(tmp_path, characters=100)


def test_built_in_text() -> None:
    found = default_text(100_000)
    assert len(found.text) == 100_000
    assert found.text.startswith(default_text(500).text)
    assert "Python" in found.name
    assert "statement" in found.text
