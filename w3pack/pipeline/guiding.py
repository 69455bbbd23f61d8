"""Calibration guided by gradients: how much each token counts for each Linear, and a moment for each of them."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from w3pack.checkpoint.staging import Staging
from w3pack.format import names
from w3pack.pipeline.decoder import Input
from w3pack.pipeline.sensitivity import Gradients
from w3pack.quantize.guidance import even_out, token_weights

if TYPE_CHECKING:  # it imports this module
    from w3pack.pipeline.quantize_model import Job


def guide(job: Job, gradients: Gradients, staging: Staging, *, workers: int, device: str) -> dict[str, torch.Tensor]:
    """How much each token of the text counts for each Linear, see `w3pack.quantize.guidance`.

    Gradients are those of the source; experts, which see a part of the tokens each, are left out.

    Returns:
        Module -> float32 [samples, length], on the CPU, 1 in the mean.
    """

    def judge(module: str, inputs: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
        return token_weights(found)[0].cpu() if names.expert_of(module) is None else torch.empty(0)

    says: dict[str, torch.Tensor] = {}
    with (
        tempfile.TemporaryDirectory(dir=staging.folder) as scratch,
        gradients.open(job, Path(scratch), device, workers) as walk,
    ):
        walk.forward(None)
        samples, length = int(gradients.facts["samples"]), int(gradients.facts["length"])
        for number in reversed(range(len(walk.blocks))):
            for module, parts in walk.backward(number, judge).items():
                if parts and parts[0].numel():
                    says[module] = even_out(torch.cat(parts).view(samples, length))
    return says


def apart(stage: tuple[Input, ...], says: Mapping[str, torch.Tensor]) -> tuple[Input, ...]:
    """An input of its own for each Linear whose tokens count in a way of its own."""
    found: list[Input] = []
    for one in stage:
        guided = [module for module in one.modules if module in says]
        found += [replace(one, modules=(module,)) for module in guided]
        if len(guided) < len(one.modules):
            found.append(replace(one, modules=tuple(module for module in one.modules if module not in says)))
    return tuple(found)
