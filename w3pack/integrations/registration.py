"""Register w3pack with transformers' quantizer registry. Cheap, and safe to call twice."""

from __future__ import annotations

from w3pack.format.config import QUANT_METHOD


def register() -> None:
    """Make `from_pretrained` understand `quant_method: w3pack`."""
    from transformers.quantizers import auto

    if QUANT_METHOD in auto.AUTO_QUANTIZER_MAPPING:
        return
    from w3pack.integrations.hf_quantizer import W3HfQuantizer, W3QuantizationConfig

    auto.register_quantization_config(QUANT_METHOD)(W3QuantizationConfig)
    auto.register_quantizer(QUANT_METHOD)(W3HfQuantizer)
