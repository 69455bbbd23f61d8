"""What transformers calls while it loads or saves a w3pack checkpoint.

Only hooks that are the same in transformers 5.17 to 5.24 are used: the skeleton is changed before the weights are loaded,
checked after, and the state dict is completed (guard tensor) before it is saved.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from w3pack.checkpoint.validate import check_files
from w3pack.errors import CheckpointError, UnsupportedError
from w3pack.format import names
from w3pack.format.config import QUANT_METHOD, W3Config
from w3pack.format.gateup import SCALES, WEIGHT, GateUpConfig, is_fused
from w3pack.integrations.hf_names import describe_experts, name_resolver
from w3pack.integrations.registration import register
from w3pack.runtime.build import check_loaded, replace_modules
from w3pack.runtime.experts import W3Experts
from w3pack.runtime.fp8_linear import Fp8Module
from w3pack.runtime.linear import W3Linear

_STACKED = re.compile(r"experts\.(gate_up_proj|down_proj)$")


class W3QuantizationConfig(QuantizationConfigMixin):  # type: ignore[misc]  # transformers is not typed
    """The `quantization_config` of config.json; `typed` is what it says, of 3-bit Linears or of fused FP8 pairs."""

    def __init__(self, **entries: Any) -> None:
        self.quant_method = QUANT_METHOD
        said = {"quant_method": QUANT_METHOD, **entries}
        self.typed: W3Config | GateUpConfig = (GateUpConfig if is_fused(said) else W3Config).from_dict(said)
        self._entries = dict(entries)

    def to_dict(self) -> dict[str, Any]:
        """The dictionary as it was read."""
        return {**self._entries, "quant_method": QUANT_METHOD}

    def __iter__(self) -> Any:
        yield from self.to_dict().items()


class W3HfQuantizer(HfQuantizer):  # type: ignore[misc]
    """Loads what `w3pack quantize` wrote; `FusedHfQuantizer`, which it turns into, what `w3pack fuse-gateup` wrote."""

    requires_calibration = True  # transformers' word for: this method only loads, it does not quantise on the fly

    def __new__(cls, quantization_config: W3QuantizationConfig | None = None, **kwargs: Any) -> W3HfQuantizer:
        """One method name, two forms of checkpoint: transformers knows methods only. A copy is made without a config."""
        if quantization_config is not None and isinstance(quantization_config.typed, GateUpConfig):
            from w3pack.integrations.hf_fused import FusedHfQuantizer

            cls = FusedHfQuantizer
        made: W3HfQuantizer = super().__new__(cls)
        return made

    def __init__(self, quantization_config: W3QuantizationConfig, **kwargs: Any) -> None:
        if not kwargs.get("pre_quantized", True):
            raise UnsupportedError(
                "expected a checkpoint that w3pack has packed, got a float model with a w3pack quantization_config; "
                "run `w3pack quantize MODEL -o OUT` and load OUT"
            )
        super().__init__(quantization_config, **kwargs)
        self._paths: dict[str, str] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._stacks: list[str] | None = None  # experts left as transformers stacks them, where others are packed
        self._base = ""

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        files = [Path(file) for file in kwargs.get("checkpoint_files") or []]
        if files and all(file.suffix == ".safetensors" for file in files):
            self._check_files(files)
        wanted = kwargs.get("dtype")
        dtype = wanted if isinstance(wanted, torch.dtype) else torch.get_default_dtype()
        self._paths = self._replace(model, dtype)
        self._dtypes = _planned_dtypes(model, dtype)
        self._shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        self._base = model.base_model_prefix
        if any(isinstance(module, W3Experts) for module in model.modules()):
            self._stacks = [path for path, module in model.named_modules() if describe_experts(module) is not None]
        _ignore_guard(model, self._paths[self.quantization_config.typed.guard])
        return model

    def _check_files(self, files: list[Path]) -> None:
        """CheckpointError unless headers and config belong together."""
        check_files(files, self.quantization_config.typed)

    def _replace(self, model: Any, dtype: torch.dtype) -> dict[str, str]:
        """Put packed modules into the skeleton; checkpoint name -> path in the model."""
        config = self.quantization_config.typed
        return replace_modules(model, config, resolve=name_resolver(model), describe=describe_experts, dtype=dtype)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        missing = _never_loaded(model)
        if missing:
            raise CheckpointError(
                f"expected every parameter in the checkpoint, {len(missing)} missing such as {missing[0]}; "
                "copy the checkpoint completely"
            )
        _check_shapes(model, self._shapes)
        _cast(model, self._dtypes)
        check_loaded(model, is_offloaded=lambda module: hasattr(module, "_hf_hook"))  # accelerate's mark
        for module in model.modules():
            if isinstance(module, W3Linear | Fp8Module):  # transformers makes every float that it loads trainable
                module.requires_grad_(False)
        return model

    def update_weight_conversions(self, weight_conversions: list[Any], *args: Any) -> list[Any]:
        """Leave experts that are packed one by one out of transformers' merging of experts into stacks."""
        if self._stacks is None:
            return weight_conversions
        return [kept for entry in weight_conversions for kept in _only_for(entry, self._stacks, base=self._base)]

    def get_state_dict_and_metadata(
        self, model: Any, *args: Any, **kwargs: Any
    ) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """The model's tensors and the guard, so that a saved checkpoint is as safe to load as the first."""
        state = model.state_dict()
        guard = self._paths[self.quantization_config.typed.guard]
        state[names.guard_tensor(guard)] = torch.frombuffer(bytearray(names.GUARD_TEXT), dtype=torch.uint8)
        return state, {}

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        """save_pretrained writes the same tensors again."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Codes are frozen."""
        return False

    @property
    def is_compileable(self) -> bool:
        """The op has a fake implementation and no graph break."""
        return True


def _ignore_guard(model: Any, path: str) -> None:
    """Tell transformers that the guard tensor is in the files on purpose."""
    patterns = [re.escape(names.guard_tensor(path)) + "$"]
    experts = re.fullmatch(r"(.*\.experts)\.\d+\.\w+", path)
    if experts is not None:  # transformers' own merging of experts renames the key before it looks it up
        patterns.append(re.escape(experts[1]) + r"\.(gate_up_proj|down_proj)$")
    model._keys_to_ignore_on_load_unexpected = {*(model._keys_to_ignore_on_load_unexpected or ()), *patterns}


def _only_for(entry: Any, stacks: list[str], *, base: str) -> list[Any]:
    """A conversion as it is, or, if it merges experts, one like it for each of `stacks`."""
    from transformers.core_model_loading import WeightConverter

    targets, sources = entry._original_target_patterns, entry._original_source_patterns
    if not isinstance(entry, WeightConverter) or not all(_STACKED.search(target) for target in targets):
        return [entry]
    if not all("experts." in source for source in sources):
        return [entry]
    narrowed = []
    for path in stacks:
        converter = deepcopy(entry)
        # a conversion can be kept to one layer: its path, without the base model's prefix and the last two names
        converter.scope_prefix = path.removeprefix(f"{base}.").rsplit(".", 2)[0]
        converter.base_model_prefix = base
        narrowed.append(converter)
    return narrowed


def _planned_dtypes(model: Any, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Float parameter -> the dtype that transformers means it to have: the skeleton's, or its keep-in-float32 plan's."""
    stored = {
        f"{path}.{part}"
        for path, module in model.named_modules()
        if isinstance(module, W3Linear | Fp8Module)
        for part in (names.PACKED if isinstance(module, W3Linear) else (WEIGHT, SCALES))
    }
    plan = {re.compile(key.replace("*", ".*")): to for key, to in model._get_dtype_plan(dtype).items()}
    return {
        name: next((to for pattern, to in plan.items() if pattern.search(name)), parameter.dtype)
        for name, parameter in model.named_parameters()
        if name not in stored and parameter.is_floating_point()
    }


def _check_shapes(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """CheckpointError for a parameter of another shape: transformers before 5.24 takes it, since the model is quantised."""
    for name, parameter in model.named_parameters():
        if tuple(parameter.shape) != shapes.get(name, tuple(parameter.shape)):
            raise CheckpointError(
                f"expected {name} of shape {list(shapes[name])}, got {list(parameter.shape)}; "
                "config.json and the weights do not belong together"
            )


def _cast(model: Any, dtypes: Mapping[str, torch.dtype]) -> None:
    """Give each parameter its dtype: transformers before 5.24 leaves one whose name it has changed in the file's dtype."""
    for name, parameter in model.named_parameters():
        wrong = parameter.is_floating_point() and parameter.dtype != dtypes.get(name, parameter.dtype)
        if wrong and parameter.device.type != "meta":
            parameter.data = parameter.data.to(dtypes[name])


def _never_loaded(model: Any) -> list[str]:
    """Parameters that no file provided: transformers marks each one that it has set."""
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    return [
        name
        for name, parameter in model.named_parameters()
        if name not in tied and parameter.device.type != "meta" and not getattr(parameter, "_is_hf_initialized", False)
    ]


register()  # for whoever imports this module first, before transformers
