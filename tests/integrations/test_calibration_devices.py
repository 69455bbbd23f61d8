"""Calibration keeps its tensors together: on a pretended GPU, no operation meets tensors of two devices; and on a real one it runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from w3pack.checkpoint.safetensors_source import SafetensorsSource
from w3pack.integrations.calibration import prepare_calibration
from w3pack.integrations.loadable import loadable_for
from w3pack.pipeline.plan import QuantizeOptions
from w3pack.pipeline.quantize_model import prepare_job, run
from w3pack.pipeline.sensitivity import measure
from w3pack.quantize import replay

GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")
#: Take tensors of two devices in torch too; of indices, those on the CPU.
MOVES = {"copy_", "_to_copy", "index", "index_put_", "_index_put_impl_"}


class Pretended:
    """Which storages are said to be on the GPU."""

    def __init__(self) -> None:
        self.known: dict[int, StorageWeakRef] = {}  # a weak reference keeps the number from being used again

    def has(self, tensor: torch.Tensor) -> bool:
        return tensor.device == CPU and tensor.untyped_storage()._cdata in self.known

    def mark(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device == CPU:
            storage = tensor.untyped_storage()
            self.known[storage._cdata] = StorageWeakRef(storage)
        return tensor

    def moved(self, tensor: torch.Tensor, target: torch.device, *, copy: bool) -> torch.Tensor:
        """What `to` gives, the dtype already being right."""
        if target.type != "meta" and (copy or self.has(tensor) != (target.type == "cuda")):
            tensor = tensor.detach().clone() if not tensor.requires_grad else tensor.clone()
            self.known.pop(tensor.untyped_storage()._cdata, None)
        return self.mark(tensor) if target.type == "cuda" else tensor


class Together(TorchDispatchMode):
    """Results of marked tensors are marked; an operation on both kinds is a fault."""

    def __init__(self, pretended: Pretended) -> None:
        super().__init__()
        self.pretended = pretended

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():  # here a device is what it is
            return self._checked(func, args, kwargs or {})

    def _checked(self, func: Any, args: Any, kwargs: Any) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        marked = [self.pretended.has(tensor) for tensor in tensors]
        name = func.overloadpacket.__name__
        first = any(marked[:1]) or not any(marked)
        apart = any(
            not mark and tensor.dim() for tensor, mark in zip(tensors, marked, strict=True) if tensor.device == CPU
        )
        if any(marked) and apart and not (name in MOVES and (first or name in ("copy_", "_to_copy"))):
            raise AssertionError(f"{func} of tensors on two devices: {marked} {[tuple(t.shape) for t in tensors]}")
        found = func(*args, **kwargs)
        if any(marked) and name not in ("copy_", "index_put_", "_index_put_impl_"):
            for tensor in tree_leaves(found):
                if isinstance(tensor, torch.Tensor):
                    self.pretended.mark(tensor)
        return found


class Gpu(TorchFunctionMode):
    """Tensors that are made on "cuda" or moved there stay where they are and are marked."""

    def __init__(self) -> None:
        super().__init__()
        self.pretended = Pretended()

    def device_of(self, value: Any) -> torch.device | None:
        if isinstance(value, torch.Tensor):
            return GPU if self.pretended.has(value) else value.device
        return torch.device(value) if isinstance(value, torch.device | str) else None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func == torch.Tensor.device.__get__:  # type: ignore[attr-defined]
            return self.device_of(args[0])
        if func is torch.Tensor.numpy:
            assert not self.pretended.has(args[0]), "numpy() of a tensor on the GPU"
        if func is torch.Tensor.cpu:
            return self.pretended.moved(args[0], CPU, copy=False)
        if func is torch.Tensor.to:
            targets = [
                device for value in (*args[1:], *kwargs.values()) if (device := self.device_of(value)) is not None
            ]
            dtypes = [value for value in (*args[1:], *kwargs.values()) if isinstance(value, torch.dtype)]
            dtypes += [value.dtype for value in args[1:] if isinstance(value, torch.Tensor)]
            if targets and targets[0].type != "meta":
                made = args[0].to(dtypes[0]) if dtypes else args[0]
                return self.pretended.moved(made, targets[0], copy=bool(kwargs.get("copy")))
        target = self.device_of(kwargs["device"]) if kwargs.get("device") is not None else None
        if target is None or target.type == "meta":
            return func(*args, **kwargs)
        return self.pretended.moved(func(*args, **{**kwargs, "device": CPU}), target, copy=False)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], AbstractContextManager[None]]:
    """A GPU of so many free bytes, as far as w3pack and transformers see."""

    @contextmanager
    def entered(free: int) -> Iterator[None]:
        mode = Gpu()
        back = torch.autograd._engine_run_backward

        def backward(*args: Any, **kwargs: Any) -> Any:
            with mode:  # which torch leaves while it works on a call, and a backward pass is one
                return back(*args, **kwargs)

        with monkeypatch.context() as patch, Together(mode.pretended), mode:
            patch.setattr(torch.autograd, "_engine_run_backward", backward)
            patch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 1 << 35))
            patch.setattr(replay.Replayed, "__call__", lambda self, work: work())
            yield

    return entered


def test_the_pretended_gpu_finds_faults(gpu: Callable[[int], Any]) -> None:
    """Else the tests below prove nothing."""
    with gpu(0):
        there, here = torch.ones(3, device="cuda"), torch.ones(3)
        assert (there * 2).device == GPU
        assert there.cpu().device == CPU
        assert (here.to("cuda") + there).view(-1)[:2].device == GPU
        assert torch.empty_like(there).device == GPU
        assert here.copy_(there).device == CPU
        assert there[torch.tensor([0])].device == GPU
        for fault in (lambda: there + here, lambda: here[there.long()], lambda: torch.cat([there, here])):
            with pytest.raises(AssertionError, match="two devices"):
                fault()
        with pytest.raises(AssertionError, match="numpy"):
            there.numpy()


class Tokens:
    """A tokenizer as far as calibration asks: a token for each character."""

    is_fast = False
    chat_template = None

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [2 + ord(sign) % 250 for sign in text]}


def calibrate_on(device: str, source: Path, output: Path, *, effort: Any, **options: Any) -> Any:
    """Quantise the last block as the command line does; the manifest."""
    opened = SafetensorsSource(source)
    chosen = QuantizeOptions(group_size=64, only=("re:.*layers\\.1\\..*",), min_coverage=0, **options)
    job = prepare_job(opened, chosen, loadable=loadable_for(opened))
    calibration = prepare_calibration(
        job, effort=effort, samples=6, length=16, guided=effort == "fast", tokenizer=Tokens(), tuning_share=1
    )
    if effort == "diagonal" and calibration is not None:
        measure(job, [64, 128], calibration.gradients, workers=1, device=device)
    run(job, output, device=device, workers=1, calibration=calibration)
    return json.loads((output / "w3pack.json").read_text())


def same_errors(found: Any, expected: Any) -> None:
    """What is left of a weight does not depend on the device, but for ties and the dtype of the activations."""
    assert found["modules"].keys() == expected["modules"].keys()
    for module, entry in expected["modules"].items():
        assert found["modules"][module]["relative_error"] == pytest.approx(entry["relative_error"], rel=0.1)


@pytest.mark.parametrize(
    ("family", "effort", "free", "options"),
    [
        ("llama_tied", "default", 1 << 34, {}),
        ("qwen3", "fast", 1 << 34, {"qmap_per": "row"}),  # guided
        ("qwen3", "diagonal", 1 << 34, {}),  # and sensitivities
        ("qwen3", "best", 1 << 34, {}),
        ("qwen3", "best", 1 << 16, {}),  # block by block, hidden states on the CPU
        ("mixtral", "default", 1 << 34, {"qmap": "nf3", "qmap_dtype": "float16"}),
    ],
)
def test_nothing_is_left_on_the_other_device(
    lab: Any,
    gpu: Callable[[int], Any],
    tmp_path: Path,
    family: str,
    effort: str,
    free: int,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("W3PACK_CACHE_DIR", str(tmp_path / "cache"))
    with gpu(free):
        found = calibrate_on("cuda", lab.source(family), tmp_path / "gpu", effort=effort, **options)
    same_errors(found, calibrate_on("cpu", lab.source(family), tmp_path / "cpu", effort=effort, **options))
    if effort == "best":
        assert found["calibration"]["tuning"]["kind"] == ("end to end" if free > 1 << 20 else "block by block")


@pytest.mark.gpu
@pytest.mark.parametrize("effort", ["diagonal", "fast", "default", "best"])
def test_on_a_gpu(lab: Any, tmp_path: Path, effort: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("W3PACK_CACHE_DIR", str(tmp_path / "cache"))
    found = calibrate_on("cuda", lab.source("qwen3"), tmp_path / "gpu", effort=effort)
    same_errors(found, calibrate_on("cpu", lab.source("qwen3"), tmp_path / "cpu", effort=effort))
