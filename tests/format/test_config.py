"""`quantization_config` of config.json: what it must say, its inverse, and damaged ones."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from w3pack.errors import CheckpointError
from w3pack.format.config import W3Config
from w3pack.format.linear import LinearSpec

PLAIN = LinearSpec(rows=60, columns=200, group_size=64, layout="dense", maps=1, qmap_dtype="int8", bias=False)
ODD = LinearSpec(rows=128, columns=256, group_size=128, layout="nibble", maps=128, qmap_dtype="float16", bias=True)


def mixed() -> W3Config:
    modules = {f"model.layers.{i}.mlp.down_proj": PLAIN for i in range(3)}
    modules["model.layers.0.self_attn.q_proj"] = ODD
    return W3Config(modules=modules, guard="model.layers.0.mlp.down_proj", producer="w3pack", version="1.2.3")


def json_form() -> dict[str, Any]:
    form: dict[str, Any] = json.loads(json.dumps(mixed().to_dict()))
    return form


def test_round_trip_through_json() -> None:
    restored = W3Config.from_dict(json_form())
    assert restored == mixed()
    assert list(restored.modules) == list(mixed().modules)
    assert restored.to_dict() == mixed().to_dict()


def test_says_what_the_document_asks_for() -> None:
    form = json_form()
    assert form["quant_method"] == "w3pack"
    assert form["format_version"] == 1
    assert form["bits"] == 3
    assert (form["layout"], form["group_size"]) == ("dense", 64)
    assert (form["producer"], form["version"]) == ("w3pack", "1.2.3")
    assert set(form["modules"]) == set(mixed().modules)


def test_each_modules_facts_can_be_read_from_the_default_and_its_exceptions() -> None:
    form = json_form()
    for name, spec in mixed().modules.items():
        facts = {**form, **form["modules"][name]}
        for key, value in spec.to_dict().items():
            assert facts[key] == value, (name, key)


def test_logical_sizes_are_stored_for_every_module() -> None:
    for entry in json_form()["modules"].values():
        assert {"rows", "columns"} <= set(entry)


def test_order_of_modules_does_not_change_their_specs() -> None:
    config = mixed()
    turned = W3Config(modules=dict(reversed(config.modules.items())), guard=config.guard)
    restored = W3Config.from_dict(turned.to_dict())
    assert dict(restored.modules) == dict(config.modules)


def test_exceptions_win_over_defaults() -> None:
    form = json_form()
    form["modules"]["model.layers.1.mlp.down_proj"]["group_size"] = 128
    specs = W3Config.from_dict(form).modules
    assert specs["model.layers.1.mlp.down_proj"].group_size == 128
    assert specs["model.layers.2.mlp.down_proj"].group_size == 64


def test_case_07_a_config_without_group_size_is_refused() -> None:
    form = json_form()
    del form["group_size"]
    with pytest.raises(CheckpointError, match=r"group_size.*down_proj"):
        W3Config.from_dict(form)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"quant_method": "gptq"}, "gptq"),
        ({"quant_method": None}, "quant_method"),
        ({"format_version": 2}, "format_version"),
        ({"format_version": None}, "format_version"),
        ({"format_version": "1"}, "format_version"),
        ({"bits": 4}, "bits"),
        ({"bits": None}, "bits"),
        ({"modules": {}}, "modules"),
        ({"modules": None}, "modules"),
        ({"modules": ["a"]}, "modules"),
        ({"modules": {"a": 1}}, "module a"),
        ({"guard": None}, "guard"),
        ({"guard": 1}, "guard"),
        ({"guard": "lm_head"}, "guard.*lm_head"),
        ({"layout": "sparse"}, "sparse"),
        ({"maps": True}, "maps"),
    ],
)
def test_damaged_configs_are_refused_with_a_sentence(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(CheckpointError, match=word):
        W3Config.from_dict({**json_form(), **changes})


@pytest.mark.parametrize("key", ["quant_method", "format_version", "bits", "modules", "guard"])
def test_missing_fields_are_refused(key: str) -> None:
    form = json_form()
    del form[key]
    with pytest.raises(CheckpointError):
        W3Config.from_dict(form)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(changes=st.dictionaries(st.sampled_from(sorted(mixed().to_dict())), JSON, min_size=1, max_size=3))
@settings(derandomize=True, database=None, deadline=None, max_examples=80)
def test_any_json_gives_a_config_or_a_checkpoint_error(changes: dict[str, Any]) -> None:
    try:
        config = W3Config.from_dict({**json_form(), **changes})
    except CheckpointError:
        return
    assert W3Config.from_dict(config.to_dict()) == config


@given(form=st.dictionaries(st.text(max_size=5), JSON, max_size=4))
@settings(derandomize=True, database=None, deadline=None, max_examples=50)
def test_a_config_of_something_else_is_a_checkpoint_error(form: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="quant_method"):
        W3Config.from_dict(form)
