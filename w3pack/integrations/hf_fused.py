"""What transformers calls while it loads or saves a checkpoint of fused FP8 pairs, and what it says of one beforehand."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from w3pack.checkpoint.source import Source
from w3pack.checkpoint.validate_gateup import check_fused_files
from w3pack.format import names
from w3pack.format.gateup import Fp8Spec, GateUpSpec
from w3pack.integrations.hf_names import describe_experts, name_resolver
from w3pack.integrations.hf_quantizer import W3HfQuantizer
from w3pack.integrations.loadable import skeleton
from w3pack.pipeline.fuse_plan import Fusable
from w3pack.runtime.build import why_not_loadable
from w3pack.runtime.build_gateup import place_pairs, why_not_fusable
from w3pack.runtime.fp8_linear import Fp8Module


class FusedHfQuantizer(W3HfQuantizer):
    """Loads what `w3pack fuse-gateup` wrote."""

    def _check_files(self, files: list[Path]) -> None:
        check_fused_files(files, self.quantization_config.typed)

    def _replace(self, model: Any, dtype: torch.dtype) -> dict[str, str]:
        return place_pairs(
            model,
            self.quantization_config.typed,
            resolve=name_resolver(model),
            describe=describe_experts,
            ignored=_ignored_by(model),
            dtype=dtype,
        )

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        super()._process_model_after_weight_loading(model, **kwargs)
        for path, module in model.named_modules():
            if isinstance(module, Fp8Module):
                module.check(path, offloaded=hasattr(module, "_hf_hook"))
        return model


def _ignored_by(model: Any) -> Callable[[str], bool]:
    """Whether a model class leaves tensors of a name aside on purpose."""
    patterns = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
    return lambda name: any(pattern.search(name) for pattern in patterns)


def fusable_for(source: Source) -> Fusable:
    """The question `make_fuse_plan` asks, answered by the class that config.json names."""

    @functools.cache
    def model() -> Any:
        return skeleton(source.config)

    def fusable(pairs: Mapping[str, GateUpSpec], fp8: Mapping[str, Fp8Spec]) -> Mapping[str, str]:
        resolve, ignored = name_resolver(model()), _ignored_by(model())
        answers = {name: why_not_fusable(model(), name, spec, resolve=resolve, describe=describe_experts)
                   for name, spec in pairs.items()}  # fmt: skip
        for name, spec in fp8.items():
            if not ignored(names.tensor(name, "weight")):
                answers[name] = why_not_loadable(
                    model(), name, rows=spec.rows, columns=spec.columns, resolve=resolve, describe=describe_experts
                )
        return {name: why for name, why in answers.items() if why is not None}

    return fusable
