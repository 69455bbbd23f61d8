"""`merge_linears` and `unmerge`: which packed Linears of a model read the same tensor, and making one product of theirs.

A decode kernel has a fixed cost of some microseconds, and matrices such as k and v are small: one launch for q, k and v and one
for gate and up takes less time than five. Nothing is guessed from names: the model runs once on two tokens, with the packed
Linears standing still, and those of one parent that got the very same tensor object, unchanged, in each of its calls are merged.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from w3pack.ops.w3_linear import check_input
from w3pack.runtime.linear import W3Linear
from w3pack.runtime.merged import MergedLinears


@dataclass(frozen=True)
class Merged:
    """Linears that share a product: children of the module at `path`, and the shape of their merged matrix."""

    path: str
    members: tuple[str, ...]
    rows: int
    columns: int

    def __str__(self) -> str:
        """One line."""
        return f"{self.path}: {_shape(self)}"


@dataclass(frozen=True)
class Merging:
    """What `merge_linears` found: all merged Linears of the model, those of earlier calls too, and why others were left alone."""

    groups: tuple[Merged, ...] = ()
    declined: tuple[str, ...] = ()

    def __str__(self) -> str:
        """A line for each kind of group, and one for each reason."""
        kinds = Counter(_shape(group) for group in self.groups)
        return "\n".join([*(f"{count} times {kind}" for kind, count in kinds.items()), *self.declined])


def _shape(group: Merged) -> str:
    return f"{' + '.join(group.members)} as one of {group.rows} x {group.columns}"


def merge_linears(model: nn.Module, *, run: Callable[[], object] | None = None) -> Merging:
    """Merge the packed Linears that share an input; `unmerge` undoes it.

    Merged are siblings that one call of their parent module calls once each, with the same tensor, and that have equal columns,
    group size, layout, kind of map and device. Codes, scales and maps are kept once, in a child of the parent, which is where
    `model.parameters()` finds them; the members' attributes and the model's state dict show views of them. At most one group's
    tensors are held twice on the way.

    Modules are run with hooks that the model has; experts that are not modules called by themselves are left alone.

    Args:
        model: any module.
        run: runs the model on a small input; without it `model` is called with token ids [1, 2], as transformers' language
            models are.
    """
    candidates = _candidates(model)
    declined: list[str] = []
    if candidates:
        try:
            with _quiet(model), _watched(model, candidates):
                (run or (lambda: _two_tokens(model)))()
        except Exception as error:  # noqa: BLE001 - a model may do anything on a small input; then nothing is known of it
            reason = (str(error).splitlines() or [""])[0][:200]
            declined.append(f"not merged: the model does not run on a small input ({type(error).__name__}: {reason})")
        else:
            sharing = [(parent, candidate, candidate.sharing()) for parent, candidate in candidates]
            for _, candidate in candidates:
                candidate.calls.clear()  # the tensors of the small input
            declined += [
                why
                for parent, candidate, groups in sharing
                for names in groups
                for why in _merge(parent, candidate, names)
            ]
    return Merging(groups=merged_of(model), declined=tuple(dict.fromkeys(declined)))


def merged_of(model: nn.Module) -> tuple[Merged, ...]:
    """The merged Linears that a model has."""
    return tuple(
        Merged(path.rpartition(".")[0], module.names, module.spec.rows, module.spec.columns)
        for path, module in model.named_modules()
        if isinstance(module, MergedLinears)
    )


def unmerge(model: nn.Module) -> int:
    """Give every merged Linear tensors of its own again, bit for bit those it had; how many groups were parted.

    At most one group's tensors are held twice on the way.
    """
    found = [
        (parent, name, child)
        for parent in list(model.modules())
        for name, child in list(parent.named_children())
        if isinstance(child, MergedLinears)
    ]
    for parent, name, child in found:
        child.dissolve(parent)
        delattr(parent, name)
    return len(found)


@dataclass
class _Candidate:
    """Packed children of one parent, by name, and what each call of the parent showed: (name, x, version) in order."""

    linears: dict[str, W3Linear]
    calls: list[list[tuple[str, torch.Tensor, int]]] = field(default_factory=list)
    running: bool = False

    def opens(self, parent: nn.Module, args: Any) -> None:
        """The parent is called."""
        self.running = True
        self.calls.append([])

    def closes(self, parent: nn.Module, args: Any, output: Any) -> None:
        """The parent's call is over."""
        self.running = False

    def sees(self, name: str, x: torch.Tensor) -> None:
        """A child is called. Its tensor is kept until the trace is over, so that no other takes its place in memory."""
        if not self.running:
            self.calls.append([])  # a call of the child alone, which nobody shares
        self.calls[-1].append((name, x, x._version))

    def sharing(self) -> list[list[str]]:
        """Names that got the same tensor in each call of the parent, once in each and unchanged in between."""
        inputs: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
        for number, call in enumerate(self.calls):
            for name, x, version in call:
                inputs[name].append((number, id(x), version))
        groups: dict[tuple[tuple[int, int, int], ...], list[str]] = defaultdict(list)
        for name, seen in inputs.items():
            if len({number for number, _, _ in seen}) == len(seen) == len(self.calls):
                groups[tuple(seen)].append(name)
        return [names for names in groups.values() if len(names) > 1]


def _candidates(model: nn.Module) -> list[tuple[nn.Module, _Candidate]]:
    """Parents of at least two packed Linears that are free to be merged: in one place of the model, with data, frozen."""
    places = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    found = []
    for parent in model.modules():
        linears = {
            name: child
            for name, child in parent.named_children()
            if type(child) is W3Linear and places[id(child)] == 1 and _is_free(child)
        }
        if len(linears) > 1 and places[id(parent)] == 1:
            found.append((parent, _Candidate(linears)))
    return found


def _is_free(linear: W3Linear) -> bool:
    # a loader's hook may fetch the tensors for each call: they are on meta between calls
    return not linear.is_member and not any(p.is_meta or p.requires_grad for p in linear.parameters())


@contextmanager
def _watched(model: nn.Module, candidates: Sequence[tuple[nn.Module, _Candidate]]) -> Iterator[None]:
    """Within it, packed Linears return zeros, and candidates note what they are called with."""
    note = {id(child): (candidate, name) for _, candidate in candidates for name, child in candidate.linears.items()}
    handles = []
    standing: list[tuple[W3Linear, Any]] = []
    try:
        for parent, candidate in candidates:
            handles.append(parent.register_forward_pre_hook(candidate.opens))
            handles.append(parent.register_forward_hook(candidate.closes, always_call=True))
        for linear in [module for module in model.modules() if isinstance(module, W3Linear)]:
            standing.append((linear, linear.__dict__.get("forward")))  # a loader may have put its own there
            linear.forward = _stand_in(linear, *note.get(id(linear), (None, "")))  # type: ignore[method-assign, assignment]
        yield
    finally:
        for handle in handles:
            handle.remove()
        for linear, before in standing:
            del linear.__dict__["forward"]
            if before is not None:
                linear.__dict__["forward"] = before


def _stand_in(linear: W3Linear, candidate: _Candidate | None, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """A forward that returns zeros, with the strides that rows of a merged product have."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        check_input(x, linear.spec.columns)
        if candidate is not None:
            candidate.sees(name, x)
        return x.new_zeros(*x.shape[:-1], linear.spec.rows + 1)[..., :-1]

    return forward


@contextmanager
def _quiet(model: nn.Module) -> Iterator[None]:
    """No gradients, no inference tensors (they do not count changes), nothing compiled, and random numbers as they were."""
    devices = {parameter.get_device() for parameter in model.parameters() if parameter.is_cuda}
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        torch.random.fork_rng(devices=sorted(devices)),
        torch.compiler.set_stance("force_eager"),
    ):
        yield


def _two_tokens(model: nn.Module) -> object:
    """Call a language model with two token ids, on the device of its embedding."""
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    first = next((embedding if isinstance(embedding, nn.Module) else model).parameters())
    return model(torch.zeros(1, 2, dtype=torch.long, device=first.device))


def _merge(parent: nn.Module, candidate: _Candidate, names: list[str]) -> Iterator[str]:
    """Merge those of `names` that fit together; reasons for the others."""
    kinds: dict[tuple[object, ...], list[str]] = defaultdict(list)
    for name in names:
        linear = candidate.linears[name]
        spec = linear.spec
        per_row = spec.rows_per_map == 1
        kinds[spec.columns, spec.group_size, spec.layout, spec.qmap_dtype, per_row, linear.codes.device].append(name)
    for fitting in kinds.values():
        members = {name: candidate.linears[name] for name in fitting}
        if len({linear.bias.dtype for linear in members.values() if linear.bias is not None}) > 1:
            yield f"not merged: {' and '.join(fitting)} have biases of different dtypes"
        elif len(members) > 1:
            parent.add_module("_".join(["merged", *fitting]), MergedLinears(parent, members))
    if len(kinds) > 1:
        apart = " and ".join(" + ".join(fitting) for fitting in kinds.values())
        yield f"not merged with each other: {apart}, which differ in group size, layout, kind of map or device"
