"""Models of transformers whose packed Linears are merged: same answers, same files, tensors held once."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from w3pack.runtime.linear import W3Linear
from w3pack.runtime.merge import Merging, merge_linears, unmerge
from w3pack.runtime.merged import MergedLinears
from w3pack.runtime.prepare import prepare

QKV = ("q_proj", "k_proj", "v_proj")
GATE_UP = ("gate_proj", "up_proj")

#: Family -> what is merged in each of its two layers.
EXPECTED: dict[str, list[tuple[str, ...]]] = {
    "llama": [QKV, GATE_UP] * 2,
    "llama_tied": [QKV, GATE_UP] * 2,
    "qwen2": [QKV, GATE_UP] * 2,
    "qwen3": [QKV, GATE_UP] * 2,
    "gemma2": [QKV, GATE_UP] * 2,
    "gemma3_text": [QKV, GATE_UP] * 2,
    "mistral": [QKV, GATE_UP] * 2,
    "phi3": [],  # fused in the model class already
    "mixtral": [QKV] * 2,  # experts are left alone
    "qwen3_moe": [QKV, QKV, GATE_UP],  # layer 1 is a dense MLP
}


def merged(lab: Any, family: str, **kwargs: Any) -> tuple[Any, Merging]:
    model = lab.load(lab.packed(family).folder, **kwargs)
    return model, merge_linears(model)


def groups(model: Any) -> list[MergedLinears]:
    return [module for module in model.modules() if isinstance(module, MergedLinears)]


def equal(lab: Any, a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return list(a) == list(b) and all(lab.same(a[name], b[name]) for name in a)


def held(model: Any) -> int:
    """Bytes of all storages behind parameters and the state dict."""
    tensors = [*model.parameters(), *model.state_dict().values()]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize("family", EXPECTED)
def test_same_answers_and_tensors(lab: Any, family: str) -> None:
    model = lab.load(lab.packed(family).folder)
    state, logits, words, nbytes = dict(model.state_dict()), lab.logits(model), lab.continuation(model), held(model)
    report = merge_linears(model)
    assert [group.members for group in report.groups] == EXPECTED[family]
    assert not report.declined
    assert equal(lab, dict(model.state_dict()), state)
    padding = sum(8 * (g.spec.maps - len(g.specs)) * g.qmap.element_size() for g in groups(model))
    padding += sum(g.bias.nbytes - 4 * sum(s.rows for s in g.specs) for g in groups(model) if g.bias is not None)
    assert held(model) == nbytes + padding
    assert lab.distance(lab.logits(model), logits) < 1e-6
    assert lab.continuation(model) == words
    assert all(group._traced is None and not group._calls for group in groups(model))
    del state
    assert unmerge(model) == len(report.groups)
    assert held(model) == nbytes
    assert torch.equal(lab.logits(model), logits)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3_text"])
def test_half_precision(lab: Any, family: str) -> None:
    """bfloat16 sums on a CPU may be ordered otherwise in a larger matrix."""
    model = lab.load(lab.packed(family).folder, dtype=torch.bfloat16)
    exact = lab.logits(lab.load(lab.packed(family).folder, dtype=torch.float64))
    separate = lab.distance(lab.logits(model), exact)
    merge_linears(model)
    assert lab.distance(lab.logits(model), exact) < 2 * separate


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3_text", "qwen3_moe"])
def test_saved_and_loaded_again(lab: Any, family: str, tmp_path: Any) -> None:
    model, _ = merged(lab, family)
    logits = lab.logits(model)
    model.save_pretrained(tmp_path)
    before, after = lab.read(lab.packed(family).folder), lab.read(tmp_path)
    assert before.keys() == after.keys()
    assert all(lab.same(before[name], after[name]) for name in before)
    again = lab.load(tmp_path)
    assert not groups(again)
    assert lab.distance(lab.logits(again), logits) < 1e-6
    merge_linears(again)
    assert torch.equal(lab.logits(again), logits)


def test_copies_and_casts(lab: Any) -> None:
    model, _ = merged(lab, "qwen2")
    logits = lab.logits(model)
    twin = copy.deepcopy(model)
    assert torch.equal(lab.logits(twin), logits)
    twin = twin.to(torch.float64)
    assert all(group.bias is None or group.bias.dtype == torch.float64 for group in groups(twin))
    assert all(group.scales.dtype == torch.float16 for group in groups(twin))
    assert lab.distance(lab.logits(twin), logits) < 1e-6
    unmerge(twin)
    assert not groups(twin)
    assert groups(model)
    assert torch.equal(lab.logits(model), logits)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3_text"])
def test_compiles_without_a_graph_break(lab: Any, family: str) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    model, report = merged(lab, family)
    expected = lab.logits(model)
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    assert lab.distance(lab.logits(compiled), expected) < 1e-5
    calls = sum("w3_linear" in str(node.target) for graph in counter.graphs for node in graph.graph.nodes)
    linears = sum(type(module) is W3Linear for module in model.modules())
    members = sum(len(group.members) for group in report.groups)
    assert calls == linears - members + len(report.groups)


def test_user_hooks_are_called(lab: Any) -> None:
    model, _ = merged(lab, "llama")
    seen: list[tuple[int, ...]] = []
    model.model.layers[0].self_attn.k_proj.register_forward_hook(lambda _m, _x, y: seen.append(tuple(y.shape)))
    model.model.layers[0].mlp.up_proj.register_forward_pre_hook(lambda _m, args: (args[0] * 2,))
    logits = lab.logits(model)
    assert seen == [(2, 9, 60)]
    unmerge(model)
    assert lab.distance(lab.logits(model), logits) < 1e-6
    assert len(seen) == 2


def test_gradients_with_checkpointing(lab: Any) -> None:
    gradients = []
    for together in (False, True):
        model = lab.load(lab.packed("llama").folder)
        if together:
            merge_linears(model)
        model.train()
        model.gradient_checkpointing_enable()
        model(lab.tokens(), labels=lab.tokens()).loss.backward()
        gradients.append(model.model.embed_tokens.weight.grad)
        assert all(not group._calls for group in groups(model))
    assert float(gradients[0].abs().max()) > 0
    assert torch.equal(*gradients)


def test_loaded_over_a_device_map(lab: Any) -> None:
    """Hooks that move inputs hand on the same tensor where it lies well already."""
    folder = lab.packed("llama").folder
    model = lab.load(folder, device_map={"model.embed_tokens": "cpu", "model": "cpu", "lm_head": "cpu"})
    expected = lab.logits(model)
    report = merge_linears(model)
    assert [group.members for group in report.groups] == EXPECTED["llama"]
    assert lab.distance(lab.logits(model), expected) < 1e-6


def test_prepare_says_what_it_merged(lab: Any) -> None:
    model = lab.load(lab.packed("qwen2").folder)
    assert str(prepare(model, merge=True)).splitlines()[1:] == [
        "2 times q_proj + k_proj + v_proj as one of 252 x 200",
        "2 times gate_proj + up_proj as one of 2024 x 200",
    ]
