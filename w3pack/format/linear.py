"""The shape of one quantised Linear, in logical and in stored terms (SPEC.md, section 1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from w3pack.errors import CheckpointError, UnsupportedError
from w3pack.format.layout import CODES_PER_MAP, COMPONENTS, LANES, LAYOUTS, TILE, VECTORS, Layout, padded

QmapDtype = Literal["int8", "float16"]
QMAP_DTYPES: tuple[QmapDtype, ...] = ("int8", "float16")
QMAP_ITEMSIZE: dict[str, int] = {"int8": 1, "float16": 2}

#: Sizes beyond this are refused before anything is computed from them; the largest matrices known are below 2^21.
MAX_SIDE = 1 << 24


@dataclass(frozen=True)
class LinearSpec:
    """One Linear of `rows` (out_features) x `columns` (in_features) in W3 form.

    `maps` is 1, or the number of equal row ranges of the padded matrix that have a map each (SPEC.md: `map_of(n)`).
    """

    rows: int
    columns: int
    group_size: int
    layout: Layout
    maps: int
    qmap_dtype: QmapDtype
    bias: bool

    def __post_init__(self) -> None:
        for side, size in (("rows", self.rows), ("columns", self.columns)):
            if not 1 <= size <= MAX_SIDE:
                raise UnsupportedError(f"expected {side} between 1 and {MAX_SIDE}, got {size}")
        if not TILE <= self.group_size <= MAX_SIDE or self.group_size % TILE:
            raise UnsupportedError(
                f"expected a group size that is a multiple of {TILE}, got {self.group_size}; use 64, 128 or 256"
            )
        if self.layout not in LAYOUTS:
            raise UnsupportedError(f"expected a layout out of {', '.join(LAYOUTS)}, got {self.layout!r}")
        if self.qmap_dtype not in QMAP_DTYPES:
            raise UnsupportedError(f"expected a qmap dtype out of {', '.join(QMAP_DTYPES)}, got {self.qmap_dtype!r}")
        if self.maps < 1 or self.padded_rows % self.maps:
            raise UnsupportedError(f"expected maps to divide {self.padded_rows} padded rows, got {self.maps}")
        if self.rows_per_map != 1 and self.rows_per_map % TILE:
            raise UnsupportedError(
                f"expected one map per row or per whole row tiles, got {self.maps} maps for {self.padded_rows} rows"
            )

    @property
    def padded_rows(self) -> int:
        """Rows as stored: rounded up to the tile."""
        return padded(self.rows, to=TILE)

    @property
    def padded_columns(self) -> int:
        """Columns as stored: rounded up to the group."""
        return padded(self.columns, to=self.group_size)

    @property
    def groups(self) -> int:
        """Groups in each row."""
        return self.padded_columns // self.group_size

    @property
    def rows_per_map(self) -> int:
        """Rows of the padded matrix that share one map."""
        return self.padded_rows // self.maps

    @property
    def codes_shape(self) -> tuple[int, ...]:
        """Shape of the int32 code words: row tile, column tile, vector, lane, component."""
        return (self.padded_rows // TILE, self.padded_columns // TILE, VECTORS[self.layout], LANES, COMPONENTS)

    @property
    def scales_shape(self) -> tuple[int, ...]:
        """Shape of the float16 scales: row tile, group, lane row, 2 * block + half."""
        return (self.padded_rows // TILE, self.groups, 8, 8)

    @property
    def qmap_shape(self) -> tuple[int, ...]:
        """Shape of the map or maps."""
        return (self.maps, CODES_PER_MAP)

    @property
    def weights(self) -> int:
        """Logical weights."""
        return self.rows * self.columns

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and maps, padding included, bias excluded."""
        words = self.padded_rows * self.padded_columns * VECTORS[self.layout] // 8
        return words + 2 * self.padded_rows * self.groups + QMAP_ITEMSIZE[self.qmap_dtype] * self.maps * CODES_PER_MAP

    @property
    def bits_per_weight(self) -> float:
        """Stored bits, padding included, for each logical weight."""
        return 8 * self.nbytes / self.weights

    def tensor_parallel_degrees(self, *, limit: int = 16) -> tuple[list[int], list[int]]:
        """Degrees up to `limit` that cut whole tiles without padding: (along rows, along columns).

        Rows are cut on axis 0 of codes and scales, columns on axis 1; a cut through a padded tile is not permitted,
        since the shards would not add up to the logical size, and several maps must be cut with their rows.
        """
        by_rows = [d for d in range(1, limit + 1) if self.rows % (d * TILE) == 0 and self._maps_divide(d)]
        by_columns = [d for d in range(1, limit + 1) if self.columns % (d * self.group_size) == 0]
        return by_rows or [1], by_columns or [1]

    def _maps_divide(self, degree: int) -> bool:
        return self.maps == 1 or self.maps % degree == 0

    def to_dict(self) -> dict[str, Any]:
        """The entry of this Linear in the manifest and, less the defaults, in config.json."""
        return {
            "rows": self.rows,
            "columns": self.columns,
            "group_size": self.group_size,
            "layout": self.layout,
            "maps": self.maps,
            "qmap_dtype": self.qmap_dtype,
            "bias": self.bias,
        }

    @classmethod
    def from_dict(cls, entry: Mapping[str, Any], *, name: str) -> LinearSpec:
        """Inverse of `to_dict`; CheckpointError, naming the module, when a field is missing or of another type."""
        fields: dict[str, type] = {
            "rows": int,
            "columns": int,
            "group_size": int,
            "layout": str,
            "maps": int,
            "qmap_dtype": str,
            "bias": bool,
        }
        values: dict[str, Any] = {}
        for key, kind in fields.items():
            value = entry.get(key)
            if type(value) is not kind:
                raise CheckpointError(
                    f"expected {key} of module {name} to be of type {kind.__name__}, got {value!r}; "
                    "the quantization_config is damaged, quantize the model again"
                )
            values[key] = value
        try:
            return cls(**values)
        except UnsupportedError as error:
            raise CheckpointError(f"module {name} has an impossible shape: {error}") from error
