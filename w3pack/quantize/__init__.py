"""Floats -> codes: maps, scales and solvers. Pure torch; no files, no modules."""

from w3pack.quantize.calibrated import CalibratedLinear, quantize_calibrated
from w3pack.quantize.linear import QuantizedLinear, QuantizeSettings, quantize_data_free
from w3pack.quantize.maps import map_names, named_map
from w3pack.quantize.moments import SecondMoment

__all__ = [
    "CalibratedLinear",
    "QuantizeSettings",
    "QuantizedLinear",
    "SecondMoment",
    "map_names",
    "named_map",
    "quantize_calibrated",
    "quantize_data_free",
]
