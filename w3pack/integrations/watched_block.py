"""One block of a decoder, run over batches of hidden states with an eye on the inputs of its Linears."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from w3pack.errors import UnsupportedError
from w3pack.format import names
from w3pack.integrations.tuned_block import TunedBlock, outside_inference
from w3pack.pipeline.decoder import Input, MakeMoment, Moment, Moments
from w3pack.quantize.chunks import in_order, one_torch_thread

Result = TypeVar("Result")
#: Told of the input of a module: its name and [..., columns].
Watch = Callable[[str, torch.Tensor], None]


@dataclass(frozen=True)
class Call:
    """What a block is called with beside the hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Tail:
    """A part of the block whose result is that of its last Linear.

    Attributes:
        part: the part, such as the attention.
        linear: its last Linear.
        stage: of this Linear's input, counted from 0.
        others: how many further results, all of them None, the part returns in a tuple; None where it returns no tuple.
        inputs: what entered the Linear, batch by batch; empty until its moment has been taken.
    """

    part: nn.Module
    linear: nn.Linear
    stage: int
    others: int | None
    inputs: dict[int, torch.Tensor]


class _Seen(Exception):
    """Ends the run of a batch through the block: all that was wanted has been seen."""


def tensor_of(output: Any) -> torch.Tensor:
    """The hidden states in what a block returns."""
    result: torch.Tensor = output[0] if isinstance(output, tuple | list) else output
    return result


class WatchedBlock:
    """A `Block` (w3pack.pipeline.decoder).

    To take the moment of o_proj's input, everything before it in the attention is run on all samples. As long as no weight
    before o_proj changes, later passes need not run that again: what entered o_proj is kept, if there is room, and the
    attention then consists of o_proj alone; the same goes for down_proj and the MLP. Kept inputs are those that would be
    computed again, to the last bit.
    """

    def __init__(
        self,
        block: nn.Module,
        linears: Mapping[str, Any],
        *,
        batches: Sequence[torch.Tensor],
        call: Call,
        device: torch.device,
        workers: int,
        name: str,
        source: Sequence[torch.Tensor] = (),
        room: int = 0,
    ) -> None:
        """A filled block.

        Args:
            linears: module to quantise -> nn.Linear within the block.
            batches: views [batch, length, width] of the hidden states, which `advance` overwrites.
            call: the other arguments, for one batch.
            workers: batches worked on at once.
            name: for messages.
            source: views of the hidden states that the source's blocks have left, which `follow` overwrites; none where
                nobody asks for them.
            room: bytes that inputs of Linears may take while the block is there.
        """
        self._source = source
        self._room = room
        self._tails: dict[str, Tail] = {}
        self._stage_of: dict[str, int] = {}
        self._first: torch.Tensor | None = None  # the batch that `error` looks at
        self._block, self._linears = block, dict(linears)
        self._batches, self._call = batches, call
        self._device, self._workers, self._name = device, workers, name
        self._noted: torch.Tensor | None = None
        self._local = threading.local()

    def _run(self, batch: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return tensor_of(self._block(batch.to(self._device), *self._call.args, **self._call.kwargs))

    def _run_number(self, number: int) -> torch.Tensor:
        """A batch of the hidden states by its number, with what has been kept of it."""
        self._local.number = number
        return self._run(self._batches[number])

    @contextmanager
    def _watching(self, modules: Sequence[str]) -> Iterator[None]:
        """Tell the watch of the running thread of the inputs of `modules`."""

        def hook_for(module: str) -> Callable[..., None]:
            def hook(_: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
                self._local.watch(module, args[0])

            return hook

        handles = [self._linears[module].register_forward_pre_hook(hook_for(module)) for module in modules]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def stages(self) -> tuple[tuple[Input, ...], ...]:
        """See `Block`."""
        seen: dict[str, torch.Tensor] = {}  # held until the end: no two inputs may share an address
        ends: dict[str, tuple[nn.Module, int | None]] = {}
        self._local.watch = seen.setdefault
        self._first = self._batches[0].clone()
        with one_torch_thread(), self._watching(list(self._linears)), self._noting_ends(ends):
            self._noted = self._run(self._first)
        if not bool(torch.isfinite(self._noted).all()):
            raise UnsupportedError(
                f"expected finite activations after {self._name}, got NaN or infinity; use --effort none, or other data"
            )
        inputs: dict[tuple[Any, ...], list[str]] = {}
        experts: dict[tuple[str, str], None] = {}
        for module, tensor in seen.items():
            expert = names.expert_of(module)
            key: tuple[Any, ...]
            if expert is not None:
                key = ("expert", expert[0])
                experts.setdefault((expert[0], expert[2]))
            else:
                key = (tensor.data_ptr(), tuple(tensor.shape))
            inputs.setdefault(key, []).append(module)
        stages: list[tuple[Input, ...]] = []
        for key, modules in inputs.items():
            if key[0] == "expert":
                stages.extend(self._expert_stages(key[1], seen))
            else:
                stages.append((self._input(tuple(modules)),))
        known = {module for stage in stages for one in stage for module in one.modules}
        for module in self._linears:
            if module not in known:  # never called
                stages.append((self._input((module,)),))
        self._stage_of = {m: n for n, stage in enumerate(stages) for one in stage for m in one.modules}
        self._tails = {
            module: Tail(part, self._linears[module], self._stage_of[module], others, {})
            for module, (part, others) in ends.items()
        }
        return tuple(stages)

    @contextmanager
    def _noting_ends(self, ends: dict[str, tuple[nn.Module, int | None]]) -> Iterator[None]:
        """For each part of the block that returns what a Linear within has returned: the Linear's name, the part, and
        the number of further results (see `Tail`)."""
        made: list[tuple[str, torch.Tensor]] = []

        def linear_hook(module: str) -> Callable[..., None]:
            return lambda _, __, output: made.append((module, output))

        def part_hook(part: nn.Module, _: Any, output: Any) -> None:
            others = len(output) - 1 if isinstance(output, tuple) else None
            if others and any(one is not None for one in output[1:]):
                return
            inside = set(part.modules())
            result = tensor_of(output) if others is not None or isinstance(output, torch.Tensor) else None
            for module, tensor in made:
                if tensor is result and self._linears[module] in inside and self._linears[module] is not part:
                    ends[module] = (part, others)

        handles = [linear.register_forward_hook(linear_hook(name)) for name, linear in self._linears.items()]
        handles += [part.register_forward_hook(part_hook) for part in self._block.children()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def _shortened(self) -> Iterator[None]:
        """Let parts of which the last Linear's inputs have been kept for every batch consist of that Linear alone."""
        ready = [tail for tail in self._tails.values() if len(tail.inputs) == len(self._batches)]

        def forward_of(tail: Tail) -> Callable[..., Any]:
            def forward(*_: Any, **__: Any) -> Any:
                result = tail.linear(tail.inputs[self._local.number])
                return result if tail.others is None else (result, *([None] * tail.others))

            return forward

        try:
            for tail in ready:
                tail.part.forward = forward_of(tail)
            yield
        finally:
            for tail in ready:
                tail.part.__dict__.pop("forward", None)

    def _input(self, modules: tuple[str, ...], pool: str | None = None) -> Input:
        return Input(modules=modules, columns=self._linears[modules[0]].in_features, pool=pool)

    def _expert_stages(self, stack: str, seen: Mapping[str, torch.Tensor]) -> Iterator[tuple[Input, ...]]:
        """Projections that share an input in the experts seen do so in all experts, called or not."""
        projections: dict[tuple[Any, ...], dict[str, None]] = {}
        for module, tensor in seen.items():
            expert = names.expert_of(module)
            if expert is not None and expert[0] == stack:
                key = (tensor.shape[-1], self._first_user(stack, expert[1], tensor, seen))
                projections.setdefault(key, {}).setdefault(expert[2])
        numbers: dict[int, None] = {}
        for module in self._linears:
            expert = names.expert_of(module)
            if expert is not None and expert[0] == stack:
                numbers.setdefault(expert[1])
        for (_, first), together in projections.items():
            stage = []
            for number in sorted(numbers):
                modules = tuple(module for name in together if (module := f"{stack}.{number}.{name}") in self._linears)
                if modules:
                    stage.append(self._input(modules, pool=f"{stack}.*.{first}"))
            yield tuple(stage)

    @staticmethod
    def _first_user(stack: str, number: int, tensor: torch.Tensor, seen: Mapping[str, torch.Tensor]) -> str:
        """The projection of this expert that was the first to be fed with `tensor`."""
        return next(
            expert[2]
            for module, other in seen.items()
            if (expert := names.expert_of(module)) is not None
            and expert[:2] == (stack, number)
            and other.data_ptr() == tensor.data_ptr()
        )

    def moments(
        self,
        inputs: tuple[Input, ...],
        make: MakeMoment,
        says: Mapping[str, torch.Tensor] | None = None,
        *,
        advance: bool = False,
    ) -> Moments:
        """See `Block`."""
        parts = {module: say.split(len(self._batches[0])) for module, say in (says or {}).items()}
        by_module = {one.modules[0]: one for one in inputs}
        pools = {one.pool: one.columns for one in inputs if one.pool is not None}
        # all experts of a pool count for it, whether or not they are among `inputs`
        others = [module for module in self._linears if self._pool_of(module) in pools]
        watched = list(dict.fromkeys([*by_module, *others]))
        alone = len(watched) == 1 and not advance
        keep = self._tail_to_keep(watched[0]) if alone else None

        def work(number: int) -> Moments:
            own: dict[Input, Moment] = {}
            pooled: dict[str, Moment] = {}

            def watch(module: str, tensor: torch.Tensor) -> None:
                moment = make(tensor.shape[-1])
                try:
                    moment.add(tensor, weights=parts[module][number] if module in parts else None)
                except UnsupportedError as error:
                    raise UnsupportedError(f"{module}: {error}") from error
                pool = self._pool_of(module)
                if pool is not None:
                    if pool not in pooled:
                        pooled[pool] = make(tensor.shape[-1])
                    pooled[pool].merge(moment)
                if module in by_module:
                    own[by_module[module]] = moment
                if keep is not None:
                    keep.inputs[number] = tensor
                if alone:
                    raise _Seen

            self._local.watch = watch
            with suppress(_Seen):
                output = self._run_number(number)
                if advance:
                    with torch.inference_mode():
                        self._batches[number].copy_(output)
            return own, pooled

        totals = {one: make(one.columns) for one in inputs}
        pool_totals = {pool: make(columns) for pool, columns in pools.items()}
        with self._shortened(), self._watching(watched):
            for own, pooled in in_order(work, range(len(self._batches)), workers=self._workers):
                for one, moment in own.items():
                    totals[one].merge(moment)
                for pool, moment in pooled.items():
                    pool_totals[pool].merge(moment)
        return totals, pool_totals

    def _tail_to_keep(self, module: str) -> Tail | None:
        """The part that ends with this Linear, if there is room for all of its inputs."""
        tail = self._tails.get(module)
        if tail is None or self._device.type != "cpu":  # elsewhere running again is faster than fetching
            return None
        if not tail.inputs:
            states = self._batches[0]
            tokens = sum(batch.shape[0] * batch.shape[1] for batch in self._batches)
            needed = tokens * tail.linear.in_features * states.element_size()
            if needed > self._room:
                return None
            self._room -= needed
        return tail

    def _pool_of(self, module: str) -> str | None:
        expert = names.expert_of(module)
        return None if expert is None else f"{expert[0]}.*.{expert[2]}"

    def set_weight(self, module: str, weight: torch.Tensor) -> None:
        """See `Block`."""
        parameter: torch.Tensor = self._linears[module].weight
        with torch.inference_mode():
            parameter.copy_(weight)
        for tail in self._tails.values():
            if tail.stage > self._stage_of.get(module, -1):
                tail.inputs.clear()

    def error(self) -> float | None:
        """See `Block`."""
        if self._noted is None or self._first is None:
            return None
        with one_torch_thread():
            batch, now = self._first.to(self._device), self._run(self._first)
            changed = (now.double() - self._noted.double()).norm()
            added = (self._noted.double() - batch.double()).norm()
        return float(changed / added) if float(added) else None

    def follow(self) -> None:
        """See `Block`."""

        def work(batch: torch.Tensor) -> None:
            with torch.inference_mode():
                batch.copy_(self._run(batch))

        for _ in in_order(work, self._source, workers=self._workers):
            pass

    def learner(self) -> AbstractContextManager[TunedBlock]:
        """See `Block`."""
        args, kwargs = outside_inference(self._call.args), outside_inference(self._call.kwargs)

        def run(batch: torch.Tensor) -> torch.Tensor:
            return tensor_of(self._block(batch, *args, **kwargs))

        return closing(
            TunedBlock(
                run,
                self._linears,
                batches=self._batches,
                wanted=self._source,
                device=self._device,
                workers=self._workers,
            )
        )

    def advance(self) -> None:
        """See `Block`."""

        def work(number: int) -> None:
            with torch.inference_mode():
                self._batches[number].copy_(self._run_number(number))

        with self._shortened():
            for _ in in_order(work, range(len(self._batches)), workers=self._workers):
                pass
        for tail in self._tails.values():
            tail.inputs.clear()
