"""How the model's answers depend on the outputs of each Linear: a decoder walked forwards, then backwards, block by block.

Forwards, the hidden states before each block are kept. Behind the last block every position draws a token from the
model's own distribution, and the loss is the sum of -log p of these tokens. Going back, each block is loaded once more,
run on the states that were kept, and handed the gradient of what follows. In the mean over draws the outer product of the
gradient of such a loss is the second derivative of KL(source || changed model) at the source: the Fisher information
(Amari 1998; for quantisation SqueezeLLM, arXiv 2306.07629). One block is in memory at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from w3pack.checkpoint.source import Source
from w3pack.errors import UnsupportedError
from w3pack.format import names
from w3pack.integrations.decoder_walk import DecoderWalk, replaced_forwards
from w3pack.integrations.tuned_block import outside_inference
from w3pack.integrations.watched_block import Call, tensor_of
from w3pack.pipeline.decoder import Input, Judge, MakeMoment, Moment
from w3pack.pipeline.hidden_states import HiddenStates
from w3pack.pipeline.plan import Plan
from w3pack.quantize.chunks import in_order, one_torch_thread
from w3pack.runtime.dense_cache import available_bytes

_POSITIONS_AT_ONCE = 64
_BATCH_TOKENS = 4096  # a backward pass keeps many times what a forward pass does
_PRIME = 1_000_003


class BackwardWalk(DecoderWalk):
    """A `BackwardWalk` (w3pack.pipeline.decoder) over transformers' modules."""

    def __init__(
        self,
        source: Source,
        plan: Plan,
        windows: torch.Tensor,
        *,
        scratch: Path,
        device: str = "cpu",
        workers: int = 1,
        seed: int = 0,
        in_memory: bool | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Embed the samples; arguments as those of `DecoderWalk`.

        Args:
            seed: of the tokens drawn.
        """
        super().__init__(
            source, plan, windows, scratch=scratch, device=device, workers=workers, in_memory=in_memory, dtype=dtype
        )
        self._seed = seed
        self._local = threading.local()
        # what was made in inference mode cannot take part in a backward pass
        self._calls = [Call(outside_inference(call.args), outside_inference(call.kwargs)) for call in self._calls]
        self._layers = len(self._calls)
        self._reached = self._layers  # layers from here on are behind us on the way back
        self._kept: HiddenStates | None = None
        self._gradient = torch.empty(0)

    def _batch_tokens(self) -> int:
        return min(super()._batch_tokens(), _BATCH_TOKENS)

    @property
    def tokens(self) -> int:
        """See `BackwardWalk`."""
        return self._windows.numel()

    def close(self) -> None:
        """Let go of the hidden states."""
        super().close()
        kept = getattr(self, "_kept", None)
        if kept is not None:
            kept.close()

    def forward(self, make: MakeMoment | None) -> Mapping[str, Moment]:
        """See `BackwardWalk`."""
        samples, length, width = self.states.shape
        nbytes = self._layers * self.states.nbytes
        in_memory = nbytes <= available_bytes() // 4 if self._in_memory is None else self._in_memory
        apart = self._scratch / "kept"  # where a file cannot lose its name while in use, two cannot share it
        if not in_memory:
            apart.mkdir(exist_ok=True)
        self._kept = HiddenStates(
            (self._layers * samples, length, width), dtype=self._dtype, folder=None if in_memory else apart
        )
        found: dict[str, Moment] = {}
        for layer in range(self._layers):
            self._states_before(layer).copy_(self.states)
            modules = self._modules_of(layer)
            with self._open(layer, modules) as block:
                if modules and make is not None:
                    inputs = tuple(self._input(module) for module in modules)
                    found |= {one.modules[0]: moment for one, moment in block.moments(inputs, make)[0].items()}
                block.advance()
        self._gradient = self._behind_the_blocks()
        return found

    def backward(self, number: int, judge: Judge) -> Mapping[str, list[torch.Tensor]]:
        """See `BackwardWalk`."""
        found: dict[str, list[torch.Tensor]] = {}
        while self._reached > self._numbers[number]:
            self._reached -= 1
            modules = self._modules_of(self._reached) if self._reached == self._numbers[number] else ()
            path = f"{self._stack}.{self._reached}"
            self._loaded.fill(path)
            try:
                found = self._through(path, modules, judge)
            finally:
                self._loaded.empty(path)
        return found

    def _modules_of(self, layer: int) -> tuple[str, ...]:
        return self.blocks[self._numbers.index(layer)] if layer in self._numbers else ()

    def _linear(self, module: str) -> Any:
        return self._loaded.model.get_submodule(self._loaded.paths[module])

    def _input(self, module: str) -> Input:
        expert = names.expert_of(module)
        pool = None if expert is None else f"{expert[0]}.*.{expert[2]}"  # as `WatchedBlock` calls it
        return Input(modules=(module,), columns=self._linear(module).in_features, pool=pool)

    def _states_before(self, layer: int) -> torch.Tensor:
        if self._kept is None:
            raise UnsupportedError("expected a walk that went forwards first, got none; call forward")
        samples = self._windows.shape[0]
        return self._kept.tensor[layer * samples : (layer + 1) * samples]

    def _through(self, path: str, modules: Sequence[str], judge: Judge) -> dict[str, list[torch.Tensor]]:
        """Take the gradient from behind a filled block to ahead of it."""
        block, call = self._loaded.model.get_submodule(path), self._calls[self._reached]
        pairs = list(
            zip(
                self._states_before(self._reached).split(self._batch), self._gradient.split(self._batch), strict=True
            )
        )  # fmt: skip

        def work(pair: tuple[torch.Tensor, torch.Tensor]) -> dict[str, torch.Tensor]:
            states, gradient = pair
            sink: dict[str, torch.Tensor] = {}
            self._local.sink = sink
            with torch.enable_grad():
                hidden = states.to(self._device, copy=True).requires_grad_(True)
                output = tensor_of(block(hidden, *call.args, **call.kwargs))
            output.backward(gradient.to(self._device, output.dtype))
            if hidden.grad is None or not bool(torch.isfinite(hidden.grad).all()):
                raise UnsupportedError(
                    f"expected finite gradients behind {path}, got NaN or infinity; leave --sensitivity, --keep-top and "
                    "--target-bits out, or pass --effort none"
                )
            gradient.copy_(hidden.grad)
            return sink

        with self._judging(modules, judge):
            results = list(in_order(work, pairs, workers=self._workers))
        return {module: [one[module] for one in results if module in one] for module in modules}

    @contextmanager
    def _judging(self, modules: Sequence[str], judge: Judge) -> Iterator[None]:
        """Call `judge` with the input of each module and the gradient of its output."""

        def hook_for(module: str) -> Callable[..., None]:
            def hook(_: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
                sink, seen = self._local.sink, args[0].detach().flatten(0, -2)

                def note(gradient: torch.Tensor) -> None:
                    sink[module] = judge(module, seen, gradient.detach().flatten(0, -2))

                output.register_hook(note)

            return hook

        handles = [self._linear(module).register_forward_hook(hook_for(module)) for module in modules]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _behind_the_blocks(self) -> torch.Tensor:
        """The gradient of the loss by the outputs of the last block: [samples, length, width] on the CPU."""
        model, hidden_states = self._loaded.model, self.states
        layers: Any = model.get_submodule(self._stack)

        def past_the_blocks(*args: Any, **kwargs: Any) -> torch.Tensor:
            result: torch.Tensor = self._local.hidden
            return result

        def work(index: int) -> torch.Tensor:
            with torch.enable_grad():
                hidden = hidden_states[index : index + 1].to(self._device, copy=True).requires_grad_(True)
                self._local.hidden = hidden
                ids = self._windows[index : index + 1].to(self._device)
                logits = model(input_ids=ids, use_cache=False).logits[0]
                likely = torch.log_softmax(logits.float(), dim=-1)
                drawn = draw(likely.detach(), seed=self._seed, window=index)
                (-likely.gather(1, drawn.unsqueeze(1)).sum()).backward()
            if hidden.grad is None:
                raise UnsupportedError("expected answers that depend on the last block, got others; pass --effort none")
            return hidden.grad[0].cpu()

        result = torch.empty_like(hidden_states)
        with self._filled_on_demand(), replaced_forwards(layers, past_the_blocks):
            with one_torch_thread():
                result[0] = work(0)  # loads what lies outside the blocks
            for index, gradient in enumerate(in_order(work, range(1, len(result)), workers=self._workers), start=1):
                result[index] = gradient
        return result


def draw(log_probabilities: torch.Tensor, *, seed: int, window: int) -> torch.Tensor:
    """A token for each position, drawn from its distribution; the same for a seed and number of the window.

    Args:
        log_probabilities: float32 [positions, vocabulary].

    Returns:
        int64 [positions].
    """
    generator = torch.Generator().manual_seed((seed * _PRIME + window) % 2**63)
    at = torch.rand(log_probabilities.shape[0], generator=generator, dtype=torch.float64)
    drawn = []
    for first in range(0, log_probabilities.shape[0], _POSITIONS_AT_ONCE):
        sums = log_probabilities[first : first + _POSITIONS_AT_ONCE].double().exp().cumsum(dim=1)
        wanted = at[first : first + _POSITIONS_AT_ONCE].to(sums.device).unsqueeze(1) * sums[:, -1:]
        drawn.append(torch.searchsorted(sums, wanted, right=True).squeeze(1).clamp_(max=sums.shape[1] - 1))
    return torch.cat(drawn)
