"""Gradients found block by block are those of the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from w3pack.checkpoint.safetensors_source import SafetensorsSource
from w3pack.errors import UnsupportedError
from w3pack.integrations.backward_walk import BackwardWalk, draw
from w3pack.integrations.loadable import loadable_for
from w3pack.pipeline.decoder import Diagonal
from w3pack.pipeline.plan import QuantizeOptions
from w3pack.pipeline.quantize_model import prepare_job

Seen = dict[str, tuple[torch.Tensor, torch.Tensor]]


def walked(source: Path, windows: torch.Tensor, scratch: Path, *, only: tuple[str, ...] = (), **how: Any) -> Seen:
    """Inputs and gradients of each module, [tokens, ...], by a walk."""
    opened = SafetensorsSource(source)
    job = prepare_job(opened, QuantizeOptions(only=only), loadable=loadable_for(opened))
    walk = BackwardWalk(opened, job.plan, windows, scratch=scratch, seed=5, **how)
    found: Seen = {}
    try:
        moments = walk.forward(Diagonal)
        for number in reversed(range(len(walk.blocks))):
            parts = walk.backward(number, lambda module, x, g: torch.cat([x, g], dim=1))
            for module, batches in parts.items():
                columns = job.plan.modules[module].columns
                both = torch.cat(batches)
                found[module] = both[:, :columns], both[:, columns:]
                assert torch.allclose(moments[module].diagonal(), found[module][0].square().mean(dim=0), rtol=1e-4)
    finally:
        walk.close()
    assert not any(path.is_file() for path in scratch.rglob("*"))
    return found


def whole(lab: Any, source: Path, windows: torch.Tensor) -> Seen:
    """The same by one backward pass through the stock model."""
    model = lab.load(source, dtype=torch.float32)
    seen: dict[str, list[torch.Tensor]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and "layers" in name:

            def hook(_: Any, args: Any, output: torch.Tensor, name: str = name) -> None:
                seen[name] = [args[0].detach().flatten(0, -2)]
                output.register_hook(lambda gradient: seen[name].append(gradient.flatten(0, -2)))

            module.register_forward_hook(hook)
    likely = model(input_ids=windows, use_cache=False).logits.float().log_softmax(dim=-1)
    drawn = torch.stack([draw(one.detach(), seed=5, window=index) for index, one in enumerate(likely)])
    (-likely.gather(2, drawn.unsqueeze(2)).sum()).backward()
    return {name: (pair[0], pair[1]) for name, pair in seen.items() if len(pair) == 2}


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "phi3"])
def test_gradients_are_those_of_the_whole_model(
    lab: Any, tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows = lab.tokens(batch=4, length=7)
    monkeypatch.setattr("w3pack.integrations.decoder_walk._BATCH_TOKENS", {"cpu": 14})
    found, wanted = walked(lab.source(family), windows, tmp_path), whole(lab, lab.source(family), windows)
    assert found.keys() <= wanted.keys()
    assert len(found) >= 8
    for name, (inputs, gradients) in found.items():
        assert lab.distance(inputs, wanted[name][0]) < 1e-4
        assert lab.distance(gradients, wanted[name][1]) < 1e-3


def test_blocks_without_a_linear_to_quantise_are_passed(lab: Any, tmp_path: Path) -> None:
    """The first block is reached through the second, of which nothing is asked."""
    windows = lab.tokens(batch=2, length=7)
    only = ("re:.*layers.0.mlp.*",)
    found, wanted = walked(lab.source("llama"), windows, tmp_path, only=only), whole(lab, lab.source("llama"), windows)
    assert len(found) == 3
    assert all(lab.distance(gradients, wanted[name][1]) < 1e-3 for name, (_, gradients) in found.items())


def test_neither_disk_nor_threads_change_a_bit(lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    windows = lab.tokens(batch=4, length=7)
    monkeypatch.setattr("w3pack.integrations.decoder_walk._BATCH_TOKENS", {"cpu": 14})
    one = walked(lab.source("qwen2"), windows, tmp_path, in_memory=True)
    other = walked(lab.source("qwen2"), windows, tmp_path, in_memory=False, workers=3)
    assert all(torch.equal(a, b) for name in one for a, b in zip(one[name], other[name], strict=True))


def test_experts_are_told_of_the_tokens_routed_to_them(lab: Any, tmp_path: Path) -> None:
    windows = lab.tokens(batch=2, length=9)
    found = walked(lab.source("qwen3_moe"), windows, tmp_path, only=("re:.*layers.0.mlp.experts.*",))
    rows = {name: len(inputs) for name, (inputs, _) in found.items() if name.endswith("up_proj")}
    assert sum(rows.values()) == 2 * windows.numel()  # two experts a token
    assert all(float(gradients.abs().sum()) > 0 for _, gradients in found.values())


def test_gradients_that_overflow_are_an_error(lab: Any, tmp_path: Path) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    for path in lab.source("llama").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    lab.edit(folder, lambda tensors: tensors["model.norm.weight"].mul_(1e38))
    with pytest.raises(UnsupportedError, match="expected finite gradients"):
        walked(folder, lab.tokens(), tmp_path)


def test_tokens_are_drawn_from_the_distribution() -> None:
    likely = torch.tensor([0.5, 0.0, 0.3, 0.2]).log().expand(4000, 4)
    drawn = draw(likely, seed=1, window=0)
    shares = torch.bincount(drawn, minlength=4) / 4000
    assert torch.allclose(shares, torch.tensor([0.5, 0.0, 0.3, 0.2]), atol=0.03)
    assert torch.equal(drawn, draw(likely, seed=1, window=0))
    assert not torch.equal(drawn, draw(likely, seed=1, window=1))
    assert not torch.equal(drawn, draw(likely, seed=2, window=0))


def test_counting_leaves_activations_as_they_are() -> None:
    """They go on through the model."""
    rows = torch.full((3, 4), 3.0)
    moment = Diagonal(4)
    moment.add(rows)
    assert torch.equal(rows, torch.full((3, 4), 3.0))
    assert torch.equal(moment.diagonal(), torch.full((4,), 9.0))
