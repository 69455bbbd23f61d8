"""Names in a checkpoint -> paths in a transformers model, and what transformers' stacked experts are."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from torch import nn

from w3pack.runtime.build import ExpertStack


def name_resolver(model: Any) -> Callable[[str], str]:
    """A function from checkpoint module names to paths in `model`.

    Tried in turn: the name itself; the name after transformers' own renamings for this class; each with the base model's
    prefix added or taken away. A name that leads nowhere comes back unchanged.
    """
    renamings = _renamings(model)
    prefix = f"{getattr(model, 'base_model_prefix', '')}."

    def resolve(name: str) -> str:
        candidates = [name]
        renamed = f"{name}.weight"
        for renaming in renamings:
            renamed, _ = renaming.rename_source_key(renamed)
        candidates.append(renamed.removesuffix(".weight"))
        for candidate in tuple(candidates):
            candidates.append(candidate.removeprefix(prefix))
            candidates.append(prefix + candidate)
        for candidate in candidates:
            try:
                model.get_submodule(candidate)
            except AttributeError:
                continue
            return candidate
        return name

    return resolve


def _conversions(model: Any) -> list[Any]:
    from copy import deepcopy

    from transformers.conversion_mapping import get_model_conversion_mapping

    # copies: a renaming remembers that it was used, which decides what save_pretrained reverts
    return deepcopy(get_model_conversion_mapping(model) or [])


def _renamings(model: Any) -> list[Any]:
    from transformers.core_model_loading import WeightRenaming

    return [entry for entry in _conversions(model) if isinstance(entry, WeightRenaming)]


def missing_parameters(model: Any, names: Collection[str]) -> list[str]:
    """Parameters of a model for which a checkpoint with tensors `names` has nothing, tied ones apart.

    Names go through transformers' own renaming and merging rules, as they will when the checkpoint is loaded.
    """
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    conversions = _conversions(model)
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    targets = {pattern: entry.target_patterns for entry in converters for pattern in entry.source_patterns}
    state = model.state_dict()
    supplied = set(names)
    for name in names:
        renamed, source = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        supplied.add(renamed)
        if source is not None:  # one tensor may be split into several
            supplied.update(renamed.replace(targets[source][0], target) for target in targets[source])
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    return [name for name, _ in model.named_parameters() if name not in supplied and name not in tied]


def stored_names(model: Any, names: Collection[str]) -> dict[str, str]:
    """Path of a parameter or stored buffer -> the checkpoint's name of it, where one tensor is the whole of it.

    Those that transformers merges from several tensors or splits off are left out.
    """
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    conversions = _conversions(model)
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    state = model.state_dict()
    found: dict[str, str] = {}
    for name in names:
        renamed, source = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if source is None and renamed in state:
            found[renamed] = name
    return found


def describe_experts(module: nn.Module) -> ExpertStack | None:
    """What `W3Experts` needs to know of a transformers experts module; None for anything it does not compute.

    It computes experts with a stacked [experts, 2 * intermediate, hidden] gate_up_proj (gate first), a stacked down_proj,
    no biases, and activation(gate) * up in between.
    """
    from transformers.integrations import moe

    gate_up, down = getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None)
    activation = getattr(module, "act_fn", None)
    if not (isinstance(gate_up, nn.Parameter) and isinstance(down, nn.Parameter)) or activation is None:
        return None
    if gate_up.dim() != 3 or down.dim() != 3 or len(list(module.parameters())) != 2:
        return None
    experts, hidden, intermediate = down.shape
    if tuple(gate_up.shape) != (experts, 2 * intermediate, hidden):
        return None
    plain_gate = getattr(type(module), "_apply_gate", None) in (None, getattr(moe, "_default_apply_gate", None))
    if getattr(module, "is_transposed", False) or not getattr(module, "is_concatenated", True) or not plain_gate:
        return None
    return ExpertStack(experts=experts, hidden=hidden, intermediate=intermediate, activation=activation)
