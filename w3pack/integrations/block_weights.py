"""A model without weights, and single modules of it filled from a source and emptied again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from w3pack.checkpoint.source import Source
from w3pack.checkpoint.tensor_file import DTYPES
from w3pack.errors import CheckpointError, UnsupportedError
from w3pack.format import names
from w3pack.integrations.hf_names import describe_experts, name_resolver, stored_names
from w3pack.integrations.loadable import skeleton
from w3pack.pipeline.one_linear import read_float
from w3pack.pipeline.plan import Plan
from w3pack.runtime.experts import PROJECTIONS, Expert, W3Experts


class WeightlessModel:
    """transformers' model of a source, its parameters on the meta device and its other buffers as they should be.

    Experts that the source stores one by one are modules of their own here.

    Attributes:
        model: in evaluation mode.
        paths: module of the plan -> path in the model.
        stored: path of a parameter or stored buffer -> its name in the checkpoint.
    """

    def __init__(self, source: Source, plan: Plan, *, dtype: torch.dtype, device: torch.device) -> None:
        self._source, self._block = source, plan.block
        self._dtype, self._device = dtype, device
        self._planned = {tensor.source.name: tensor for tensor in plan.tensors}
        self.model = skeleton(source.config, buffers=True).eval().requires_grad_(False)
        resolve = name_resolver(self.model)
        stacks = _experts_apart(self.model, source, resolve=resolve, dtype=dtype)
        self.stored = stored_names(self.model, source.tensors)
        for target, origin in (getattr(self.model, "all_tied_weights_keys", None) or {}).items():
            if target not in self.stored and origin in self.stored:
                self.stored[target] = self.stored[origin]
        for name in source.tensors:
            expert = names.expert_of(name.rpartition(".")[0])
            if expert is not None and expert[0] in stacks:
                self.stored[f"{stacks[expert[0]]}.{expert[1]}.{expert[2]}.{name.rpartition('.')[2]}"] = name
        self.paths = {
            module: path.removesuffix(".weight")
            for path, name in self.stored.items()
            if (module := name.removesuffix(".weight")) in plan.modules
        }
        lost = [module for module in plan.modules if module not in self.paths]
        if lost:
            raise UnsupportedError(
                f"expected to find {lost[0]} in {type(self.model).__name__} to calibrate it, got no such module; "
                "pass --effort none"
            )
        for name, buffer in list(self.model.named_buffers()):
            parent, _, leaf = name.rpartition(".")
            self.model.get_submodule(parent)._buffers[leaf] = buffer.to(device)

    def weight(self, module: str) -> torch.Tensor:
        """A planned weight as the source has it: float32 [rows, columns] on the model's device."""
        return self._read(names.tensor(module, "weight"))

    def read_as_stored(self, name: str) -> torch.Tensor:
        """A tensor in the dtype that it keeps in the output."""
        return self._read(name).to(DTYPES[self._planned[name].outputs[0].dtype])

    def _read(self, name: str) -> torch.Tensor:
        return read_float(self._source, self._planned[name], block=self._block, device=self._device)

    def fill(self, path: str, *, recurse: bool = True) -> None:
        """Load the parameters and stored buffers of the module at `path`.

        Raises:
            UnsupportedError: a parameter that the source does not hold under one name.
            CheckpointError: one of another shape.
        """
        prefix = f"{path}." if path else ""
        module = self.model.get_submodule(path)
        stored = [name for name, _ in module.named_parameters(recurse=recurse)]
        stored += [name for name, _ in module.named_buffers(recurse=recurse) if prefix + name in self.stored]
        for name in stored:
            origin = self.stored.get(prefix + name)
            if origin is None:
                raise UnsupportedError(
                    f"expected one tensor of the checkpoint for {prefix}{name} of {type(self.model).__name__}, got none; "
                    "this model cannot be calibrated, pass --effort none"
                )
            parent_path, _, leaf = name.rpartition(".")
            parent = module.get_submodule(parent_path)
            old: torch.Tensor = getattr(parent, leaf)
            data = self._read(origin)
            if data.shape != old.shape:
                raise CheckpointError(
                    f"expected {origin} of shape {list(old.shape)}, got {list(data.shape)}; "
                    "config.json and the weights do not belong together"
                )
            dtype = self._dtype if isinstance(old, nn.Parameter) else old.dtype
            data = data.to(dtype)
            if isinstance(old, nn.Parameter):
                setattr(parent, leaf, nn.Parameter(data, requires_grad=False))
            else:
                parent._buffers[leaf] = data

    def fill_all(self, filled: Callable[[str], None]) -> None:
        """`fill` for the whole model, module by module; parameters that the class ties to others are tied.

        Args:
            filled: told of the path of each module that has just been filled.
        """
        tied = set(getattr(self.model, "all_tied_weights_keys", None) or {})
        for path, module in self.model.named_modules():
            own = [f"{path}.{name}".removeprefix(".") for name, _ in module.named_parameters(recurse=False)]
            if not own or all(name in tied and name not in self.stored for name in own):
                continue
            self.fill(path, recurse=False)
            filled(path)
        self.model.tie_weights()

    def empty(self, path: str, *, recurse: bool = True) -> None:
        """Let go of the parameters of the module at `path`."""
        module = self.model.get_submodule(path)
        for name, parameter in list(module.named_parameters(recurse=recurse)):
            parent_path, _, leaf = name.rpartition(".")
            empty = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=False)
            setattr(module.get_submodule(parent_path), leaf, empty)


def _experts_apart(model: Any, source: Source, *, resolve: Any, dtype: torch.dtype) -> Mapping[str, str]:
    """Put a module for each expert in the place of stacks whose experts the source stores one by one.

    Returns:
        Name of the experts in the source -> path of the new module.
    """
    apart: dict[str, set[str]] = {}
    for name in source.tensors:
        expert = names.expert_of(name.removesuffix(".weight"))
        if expert is not None:
            apart.setdefault(expert[0], set()).add(expert[2])
    replaced: dict[str, str] = {}
    for name, projections in apart.items():
        path = resolve(name)
        try:
            stack = describe_experts(model.get_submodule(path))
        except AttributeError:
            continue
        triple = next((triple for triple in PROJECTIONS if set(triple) == projections), None)
        if stack is None or triple is None:
            continue
        shapes = stack.shapes(triple)
        experts = [
            Expert(
                {
                    projection: nn.Linear(columns, rows, bias=False, device="meta", dtype=dtype)
                    for projection, (rows, columns) in shapes.items()
                }
            )
            for _ in range(stack.experts)
        ]
        parent, _, leaf = path.rpartition(".")
        setattr(model.get_submodule(parent), leaf, W3Experts(experts, stack.activation))
        replaced[name] = path
    return replaced
