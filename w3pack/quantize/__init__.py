"""Floats -> codes: maps, scales and solvers. Pure torch; no files, no modules."""

from w3pack.quantize.linear import QuantizedLinear, QuantizeSettings, quantize_data_free
from w3pack.quantize.maps import map_names, named_map

__all__ = ["QuantizeSettings", "QuantizedLinear", "map_names", "named_map", "quantize_data_free"]
