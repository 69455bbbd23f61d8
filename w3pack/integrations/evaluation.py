"""How far a model is from the one it was made from, on texts: what `w3pack eval` runs, and a notebook can.

Windows of each text go through both models and every predicted token is compared (`w3pack.pipeline.agreement`). Where
both models fit in memory they run side by side; where they do not, the reference runs first and its logits wait, bit
for bit, in a temporary file. Both ways give the same figures. Beside them stands the noise floor: the divergence of the
reference run in 16 bits from itself run in float32. What lies below it says nothing about the model.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import torch

from w3pack.errors import CheckpointError, UsageError
from w3pack.integrations.language_model import LanguageModel, open_language_model, tokenizer_digest
from w3pack.integrations.passages import Passage, make_passage, prefix_ids
from w3pack.pipeline.agreement import Agreement, Tally
from w3pack.pipeline.logit_store import LogitStore
from w3pack.pipeline.texts import Text
from w3pack.runtime.dense_cache import available_bytes

_LOG = logging.getLogger(__name__)
#: Tokens of each text on which the noise floor is measured: enough for a magnitude.
FLOOR_TOKENS = 2048
#: Characters to read for each token that is wanted: far above what any tokenizer averages.
CHARACTERS_PER_TOKEN = 32
_MOST_WINDOWS_AT_ONCE = 16
_GIB = 1 << 30

_BOS_FIRST = "each window starts with what the tokenizer puts before a text; every token of the text is predicted"
_CONTEXT_FIRST = "the first token of each window is context and not predicted"

Progress = Callable[[str, int], None]


@dataclass(frozen=True)
class Course:
    """How a comparison runs.

    Attributes:
        together: both models in memory; else the reference first, its logits in a file.
        windows_at_once: windows in one call of a model.
        why: the figures that decided, for the log.
    """

    together: bool
    windows_at_once: int
    why: str


@dataclass(frozen=True)
class TextResult:
    """One text: see `Agreement`; `floor` is the same comparison of the reference with its own run in float32."""

    passage: Passage
    agreement: Agreement
    floor: Agreement | None


@dataclass(frozen=True)
class Evaluation:
    """What `evaluate_model` found; `facts` holds names, digests, versions and settings."""

    facts: dict[str, Any]
    texts: tuple[TextResult, ...]

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return self.facts | {"texts": [_text_dict(result) for result in self.texts]}


def decide(*, model_bytes: int, reference_bytes: int, window: int, vocabulary: int, free: int, device: str) -> Course:
    """Side by side where both models and a call's logits fit in four fifths of the free memory. A pure function.

    The reference counts twice: it grows to float32 for the noise floor.
    """
    largest = min(_GIB if device != "cpu" else _GIB // 4, free // 8)
    at_once = max(1, min(_MOST_WINDOWS_AT_ONCE, largest // (4 * window * vocabulary)))
    work = 3 * 4 * at_once * window * vocabulary
    needed = reference_bytes + max(model_bytes, reference_bytes) + work
    return Course(
        together=needed <= free * 4 // 5,
        windows_at_once=at_once,
        why=f"{needed / 1e9:.1f} GB for both models and their logits, {free / 1e9:.1f} GB free on {device}",
    )


def evaluate_model(
    model: str,
    *,
    reference: str | None = None,
    texts: Sequence[Text],
    tokens: int = 8192,
    window: int = 512,
    device: str = "cpu",
    seed: int = 0,
    together: bool | None = None,
    progress: Callable[[int], Progress] | None = None,
) -> Evaluation:
    """Measure `model` on each text, and its distance from `reference`.

    Args:
        model, reference: a packed checkpoint, a checkpoint folder, a GGUF file or a hub id.
        texts: from `w3pack.pipeline.texts`.
        tokens: tokens of each text.
        window: tokens of a window; each starts without memory of the one before.
        seed: given to torch; nothing here draws random numbers.
        together: both models in memory at once, or not; None decides by the memory that is free.
        progress: told once the number of windows that will run; what it returns is told of each batch.

    Raises:
        UsageError: texts too short, or models whose tokenizers or vocabularies differ.
        CheckpointError, UnsupportedError, ResourceError: a model that does not load; a full disk.
    """
    if not texts:
        raise UsageError("expected at least one text, got none; pass one from w3pack.pipeline.texts")
    torch.manual_seed(seed)
    with ExitStack() as stack:
        opened = stack.enter_context(open_language_model(model))
        base = stack.enter_context(open_language_model(reference)) if reference is not None else None
        _check_window(window, opened, base)
        lead = (base or opened).tokenizer
        prefix = prefix_ids(lead)
        passages = [
            make_passage(text, lead, window=window, tokens=tokens, other=opened.tokenizer if base else None)
            for text in texts
        ]
        course = decide(
            model_bytes=opened.memory_bytes,
            reference_bytes=base.memory_bytes if base else 0,
            window=window,
            vocabulary=max(len(lead), 1),
            free=_free_bytes(device),
            device=device,
        )
        if together is None:
            together = course.together
        if base is not None:
            way = "side by side" if together else "one after the other, the reference's logits in a temporary file"
            _LOG.info("models run %s: %s", way, course.why)
        run = _Run(passages, course.windows_at_once, device)
        run.start(progress, with_reference=base is not None)
        if base is None:
            run.alone(opened)
        elif together:
            run.side_by_side(opened, base)
        else:
            run.one_after_the_other(opened, base)
        facts = {
            "model": opened.identity() | run.described["model"],
            "reference": base.identity() | run.described["reference"] if base else None,
            "tokenizer": {"sha256": tokenizer_digest(lead), "class": type(lead).__name__, "prefix": prefix},
            "tokens": tokens,
            "window": window,
            "first_token": _BOS_FIRST if prefix else _CONTEXT_FIRST,
            "windows_at_once": course.windows_at_once,
            "reference_logits": None if base is None else "in memory" if together else "in a temporary file",
            "noise_floor": run.floor_note,
            "device": _device_name(device),
            "threads": torch.get_num_threads(),
            "seed": seed,
            "versions": _versions(),
            "notes": [note for one in (opened, base) if one for note in one.source.notes],
        }
    return Evaluation(facts=facts, texts=tuple(run.results()))


class _Run:
    """The passes over all windows, and what they found so far."""

    def __init__(self, passages: Sequence[Passage], at_once: int, device: str) -> None:
        self.passages, self.at_once, self.device = passages, at_once, device
        self.tallies = [Tally() for _ in passages]
        self.floors = [Tally() for _ in passages]
        self.described: dict[str, dict[str, Any]] = {"model": {}, "reference": {}}
        self.floor_note: str | None = None
        self.advance: Progress = lambda name, amount: None

    def start(self, progress: Callable[[int], Progress] | None, *, with_reference: bool) -> None:
        every = sum(len(passage.windows) for passage in self.passages)
        floor = sum(_floor_windows(passage) for passage in self.passages)
        if progress is not None:
            self.advance = progress(2 * every + floor if with_reference else every)

    def alone(self, opened: LanguageModel) -> None:
        """The model without a reference."""
        model = self._load(opened, "model")
        for number, passage, start, logits in self._pass(model, "model"):
            for offset, one in enumerate(logits):
                self._compare(self.tallies[number], passage, start + offset, one, None)

    def side_by_side(self, opened: LanguageModel, base: LanguageModel) -> None:
        """Both models in memory; only the windows of the noise floor are kept."""
        expected, model = self._load(base, "reference"), self._load(opened, "model")
        with LogitStore() as store:
            ours = self._pass(model, "model")
            for number, passage, start, theirs in self._pass(expected, "reference"):
                logits = next(ours)[3]
                for offset, one in enumerate(logits):
                    self._compare(self.tallies[number], passage, start + offset, one, theirs[offset])
                    if start + offset < _floor_windows(passage):
                        store.append(theirs[offset])
            next(ours, None)  # past its end, so that it lets go of the model
            del model, ours, logits, one
            _collect()
            self._noise_floor(base, expected, store, kept=_floor_windows)

    def one_after_the_other(self, opened: LanguageModel, base: LanguageModel) -> None:
        """One model in memory at a time; the reference's logits are kept in a file."""
        with LogitStore() as store:
            expected = self._load(base, "reference")
            for number, _, start, theirs in self._pass(expected, "reference"):
                if number == start == 0:
                    store.reserve(theirs[0].nbytes * sum(len(one.windows) for one in self.passages))
                for one in theirs:
                    store.append(one)
            del theirs, one
            self._noise_floor(base, expected, store, kept=lambda passage: len(passage.windows))
            del expected
            _collect()
            model = self._load(opened, "model")
            index = 0
            for number, passage, start, logits in self._pass(model, "model"):
                for offset, one in enumerate(logits):
                    self._compare(self.tallies[number], passage, start + offset, one, store.read(index))
                    index += 1

    def results(self) -> Iterator[TextResult]:
        for passage, tally, floor in zip(self.passages, self.tallies, self.floors, strict=True):
            measured = floor.result()
            yield TextResult(
                passage=passage, agreement=tally.result(), floor=measured if measured.kl is not None else None
            )

    def _load(self, opened: LanguageModel, role: str) -> Any:
        model = opened.load(self.device)
        rows = model.get_input_embeddings().weight.shape[0]
        highest = max(int(passage.windows.max()) for passage in self.passages)
        if highest >= rows:
            raise CheckpointError(
                f"expected token ids below {rows}, the rows of the embedding of {opened.name}, got {highest}; "
                "tokenizer and model do not belong together"
            )
        self.described[role] = {"class": type(model).__name__, "dtype": str(model.dtype).removeprefix("torch.")}
        return model

    def _pass(
        self, model: Any, name: str, *, windows: Callable[[Passage], int] = lambda passage: len(passage.windows)
    ) -> Iterator[tuple[int, Passage, int, torch.Tensor]]:
        """Logits of every batch of windows at the predicted positions: text, passage, first window, [windows, positions, vocabulary]."""
        for number, passage in enumerate(self.passages):
            count = windows(passage)
            for start in range(0, count, self.at_once):
                batch = passage.windows[start : min(count, start + self.at_once)]
                with torch.inference_mode():
                    logits = model(batch.to(self.device), use_cache=False).logits[:, passage.first - 1 : -1]
                yield number, passage, start, logits
                self.advance(f"{name}: {passage.text.name}", len(batch))

    def _compare(
        self, tally: Tally, passage: Passage, index: int, logits: torch.Tensor, reference: torch.Tensor | None
    ) -> None:
        if reference is not None and reference.shape != logits.shape:
            raise UsageError(
                f"expected the reference's vocabulary of {reference.shape[-1]} entries, got {logits.shape[-1]}; "
                "compare a model with the one that it was made from"
            )
        tally.add(
            logits,
            passage.windows[index, passage.first :],
            nbytes=passage.nbytes[index],
            reference=reference.to(logits.device) if reference is not None else None,
        )

    def _noise_floor(
        self, base: LanguageModel, expected: Any, store: LogitStore, *, kept: Callable[[Passage], int]
    ) -> None:
        """Run the reference again in the other width, in place, on the first windows of each text."""
        _collect()
        own = expected.dtype
        wide = torch.float32 if own != torch.float32 else torch.bfloat16
        label = f"KL(reference in float32 || reference in {str(own if wide is torch.float32 else wide)[6:]})"
        growth = base.memory_bytes if wide is torch.float32 else 0
        if base.kind == "quantised":
            self.floor_note = "not measured: the reference is quantised by another method, which fixes its dtype"
        elif 0 < _free_bytes(self.device) * 4 // 5 < growth:
            self.floor_note = f"not measured: the reference in float32 needs {growth / 1e9:.1f} GB more than there are"
        if self.floor_note is not None:
            _LOG.info("noise floor %s", self.floor_note)
            return
        expected.to(wide)
        first = [sum(kept(one) for one in self.passages[:number]) for number in range(len(self.passages))]
        for number, passage, start, logits in self._pass(expected, "noise floor", windows=_floor_windows):
            for offset, one in enumerate(logits):
                stored = store.read(first[number] + start + offset).to(one.device)
                model, reference = (stored, one) if wide is torch.float32 else (one, stored)
                self._compare(self.floors[number], passage, start + offset, model, reference)
        self.floor_note = f"{label}, first {FLOOR_TOKENS} tokens of each text"


def _floor_windows(passage: Passage) -> int:
    return min(len(passage.windows), max(1, FLOOR_TOKENS // passage.windows.shape[1]))


def _check_window(window: int, *models: LanguageModel | None) -> None:
    for model in models:
        if model is not None and model.longest is not None and window > model.longest:
            raise UsageError(
                f"expected windows of at most {model.longest} tokens, the context of {model.name}, got {window}; "
                "lower --window"
            )


def _text_dict(result: TextResult) -> dict[str, Any]:
    passage, found = result.passage, asdict(result.agreement)
    floor = None
    if result.floor is not None and result.floor.kl is not None:
        floor = {"positions": result.floor.positions, "kl": asdict(result.floor.kl)}
        floor |= {name: getattr(result.floor, name) for name in ("top1_agreement", "top10_overlap", "rms_change")}
    return {
        "name": passage.text.name,
        "sha256": passage.text.sha256,
        "ids_sha256": passage.ids_sha256,
        "windows": len(passage.windows),
        **found,
        "noise_floor": floor,
    }


def _free_bytes(device: str) -> int:
    """0 where the system does not say."""
    return torch.cuda.mem_get_info(device)[0] if device != "cpu" else available_bytes()


def _collect() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device != "cpu" else "cpu"


def _versions() -> dict[str, str]:
    import platform

    import transformers

    from w3pack import __version__

    return {
        "w3pack": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
