"""Tables of tuned choices: merged by key, sorted, the same bytes for the same content, never half written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from w3pack.bench.table import merged, table_at, write_table
from w3pack.errors import ResourceError
from w3pack.ops.w3_config import DeviceLimits, W3Config
from w3pack.ops.w3_table import Entry, Table, read_table

CONFIG = W3Config(token_tiles=1, row_warps=2, split_warps=4, token_warps=1, slots=4, ring=0, blocks=132)
LIMITS = DeviceLimits("sm_90a", 132, 227 << 10)
EMPTY = Table(device="X", entries=(), prefill_from=(), arch="sm_90a", multiprocessors=132)


def entry(rows: int, tokens: int, microseconds: float = 1.0, **changes: Any) -> Entry:
    fields: dict[str, Any] = {"layout": "dense", "qmap_dtype": "int8", "map_kind": "linear", "scale_sets": 1}
    fields |= {"x_dtype": None, "config": CONFIG, "microseconds": microseconds, **changes}
    return Entry(rows=rows, columns=4096, tokens=tokens, **fields)


def test_a_missing_file_is_an_empty_table(tmp_path: Path) -> None:
    assert table_at(tmp_path / "none.json", device="X", limits=LIMITS) == EMPTY


def test_written_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "tables" / "x.json"
    table = merged(
        Table("X", (), ((4096, 4096, 129),), "sm_90a", 132), [entry(64, 8), entry(64, 1, x_dtype="bfloat16")]
    )
    write_table(path, table, provenance={"torch": "2.11"})
    assert table_at(path, device="another", limits=LIMITS) == read_table(path) == table
    first = path.read_bytes()
    write_table(path, table_at(path, device="X", limits=LIMITS), provenance={"torch": "2.11"})
    assert path.read_bytes() == first
    document = json.loads(first)
    assert [found["tokens"] for found in document["entries"]] == [1, 8]
    assert document["provenance"] == {"torch": "2.11"}
    assert first.count(b'"rows"') == sum(b'"rows"' in line for line in first.splitlines()) == 2
    assert list(path.parent.iterdir()) == [path]


def test_an_empty_table_can_be_written(tmp_path: Path) -> None:
    write_table(tmp_path / "x.json", EMPTY)
    assert read_table(tmp_path / "x.json") == EMPTY


def test_an_entry_for_the_same_call_is_replaced_and_the_rest_kept() -> None:
    old = merged(EMPTY, [entry(64, 1), entry(64, 8), entry(64, 1, layout="nibble")])
    new = merged(old, [entry(64, 1, microseconds=0.5)])
    assert [(found.tokens, found.layout, found.microseconds) for found in new.entries] == [
        (1, "dense", 0.5),
        (1, "nibble", 1.0),
        (8, "dense", 1.0),
    ]
    assert len(old.entries) == 3


def test_one_dtype_comes_before_any_dtype() -> None:
    table = merged(EMPTY, [entry(64, 1), entry(64, 1, x_dtype="float16"), entry(64, 1, x_dtype="bfloat16")])
    assert [found.x_dtype for found in table.entries] == ["bfloat16", "float16", None]


def test_order_does_not_depend_on_the_order_of_tuning() -> None:
    entries = [entry(rows, tokens) for rows in (128, 64, 4096) for tokens in (16, 1)]
    assert merged(EMPTY, entries) == merged(EMPTY, reversed(entries))


@pytest.mark.parametrize("text", ["", "[]", "{", "{}", '{"format": 2, "entries": []}'])
def test_another_file_is_refused_and_left_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ResourceError, match=r"expected .* got"):
        table_at(path, device="X", limits=LIMITS)
    assert path.read_text() == text


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match="--output"):
        write_table(tmp_path / "file" / "x.json", EMPTY)
