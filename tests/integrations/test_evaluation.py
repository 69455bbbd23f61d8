"""Whole evaluations of tiny models, against the same figures worked out with numpy from transformers' own logits."""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from w3pack.errors import CheckpointError, UnsupportedError, UsageError
from w3pack.integrations import evaluation, harness
from w3pack.integrations.evaluation import decide, evaluate_model
from w3pack.integrations.passages import make_passage
from w3pack.pipeline.texts import Text, default_text

WINDOW, TOKENS = 32, 320
PROSE = default_text(4000)


def give_tokenizer(folder: Path, *, bos: bool = False, merges: int = 20) -> Path:
    """A byte-level tokenizer of 258 tokens and some merges, so that tokens spell one byte or several."""
    alphabet = ["<bos>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    pairs = [("t", "h"), ("e", "r"), ("i", "n"), *((sign, sign) for sign in "abcdefghijklmnopqrstuvw")][:merges]
    vocabulary = {token: number for number, token in enumerate([*alphabet, *(a + b for a, b in pairs)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def copy(folder: Path, to: Path) -> Path:
    to.mkdir(parents=True)
    for path in folder.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    return to


@pytest.fixture(scope="module")
def pair(lab: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A packed llama and its float32 source, with a tokenizer. Read them, never write to them."""
    return _pair(lab, "llama", tmp_path_factory.mktemp("pair"))


def _pair(lab: Any, family: str, root: Path, **options: Any) -> tuple[Path, Path]:
    packed = lab.packed(family, qmap="nf3", **options)
    return give_tokenizer(copy(packed.folder, root / "packed")), give_tokenizer(copy(packed.source, root / "source"))


def run(model: Path, reference: Path | None, *, texts: list[Text] | None = None, **options: Any) -> dict[str, Any]:
    options = {"tokens": TOKENS, "window": WINDOW} | options
    found = evaluate_model(
        str(model), reference=None if reference is None else str(reference), texts=texts or [PROSE], **options
    ).to_dict()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    return found


def probabilities(folder: Path, windows: torch.Tensor) -> np.ndarray:
    """float64 [windows, window, vocabulary]."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        logits = model(windows).logits.to(torch.float64).numpy()
    exponents = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return exponents / exponents.sum(axis=-1, keepdims=True)


def test_figures_equal_numpy(pair: tuple[Path, Path]) -> None:
    packed, source = pair
    found = run(packed, source)["texts"][0]
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    ids = tokenizer(PROSE.text)["input_ids"][:TOKENS]
    windows = torch.tensor(ids).view(-1, WINDOW)
    q, p = (probabilities(folder, windows)[:, :-1].reshape(-1, 300) for folder in (packed, source))
    follow = windows[:, 1:].reshape(-1).numpy()
    at = np.arange(len(follow)), follow
    assert found["windows"] == 10
    assert found["positions"] == len(follow) == 310
    spelled = sum(len(tokenizer.decode(window[1:]).encode()) for window in windows)
    assert found["nbytes"] == spelled
    assert found["model"]["nll"] == pytest.approx(-np.log(q[at]).mean(), rel=1e-5)
    assert found["reference"]["perplexity"] == pytest.approx(np.exp(-np.log(p[at]).mean()), rel=1e-5)
    assert found["model"]["bits_per_byte"] == pytest.approx(-np.log2(q[at]).sum() / spelled, rel=1e-5)
    assert found["log_ratio"] == pytest.approx((np.log(p[at]) - np.log(q[at])).mean(), rel=1e-3)
    assert found["kl"]["mean"] == pytest.approx((p * np.log(p / q)).sum(axis=1).mean(), rel=1e-4)
    assert found["top1_agreement"] == pytest.approx((p.argmax(axis=1) == q.argmax(axis=1)).mean(), abs=1 / 300)
    assert found["rms_change"] == pytest.approx(np.sqrt(((p[at] - q[at]) ** 2).mean()), rel=1e-4)


def test_bos_comes_first_in_every_window_and_every_token_counts(pair: tuple[Path, Path], tmp_path: Path) -> None:
    source = give_tokenizer(copy(pair[1], tmp_path / "source"), bos=True)
    found = run(source, None)
    text = found["texts"][0]
    assert found["tokenizer"]["prefix"] == [0]
    assert (text["windows"], text["positions"]) == (10, 310)  # 310 tokens of the text and a bos for each 31
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    passage = make_passage(PROSE, tokenizer, window=WINDOW, tokens=TOKENS)
    assert passage.windows[:, 0].tolist() == [0] * 10
    body = passage.windows[:, 1:].flatten()
    assert body.tolist() == tokenizer(PROSE.text, add_special_tokens=False)["input_ids"][:310]
    assert text["nbytes"] == len(tokenizer.decode(body).encode())


def test_bytes_of_tokens_sum_to_the_bytes_of_the_text(pair: tuple[Path, Path]) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(pair[1])
    text = "there is \u00e4\u20ac\U0001f600 in the inner \u00fc " * 8
    count = len(tokenizer(text)["input_ids"])
    passage = make_passage(Text("x", text, ""), tokenizer, window=count, tokens=count)
    first = len(tokenizer.decode(passage.windows[0, :1]).encode())
    assert int(passage.nbytes.sum()) + first == len(text.encode())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_file_and_memory_give_the_same_bits(lab: Any, tmp_path: Path, dtype: torch.dtype) -> None:
    packed, source = _pair(lab, "llama", tmp_path, dtype=dtype)
    texts = [PROSE, Text("other", PROSE.text[::-1], "")]
    beside = run(packed, source, texts=texts, together=True)
    stored = run(packed, source, texts=texts, together=False)
    assert (beside.pop("reference_logits"), stored.pop("reference_logits")) == ("in memory", "in a temporary file")
    assert beside == stored
    again = run(packed, source, texts=texts, together=True)
    assert again.pop("reference_logits") == "in memory"
    assert beside == again
    assert beside["model"]["dtype"] == str(dtype)[6:]
    floor = beside["texts"][1]["noise_floor"]["kl"]["mean"]
    assert 0 < floor < 0.1 * beside["texts"][1]["kl"]["mean"]
    assert "bfloat16" in beside["noise_floor"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_on_a_gpu(lab: Any, tmp_path: Path, dtype: torch.dtype) -> None:
    """Memory and file give the same bits there too, and about the figures of the CPU."""
    packed, source = _pair(lab, "llama", tmp_path, dtype=dtype)
    beside = run(packed, source, device="cuda", together=True)
    stored = run(packed, source, device="cuda", together=False)
    assert beside["texts"] == stored["texts"]
    assert beside["model"]["dtype"] == str(dtype)[6:]
    expected = run(packed, source)["texts"][0]
    assert beside["texts"][0]["kl"]["mean"] == pytest.approx(expected["kl"]["mean"], rel=0.05)
    assert 0 < beside["texts"][0]["noise_floor"]["kl"]["mean"] < 0.1 * expected["kl"]["mean"]


def test_a_model_against_itself(pair: tuple[Path, Path]) -> None:
    for folder in pair:
        found = run(folder, folder)["texts"][0]
        assert found["kl"]["largest"] == found["log_ratio"] == found["rms_change"] == 0
        assert found["top1_agreement"] == found["top10_overlap"] == 1


def test_what_is_recorded(pair: tuple[Path, Path]) -> None:
    packed, source = pair
    found = run(packed, source)
    assert found["model"]["kind"] == "w3pack"
    assert len(found["model"]["manifest_sha256"]) == 64
    assert found["reference"]["files"] == {"model.safetensors": (source / "model.safetensors").stat().st_size}
    assert {"w3pack", "python", "torch", "transformers"} <= set(found["versions"])
    assert len(found["tokenizer"]["sha256"]) == len(found["texts"][0]["ids_sha256"]) == 64
    assert found["texts"][0]["sha256"] == PROSE.sha256
    assert str(packed.parent) not in json.dumps(found)


def test_only_the_model(pair: tuple[Path, Path]) -> None:
    found = run(pair[0], None)
    assert found["reference"] is found["noise_floor"] is found["texts"][0]["kl"] is None
    assert found["texts"][0]["model"] == run(pair[0], pair[1])["texts"][0]["model"]


@pytest.mark.parametrize("family", ["llama_tied", "qwen3_moe"])
def test_tied_heads_and_experts(lab: Any, tmp_path: Path, family: str) -> None:
    packed, source = _pair(lab, family, tmp_path)
    found = run(packed, source)["texts"][0]
    assert 0 < found["kl"]["mean"] < 5
    assert found["non_finite_model"] == found["non_finite_reference"] == 0


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_fp8_is_read_as_floats(lab: Any, tmp_path: Path, family: str) -> None:
    original = give_tokenizer(copy(lab.source(family), tmp_path / "original"))
    source = copy(original, tmp_path / "fp8")
    block, config = (128, 128), json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": list(block)}
    (source / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))

    def shrink(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            rows, columns = tensors[name].shape
            tensors[f"{name}_scale_inv"] = torch.full((-(-rows // 128), -(-columns // 128)), 2.0**-9)
            tensors[name] = (tensors[name] * 2.0**9).to(torch.float8_e4m3fn)

    lab.edit(source, shrink)
    found = run(source, original)
    assert (found["model"]["kind"], found["model"]["dtype"]) == ("fp8", "float32")
    assert 0 < found["texts"][0]["kl"]["mean"] < 0.05


def test_not_finite_is_counted(pair: tuple[Path, Path], lab: Any, tmp_path: Path) -> None:
    broken = copy(pair[1], tmp_path / "broken")
    tokenizer = transformers.AutoTokenizer.from_pretrained(broken)
    ids = tokenizer(PROSE.text)["input_ids"][:TOKENS]
    rare = min(set(ids), key=ids.count)
    lab.edit(broken, lambda tensors: tensors["model.embed_tokens.weight"][rare].fill_(float("nan")))
    found = run(broken, pair[1])["texts"][0]
    assert 0 < found["non_finite_model"] < found["windows"] * WINDOW / 2
    assert found["non_finite_reference"] == 0
    assert found["positions"] == 310 - found["non_finite_model"]
    assert found["kl"]["largest"] < 1e-6  # elsewhere it is the same model


def test_another_tokenizer_is_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    for number, options in enumerate(({"merges": 2}, {"bos": True})):
        other = give_tokenizer(copy(pair[1], tmp_path / str(number)), **options)
        with pytest.raises(UsageError, match=r"same tokens of .* at position \d"):
            run(pair[0], other)


def test_another_vocabulary_is_refused(pair: tuple[Path, Path], tmp_path: Path, lab: Any) -> None:
    other = copy(pair[1], tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"vocab_size": 290}))

    def cut(tensors: dict[str, torch.Tensor]) -> None:
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[name] = tensors[name][:290]

    lab.edit(other, cut)
    with pytest.raises(UsageError, match="vocabulary of 290 entries, got 300"):
        run(pair[0], other)


def test_token_beyond_the_embedding(pair: tuple[Path, Path], tmp_path: Path, lab: Any) -> None:
    small = copy(pair[1], tmp_path / "small")
    config = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps(config | {"vocab_size": 50}))

    def cut(tensors: dict[str, torch.Tensor]) -> None:
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[name] = tensors[name][:50]

    lab.edit(small, cut)
    with pytest.raises(CheckpointError, match="token ids below 50"):
        run(small, None)


def test_missing_tensor_is_no_random_one(pair: tuple[Path, Path], tmp_path: Path, lab: Any) -> None:
    broken = lab.edit(copy(pair[1], tmp_path / "x"), lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(CheckpointError, match=r"1 have none, such as model\.layers\.1\.mlp\.up_proj\.weight"):
        run(pair[0], broken)


def test_wrong_shape(pair: tuple[Path, Path], tmp_path: Path) -> None:
    broken = copy(pair[1], tmp_path / "x")
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"intermediate_size": 900}))
    with pytest.raises(CheckpointError, match=r"fit config\.json"):
        run(pair[0], broken)


def test_without_a_tokenizer(pair: tuple[Path, Path], tmp_path: Path) -> None:
    bare = copy(pair[0], tmp_path / "bare")
    for path in bare.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(CheckpointError, match="tokenizer"):
        run(bare, pair[1])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"window": 65}, "at most 64 tokens"),
        ({"tokens": 20}, "--tokens of at least one window"),
        ({"texts": [Text("short", "too short", "")]}, "at least 32 tokens in short"),
        ({"window": 1}, "at least 2 tokens"),
    ],
)
def test_usage(pair: tuple[Path, Path], options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        run(*pair, **options)


def test_no_text(pair: tuple[Path, Path]) -> None:
    with pytest.raises(UsageError, match="at least one text"):
        evaluate_model(str(pair[0]), texts=[])


def test_the_temporary_file_goes_when_the_run_breaks_off(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    calls: list[str] = []

    def progress(total: int) -> Any:
        calls.append(str(total))

        def advance(name: str, amount: int) -> None:
            calls.append(name)
            if name.startswith("model"):
                raise KeyboardInterrupt

        return advance

    with pytest.raises(KeyboardInterrupt):
        evaluate_model(
            str(pair[0]), reference=str(pair[1]), texts=[PROSE], tokens=TOKENS, window=WINDOW, together=False,
            progress=progress,
        )  # fmt: skip
    assert calls[0] == str(10 + 10 + 10)
    assert list(tmp_path.iterdir()) == []


def test_course_follows_from_memory() -> None:
    def course(free: int, device: str = "cpu") -> Any:
        return decide(
            model_bytes=8 << 30, reference_bytes=16 << 30, window=512, vocabulary=150_000, free=free, device=device
        )

    assert course(64 << 30).together
    assert not course(32 << 30).together  # the reference fits, but not twice
    assert not course(0).together  # a system that does not say
    assert [course(free).windows_at_once for free in (0, 64 << 30)] == [1, 1]
    assert course(64 << 30, "cuda").windows_at_once == 3
    assert course(1 << 30, "cuda").windows_at_once == 1
    small = decide(model_bytes=1, reference_bytes=1, window=32, vocabulary=300, free=1 << 33, device="cpu")
    assert small.windows_at_once == 16


def test_the_log_says_which_way_it_went(
    pair: tuple[Path, Path], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, logger="w3pack")
    run(*pair)
    assert "side by side" in caplog.text
    monkeypatch.setattr(evaluation, "_free_bytes", lambda device: 0)
    found = run(*pair)
    assert "one after the other" in caplog.text
    assert found["reference_logits"] == "in a temporary file"
    assert found["texts"][0]["noise_floor"] is not None
    monkeypatch.setattr(evaluation, "_free_bytes", lambda device: 100)
    monkeypatch.setattr(evaluation, "_floor_windows", lambda passage: 1)
    assert run(*pair)["noise_floor"].startswith("KL")  # float32 to bfloat16 needs nothing more


def test_no_room_for_the_noise_floor(lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed, source = _pair(lab, "llama", tmp_path, dtype=torch.bfloat16)
    monkeypatch.setattr(evaluation, "_free_bytes", lambda device: 100)
    found = run(packed, source)
    assert found["noise_floor"].startswith("not measured")
    assert found["texts"][0]["noise_floor"] is None
    assert found["texts"][0]["kl"] is not None


def test_tasks_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(UnsupportedError, match="pip install"):
        harness.run_tasks({"model": "nowhere"}, ["arc_easy"])


def test_tasks_are_handed_to_the_package(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    package, inner, tasks, wrapper = (
        ModuleType(name) for name in ("lm_eval", "lm_eval.models", "lm_eval.tasks", "lm_eval.models.huggingface")
    )
    seen: list[dict[str, Any]] = []

    def simple_evaluate(**options: Any) -> dict[str, Any]:
        seen.append(options)
        return {"results": {"toy": {"acc,none": 0.5, "acc_stderr,none": 0.1}}, "versions": {"toy": 1}, "config": 1}

    class TaskManager:
        def match_tasks(self, names: list[str]) -> list[str]:
            return [name for name in names if name == "toy"]

    package.simple_evaluate = simple_evaluate  # type: ignore[attr-defined]
    package.__version__ = "0.4.13"  # type: ignore[attr-defined]
    tasks.TaskManager = TaskManager  # type: ignore[attr-defined]
    wrapper.HFLM = lambda **options: options  # type: ignore[attr-defined]
    for module in (package, inner, tasks, wrapper):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    found = harness.run_tasks({"model": str(pair[0]), "reference": str(pair[1])}, ["toy"], seed=3)
    assert found["lm_eval"] == "0.4.13"
    assert found["model"] == {
        "results": {"toy": {"acc,none": 0.5, "acc_stderr,none": 0.1}},
        "versions": {"toy": 1},
        "n-shot": {},
    }
    assert [one["random_seed"] for one in seen] == [3, 3]
    assert all(isinstance(one["model"]["pretrained"], torch.nn.Module) for one in seen)
    with pytest.raises(UsageError, match="no-such"):
        harness.run_tasks({"model": str(pair[0])}, ["toy", "no-such"])
