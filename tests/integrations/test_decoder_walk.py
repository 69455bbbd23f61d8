"""Walking a decoder block by block gives what transformers' own forward gives, for every kind of block."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from w3pack.checkpoint.safetensors_source import SafetensorsSource
from w3pack.errors import UnsupportedError
from w3pack.format import names
from w3pack.integrations.decoder_walk import DecoderWalk
from w3pack.integrations.hf_names import name_resolver
from w3pack.integrations.loadable import loadable_for
from w3pack.pipeline.decoder import Diagonal
from w3pack.pipeline.plan import QuantizeOptions
from w3pack.pipeline.quantize_model import Job, prepare_job
from w3pack.quantize.moments import SecondMoment
from w3pack.runtime.experts import W3Experts

FAMILIES = ["llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "mistral", "phi3", "qwen3_moe", "mixtral"]


def job_of(lab: Any, family: str, **options: Any) -> Job:
    source = SafetensorsSource(lab.source(family))
    return prepare_job(source, QuantizeOptions(**options), loadable=loadable_for(source))


def stock(lab: Any, family: str) -> Any:
    return lab.load(lab.source(family))


def walk_of(job: Job, windows: torch.Tensor, folder: Path, **options: Any) -> DecoderWalk:
    return DecoderWalk(job.source, job.plan, windows, scratch=folder, **options)


def layers_of(model: Any) -> Any:
    return model.get_decoder().layers


@torch.no_grad()
def layer_outputs(model: Any, windows: torch.Tensor) -> list[torch.Tensor]:
    """Output of every block of a whole model."""
    found: list[torch.Tensor] = []
    handles = [
        layer.register_forward_hook(lambda _, __, out: found.append(out[0] if isinstance(out, tuple) else out))
        for layer in layers_of(model)
    ]
    model(input_ids=windows, use_cache=False)
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_one_by_one_equal_the_whole_model(lab: Any, tmp_path: Path, family: str) -> None:
    windows = lab.tokens(batch=3, length=11)  # longer than the sliding windows of 4
    model = stock(lab, family)
    expected = layer_outputs(model, windows)
    walk = walk_of(job_of(lab, family), windows, tmp_path)
    with torch.no_grad():
        embedded = walk.states.clone()
        assert torch.equal(embedded, _inputs_of_first(model, windows))
    for number, wanted in enumerate(expected):
        with walk.block(number) as block:
            block.stages()
            block.advance()
        assert lab.distance(walk.states, wanted) < 1e-5
    assert all(parameter.is_meta for parameter in walk._loaded.model.parameters())  # one block at a time


@torch.no_grad()
def _inputs_of_first(model: Any, windows: torch.Tensor) -> torch.Tensor:
    found: list[torch.Tensor] = []
    handle = layers_of(model)[0].register_forward_pre_hook(lambda _, args: found.append(args[0]))
    model(input_ids=windows, use_cache=False)
    handle.remove()
    return found[0]


@torch.no_grad()
def inputs_by_hooks(lab: Any, job: Job, windows: torch.Tensor, family: str) -> dict[str, torch.Tensor]:
    """Module -> all rows that enter it in transformers' own model, float64 [tokens, columns]."""
    model = stock(lab, family)
    resolve = name_resolver(model)
    seen: dict[str, list[torch.Tensor]] = {}
    handles = []
    for module in job.plan.modules:
        expert = names.expert_of(module)
        if expert is None:
            place = model.get_submodule(resolve(module))
            assert isinstance(place, nn.Linear)
            handles.append(
                place.register_forward_pre_hook(
                    lambda _, args, module=module: seen.setdefault(module, []).append(args[0].flatten(0, -2))
                )
            )
    stacks = {expert[0] for module in job.plan.modules if (expert := names.expert_of(module)) is not None}
    for stack in stacks:
        place = model.get_submodule(resolve(stack))

        def hook(place: Any, args: Any, stack: str = stack) -> None:
            hidden, chosen = args[0], args[1]
            for number in range(len(place.down_proj)):
                tokens = torch.where(chosen == number)[0]
                rows = hidden[tokens]
                gate, up = (rows @ place.gate_up_proj[number].t()).chunk(2, dim=-1)
                inner = place.act_fn(gate) * up
                fed = {"gate_proj": rows, "up_proj": rows, "down_proj": inner, "w1": rows, "w3": rows, "w2": inner}
                for projection, value in fed.items():
                    seen.setdefault(f"{stack}.{number}.{projection}", []).append(value)

        handles.append(place.register_forward_pre_hook(hook))
    model(input_ids=windows, use_cache=False)
    for handle in handles:
        handle.remove()
    return {module: torch.cat(seen[module]).double() for module in job.plan.modules}


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "phi3", "qwen3_moe", "mixtral"])
def test_moments_equal_those_of_hooks_on_the_whole_model(
    lab: Any, tmp_path: Path, family: str, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("w3pack.integrations.decoder_walk._BATCH_TOKENS", {"cpu": 22})
    windows = lab.tokens(batch=6, length=11)
    job = job_of(lab, family)
    expected = inputs_by_hooks(lab, job, windows, family)
    walk = walk_of(job, windows, tmp_path, workers=workers)
    met: set[str] = set()
    for number in range(len(walk.blocks)):
        with walk.block(number) as block:
            for stage in block.stages():
                moments, pools = block.moments(stage, SecondMoment)
                squares, _ = block.moments(stage, Diagonal)
                for one in stage:
                    rows = expected[one.modules[0]]
                    assert moments[one].tokens == squares[one].tokens == len(rows)
                    assert all(torch.equal(expected[other], rows) for other in one.modules)
                    if len(rows):
                        mean = rows.t() @ rows / len(rows)
                        assert lab.distance(moments[one].matrix(), mean) < 1e-5
                        assert lab.distance(squares[one].matrix(), mean.diagonal()) < 1e-5
                    met.update(one.modules)
                for pool, moment in pools.items():
                    members = [expected[one.modules[0]] for one in stage if one.pool == pool]
                    rows = torch.cat(members)
                    assert moment.tokens == len(rows)
                    assert lab.distance(moment.matrix(), rows.t() @ rows / len(rows)) < 1e-5
            block.advance()
    assert met == set(job.plan.modules)


def test_stages_follow_the_computation(lab: Any, tmp_path: Path) -> None:
    walk = walk_of(job_of(lab, "llama"), lab.tokens(), tmp_path)
    with walk.block(1) as block:
        leaves = [[m.rpartition(".")[2] for one in stage for m in one.modules] for stage in block.stages()]
    assert leaves == [["q_proj", "k_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj"], ["down_proj"]]


def test_experts_of_a_layer_form_two_stages(lab: Any, tmp_path: Path) -> None:
    walk = walk_of(job_of(lab, "qwen3_moe"), lab.tokens(), tmp_path)
    with walk.block(0) as block:
        experts = [stage for stage in block.stages() if stage[0].pool is not None]
        assert isinstance(walk._loaded.model.get_submodule("model.layers.0.mlp.experts"), W3Experts)
    assert [len(stage) for stage in experts] == [4, 4]
    assert {len(one.modules) for one in experts[0]} == {2}
    assert len({one.pool for stage in experts for one in stage}) == 2


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_neither_disk_nor_threads_nor_batches_change_the_states(
    lab: Any, tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows = lab.tokens(batch=6, length=11)
    monkeypatch.setattr("w3pack.integrations.decoder_walk._BATCH_TOKENS", {"cpu": 22})
    found = []
    for in_memory, workers in ((True, 1), (False, 1), (False, 3)):
        walk = walk_of(job_of(lab, family), windows, tmp_path, in_memory=in_memory, workers=workers)
        assert walk.on_disk is not in_memory
        for number in range(len(walk.blocks)):
            with walk.block(number) as block:
                block.advance()
        found.append(walk.states.clone())
        walk.close()
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert not list(tmp_path.iterdir())


def test_fp8_blocks_are_dequantised(lab: Any, tmp_path: Path) -> None:
    plain, fp8 = tmp_path / "plain", tmp_path / "fp8"
    tensors = lab.read(lab.source("llama"))
    packed: dict[str, torch.Tensor] = {}
    for name, tensor in list(tensors.items()):
        if "_proj.weight" not in name:
            packed[name] = tensor
            continue
        grid = [-(-side // 128) for side in tensor.shape]
        scales = torch.rand(grid, generator=torch.Generator().manual_seed(1)) * 0.01 + 0.001
        spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: tensor.shape[0], : tensor.shape[1]]
        packed[name] = (tensor / spread).to(torch.float8_e4m3fn)
        packed[f"{name}_scale_inv"] = scales
        tensors[name] = packed[name].float() * spread
    config = json.loads((lab.source("llama") / "config.json").read_text())
    states = []
    for folder, content, more in (
        (plain, tensors, {}),
        (fp8, packed, {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}),
    ):
        folder.mkdir()
        save_file(content, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({**config, **more}))
        source = SafetensorsSource(folder)
        walk = walk_of(prepare_job(source, QuantizeOptions(), loadable=loadable_for(source)), lab.tokens(), tmp_path)
        for number in range(len(walk.blocks)):
            with walk.block(number) as block:
                block.advance()
        states.append(walk.states)
    assert torch.equal(*states)


def test_models_that_cannot_be_walked_are_refused(lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of(lab, "llama")
    forward = transformers.LlamaModel.forward

    def one_only(self: Any, **kwargs: Any) -> Any:
        return BaseModelOutputWithPast(last_hidden_state=self.layers[0](self.embed_tokens(kwargs["input_ids"])))

    def between(self: Any, **kwargs: Any) -> Any:
        hidden = self.embed_tokens(kwargs["input_ids"])
        for layer in self.layers:
            hidden = layer(hidden) + 1
        return hidden

    def telling(self: Any, **kwargs: Any) -> Any:
        hidden = self.embed_tokens(kwargs["input_ids"])
        for layer in self.layers:
            hidden = layer(hidden, kwargs["input_ids"])
        return hidden

    for other, message in (
        (one_only, "to call its 2 blocks one after the other, got 1 calls"),
        (between, "got something in between"),
        (telling, "that depend on the text by their input alone"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(transformers.LlamaModel, "forward", other)
            with pytest.raises(UnsupportedError, match=message):
                walk_of(job, lab.tokens(), tmp_path)
    assert transformers.LlamaModel.forward is forward


def test_blocks_with_nothing_to_quantise_are_run_all_the_same(lab: Any, tmp_path: Path) -> None:
    windows = lab.tokens(batch=3, length=11)
    expected = layer_outputs(stock(lab, "llama"), windows)
    walk = walk_of(job_of(lab, "llama", only=("re:.*layers.1.*",)), windows, tmp_path)
    assert len(walk.blocks) == 1
    with walk.block(0) as block:
        block.advance()
    assert lab.distance(walk.states, expected[1]) < 1e-5


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "phi3", "qwen3_moe"])
def test_kept_inputs_change_nothing(
    lab: Any, tmp_path: Path, family: str, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("w3pack.integrations.decoder_walk._BATCH_TOKENS", {"cpu": 22})
    windows = lab.tokens(batch=6, length=11)
    found: list[list[torch.Tensor]] = []
    kept: list[int] = []
    for memory in (0, 1 << 30):
        monkeypatch.setattr("w3pack.integrations.decoder_walk.available_bytes", lambda memory=memory: memory)
        walk = walk_of(job_of(lab, family), windows, tmp_path, in_memory=True, workers=workers)
        seen, most = [], 0
        for number in range(len(walk.blocks)):
            with walk.block(number) as block:
                for stage in block.stages():
                    moments, pools = block.moments(stage, SecondMoment)
                    seen += [moment.matrix() for moment in (*moments.values(), *pools.values()) if moment.tokens]
                    for one in stage:
                        for module in one.modules:
                            block.set_weight(module, walk.weight(module) * 1.25)
                    most = max(most, sum(len(tail.inputs) for tail in block._tails.values()))  # type: ignore[attr-defined]
                block.advance()
            seen.append(walk.states.clone())
        found.append(seen)
        kept.append(most)
    assert kept == [0, 6]  # attention and a dense MLP, three batches each
    assert len(found[0]) == len(found[1])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_kept_inputs_are_forgotten_when_a_weight_before_them_changes(lab: Any, tmp_path: Path) -> None:
    windows = lab.tokens(batch=3, length=11)
    states = []
    for looked in (False, True):
        walk = walk_of(job_of(lab, "llama"), windows, tmp_path)
        with walk.block(0) as block:
            stages = block.stages()
            if looked:
                for stage in stages:
                    block.moments(stage, SecondMoment)
            (query, *_), down = stages[0][0].modules, stages[3][0].modules[0]
            block.set_weight(down, walk.weight(down) * 2)
            assert [len(tail.inputs) for tail in block._tails.values()] == [looked, looked]  # type: ignore[attr-defined]
            block.set_weight(query, walk.weight(query) * 2)
            assert not any(tail.inputs for tail in block._tails.values())  # type: ignore[attr-defined]
            block.advance()
        states.append(walk.states.clone())
    assert torch.equal(*states)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_moments_of_all_inputs_and_the_outputs_in_one_pass(lab: Any, tmp_path: Path, family: str) -> None:
    windows = lab.tokens(batch=3, length=11)
    walks = [walk_of(job_of(lab, family), windows, tmp_path) for _ in range(2)]
    for number in range(len(walks[0].blocks)):
        with walks[0].block(number) as block, walks[1].block(number) as other:
            expected = [block.moments(stage, Diagonal) for stage in block.stages()]
            block.advance()
            everything = tuple(one for stage in other.stages() for one in stage)
            moments, pools = other.moments(everything, Diagonal, advance=True)
            for wanted, wanted_pools in expected:
                assert all(torch.equal(moments[one].matrix(), moment.matrix()) for one, moment in wanted.items())
                assert all(torch.equal(pools[pool].matrix(), moment.matrix()) for pool, moment in wanted_pools.items())
            for module in walks[1].blocks[number]:
                other.set_weight(module, walks[1].weight(module) * 1.5)
            error = other.error()  # of the batch as it came in, though the states have gone on
            assert error is not None
            assert 0.1 < error < 10
        assert torch.equal(walks[0].states, walks[1].states)
