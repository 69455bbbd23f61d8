"""Put packed modules into a model's skeleton, and check what a loader has put into them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from w3pack.errors import CheckpointError, UnsupportedError
from w3pack.format import names
from w3pack.format.config import W3Config
from w3pack.format.linear import LinearSpec
from w3pack.runtime.experts import PROJECTIONS, Expert, W3Experts
from w3pack.runtime.linear import W3Linear

#: Checkpoint name of a module -> its path in the model.
Resolve = Callable[[str], str]


@dataclass(frozen=True)
class ExpertStack:
    """How a model holds experts that the checkpoint stores one by one.

    `intermediate` and `hidden` are the sizes of each expert; `activation` is applied to the gate.
    """

    experts: int
    hidden: int
    intermediate: int
    activation: Callable[[torch.Tensor], torch.Tensor]

    def shapes(self, projections: tuple[str, str, str]) -> dict[str, tuple[int, int]]:
        """Rows and columns of each projection, given the names of (gate, up, down)."""
        gate, up, down = projections
        inner = (self.intermediate, self.hidden)
        return {gate: inner, up: inner, down: (self.hidden, self.intermediate)}


#: Describes a module as an `ExpertStack`, or says None when it is not one that `W3Experts` computes.
DescribeExperts = Callable[[nn.Module], ExpertStack | None]


def why_not_loadable(
    model: nn.Module, module: str, *, rows: int, columns: int, resolve: Resolve, describe: DescribeExperts
) -> str | None:
    """None when `module` of the checkpoint, of `rows` x `columns`, can be replaced in `model`; otherwise the reason."""
    expert = names.expert_of(module)
    if expert is not None:
        stack = find(model, resolve(expert[0]))
        described = None if stack is None else describe(stack)
        if described is not None:
            return _why_not_expert(described, number=expert[1], projection=expert[2], shape=(rows, columns))
        if stack is not None and not isinstance(stack, nn.ModuleList):
            return f"the model class holds {type(stack).__name__}, experts that w3pack cannot run"
    found = find(model, resolve(module))
    if found is None:
        return "the model class has no such module"
    if type(found) is not nn.Linear:
        return f"the model class has a {type(found).__name__} there, not a Linear"
    if (found.out_features, found.in_features) != (rows, columns):
        return f"the model class has a Linear of {found.out_features} x {found.in_features} there"
    return None


def _why_not_expert(stack: ExpertStack, *, number: int, projection: str, shape: tuple[int, int]) -> str | None:
    wanted = {name: size for triple in PROJECTIONS for name, size in stack.shapes(triple).items()}.get(projection)
    if number >= stack.experts:
        return f"the model class has {stack.experts} experts there"
    if wanted is None:
        return f"experts have no projection {projection} that w3pack knows"
    if wanted != shape:
        return f"the model class has an expert's projection of {wanted[0]} x {wanted[1]} there"
    return None


def find(model: nn.Module, path: str) -> nn.Module | None:
    """The module at `path`, or None."""
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


def place(model: nn.Module, path: str, module: nn.Module) -> None:
    """Put `module` where `path` leads."""
    parent, _, leaf = path.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)


def replace_modules(
    model: nn.Module, config: W3Config, *, resolve: Resolve, describe: DescribeExperts, dtype: torch.dtype
) -> dict[str, str]:
    """Replace every quantised module of `config` in a model on the meta device.

    Returns:
        Checkpoint name -> path in the model, for all quantised modules.

    Raises:
        UnsupportedError: a module of the config that the model has not, or that is no Linear of its shape.
    """
    placed: dict[str, str] = {}
    stacks: dict[str, dict[int, dict[str, LinearSpec]]] = {}
    for name, spec in config.modules.items():
        expert = names.expert_of(name)
        if (
            expert is not None
            and (stack := find(model, resolve(expert[0]))) is not None
            and describe(stack) is not None
        ):
            path = resolve(expert[0])
            stacks.setdefault(path, {}).setdefault(expert[1], {})[expert[2]] = spec
            placed[name] = f"{path}.{expert[1]}.{expert[2]}"
            continue
        why = why_not_loadable(model, name, rows=spec.rows, columns=spec.columns, resolve=resolve, describe=describe)
        if why is not None:
            raise UnsupportedError(
                f"expected to place the packed {name} in {type(model).__name__}, but {why}; "
                "load it with the class named in config.json"
            )
        placed[name] = resolve(name)
        place(model, placed[name], W3Linear(spec, dtype=dtype, device="meta"))
    for path, experts in stacks.items():
        place(model, path, _packed_experts(model, path, experts, describe=describe, dtype=dtype))
    return placed


def _packed_experts(
    model: nn.Module,
    path: str,
    experts: Mapping[int, Mapping[str, LinearSpec]],
    *,
    describe: DescribeExperts,
    dtype: torch.dtype,
) -> W3Experts:
    stack = describe(model.get_submodule(path))
    if stack is None or max(experts) >= stack.experts:
        raise UnsupportedError(f"expected experts below {stack.experts if stack else 0} at {path}, got {max(experts)}")
    seen = {projection for specs in experts.values() for projection in specs}
    triple = next((triple for triple in PROJECTIONS if seen <= set(triple)), None)
    if triple is None:
        raise UnsupportedError(
            f"expected experts with projections {' or '.join(map(str, PROJECTIONS))} at {path}, got {sorted(seen)}; "
            "config.json and the model class do not belong together"
        )
    shapes = stack.shapes(triple)
    packed = []
    for number in range(stack.experts):
        projections: dict[str, nn.Module] = {}
        for projection, (rows, columns) in shapes.items():
            spec = experts.get(number, {}).get(projection)
            if spec is None:  # one that stayed in floats: mixed precision inside a layer is legal
                projections[projection] = nn.Linear(columns, rows, bias=False, device="meta", dtype=dtype)
            elif (spec.rows, spec.columns) != (rows, columns):
                raise UnsupportedError(
                    f"expected {path}.{number}.{projection} of {rows} x {columns}, got {spec.rows} x {spec.columns}"
                )
            else:
                projections[projection] = W3Linear(spec, dtype=dtype, device="meta")
        packed.append(Expert(projections))
    return W3Experts(packed, stack.activation)


def check_loaded(model: nn.Module, *, is_offloaded: Callable[[nn.Module], bool]) -> None:
    """UnsupportedError or CheckpointError naming a packed tensor that a loader changed or that holds impossible values.

    `is_offloaded` tells modules whose tensors wait elsewhere, and are on meta until they are called; of those only shapes
    and dtypes are checked.
    """
    for path, module in model.named_modules():
        if not isinstance(module, W3Linear):
            continue
        module.check(path, offloaded=is_offloaded(module))
        for part in ("scales", "qmap"):
            tensor = getattr(module, part)
            if tensor.device.type != "meta" and not bool(torch.isfinite(tensor).all()):
                raise CheckpointError(
                    f"expected finite {part} in {path}.{part}, got NaN or infinity; the checkpoint is damaged"
                )
