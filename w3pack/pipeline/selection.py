"""Which tensors of a checkpoint are Linears of the decoder, judged by name, dtype and shape alone.

Tensors come from the files, not from modules, so the rules look at names as checkpoints write them. What the model class
says (whether a loader will have a Linear there) is asked separately, by the caller's `loadable`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from w3pack.checkpoint.source import TensorInfo
from w3pack.errors import UsageError

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.\d+\.")
_OTHER_TOWERS = ("vision", "visual", "audio", "image", "speech", "encoder", "projector")
_ROUTERS = ("gate", "router", "shared_expert_gate", "gate_inp")
FP8 = ("F8_E4M3", "F8_E5M2")
FLOATS = ("F64", "F32", "F16", "BF16", *FP8)


def module_of(tensor: str) -> str:
    """The module that owns a tensor: its name without the last component."""
    return tensor.rpartition(".")[0]


def in_decoder(name: str) -> bool:
    """Whether a tensor belongs to a numbered layer of the text decoder, not to a vision or audio tower."""
    parts = name.lower().split(".")
    return _LAYER.search(name) is not None and not any(word in part for part in parts for word in _OTHER_TOWERS)


def block_of(name: str) -> str:
    """The numbered layer that a tensor of the text decoder belongs to, such as "model.layers.3."; "" for one outside."""
    match = _LAYER.search(name)
    return name[: match.end()] if match is not None and in_decoder(name) else ""


def is_matrix(info: TensorInfo) -> bool:
    """Whether the tensor counts as matrix weights of the decoder for the coverage figure."""
    return len(info.shape) >= 2 and info.dtype in FLOATS and in_decoder(info.name) and not info.name.endswith(".bias")


def why_not_linear(info: TensorInfo) -> str | None:
    """None when the tensor is the weight of a decoder Linear; otherwise why it is kept as it is."""
    leaf = module_of(info.name).rpartition(".")[2]
    if info.dtype not in FLOATS:
        return f"{info.dtype} data"
    if not in_decoder(info.name):
        return "outside the decoder's layers"
    if len(info.shape) > 2:
        return f"{len(info.shape)}-dimensional, not a Linear"
    if len(info.shape) < 2 or not info.name.endswith(".weight"):
        return "not a matrix"
    if leaf in _ROUTERS:
        return "router"
    if "norm" in leaf or "embed" in leaf:
        return "norm or embedding"
    return None


def kind_of(module: str) -> str:
    """The kind under which the report sums up a module: its name without layer and expert numbers."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", _LAYER.split(module, maxsplit=1)[-1])


@dataclass(frozen=True)
class Selector:
    """`--skip` or `--only` entries: whole module names, or regular expressions after `re:` that match the whole name."""

    entries: tuple[str, ...]

    @cached_property
    def _whole(self) -> frozenset[str]:
        return frozenset(entry for entry in self.entries if not entry.startswith("re:"))

    @cached_property
    def _patterns(self) -> tuple[re.Pattern[str], ...]:
        return tuple(_compiled(entry) for entry in self.entries if entry.startswith("re:"))

    def matches(self, module: str) -> bool:
        """Whether any entry means this module."""
        return module in self._whole or any(pattern.fullmatch(module) for pattern in self._patterns)

    def check(self, modules: Collection[str], *, option: str) -> None:
        """UsageError, listing near names, for an entry that means none of `modules`."""
        known = set(modules)
        for entry in self.entries:
            if not entry:
                raise UsageError(
                    f"expected a module name after {option}, got a blank; leave the option out to name none"
                )
            pattern = _compiled(entry) if entry.startswith("re:") else None
            found = entry in known if pattern is None else any(pattern.fullmatch(module) for module in known)
            if not found:
                near = difflib.get_close_matches(entry.removeprefix("re:"), list(modules), n=3, cutoff=0.5)
                example = max(modules, key=lambda module: module.count("."), default="none")
                like = f"names look like {example}, and re:.*{example.rpartition('.')[2]} means all of that kind"
                hint = f"; near names: {', '.join(near)}" if near else f"; {like}"
                raise UsageError(f"expected {option} {entry!r} to name a Linear of this checkpoint, got no match{hint}")


def _compiled(entry: str) -> re.Pattern[str]:
    try:
        return re.compile(entry.removeprefix("re:"))
    except (re.error, OverflowError, RecursionError) as error:
        raise UsageError(f"expected a regular expression after re:, got {entry[3:]!r} ({error}); mend it") from error


def selector(entries: Iterable[str] | Sequence[str]) -> Selector:
    """A `Selector` of the entries, without blanks around them."""
    return Selector(tuple(entry.strip() for entry in entries))
