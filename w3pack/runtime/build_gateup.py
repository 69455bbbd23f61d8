"""Put fused pairs and FP8 Linears into a model's skeleton."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import nn

from w3pack.checkpoint.tensor_file import DTYPES
from w3pack.errors import UnsupportedError
from w3pack.format import names
from w3pack.format.gateup import FUSED_LEAF, Fp8Spec, GateUpConfig, GateUpSpec, halves_of
from w3pack.runtime.build import DescribeExperts, ExpertStack, Resolve, find, place, why_not_loadable
from w3pack.runtime.experts import PROJECTIONS, Expert, FusedExperts
from w3pack.runtime.fp8_linear import Fp8Linear
from w3pack.runtime.gateup import Activation, FusedGateUp, FusedMLP, GateUpHalf

#: Whether a model class leaves tensors of this name aside on purpose.
Ignored = Callable[[str], bool]


def why_not_fusable(
    model: nn.Module, fused: str, spec: GateUpSpec, *, resolve: Resolve, describe: DescribeExperts
) -> str | None:
    """None when the pair `fused` of the checkpoint can be placed in `model`; otherwise the reason."""
    paths = []
    for half in halves_of(fused, spec):
        why = why_not_loadable(model, half, rows=spec.rows, columns=spec.columns, resolve=resolve, describe=describe)
        if why is not None:
            return why
        paths.append(resolve(half))
    if _stack_of(model, fused, resolve=resolve, describe=describe) is not None:
        return None
    if paths[0].rpartition(".")[0] != paths[1].rpartition(".")[0]:
        return "the model class has gate and up in different modules"
    linears = [model.get_submodule(path) for path in paths]
    if any(getattr(linear, "bias", None) is not None for linear in linears):
        return "the model class has biases there"
    return None


def place_pairs(
    model: nn.Module,
    config: GateUpConfig,
    *,
    resolve: Resolve,
    describe: DescribeExperts,
    ignored: Ignored,
    dtype: torch.dtype,
) -> dict[str, str]:
    """Replace every pair and every FP8 Linear of `config` in a model on the meta device.

    Returns:
        Checkpoint name of each half of a pair -> the path where the model had it.

    Raises:
        UnsupportedError: a module of the config that the model has not, or that is no Linear of its shape.
    """
    placed: dict[str, str] = {}
    stacks: dict[str, dict[int, dict[str, GateUpSpec | Fp8Spec]]] = {}
    for fused, spec in config.pairs.items():
        gate, up = halves_of(fused, spec)
        placed |= {gate: resolve(gate), up: resolve(up)}
        stack = _stack_of(model, fused, resolve=resolve, describe=describe)
        if stack is not None:
            path, number, _ = stack
            stacks.setdefault(path, {}).setdefault(number, {})[FUSED_LEAF] = spec
            placed |= {gate: f"{path}.{number}.{spec.gate}", up: f"{path}.{number}.{spec.up}"}
            continue
        if find(model, resolve(gate)) is None and ignored(names.tensor(fused, "weight")):
            continue
        why = why_not_fusable(model, fused, spec, resolve=resolve, describe=describe)
        _refuse(model, fused, why)
        _place_pair(model, placed[gate], placed[up], spec, block=config.block)
    for module, fp8 in config.fp8.items():
        stack = _stack_of(model, module, resolve=resolve, describe=describe)
        if stack is not None:
            path, number, projection = stack
            stacks.setdefault(path, {}).setdefault(number, {})[projection] = fp8
            continue
        if find(model, resolve(module)) is None and ignored(names.tensor(module, "weight")):
            continue
        why = why_not_loadable(model, module, rows=fp8.rows, columns=fp8.columns, resolve=resolve, describe=describe)
        _refuse(model, module, why)
        place(model, resolve(module), _fp8_linear(fp8, block=config.block, dtype=dtype))
    for path, experts in stacks.items():
        described = describe(model.get_submodule(path))
        if described is not None:
            place(model, path, _experts(path, described, experts, block=config.block, dtype=dtype))
    return placed


def _refuse(model: nn.Module, module: str, why: str | None) -> None:
    if why is not None:
        raise UnsupportedError(
            f"expected to place {module} in {type(model).__name__}, but {why}; load it with the class named in config.json"
        )


def _stack_of(
    model: nn.Module, module: str, *, resolve: Resolve, describe: DescribeExperts
) -> tuple[str, int, str] | None:
    """(path of the stack, number, projection) of an expert's module whose model class stacks experts; else None."""
    expert = names.expert_of(module)
    if expert is None:
        return None
    path = resolve(expert[0])
    stack = find(model, path)
    return None if stack is None or describe(stack) is None else (path, expert[1], expert[2])


def _fp8_linear(spec: Fp8Spec, *, block: tuple[int, int], dtype: torch.dtype) -> Fp8Linear:
    if spec.scales not in DTYPES:
        raise UnsupportedError(f"expected a known dtype of scales, got {spec.scales!r}; fuse the checkpoint again")
    return Fp8Linear(
        spec.rows, spec.columns, block=block, scales=DTYPES[spec.scales], bias=spec.bias, dtype=dtype, device="meta"
    )


def _place_pair(model: nn.Module, gate: str, up: str, spec: GateUpSpec, *, block: tuple[int, int]) -> None:
    parent, _, gate_leaf = gate.rpartition(".")
    spec = replace(spec, gate=gate_leaf, up=up.rpartition(".")[2])
    mlp = model.get_submodule(parent)
    found = plain_gated_mlp(mlp, gate=spec.gate, up=spec.up)
    activation = found[1] if found is not None else nn.functional.silu
    fused = FusedGateUp(spec, activation, block=block, device="meta")
    if found is not None:
        place(model, parent, FusedMLP(fused, mlp.get_submodule(found[0]), down_name=found[0]))
        return
    # a module that computes something else: it goes on calling its gate and up, which are views now
    mlp.add_module(FUSED_LEAF, fused)
    for half, leaf in enumerate((spec.gate, spec.up)):
        setattr(mlp, leaf, GateUpHalf(fused, half))


def plain_gated_mlp(mlp: nn.Module, *, gate: str, up: str) -> tuple[str, Activation] | None:
    """(name of down, activation) of a module that computes down(act(gate(x)) * up(x)), or None.

    Found out by running the module's own forward on small matrices: what a class is called says nothing.
    """
    activation = getattr(mlp, "act_fn", None)
    children = {name: child for name, child in mlp.named_children() if any(True for _ in child.parameters())}
    others = set(children) - {gate, up}
    if not callable(activation) or len(others) != 1 or any(mlp.named_parameters(recurse=False)):
        return None
    down = next(iter(others))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        small = {
            name: nn.Linear(*sides, bias=False, dtype=torch.float64, device="cpu")
            for name, sides in ((gate, (3, 5)), (up, (3, 5)), (down, (5, 3)))
        }
        for number, linear in enumerate(small.values()):
            values = torch.linspace(-2, 3, 15, dtype=torch.float64).roll(4 * number + 1)
            linear.weight.copy_(values.view(linear.weight.shape))
        x = torch.linspace(-1, 2, 12, dtype=torch.float64).view(1, 4, 3)
        x = torch.cat([x, 64 * x], dim=1)  # large values too: some classes limit them
        stand_in = object.__new__(type(mlp))
        stand_in.__dict__.update({**mlp.__dict__, "_modules": {**mlp._modules, **small}})
        try:
            found = type(mlp).forward(stand_in, x)
        except Exception:  # noqa: BLE001 - any class may do anything; then it is not a plain one
            return None
        expected = small[down](activation(small[gate](x)) * small[up](x))
    same = isinstance(found, torch.Tensor) and found.shape == expected.shape and bool(torch.equal(found, expected))
    return (down, activation) if same else None


def _experts(
    path: str,
    stack: ExpertStack,
    experts: Mapping[int, Mapping[str, GateUpSpec | Fp8Spec]],
    *,
    block: tuple[int, int],
    dtype: torch.dtype,
) -> FusedExperts:
    seen = {leaf for parts in experts.values() for leaf in parts if leaf != FUSED_LEAF}
    for parts in experts.values():
        for spec in parts.values():
            seen |= {spec.gate, spec.up} if isinstance(spec, GateUpSpec) else set()
    triple = next((triple for triple in PROJECTIONS if seen <= set(triple)), None)
    if triple is None or max(experts) >= stack.experts:
        raise UnsupportedError(
            f"expected {stack.experts} experts with projections {' or '.join(map(str, PROJECTIONS))} at {path}, got "
            f"{sorted(seen)} of up to {max(experts) + 1}; config.json and the model class do not belong together"
        )
    shapes = stack.shapes(triple)
    made = []
    for number in range(stack.experts):
        parts, modules = experts.get(number, {}), dict[str, nn.Module]()
        pair = parts.get(FUSED_LEAF)
        if isinstance(pair, GateUpSpec):
            _same_shape(path, number, pair, shapes[triple[0]])
            modules[FUSED_LEAF] = FusedGateUp(pair, stack.activation, block=block, device="meta")
        for projection in triple[2:] if isinstance(pair, GateUpSpec) else triple:
            fp8, (rows, columns) = parts.get(projection), shapes[projection]
            if isinstance(fp8, Fp8Spec):
                _same_shape(path, number, fp8, (rows, columns))
                modules[projection] = _fp8_linear(fp8, block=block, dtype=dtype)
            else:  # one that stayed in floats: mixed precision inside a layer is legal
                modules[projection] = nn.Linear(columns, rows, bias=False, device="meta", dtype=dtype)
        made.append(Expert(modules))
    return FusedExperts(made, stack.activation, projections=triple)


def _same_shape(path: str, number: int, spec: GateUpSpec | Fp8Spec, shape: tuple[int, int]) -> None:
    if (spec.rows, spec.columns) != shape:
        raise UnsupportedError(
            f"expected matrices of {shape[0]} x {shape[1]} in {path}.{number}, got {spec.rows} x {spec.columns}; "
            "config.json and the model class do not belong together"
        )
