"""Choices of FP8 arms on disk: found again by the next process, replaced where something changed, and never in the way."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from w3pack.ops import gateup_arms, gateup_choices, gateup_cuda, gateup_probe, versions
from w3pack.ops.configs import DEVICES
from w3pack.ops.gateup_choices import ArmChoice, Question
from w3pack.ops.gateup_launch import Matrix
from w3pack.quantize.fp8_blocks import quantize_fp8_blocks

MADE_WITH = {"cublaslt": "130000", "driver": "580.1", "kernels": "ab", "torch": "2.11", "w3pack": "0"}
QUESTION = Question(256, 128, 8, "float16", ("kernel", "fused", "separate", "dequantize"), "0" * 64)
CHOICE = ArmChoice(
    256,
    128,
    8,
    "float16",
    "fused",
    (("kernel", 50.25), ("fused", 30.0), ("dequantize", 900.0)),
    (("separate", "it does\tnot run"),),
    equal=True,
)


class Machine:
    """What a process finds: a device, versions, and how long arms take."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
        self.folder = root / "cache" / "gateup"
        self.device, self.made_with = "NVIDIA H200", dict(MADE_WITH)
        self.times = {"kernel": 50.0, "fused": 30.0, "separate": 60.0, "dequantize": 900.0}
        self.timed: list[str] = []
        self.equal = True
        monkeypatch.setattr(gateup_choices, "folder", lambda: self.folder)
        monkeypatch.setattr(gateup_choices, "_made_with", lambda: self.made_with)
        monkeypatch.setattr(gateup_choices, "_WARNED", set())
        monkeypatch.setattr(gateup_choices.devices, "device_name", lambda index: self.device)
        monkeypatch.setattr(gateup_cuda.devices, "limits", lambda index: DEVICES["sm_90a"])
        monkeypatch.setattr(gateup_cuda, "_FORMS", {})
        monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
        monkeypatch.setattr(gateup_probe, "microseconds", lambda run: run())
        for arm in gateup_arms.ARMS:
            monkeypatch.setitem(gateup_arms.RUN, arm, lambda x, gate, up, arm=arm: self.run(arm))
        monkeypatch.setattr(gateup_arms, "separate_products", lambda x, gate, up: (x, x))
        monkeypatch.setattr(gateup_arms, "fused_products", lambda x, gate, up: (x, x if self.equal else x + 1))
        weight, scales = zip(*(quantize_fp8_blocks(torch.randn(256, 128)) for _ in range(2)), strict=True)
        both = torch.cat([part.view(torch.uint8) for part in weight]).view(torch.float8_e4m3fn)
        grid = torch.cat(scales)
        self.halves = Matrix(both[:256], grid[:2]), Matrix(both[256:], grid[2:])
        gateup_probe.forget()

    def run(self, arm: str) -> Any:
        self.timed.append(arm)
        return self.times[arm]

    def start(self, tokens: int = 8, **options: Any) -> tuple[ArmChoice, list[str]]:
        """What a new process decides, and which arms it timed."""
        gateup_probe.forget()
        gateup_cuda._FORMS.clear()
        self.timed.clear()
        dtype = options.pop("dtype", torch.float16)
        choice = gateup_probe.decide(*self.halves, tokens, dtype, **options)
        assert gateup_arms.chosen(256, 128, dtype, -1, tokens) == choice.arm
        return choice, list(self.timed)

    @property
    def file(self) -> Path:
        (path,) = self.folder.glob("*.json")
        return path

    def entries(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.file.read_text())["entries"]
        return found


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    return Machine(monkeypatch, tmp_path)


def test_the_next_process_finds_what_was_measured(machine: Machine) -> None:
    first, timed = machine.start()
    assert (timed, first.from_disk, first.arm) == (["kernel", "dequantize"], False, "kernel")
    assert str(first) == "256 x 128, 8 tokens, float16: kernel (kernel 50.0 us, dequantize 900.0 us)"
    again, timed = machine.start()
    assert timed == []
    assert again == replace(first, from_disk=True)
    assert str(again) == "256 x 128, 8 tokens, float16: kernel (kernel 50.0 us, dequantize 900.0 us; from disk)"
    assert machine.start(5)[1] == []  # counted as 8
    assert machine.file.name.startswith("nvidia_h200-")
    document = json.loads(machine.file.read_text())
    assert (document["device"], document["made_with"]) == ("NVIDIA H200", MADE_WITH)
    (entry,) = document["entries"]
    assert entry["microseconds"] == {"kernel": 50.0, "dequantize": 900.0}
    assert entry["equal"] is None
    assert [path.name for path in machine.folder.iterdir()] == [machine.file.name]


def test_within_a_process_it_is_asked_for_once(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = machine.start()
    monkeypatch.setattr(gateup_choices, "find", lambda *_: pytest.fail("asked again"))
    assert gateup_probe.decide(*machine.halves, 8, torch.float16) is first


@pytest.mark.parametrize("name", sorted(MADE_WITH))
def test_another_version_measures_again_and_leaves_the_first_alone(machine: Machine, name: str) -> None:
    machine.start()
    machine.made_with[name] = "another"
    assert machine.start()[1] == ["kernel", "dequantize"]
    assert len(list(machine.folder.glob("*.json"))) == 2
    machine.made_with = dict(MADE_WITH)
    assert machine.start()[1] == []


def test_all_that_can_change_the_answer_is_asked_for(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.start()
    for options in ({"tokens": 16}, {"dtype": torch.bfloat16}, {"w8a8": True}):
        assert machine.start(**options)[1] != [], options
        assert machine.start(**options)[1] == [], options
    assert len(machine.entries()) == 4
    fewer = replace(DEVICES["sm_90a"], multiprocessors=66)
    monkeypatch.setattr(gateup_cuda.devices, "limits", lambda index: fewer)  # other plans for the kernel
    assert machine.start()[1] != []
    machine.device = "NVIDIA H100"
    assert machine.start()[1] != []
    assert len(list(machine.folder.glob("nvidia_h100-*.json"))) == 1
    whole = machine.halves
    apart = Matrix(whole[1].weight.clone(), whole[1].scales.clone())
    machine.start(w8a8=True)
    machine.halves = (whole[0], apart)
    assert machine.start(w8a8=True)[1] == [
        "kernel",
        "separate",
        "dequantize",
    ]  # fused cannot be taken: another question


def test_versions_that_nobody_tells_keep_choices_in_the_process(machine: Machine) -> None:
    machine.made_with = None  # type: ignore[assignment]
    assert machine.start()[1] == machine.start()[1] == ["kernel", "dequantize"]
    assert not machine.folder.exists()


def test_a_version_that_is_missing_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "driver", lambda: "580.1")
    monkeypatch.setattr(versions, "cublaslt", lambda: "130000")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    known = gateup_choices._made_with.__wrapped__()
    assert known is not None
    assert known["torch"] == torch.__version__
    assert len(known["kernels"]) == 64
    monkeypatch.setattr(versions, "cublaslt", lambda: None)
    assert gateup_choices._made_with.__wrapped__() is None


def test_without_a_driver_there_is_no_version() -> None:
    if not torch.cuda.is_available():
        assert versions.cublaslt() is None
        assert versions.driver() is None or versions.driver()[0].isdigit()


@pytest.mark.gpu
def test_versions_of_a_gpu_are_told() -> None:
    driver, cublaslt = versions.driver(), versions.cublaslt()
    assert driver is not None
    assert cublaslt is not None
    assert driver[0].isdigit()
    assert int(cublaslt) >= 120000
    assert gateup_choices._made_with() is not None


def test_fresh_measures_and_replaces_memory_leaves_the_disk_alone(machine: Machine) -> None:
    machine.start()
    machine.times["kernel"] = 1000.0
    choice, timed = machine.start(probe="memory")
    assert (choice.arm, timed) == ("dequantize", ["kernel", "dequantize"])
    assert machine.start()[0].arm == "kernel"
    found = gateup_probe.decide(*machine.halves, 8, torch.float16, probe="memory")  # in the same process
    assert (found.arm, found.from_disk) == ("dequantize", False)
    choice, timed = machine.start(probe="fresh")
    assert (choice.arm, timed, choice.from_disk) == ("dequantize", ["kernel", "dequantize"], False)
    choice, timed = machine.start()
    assert (choice.arm, timed, choice.from_disk) == ("dequantize", [], True)
    assert len(machine.entries()) == 1


@pytest.mark.parametrize("wanted", ["kernel", "fused", "separate", "dequantize"])
def test_an_arm_that_is_named_needs_no_file(machine: Machine, wanted: Any) -> None:
    choice, timed = machine.start(wanted=wanted)
    assert (choice.arm, timed, choice.from_disk) == (wanted, [], False)
    assert choice.equal is (True if wanted == "fused" else None)
    assert not machine.folder.exists()


def test_bytes_are_compared_in_every_process(machine: Machine) -> None:
    choice, _ = machine.start(w8a8=True)
    assert (choice.arm, choice.equal) == ("fused", True)
    assert machine.entries()[0]["equal"] is True
    choice, timed = machine.start(w8a8=True)
    assert (choice.arm, choice.from_disk, timed) == ("fused", True, [])
    machine.equal = False  # other weights, or the same elsewhere in memory
    choice, timed = machine.start(w8a8=True)
    assert (choice.arm, choice.equal, timed) == ("kernel", False, ["kernel", "separate", "dequantize"])
    assert dict(choice.declined) == {"fused": "1024 of 2048 numbers differ from two products"}
    machine.equal = True
    choice, timed = machine.start(w8a8=True)  # it declined once: that is kept
    assert (choice.arm, choice.equal, choice.from_disk, timed) == ("kernel", False, True, [])
    assert dict(choice.declined) == {"fused": "1024 of 2048 numbers differ from two products"}


# ---- the file itself


def test_written_and_read_again(machine: Machine) -> None:
    gateup_choices.keep(QUESTION, CHOICE, 0)
    reason = (("separate", "it does not run"),)  # a line is a line
    assert gateup_choices.find(QUESTION, 0) == replace(CHOICE, declined=reason, from_disk=True)
    assert gateup_choices.find(replace(QUESTION, tokens=12), 0) is None


def damaged(change: Callable[[dict[str, Any]], Any]) -> Callable[[bytes], bytes]:
    """The file with something in it changed."""

    def apply(data: bytes) -> bytes:
        document = json.loads(data)
        changed = change(document)
        return json.dumps(document if changed is None else changed).encode()

    return apply


def entry(**changes: Any) -> Callable[[bytes], bytes]:
    return damaged(lambda document: document["entries"][0].update(changes))


@pytest.mark.parametrize(
    "change",
    [
        lambda data: b"",
        lambda data: data[: len(data) // 2],
        lambda data: b"\xff\xfe" + data,
        lambda data: b"[" * 200_000,
        lambda data: b"9" * 10_000,
        lambda data: data + b" " * (gateup_choices._MAX_BYTES + 1),
        damaged(lambda document: []),
        damaged(lambda document: document.update(format=2)),
        damaged(lambda document: document.update(device="NVIDIA H100")),
        damaged(lambda document: document.update(made_with={**MADE_WITH, "torch": "2.12"})),
        damaged(lambda document: document.update(entries={})),
        damaged(lambda document: document.update(entries=document["entries"] * 2001)),
        damaged(lambda document: document.update(entries=[3])),
        entry(rows=0),
        entry(rows="256"),
        entry(tokens=True),
        entry(columns=10**30),
        entry(arms=[["kernel"]]),
        entry(arms="kernel"),
        entry(arms=["kernel", "kernel", "fused", "separate", "dequantize"]),
        entry(arm="cutlass"),
        entry(arm="separate"),
        entry(arm=["kernel"]),
        entry(arm=None),
        entry(plans=7),
        entry(plans="../" * 21 + "0"),
        entry(x_dtype="float32"),
        entry(microseconds={"kernel": float("nan"), "fused": 1.0}),
        entry(microseconds={"kernel": True, "fused": 1.0}),
        entry(microseconds={"kernel": -1.0, "fused": 1.0}),
        entry(microseconds=[1.0]),
        entry(microseconds={"cutlass": 1.0}),
        entry(equal=1),
        entry(equal=None),
        entry(equal=False),
        entry(declined={"separate": "\x1b[2J"}),
        entry(declined={"separate": "no" * 200}),
        entry(declined={"kernel": "both"}),
        entry(declined=["separate"]),
    ],
)
def test_a_bad_file_is_ignored_with_one_warning_and_replaced(
    machine: Machine, change: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    gateup_choices.keep(QUESTION, CHOICE, 0)
    machine.file.write_bytes(change(machine.file.read_bytes()))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert gateup_choices.find(QUESTION, 0) is None
        gateup_choices.keep(QUESTION, CHOICE, 0)
        assert gateup_choices.find(QUESTION, 0) is not None
    assert len(caplog.records) == 1
    assert "measured again" in caplog.text
    assert len(caplog.text) < 1500
    assert len(machine.entries()) == 1


def test_no_regular_file_is_opened(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    gateup_choices.keep(QUESTION, CHOICE, 0)
    path = machine.file
    path.unlink()
    os.mkfifo(path)  # opening it would wait for a writer
    assert gateup_choices.find(QUESTION, 0) is None
    gateup_choices.keep(QUESTION, CHOICE, 0)
    assert gateup_choices.find(QUESTION, 0) is not None
    assert path.is_file()


def test_a_folder_that_cannot_be_written_is_said_once(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    machine.folder.parent.mkdir()
    machine.folder.write_text("in the way")
    with caplog.at_level(logging.WARNING):
        assert machine.start()[0].arm == machine.start()[0].arm == "kernel"
    assert len(caplog.records) == 1
    assert "set W3PACK_CACHE_DIR" in caplog.text


def test_the_oldest_leave_a_full_file(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateup_choices, "_MAX_ENTRIES", 3)
    questions = [replace(QUESTION, tokens=tokens) for tokens in (4, 8, 12)]
    for question in [*questions, questions[0], replace(QUESTION, tokens=16)]:
        gateup_choices.keep(question, replace(CHOICE, tokens=question.tokens), 0)
    assert [found["tokens"] for found in machine.entries()] == [12, 4, 16]


def test_a_file_with_all_entries_and_reasons_is_small_enough(machine: Machine) -> None:
    reason = "é" * gateup_choices._MAX_REASON  # six letters each in JSON
    choice = replace(CHOICE, declined=(("separate", reason),))
    entries = {replace(QUESTION, tokens=4 * number + 4): choice for number in range(gateup_choices._MAX_ENTRIES)}
    place = gateup_choices._place(0)
    assert place is not None
    gateup_choices._write(place, entries)
    assert machine.file.stat().st_size < gateup_choices._MAX_BYTES


WRITER = """
import sys
from dataclasses import replace
from pathlib import Path
from w3pack.ops import gateup_choices
from w3pack.ops.gateup_choices import ArmChoice, Question
gateup_choices.folder = lambda: Path(sys.argv[1])
gateup_choices._made_with = lambda: {"torch": "2.11"}
gateup_choices.devices.device_name = lambda index: "NVIDIA H200"
for tokens in range(4, 164, 4):
    question = Question(256, int(sys.argv[2]), tokens, "float16", ("kernel",), "0" * 64)
    gateup_choices.keep(question, ArmChoice(256, int(sys.argv[2]), tokens, "float16", "kernel", (("kernel", 1.0),)), 0)
    assert gateup_choices.find(replace(question, tokens=4), 0) or True
print("done")
"""


def test_processes_may_write_at_once(machine: Machine) -> None:
    root = str(Path(gateup_choices.__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": root}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(machine.folder), str(columns)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for columns in (128, 256, 384)
    ]
    for process in running:
        out, errors = process.communicate(timeout=120)
        assert (out, errors, process.returncode) == ("done\n", "", 0)  # a warning would say that a half file was seen
    entries = machine.entries()
    assert max(found["tokens"] for found in entries) == 160
    assert len(entries) >= 40
    assert [path.name for path in machine.folder.iterdir()] == [machine.file.name]
