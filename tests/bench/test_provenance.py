"""What a result says of its making."""

from __future__ import annotations

import pytest

from w3pack.bench.provenance import without_folders


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("w3pack tune --output /root/out/table.json --json", "w3pack tune --output table.json --json"),
        ("python a.py --folder=/tmp/gen b", "python a.py --folder=gen b"),
        ("python scripts/a.py --shape 3/4 /x", "python scripts/a.py --shape 3/4 x"),
        ("python '/home/me/my file.py'", "python 'my file.py'"),
        ("w3pack bench --tokens 1,8", "w3pack bench --tokens 1,8"),
    ],
)
def test_commands_without_folders(typed: str, told: str) -> None:
    assert without_folders(typed) == told
