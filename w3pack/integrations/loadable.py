"""Ask the model class, before any work, which modules a packed checkpoint could be loaded into."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from importlib import import_module
from typing import Any

import torch

from w3pack.checkpoint.source import Source
from w3pack.errors import CheckpointError, UnsupportedError
from w3pack.format import names
from w3pack.integrations.hf_names import describe_experts, missing_parameters, name_resolver
from w3pack.pipeline.plan import Loadable
from w3pack.runtime.build import why_not_loadable


def skeleton(config: Mapping[str, Any], *, buffers: bool = False) -> Any:
    """The model of a config on the meta device: its modules and shapes without any memory.

    With `buffers`, tables such as those of rotary embeddings are computed, so that modules can be filled and run, and all
    parameters are float32.

    Raises:
        UnsupportedError: a model_type or architecture that the installed transformers does not know.
    """
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise UnsupportedError(
            f"expected a model_type that transformers {transformers.__version__} knows, got {model_type!r}; "
            "upgrade transformers, or check config.json (models with their own code are not supported)"
        )
    entries = {key: value for key, value in config.items() if key not in ("quantization_config", "model_type")}
    try:
        parsed = CONFIG_MAPPING[model_type].from_dict(entries)
        architecture = (config.get("architectures") or [None])[0]
        model_class = getattr(transformers, architecture or "", None)
        build = getattr(model_class, "_from_config", transformers.AutoModelForCausalLM.from_config)
        if buffers:
            empty: Any = import_module("accelerate").init_empty_weights
            with empty(include_buffers=False):
                return build(parsed, dtype=torch.float32)
        with torch.device("meta"):
            return build(parsed)
    except MemoryError:
        raise
    except Exception as error:  # model classes check their config in whatever way they like
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise UnsupportedError(
            f"expected a causal language model that transformers {transformers.__version__} can build from config.json, "
            f"got model_type {model_type!r}: {reason}"
        ) from error


def loadable_for(source: Source) -> Loadable:
    """The question `make_plan` asks, answered by the class that config.json names."""

    def loadable(modules: Collection[str]) -> Mapping[str, str]:
        _check_layers(source)
        model = skeleton(source.config)
        missing = missing_parameters(model, source.tensors)
        if missing:
            raise CheckpointError(
                f"expected a tensor for every parameter of {type(model).__name__}, {len(missing)} have none, such as "
                f"{missing[0]}; config.json and the weights do not belong together, or a file is missing"
            )
        resolve = name_resolver(model)
        refused: dict[str, str] = {}
        for module in modules:
            rows, columns = source.tensors[names.tensor(module, "weight")].shape
            why = why_not_loadable(
                model, module, rows=rows, columns=columns, resolve=resolve, describe=describe_experts
            )
            if why is not None:
                refused[module] = why
        return refused

    return loadable


def _check_layers(source: Source) -> None:
    """Refuse a layer count that the files cannot have before a model of that many layers is built."""
    text = source.config.get("text_config")
    for config in (source.config, text if isinstance(text, dict) else {}):
        layers = config.get("num_hidden_layers")
        if isinstance(layers, int) and layers > len(source.tensors):
            raise CheckpointError(
                f"expected at most {len(source.tensors)} layers, one for each tensor, got num_hidden_layers {layers}; "
                "config.json and the weights do not belong together"
            )
