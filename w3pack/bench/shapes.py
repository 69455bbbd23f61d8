"""Which Linears models have, and the cases that a suite or the tuner goes through.

A shape is rows (out_features) x columns (in_features), as the weight is stored. Sizes are those of the public configs;
`qkv` and `gate_up` are the matrices side by side, as engines that fuse them run them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from w3pack.errors import UsageError
from w3pack.format.layout import TILE, Layout
from w3pack.format.linear import LinearSpec, QmapDtype
from w3pack.ops.w3_config import DeviceLimits, MapKind, W3Desc, XDtype


@dataclass(frozen=True)
class Shape:
    """One Linear; `name` says what it is in its model."""

    name: str
    rows: int
    columns: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}"


@dataclass(frozen=True)
class _Decoder:
    hidden: int
    intermediate: int
    heads: int
    key_heads: int
    head: int

    def shapes(self) -> tuple[Shape, ...]:
        attention = self.heads * self.head
        return (
            Shape("qkv", attention + 2 * self.key_heads * self.head, self.hidden),
            Shape("o", self.hidden, attention),
            Shape("gate_up", 2 * self.intermediate, self.hidden),
            Shape("down", self.hidden, self.intermediate),
        )


_DECODERS = {
    "gemma-3-270m": _Decoder(hidden=640, intermediate=2048, heads=4, key_heads=1, head=256),
    "llama-2-7b": _Decoder(hidden=4096, intermediate=11008, heads=32, key_heads=32, head=128),
    "llama-2-13b": _Decoder(hidden=5120, intermediate=13824, heads=40, key_heads=40, head=128),
    "llama-3-8b": _Decoder(hidden=4096, intermediate=14336, heads=32, key_heads=8, head=128),
    "llama-3-70b": _Decoder(hidden=8192, intermediate=28672, heads=64, key_heads=8, head=128),
    "llama-3.2-1b": _Decoder(hidden=2048, intermediate=8192, heads=32, key_heads=8, head=64),
    "llama-3.2-3b": _Decoder(hidden=3072, intermediate=8192, heads=24, key_heads=8, head=128),
    "qwen2.5-0.5b": _Decoder(hidden=896, intermediate=4864, heads=14, key_heads=2, head=64),
    "qwen2.5-7b": _Decoder(hidden=3584, intermediate=18944, heads=28, key_heads=4, head=128),
    "qwen3-8b": _Decoder(hidden=4096, intermediate=12288, heads=32, key_heads=8, head=128),
    "qwen3-14b": _Decoder(hidden=5120, intermediate=17408, heads=40, key_heads=8, head=128),
    "qwen3-32b": _Decoder(hidden=5120, intermediate=25600, heads=64, key_heads=8, head=128),
    "smollm2-135m": _Decoder(hidden=576, intermediate=1536, heads=9, key_heads=3, head=64),
}

#: The shapes for which other projects' kernels were measured on an H200 (docs/results/published_h200.json).
_LIMITS = (
    (28672, 8192),
    (8192, 28672),
    (8192, 8192),
    (14336, 4096),
    (4096, 14336),
    (17408, 5120),
    (5120, 17408),
    (4096, 4096),
)

MODELS: dict[str, tuple[Shape, ...]] = {
    "limits": tuple(Shape("", rows, columns) for rows, columns in _LIMITS),
    **{name: decoder.shapes() for name, decoder in _DECODERS.items()},
}


def shapes_of(model: str) -> tuple[Shape, ...]:
    """The Linears of one layer of a model.

    Raises:
        UsageError: a name that is not in `MODELS`.
    """
    found = MODELS.get(model.lower())
    if found is None:
        raise UsageError(f"expected a model out of {', '.join(MODELS)}, got {model!r}; or pass --shape ROWSxCOLUMNS")
    return found


def parse_shape(text: str) -> Shape:
    """ "4096x14336": rows x columns.

    Raises:
        UsageError: anything else.
    """
    match = re.fullmatch(r"\s*(\d{1,8})\s*[xX*]\s*(\d{1,8})\s*", text)
    if match is None or int(match[1]) < 1 or int(match[2]) < 1:
        raise UsageError(f"expected a shape such as 4096x14336 (rows x columns), got {text[:80]!r}; write two numbers")
    return Shape("", int(match[1]), int(match[2]))


def parse_tokens(text: str) -> tuple[int, ...]:
    """ "1,8,16": token counts, sorted, each once.

    Raises:
        UsageError: anything else, or a count out of 1..65536.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"\d{1,6}", part) and 1 <= int(part) <= 1 << 16 for part in parts):
        raise UsageError(
            f"expected token counts such as 1,8,16, each 1 to 65536, got {text[:80]!r}; separate by commas"
        )
    return tuple(sorted({int(part) for part in parts}))


def select(models: Sequence[str], shapes: Sequence[str]) -> tuple[Shape, ...]:
    """The shapes of all `models` and `shapes` (as `parse_shape` takes them), each size once; "limits" for neither."""
    names = models or (() if shapes else ("limits",))
    found = [shape for name in names for shape in shapes_of(name)] + [parse_shape(text) for text in shapes]
    each: dict[tuple[int, int], Shape] = {}
    for shape in found:
        each.setdefault((shape.rows, shape.columns), shape)
    return tuple(each.values())


@dataclass(frozen=True)
class Case:
    """One measurement: a Linear in a form, called with `tokens` rows of x."""

    rows: int
    columns: int
    tokens: int
    group_size: int = 128
    layout: Layout = "dense"
    qmap_dtype: QmapDtype = "int8"
    map_kind: MapKind = "linear"
    x_dtype: XDtype = "float16"

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns} m{self.tokens} {self.layout} {self.qmap_dtype} {self.x_dtype}"

    @property
    def spec(self) -> LinearSpec:
        """The Linear in stored terms, without a bias."""
        padded_rows = -(-self.rows // TILE) * TILE
        return LinearSpec(
            rows=self.rows,
            columns=self.columns,
            group_size=self.group_size,
            layout=self.layout,
            maps={"linear": 1, "tile": padded_rows // TILE, "row": padded_rows}[self.map_kind],
            qmap_dtype=self.qmap_dtype,
            bias=False,
        )

    def desc(self, device: DeviceLimits) -> W3Desc:
        """The call as the operator describes it."""
        return W3Desc.of(self.spec, tokens=self.tokens, x_dtype=self.x_dtype, device=device)

    def to_dict(self) -> dict[str, Any]:
        """Fields by name."""
        return asdict(self)


def cases(
    shapes: Iterable[Shape],
    *,
    tokens: Iterable[int],
    layouts: Iterable[Layout] = ("dense",),
    qmap_dtypes: Iterable[QmapDtype] = ("int8",),
    x_dtypes: Iterable[XDtype] = ("float16",),
    map_kind: MapKind = "linear",
    group_size: int = 128,
) -> tuple[Case, ...]:
    """The product of all choices, in an order that lets neighbours share operands: tokens run fastest."""
    counts = tuple(tokens)
    layout_list, dtypes, xs = tuple(layouts), tuple(qmap_dtypes), tuple(x_dtypes)
    return tuple(
        Case(shape.rows, shape.columns, count, group_size, layout, qmap_dtype, map_kind, x_dtype)
        for shape in shapes
        for layout in layout_list
        for qmap_dtype in dtypes
        for x_dtype in xs
        for count in counts
    )
