"""A whole decoder in memory beside what its source answers: losses and their gradients for tuning end to end.

The source runs first. Of every window its last hidden states are kept, from which the head gives its distributions again:
a thousandth of what logits would take, and exact. Then the quantised weights take the place of the source's.

Products with weights are computed in bfloat16 where the processor has instructions for it, everything else in float32.
Windows are worked on in small batches by several threads, each with one torch thread, and their gradients are added in
order: the result does not depend on the number of threads.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from w3pack.checkpoint.source import Source
from w3pack.errors import UnsupportedError
from w3pack.format import names
from w3pack.integrations.block_weights import WeightlessModel
from w3pack.integrations.tuned_products import TunedProducts, free, product_dtype
from w3pack.pipeline.hidden_states import HiddenStates
from w3pack.pipeline.plan import BASE_MEMORY, Plan
from w3pack.pipeline.selection import block_of
from w3pack.quantize.chunks import in_order, one_torch_thread
from w3pack.quantize.tuning import Layout
from w3pack.runtime.dense_cache import available_bytes

#: Tokens of a batch that one thread works on.
_BATCH_TOKENS = {"cpu": 1024, "cuda": 4096}
#: Positions whose logits are alive at once.
_POSITIONS = {"cpu": 128, "cuda": 2048}
#: For the estimate of memory: copies of logits and of latents, and experts that a token may reach.
_LOGITS = 6
_LATENTS = 8
_EXPERTS_AT_ONCE = 8
_LAYER = re.compile(r"\.(?:layers|h|blocks|block)\.(\d+)\.")


def batch_tokens(device: torch.device, length: int) -> int:
    """Tokens of a batch of whole windows."""
    return max(1, _BATCH_TOKENS[device.type] // length) * length


def activation_bytes(plan: Plan) -> int:
    """What the backward pass keeps for a token, all blocks together: inputs and outputs of Linears and as much again."""
    return sum(
        8 * spec.rows + 4 * spec.columns
        for module, spec in plan.modules.items()
        if (expert := names.expert_of(module)) is None or expert[1] < _EXPERTS_AT_ONCE
    )


def recomputes(plan: Plan, *, tokens: int, free: int) -> bool:
    """Whether the activations of so many tokens take more than a quarter of the free memory."""
    return tokens * activation_bytes(plan) > free // 4


def memory_bytes(
    plan: Plan, *, tokens: int, length: int, width: int, vocabulary: int, workers: int, device: str = "cpu"
) -> int:
    """Upper estimate of what tuning takes at its peak on a device that has as much memory free as now.

    Args:
        tokens: of all windows; their hidden states beyond a quarter of the CPU's memory lie on the disk.
        length: of a window.
        width: of the hidden states.
        workers: threads, which only a CPU has.
    """
    kind = torch.device(device)
    workers = workers if kind.type == "cpu" else 1
    weights = plan.weights
    narrow = product_dtype(kind).itemsize
    outside = sum(math.prod(t.source.shape) for t in plan.tensors if t.action not in ("quantize", "drop"))
    latents = sum(spec.rows * spec.groups for spec in plan.modules.values())
    largest = max(spec.weights for spec in plan.modules.values())
    batch = batch_tokens(kind, length)
    blocks = max(1, len({block_of(tensor.source.name) for tensor in plan.quantized}))
    recompute = recomputes(plan, tokens=batch * workers, free=free_bytes(device))
    working = (
        activation_bytes(plan) // (blocks if recompute else 1) * batch
        + 4 * blocks * batch * width
        + 4 * _LOGITS * _POSITIONS[kind.type] * vocabulary
        + 4 * 3 * largest
        + 4 * latents
    )
    return (
        BASE_MEMORY
        + weights * (1 + narrow)
        + outside * 4
        + vocabulary * width * narrow
        + 4 * tokens * width
        + 4 * _LATENTS * latents
        + workers * working
    )


def free_bytes(device: str) -> int:
    """Memory that can be had on a device; 0 where the system does not say."""
    return torch.cuda.mem_get_info(device)[0] if device != "cpu" else available_bytes()


class WholeModel:
    """The model of a plan; see the module."""

    def __init__(
        self,
        source: Source,
        plan: Plan,
        windows: torch.Tensor,
        *,
        scratch: Path,
        device: str = "cpu",
        workers: int = 1,
        dtype: torch.dtype | None = None,
        recompute: bool | None = None,
    ) -> None:
        """Load the source and note its last hidden states.

        Args:
            windows: int64 [samples, length], token ids.
            scratch: folder for the hidden states where they take more than a quarter of the memory.
            workers: batches worked on at the same time on a CPU.
            dtype: of products with weights; None: `product_dtype`.
            recompute: run each block twice instead of keeping its activations for the backward pass; None: if they
                take more than a quarter of what is available.

        Raises:
            UnsupportedError: a model whose logits do not follow from its last hidden states.
        """
        self._device = torch.device(device)
        self._workers = workers if self._device.type == "cpu" else 1
        self._products = TunedProducts(device=self._device, dtype=dtype)
        self._loaded = WeightlessModel(source, plan, dtype=torch.float32, device=self._device)
        self.model = self._loaded.model
        self._windows = windows
        by_path = {self._loaded.paths[module]: module for module in plan.modules}

        def filled(path: str) -> None:
            module = by_path.get(path)
            if module is not None and _LAYER.search(path) is not None:  # the head is outside
                linear: Any = self.model.get_submodule(path)
                self._products.take(module, linear)
                linear.weight = nn.Parameter(torch.empty_like(linear.weight, device="meta"), requires_grad=False)

        self._loaded.fill_all(filled)
        self._vectors = self._find_vectors(plan)
        if recompute is None:
            tokens = batch_tokens(self._device, windows.shape[1]) * self._workers
            recompute = recomputes(plan, tokens=tokens, free=free_bytes(device))
        if recompute:
            self._recompute_blocks()
        self._base = self._find_base()
        head: Any = self.model.get_output_embeddings()
        if type(head) is nn.Linear:
            self._products.take_without_gradient(head)
        self._states: HiddenStates | None = None
        try:
            self._remember(scratch)
        except BaseException:
            self.close()
            raise

    @property
    def facts(self) -> Mapping[str, Any]:
        """For the manifest."""
        return {"products": str(self._products.dtype).removeprefix("torch.")}

    @property
    def modules(self) -> tuple[str, ...]:
        """The Linears whose codes are settled, in the order of the checkpoint."""
        return tuple(self._products.weights)

    @property
    def vectors(self) -> Mapping[str, torch.Tensor]:
        """Name in the checkpoint of each gain and bias that may move -> its value, in the source's dtype."""
        return self._vectors

    def weight(self, module: str) -> torch.Tensor:
        """A source weight, float32 [rows, columns], on the model's device."""
        return self._loaded.weight(module)

    def close(self) -> None:
        """Let go of the hidden states."""
        if self._states is not None:
            self._states.close()

    def put(self, layout: Layout, latents: torch.Tensor) -> None:
        """Make the model's weights what latents stand for.

        Args:
            layout: modules and vectors by their names in the checkpoint.
            latents: float32 [n].
        """
        self._products.put(layout, latents, vectors=self._parameters, workers=self._workers)

    def loss(self, samples: Sequence[int]) -> float:
        """Mean KL(source || model) over all positions of some windows, nats."""

        def work(batch: list[int]) -> float:
            with torch.no_grad():
                hidden = self._hidden(self._windows[batch])
                return sum(float(part) for part, _ in self._divergences(batch, hidden, slopes=False))

        found = list(in_order(work, self._batches(samples), workers=self._workers))
        return sum(found) / (len(samples) * self._windows.shape[1])

    def gradient(self, layout: Layout, latents: torch.Tensor, samples: Sequence[int]) -> torch.Tensor:
        """dL/dlatents, float32 [n], of the mean KL over some windows; the weights must be those of `latents`."""
        vectors = {name: one for name, one in self._parameters.items() if name in layout.parts}

        def work(batch: list[int]) -> torch.Tensor:
            def run() -> tuple[torch.Tensor, torch.Tensor]:
                hidden = self._hidden(self._windows[batch])
                slopes = [slope for _, slope in self._divergences(batch, hidden.detach(), slopes=True)]
                return hidden, torch.cat(slopes).view_as(hidden)

            return self._products.gradient(layout, latents, run, vectors=vectors)

        total = torch.zeros_like(latents)
        with free(list(vectors.values())):
            for one in in_order(work, self._batches(samples), workers=self._workers):
                total += one
        return total.div_(len(samples) * self._windows.shape[1])

    def _batches(self, samples: Sequence[int]) -> list[list[int]]:
        size = batch_tokens(self._device, self._windows.shape[1]) // self._windows.shape[1]
        return [list(samples[first : first + size]) for first in range(0, len(samples), size)]

    def _hidden(self, ids: torch.Tensor) -> torch.Tensor:
        """Last hidden states, [batch, length, width]."""
        found: torch.Tensor = self._base(input_ids=ids.to(self._device), use_cache=False).last_hidden_state
        return found

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [positions, vocabulary] of [positions, width]."""
        ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=self._device)
        with self._products.own.going_on_from(hidden.unsqueeze(0)):
            logits: torch.Tensor = self.model(input_ids=ids).logits[0]
        return logits.to(torch.float32)

    def _divergences(
        self, batch: list[int], hidden: torch.Tensor, *, slopes: bool
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Sum of KL(source || model) over some positions at a time, and its gradient by the hidden states."""
        wanted = self.states[batch].flatten(0, 1)
        step = _POSITIONS[self._device.type]
        for source, own in zip(wanted.split(step), hidden.flatten(0, 1).split(step), strict=True):
            with torch.no_grad():
                reference = torch.log_softmax(self._logits(source.to(self._device)), dim=-1)
            own = own.detach().requires_grad_(slopes)
            logs = torch.log_softmax(self._logits(own), dim=-1)
            loss = torch.nn.functional.kl_div(logs, reference, reduction="sum", log_target=True)
            yield loss.detach(), torch.autograd.grad(loss, own)[0] if slopes else own

    @property
    def states(self) -> torch.Tensor:
        """[samples, length, width]: the source's last hidden states."""
        if self._states is None:
            raise UnsupportedError("expected the source's hidden states, got a model that is closed; open it again")
        return self._states.tensor

    def _remember(self, scratch: Path) -> None:
        batches = self._batches(range(len(self._windows)))

        def work(batch: list[int]) -> None:
            with torch.no_grad():
                self.states[batch] = self._hidden(self._windows[batch]).to(self.states.dtype).cpu()

        with torch.no_grad(), one_torch_thread():
            first = self._hidden(self._windows[:1])
            wanted = self.model(input_ids=self._windows[:1].to(self._device), use_cache=False).logits[0]
            again = self._logits(first[0])
        if not torch.allclose(wanted.float(), again, rtol=1e-3, atol=1e-3 * float(wanted.abs().max())):
            raise UnsupportedError(
                f"expected logits of {type(self.model).__name__} that follow from its last hidden states, got others; "
                "this model cannot be tuned end to end, pass --effort default"
            )
        shape = (*self._windows.shape, first.shape[-1])
        in_memory = 4 * math.prod(shape) <= available_bytes() // 4
        self._states = HiddenStates(shape, dtype=torch.float32, folder=None if in_memory else scratch)
        for _ in in_order(work, batches, workers=self._workers):
            pass

    def _find_vectors(self, plan: Plan) -> dict[str, torch.Tensor]:
        """Norms and biases of the decoder that the checkpoint keeps in floats."""
        copied = {tensor.source.name for tensor in plan.tensors if tensor.action == "copy"}
        by_path = {path: name for path, name in self._loaded.stored.items() if name in copied}
        self._parameters: dict[str, nn.Parameter] = {}
        found: dict[str, torch.Tensor] = {}
        for path, parameter in self.model.named_parameters():
            name = by_path.get(path)
            if name is not None and parameter.dim() == 1 and "vision" not in path:
                self._parameters[name] = parameter
                found[name] = self._loaded.read_as_stored(name).to(self._device)
        return found

    def _find_base(self) -> Any:
        """The model below the head, its forward replaced by one that can hand out hidden states given to it."""
        base: Any = getattr(self.model, self.model.base_model_prefix, None)
        if base is None or base is self.model:
            raise UnsupportedError(
                f"expected {type(self.model).__name__} to be a decoder and a head, got another model; "
                "it cannot be tuned end to end, pass --effort default"
            )
        run, own = base.forward, self._products.own

        def forward(*args: Any, **kwargs: Any) -> Any:
            given = own.hidden
            if given is None:
                return run(*args, **kwargs)
            from transformers.modeling_outputs import MoeModelOutputWithPast

            return MoeModelOutputWithPast(last_hidden_state=given)

        base.forward = forward
        return base

    def _recompute_blocks(self) -> None:
        for path, layer in self.model.named_modules():
            if re.fullmatch(r".*\.(?:layers|h|blocks|block)\.\d+", path) and isinstance(layer, nn.Module):
                self._recompute(layer)

    def _recompute(self, layer: Any) -> None:
        run = layer.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return run(*args, **kwargs)
            return checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

        layer.forward = forward
