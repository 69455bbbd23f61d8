"""Adapters on top of frozen codes train; the codes do not move."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from w3pack.runtime import dense_cache
from w3pack.runtime.linear import W3Linear


class Adapted(nn.Module):
    """A packed Linear and a low-rank term beside it."""

    def __init__(self, packed: W3Linear, *, rank: int) -> None:
        super().__init__()
        self.packed = packed
        generator = torch.Generator().manual_seed(packed.in_features + packed.out_features)
        self.a = nn.Parameter(torch.randn(packed.in_features, rank, generator=generator) * packed.in_features**-0.5)
        self.b = nn.Parameter(torch.randn(rank, packed.out_features, generator=generator) * 0.01)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.packed(x) + x @ self.a @ self.b


@pytest.mark.parametrize("used_before", [False, True], ids=["fresh", "after inference"])
@pytest.mark.parametrize("kept", [True, False], ids=["unpacked once", "unpacked each call"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_adapters_train(lab: Any, family: str, kept: bool, used_before: bool) -> None:
    packed = lab.packed(family)
    if not kept:
        dense_cache.set_budget(0)
    try:
        model = lab.load(packed.folder)
        if used_before:
            with torch.inference_mode():
                model(lab.tokens())
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        adapters: list[Adapted] = []
        for layer in model.model.layers:
            for owner, name in ((layer.self_attn, "q_proj"), (layer.self_attn, "v_proj"), (layer.mlp, "down_proj")):
                adapters.append(Adapted(getattr(owner, name), rank=4))
                setattr(owner, name, adapters[-1])
        trained = [tensor for adapter in adapters for tensor in (adapter.a, adapter.b)]
        optimizer = torch.optim.Adam(trained, lr=3e-3)
        losses = []
        for step in range(5):
            loss = model(lab.tokens(), labels=lab.tokens()).loss
            losses.append(loss.item())
            optimizer.zero_grad()
            loss.backward()
            if step == 0:
                assert all(tensor.grad is not None and float(tensor.grad.abs().max()) > 0 for tensor in trained)
            optimizer.step()
        assert losses == sorted(losses, reverse=True)
        assert losses[-1] < 0.98 * losses[0]
    finally:
        dense_cache.set_budget(None)
    stored = lab.read(packed.folder)
    module = model.model.layers[0].self_attn.q_proj.packed
    for part in ("codes", "scales", "qmap"):
        assert lab.same(getattr(module, part), stored[f"model.layers.0.self_attn.q_proj.{part}"])
        assert getattr(module, part).grad is None


def test_packed_modules_are_frozen(lab: Any) -> None:
    model = lab.load(lab.packed("qwen2", qmap_dtype="float16").folder)
    packed = [module for module in model.modules() if isinstance(module, W3Linear)]
    assert not any(parameter.requires_grad for module in packed for parameter in module.parameters())
    assert model.model.norm.weight.requires_grad
    for _ in range(2):  # the norms train; nothing that was kept belongs to an older graph
        model(lab.tokens(), labels=lab.tokens()).loss.backward()


@pytest.mark.parametrize("kept", [True, False], ids=["unpacked once", "unpacked each call"])
def test_gradient_of_the_input_is_that_of_a_stock_linear(lab: Any, kept: bool) -> None:
    packed = lab.packed("qwen2")
    name = "model.layers.0.mlp.down_proj"
    weight = lab.weights(packed)[name]
    x = torch.randn(3, 5, weight.shape[1], generator=torch.Generator().manual_seed(5), requires_grad=True)
    outside = torch.randn(3, 5, weight.shape[0], generator=torch.Generator().manual_seed(6))
    dense_cache.set_budget(None if kept else 0)
    try:
        (lab.load(packed.folder).get_submodule(name)(x) * outside).sum().backward()
    finally:
        dense_cache.set_budget(None)
    assert x.grad is not None
    assert lab.distance(x.grad, outside @ weight) < 1e-5


def test_peft(lab: Any) -> None:
    peft = pytest.importorskip("peft")
    model = lab.load(lab.packed("llama").folder)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    refusal = None
    try:
        peft.get_peft_model(model, config)(lab.tokens(), labels=lab.tokens()).loss.backward()
    except ValueError as error:
        refusal = str(error)
    assert refusal is None or "W3Linear" in refusal
