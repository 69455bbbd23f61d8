"""The FP8 part of `prepare`: which kernels FP8 modules launch, and which arm each fused pair takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from w3pack.jit import KernelText, ToolchainError
from w3pack.ops import gateup_cuda, gateup_probe, workspace
from w3pack.ops.gateup_arms import ROUNDING, padded
from w3pack.ops.gateup_between import between_text
from w3pack.ops.gateup_choices import ArmChoice
from w3pack.ops.gateup_cuda import Fp8Form
from w3pack.ops.gateup_launch import Matrix
from w3pack.ops.gateup_probe import Probe, Wanted
from w3pack.pack.gateup import split_rows
from w3pack.runtime.fp8_linear import Fp8Linear, Fp8Module
from w3pack.runtime.gateup import FusedGateUp

_KernelOf = tuple[KernelText, int]


class Fp8Work:
    """What is to be done for the FP8 modules of a model that lie on CUDA devices and whose weights a kernel can read."""

    def __init__(
        self,
        model: nn.Module,
        dtypes: Sequence[torch.dtype],
        batch_sizes: Sequence[int],
        *,
        wanted: Wanted,
        w8a8: bool,
        probe: Probe,
    ) -> None:
        """Scales are widened here; nothing is built yet."""
        self._dtypes, self._sizes, self._wanted, self._w8a8, self._probe = dtypes, batch_sizes, wanted, w8a8, probe
        found = [module for module in model.modules() if isinstance(module, Fp8Module) and module.weight.is_cuda]
        for module in found:
            module.widen()
        self.modules = [module for module in found if gateup_cuda.takes(module.weight, module.scales, module.block)]
        self.pairs = [module for module in self.modules if isinstance(module, FusedGateUp) and module.silu]
        self.forms = list(dict.fromkeys(self._forms()))

    @property
    def devices(self) -> set[int]:
        """CUDA devices that the modules lie on."""
        return {module.weight.get_device() for module in self.modules}

    def _forms(self) -> Iterator[Fp8Form]:
        for module in self.modules:
            index, (rows, columns) = module.weight.get_device(), module.weight.shape
            pair = isinstance(module, FusedGateUp)
            for dtype in self._dtypes:
                if pair and module in self.pairs:
                    yield gateup_cuda.form_of(rows // 2, columns, paired=True, x_dtype=dtype, device_index=index)
                elif pair:
                    yield gateup_cuda.form_of(rows // 2, columns, paired=False, x_dtype=dtype, device_index=index)
                elif isinstance(module, Fp8Linear):
                    yield gateup_cuda.form_of(rows, columns, paired=False, x_dtype=dtype, device_index=index)

    def texts(self) -> Iterator[_KernelOf]:
        """Every kernel that calls, and the choice of arms, launch."""
        for form in self.forms:
            for size in self._sizes:
                yield from ((text, form.device_index) for text in form.texts(size))
        if self.pairs and ROUNDING & set(gateup_probe.allowed(self._wanted, w8a8=self._w8a8)):
            for index in {module.weight.get_device() for module in self.pairs}:
                for dtype in self._dtypes:
                    yield between_text(dtype, paired=False, quantized=True), index
                    yield between_text(dtype, paired=True, quantized=False), index

    def warm(self, captures: int) -> None:
        """Decoders and workspace for every number of tokens."""
        for form in self.forms:
            for portion in {portion for size in self._sizes for portion in form.portions(size)}:
                workspace.provide(form.device_index, form.decoder(portion).plan.partial_bytes, captures)

    def give_up(self, error: ToolchainError) -> None:
        """No kernels can be built or loaded: dequantise."""
        for form in self.forms:
            form.give_up(error)

    def decide(self) -> tuple[ArmChoice, ...]:
        """Choose an arm for each shape and number of tokens, once for each."""
        choices: dict[tuple[object, ...], ArmChoice] = {}
        for module in self.pairs:
            (gate, up), (gate_scales, up_scales) = split_rows(module.weight), split_rows(module.scales)
            halves = Matrix(gate.detach(), gate_scales.detach()), Matrix(up.detach(), up_scales.detach())
            for dtype in self._dtypes:
                for size in self._sizes:
                    key = (*gate.shape, gate.get_device(), dtype, padded(size))
                    if key not in choices:
                        choices[key] = gateup_probe.decide(
                            *halves, size, dtype, wanted=self._wanted, w8a8=self._w8a8, probe=self._probe
                        )
        return tuple(dict.fromkeys(choices.values()))
