"""Register w3pack with transformers' quantizer registry. Cheap, and safe to call twice."""

from __future__ import annotations

from w3pack.format.config import QUANT_METHOD


def register() -> None:
    """Make `from_pretrained` understand `quant_method: w3pack`."""
    from transformers.quantizers import auto

    import w3pack.integrations.hf_quantizer as ours

    if not hasattr(
        ours, "W3HfQuantizer"
    ):  # it is being imported and has just imported transformers: it calls this at its end
        return
    if QUANT_METHOD not in auto.AUTO_QUANTIZATION_CONFIG_MAPPING:
        auto.register_quantization_config(QUANT_METHOD)(ours.W3QuantizationConfig)
    if QUANT_METHOD not in auto.AUTO_QUANTIZER_MAPPING:
        auto.register_quantizer(QUANT_METHOD)(ours.W3HfQuantizer)
