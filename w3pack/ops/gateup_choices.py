"""Which arm was found fastest, and its file in the user's cache folder, read on the next start and trusted in nothing.

    <cache>/gateup/nvidia_h200-<digest of made_with>.json
    {"format": 1, "device": "NVIDIA H200", "made_with": {"driver": "580.159.04", "torch": "2.11.0+cu130", "cublaslt": "130000", ...},
     "entries": [{"rows": 12288, "columns": 4096, "tokens": 8, "x_dtype": "bfloat16", "arms": ["kernel", "dequantize"], "plans": "...",
                  "arm": "kernel", "microseconds": {"kernel": 27.9, "dequantize": 310.2}, "equal": null, "declined": {}}, ...]}

Weights are E4M3 with float32 scales of 128 x 128; `arms` are those between which was chosen, and `plans` is a digest of the kernel's plans
(configs, launches, the device's limits). Files appear by rename. Two processes that write at once may lose what the other has added: it is
measured again. A file that cannot be read, is no such file or belongs elsewhere is ignored with one warning, and replaced by the next
choice. Where a version cannot be found out, nothing is read or kept.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch

from w3pack import __version__
from w3pack.errors import ResourceError, W3PackError
from w3pack.format.linear import MAX_SIDE
from w3pack.jit import bindings, cache_folder, kernels_folder
from w3pack.jit.source import folder_digest
from w3pack.ops import device as devices
from w3pack.ops import versions
from w3pack.ops.gateup_arms import ARMS, Arm

_LOG = logging.getLogger(__name__)
#: Goes up when a file says other things, an arm computes otherwise, or the probe measures otherwise.
FORMAT = 1
_MAX_BYTES = 4 << 20
#: Kept in a file; the oldest leave first.
_MAX_ENTRIES = 2000
_MAX_TOKENS = 1 << 24
_MAX_REASON = 200
_DIGEST = re.compile(r"[0-9a-f]{64}")
_WARNED: set[Path] = set()


@dataclass(frozen=True)
class ArmChoice:
    """What was found for one shape and number of tokens.

    Attributes:
        rows, columns: of gate and of up.
        tokens: rounded up to a multiple of 4.
        arm: what calls take from now on.
        microseconds: of each arm that was timed.
        declined: arms that cannot be taken, and why.
        equal: whether `fused` had the bytes of `separate`; None where they were not compared.
        from_disk: whether an earlier process measured it.
    """

    rows: int
    columns: int
    tokens: int
    x_dtype: str
    arm: Arm
    microseconds: tuple[tuple[Arm, float], ...] = ()
    declined: tuple[tuple[Arm, str], ...] = ()
    equal: bool | None = None
    from_disk: bool = False

    def __str__(self) -> str:
        """One line."""
        times = ", ".join(f"{arm} {time:.1f} us" for arm, time in self.microseconds)
        refused = "; ".join(f"{arm} declined: {why}" for arm, why in self.declined)
        about = "; ".join(filter(None, (times, refused, "from disk" if self.from_disk else "")))
        return f"{self.rows} x {self.columns}, {self.tokens} tokens, {self.x_dtype}: {self.arm}" + (
            f" ({about})" if about else ""
        )


@dataclass(frozen=True)
class Question:
    """What a choice is made for, and between which arms; `plans` is what the kernel would launch."""

    rows: int
    columns: int
    tokens: int
    x_dtype: str
    arms: tuple[Arm, ...]
    plans: str


def digest_of(plans: Sequence[object]) -> str:
    """A text that differs where two lists of plans do."""
    return hashlib.sha256(repr(plans).encode()).hexdigest()


def find(question: Question, device_index: int) -> ArmChoice | None:
    """What an earlier process found, if it is kept."""
    place = _place(device_index)
    return None if place is None else _read(place).get(question)


def keep(question: Question, choice: ArmChoice, device_index: int) -> None:
    """Add a choice to the file, or replace the one that it has."""
    place = _place(device_index)
    if place is None:
        return
    entries = _read(place)
    entries.pop(question, None)
    entries[question] = choice
    try:
        _write(place, dict(list(entries.items())[-_MAX_ENTRIES:]))
    except OSError as error:
        _warn(
            place.path.parent,
            f"expected to keep choices of FP8 arms in {place.path.parent}, got: {error}; every process will measure them again, "
            "set W3PACK_CACHE_DIR to a folder that can be written",
        )


# ---- where, and with what


@dataclass(frozen=True)
class _Place:
    """The file of a device, and what it must say of itself."""

    path: Path
    device: str
    made_with: Mapping[str, str]


def folder() -> Path:
    """Where the files lie; ResourceError where no cache folder is known."""
    return cache_folder() / "gateup"


def _place(device_index: int) -> _Place | None:
    made_with = _made_with()
    if made_with is None:
        return None
    try:
        parent = folder()
    except ResourceError as error:
        _LOG.info("%s; until then choices of FP8 arms are kept in the process only", error)
        return None
    name = devices.device_name(device_index)
    stem = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")[:80]
    digest = hashlib.sha256(json.dumps([FORMAT, name, *made_with.items()]).encode()).hexdigest()
    return _Place(parent / f"{stem}-{digest[:16]}.json", name, made_with)


@functools.cache
def _made_with() -> Mapping[str, str] | None:
    """All versions that can change an answer; None where one of them cannot be told."""
    found = {"driver": versions.driver(), "cuda": torch.version.cuda, "cublaslt": versions.cublaslt()}
    try:
        found["kernels"] = folder_digest(kernels_folder())
    except W3PackError:
        found["kernels"] = None
    try:
        nvrtc = ".".join(map(str, bindings.nvrtc_version()))
    except W3PackError:
        nvrtc = "none"  # kernels can come built with the package
    found |= {"nvrtc": nvrtc, "torch": str(torch.__version__), "w3pack": __version__}
    known = {name: version for name, version in sorted(found.items()) if version is not None}
    if len(known) < len(found):
        missing = ", ".join(sorted(set(found) - set(known)))
        _LOG.info("choices of FP8 arms are kept in the process only: not found out: %s", missing)
        return None
    return known


# ---- the file


def _read(place: _Place) -> dict[Question, ArmChoice]:
    """What the file has, in its order; nothing where there is none or it is not as it should be."""
    try:
        if not place.path.exists():
            return {}
        if not place.path.is_file():
            raise ValueError("no regular file")
        with place.path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise ValueError(f"more than {_MAX_BYTES} bytes")
        return _entries(json.loads(data), place)
    except (OSError, ValueError, RecursionError) as error:  # ValueError: neither UTF-8 nor JSON, too
        _warn(
            place.path,
            f"expected choices of FP8 arms in {place.path}, got: {error}; they are measured again and the file is replaced",
        )
        return {}


def _write(place: _Place, entries: Mapping[Question, ArmChoice]) -> None:
    head = {"format": FORMAT, "device": place.device, "made_with": dict(place.made_with)}
    fields = "".join(f" {json.dumps(name)}: {json.dumps(value)},\n" for name, value in head.items())
    lines = ",\n".join(f"  {json.dumps(_entry(*item))}" for item in entries.items())
    place.path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=place.path.parent, prefix=f".{place.path.stem}-", suffix=".partial")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write("{\n" + fields + ' "entries": [\n' + lines + "\n ]\n}\n")
        os.replace(temporary, place.path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _entry(question: Question, choice: ArmChoice) -> dict[str, Any]:
    return {
        **asdict(question),
        "arm": choice.arm,
        "microseconds": {arm: float(f"{time:.6g}") for arm, time in choice.microseconds},
        "equal": choice.equal,
        "declined": {arm: _printable(why) for arm, why in choice.declined},
    }


def _printable(why: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in why[:_MAX_REASON])


def _entries(document: Any, place: _Place) -> dict[Question, ArmChoice]:
    """ValueError for a document that is not one of this device and these versions, whole and in range."""
    head = {"format": FORMAT, "device": place.device, "made_with": dict(place.made_with)}
    if not isinstance(document, dict) or {name: document.get(name) for name in head} != head:
        raise ValueError("the file of another device, format or version")
    entries = document.get("entries")
    if not isinstance(entries, list) or len(entries) > _MAX_ENTRIES:
        raise ValueError(f"no list of at most {_MAX_ENTRIES} entries")
    return dict(map(_known, entries))


def _known(entry: Any) -> tuple[Question, ArmChoice]:
    if not isinstance(entry, dict):
        raise ValueError("an entry that is no object")
    arms, times, declined = entry.get("arms"), entry.get("microseconds"), entry.get("declined")
    arm, plans, x_dtype, equal = (entry.get(name) for name in ("arm", "plans", "x_dtype", "equal"))
    sizes = {
        name: _whole(entry, name, most)
        for name, most in (("rows", MAX_SIDE), ("columns", MAX_SIDE), ("tokens", _MAX_TOKENS))
    }
    if not isinstance(arms, list) or not set(map(str, arms)) <= set(ARMS) or len(set(map(str, arms))) != len(arms):
        raise ValueError(f"an entry for the arms {arms!r:.200}")
    if not isinstance(times, dict) or not isinstance(declined, dict) or not {*times, *declined} <= set(arms):
        raise ValueError("an entry with arms between which it does not choose")
    if not all(type(time) in (int, float) and 0 < time < 1e9 for time in times.values()):
        raise ValueError("an entry with times that are none")
    if not all(isinstance(why, str) and len(why) <= _MAX_REASON and why.isprintable() for why in declined.values()):
        raise ValueError("an entry with reasons that are none")
    if not isinstance(arm, str) or arm not in times or set(times) & set(declined):
        raise ValueError("an entry whose arm was not timed")
    if not isinstance(plans, str) or not _DIGEST.fullmatch(plans) or x_dtype not in ("float16", "bfloat16"):
        raise ValueError("an entry without plans or dtype")
    if not (equal is None or isinstance(equal, bool)) or (equal is not True and "fused" in times):
        raise ValueError("an entry that says otherwise of the fused product's bytes")
    question = Question(**sizes, x_dtype=x_dtype, arms=tuple(arms), plans=plans)
    choice = ArmChoice(
        **sizes,
        x_dtype=x_dtype,
        arm=cast("Arm", arm),
        microseconds=tuple((timed, float(time)) for timed, time in times.items()),
        declined=tuple(declined.items()),
        equal=equal,
        from_disk=True,
    )
    return question, choice


def _whole(entry: Mapping[str, Any], name: str, most: int) -> int:
    value = entry.get(name)
    if type(value) is not int or not 1 <= value <= most:
        raise ValueError(f"an entry with {name} of {value!r:.200}")
    return value


def _warn(path: Path, text: str) -> None:
    if path not in _WARNED:
        _WARNED.add(path)
        _LOG.warning("%s", text)
