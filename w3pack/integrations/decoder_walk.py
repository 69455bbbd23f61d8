"""A decoder walked block by block over the calibration samples, with transformers' own modules and one block in memory.

The model's forward runs once per batch with every block replaced by one that only notes how it is called: that gives the
embeddings, and for each block the masks, positions and rotary tables that its class wants. After that the blocks are
called directly. Batches are worked on by several threads, each with one torch thread, and their sums are added in order,
so that the result depends neither on their number nor on where the hidden states lie.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from w3pack.checkpoint.source import Source
from w3pack.errors import UnsupportedError
from w3pack.integrations.block_weights import WeightlessModel
from w3pack.integrations.watched_block import Call, WatchedBlock
from w3pack.integrations.whole_model import free_bytes
from w3pack.pipeline.decoder import Block
from w3pack.pipeline.hidden_states import HiddenStates
from w3pack.pipeline.plan import Plan
from w3pack.quantize.chunks import one_torch_thread
from w3pack.runtime.dense_cache import available_bytes

_LAYER = re.compile(r"(.*\.(?:layers|h|blocks|block))\.(\d+)\.")
#: Tokens of a batch: enough for efficient products, few enough for a block's activations to stay small.
_BATCH_TOKENS = {"cpu": 2048, "cuda": 16384}
#: A block of more bytes in float32 is run in bfloat16 on a CPU.
_LARGE_BLOCK = 4 << 30


class _Captured(Exception):
    """Ends a forward pass whose rest nobody needs."""


class DecoderWalk:
    """A `Walk` (w3pack.pipeline.decoder) over transformers' modules."""

    def __init__(
        self,
        source: Source,
        plan: Plan,
        windows: torch.Tensor,
        *,
        scratch: Path,
        device: str = "cpu",
        workers: int = 1,
        in_memory: bool | None = None,
        dtype: torch.dtype | None = None,
        follow: bool = False,
    ) -> None:
        """Embed the samples.

        Args:
            source: where weights come from.
            plan: its modules are to be quantised.
            windows: int64 [samples, length], token ids.
            scratch: folder for the hidden states where memory is short.
            workers: batches worked on at the same time on a CPU.
            in_memory: whether hidden states stay in memory rather than in a file; None: if they take at most a quarter of
                what is available, on a GPU that of the GPU or else of the CPU.
            dtype: of weights and activations; None: float32 on a CPU unless a block is very large, else bfloat16 for 16-bit
                and FP8 sources.
            follow: keep what the source's blocks leave beside what the quantised ones do, for `Block.follow`.

        Raises:
            UnsupportedError: a model whose blocks cannot be run one after the other.
        """
        self._device = torch.device(device)
        self._workers = workers if self._device.type == "cpu" else 1
        self._dtype = dtype or _pick_dtype(plan, self._device)
        self._loaded = WeightlessModel(source, plan, dtype=self._dtype, device=self._device)
        self._stack, self.blocks, self._numbers = _blocks(self._loaded.paths)
        self._batch = _batch_size(*windows.shape, most=self._batch_tokens())
        self._windows = windows
        self._scratch = scratch
        self._in_memory = in_memory
        self._states: HiddenStates | None = None
        self._source: HiddenStates | None = None
        self._apart = scratch / "source"  # where a file cannot lose its name while in use, two cannot share it
        self._largest_block = 0
        try:
            self._calls = self._embed()
            if follow:
                if self.on_disk:
                    self._apart.mkdir(exist_ok=True)
                shape = (*windows.shape, self.states.shape[-1])
                folder = self._apart if self.on_disk else None
                self._source = HiddenStates(shape, dtype=self._dtype, folder=folder, device=self.states.device)
                self._source.tensor.copy_(self.states)
        except BaseException:
            self.close()
            raise

    def _batch_tokens(self) -> int:
        return _BATCH_TOKENS[self._device.type]

    @property
    def facts(self) -> Mapping[str, Any]:
        """For the manifest."""
        return {"activations": str(self._dtype).removeprefix("torch.")}

    @property
    def states(self) -> torch.Tensor:
        """[samples, length, width]: the inputs of the next block."""
        if self._states is None:
            raise UnsupportedError("expected hidden states, got a walk that is closed; open it again")
        return self._states.tensor

    @property
    def on_disk(self) -> bool:
        """Whether the hidden states lie in a file."""
        return self._states is not None and self._states.on_disk

    def close(self) -> None:
        """Let go of the hidden states."""
        for states in (self._states, self._source):
            if states is not None:
                states.close()
        with suppress(OSError):
            self._apart.rmdir()

    def weight(self, module: str) -> torch.Tensor:
        """A source weight, float32 [rows, columns], on the walk's device."""
        return self._loaded.weight(module)

    @contextmanager
    def block(self, number: int) -> Iterator[Block]:
        """Load a block; blocks before it without a Linear to quantise are run on the way."""
        previous = self._numbers[number - 1] if number else -1
        for skipped in range(previous + 1, self._numbers[number]):
            with self._open(skipped, ()) as block:
                block.follow()
                block.advance()
        with self._open(self._numbers[number], self.blocks[number]) as block:
            yield block

    @contextmanager
    def _open(self, layer: int, modules: tuple[str, ...]) -> Iterator[WatchedBlock]:
        path = f"{self._stack}.{layer}"
        self._loaded.fill(path)
        try:
            yield WatchedBlock(
                self._loaded.model.get_submodule(path),
                {module: self._loaded.model.get_submodule(self._loaded.paths[module]) for module in modules},
                batches=list(self.states.split(self._batch)),
                call=self._calls[layer],
                device=self._device,
                workers=self._workers,
                name=path,
                source=() if self._source is None else list(self._source.tensor.split(self._batch)),
                room=0 if self.on_disk else available_bytes() // 4,
            )
        finally:
            self._loaded.empty(path)

    def _embed(self) -> list[Call]:
        """Fill the hidden states with embeddings; returns how each block is called."""
        model = self._loaded.model
        layers: Any = model.get_submodule(self._stack)
        calls: list[Call] = []
        first: list[torch.Tensor] = []

        def note(*args: Any, **kwargs: Any) -> torch.Tensor:
            hidden = args[0] if args else kwargs.pop("hidden_states")
            if first and hidden is not first[0]:
                raise UnsupportedError(
                    f"expected {type(model).__name__} to hand each block's output to the next, got something in between; "
                    "this model cannot be calibrated, pass --effort none"
                )
            first.append(hidden)
            calls.append(Call(args=args[1:], kwargs=kwargs))
            if len(calls) == len(layers):
                raise _Captured
            result: torch.Tensor = hidden
            return result

        def run(ids: torch.Tensor) -> tuple[torch.Tensor, list[Call]]:
            calls.clear()
            first.clear()
            try:
                model(input_ids=ids.to(self._device), use_cache=False)
            except _Captured:
                return first[0], list(calls)
            raise UnsupportedError(
                f"expected {type(model).__name__} to call its {len(layers)} blocks one after the other, got {len(calls)} calls; "
                "this model cannot be calibrated, pass --effort none"
            )

        batches = self._windows.split(self._batch)
        with torch.inference_mode(), one_torch_thread(), self._filled_on_demand(), replaced_forwards(layers, note):
            hidden, found = run(batches[0])
            _, again = run(batches[0].flip(1))
            if not all(_same(one, other) for one, other in zip(found, again, strict=True)):
                raise UnsupportedError(
                    f"expected blocks of {type(model).__name__} that depend on the text by their input alone, got others; "
                    "this model cannot be calibrated, pass --effort none"
                )
            shape = (self._windows.shape[0], self._windows.shape[1], hidden.shape[-1])
            nbytes = self._windows.numel() * hidden.shape[-1] * self._dtype.itemsize
            self._states = self._room_for(shape, nbytes)
            for ids, into in zip(batches, self.states.split(self._batch), strict=True):
                into.copy_(run(ids)[0])
        return found

    def _room_for(self, shape: tuple[int, int, int], nbytes: int) -> HiddenStates:
        """Hidden states where there is room for them: on the device if it is a GPU, in memory, or in a file."""
        if self._in_memory is None and self._device.type != "cpu" and nbytes <= free_bytes(str(self._device)) // 4:
            return HiddenStates(shape, dtype=self._dtype, folder=None, device=self._device)
        in_memory = nbytes <= available_bytes() // 4 if self._in_memory is None else self._in_memory
        return HiddenStates(shape, dtype=self._dtype, folder=None if in_memory else self._scratch)

    @contextmanager
    def _filled_on_demand(self) -> Iterator[None]:
        """Load each module outside the blocks when it is first called, and let go of all of them at the end."""
        loaded: list[str] = []

        def load(path: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any) -> None:
                if any(parameter.is_meta for parameter in module.parameters(recurse=False)):
                    loaded.append(path)
                    self._loaded.fill(path, recurse=False)

            return hook

        handles = [
            module.register_forward_pre_hook(load(path))
            for path, module in self._loaded.model.named_modules()
            if not path.startswith(f"{self._stack}.") and next(module.parameters(recurse=False), None) is not None
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for path in loaded:
                self._loaded.empty(path, recurse=False)


def _pick_dtype(plan: Plan, device: torch.device) -> torch.dtype:
    if device.type == "cpu":
        sizes: dict[str, int] = {}
        for tensor in plan.quantized:
            match = _LAYER.match(f"{tensor.source.name}")
            key = match[0] if match else ""
            sizes[key] = sizes.get(key, 0) + 4 * (tensor.spec.weights if tensor.spec else 0)
        return torch.bfloat16 if max(sizes.values()) > _LARGE_BLOCK else torch.float32
    full = all(tensor.source.dtype in ("F32", "F64") for tensor in plan.quantized)
    return torch.float32 if full else torch.bfloat16


def _blocks(paths: Mapping[str, str]) -> tuple[str, tuple[tuple[str, ...], ...], tuple[int, ...]]:
    """Path of the list of blocks, modules to quantise of each block that has any, and the numbers of these blocks."""
    found: dict[int, list[str]] = {}
    stacks: dict[str, str] = {}
    for module, path in paths.items():
        match = _LAYER.match(path)
        if match is not None:  # the head is outside
            stacks.setdefault(match[1], module)
            found.setdefault(int(match[2]), []).append(module)
    if len(stacks) != 1:
        raise UnsupportedError(
            f"expected the Linears to quantise in one list of blocks, got {len(stacks)}: {', '.join(stacks) or 'none'}; "
            "choose with --only, or pass --effort none"
        )
    numbers = tuple(sorted(found))
    return next(iter(stacks)), tuple(tuple(found[number]) for number in numbers), numbers


def _batch_size(samples: int, length: int, *, most: int) -> int:
    """The largest divisor of `samples` whose tokens are at most `most`: all batches then have one shape."""
    return max(size for size in range(1, samples + 1) if samples % size == 0 and (size == 1 or size * length <= most))


def _same(one: Call, other: Call) -> bool:
    first, second = list(_tensors((one.args, one.kwargs))), list(_tensors((other.args, other.kwargs)))
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from _tensors(entry)
    elif isinstance(value, tuple | list):
        for entry in value:
            yield from _tensors(entry)


@contextmanager
def replaced_forwards(layers: Any, forward: Callable[..., Any]) -> Iterator[None]:
    """Give every layer another `forward` for a while; attributes that the model asks of its layers stay."""
    try:
        for layer in layers:
            layer.forward = forward
        yield
    finally:
        for layer in layers:
            layer.__dict__.pop("forward", None)
