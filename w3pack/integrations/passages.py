"""A text -> windows of token ids, with the bytes that each token spells."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
import torch

from w3pack.errors import UsageError
from w3pack.pipeline.evaluate import token_windows
from w3pack.pipeline.texts import Text


@dataclass(frozen=True)
class Passage:
    """The part of a text that models are compared on.

    Attributes:
        text: where it comes from.
        windows: int64 [windows, window]; each starts with what the tokenizer puts before a text, such as bos.
        first: the first position of a window that is predicted; those before are only context.
        nbytes: bytes that each predicted token spells, int64 [windows, window - first].
    """

    text: Text
    windows: torch.Tensor
    first: int
    nbytes: torch.Tensor

    @property
    def ids_sha256(self) -> str:
        """Digest of the ids as little-endian int64."""
        return hashlib.sha256(self.windows.numpy().astype("<i8").tobytes()).hexdigest()


def prefix_ids(tokenizer: Any) -> list[int]:
    """What the tokenizer puts before a text: usually bos or nothing."""
    framed, plain = tokenizer("a")["input_ids"], tokenizer("a", add_special_tokens=False)["input_ids"]
    for start in range(len(framed) - len(plain) + 1):
        if framed[start : start + len(plain)] == plain:
            return list(framed[:start])
    return []


def make_passage(text: Text, tokenizer: Any, *, window: int, tokens: int, other: Any = None) -> Passage:
    """Cut the first `tokens` tokens of a text into windows.

    Args:
        text: at least that long.
        tokenizer: transformers' tokenizer.
        window: tokens of a window, prefix included.
        tokens: tokens of the text to use; what does not fill a window is left out.
        other: the other model's tokenizer, which must give the same ids.

    Raises:
        UsageError: the tokenizers differ on this text, or it is too short.
    """
    prefix = prefix_ids(tokenizer)
    ids = tokenizer(text.text, add_special_tokens=False)["input_ids"]
    if other is not None:
        _same_ids(
            [*prefix, *ids],
            [*prefix_ids(other), *other(text.text, add_special_tokens=False)["input_ids"]],
            name=text.name,
        )
    own = window - len(prefix)
    if own < 2:
        raise UsageError(f"expected windows of at least {len(prefix) + 2} tokens, got {window}; use 512")
    if len(ids) < own:
        raise UsageError(
            f"expected at least {own} tokens in {text.name} for a window, got {len(ids)}; use a longer text or a smaller --window"
        )
    if tokens < own:
        raise UsageError(f"expected --tokens of at least one window ({own}), got {tokens}; raise it or lower --window")
    body = token_windows(ids, window=own, tokens=tokens)
    head = torch.tensor(prefix, dtype=torch.int64).expand(body.shape[0], len(prefix))
    nbytes = torch.from_numpy(_token_bytes(text.text, tokenizer, body.numel())).view(body.shape)
    first = max(1, len(prefix))
    return Passage(
        text=text,
        windows=torch.cat([head, body], dim=1),
        first=first,
        nbytes=nbytes[:, first - len(prefix) :],
    )


def _same_ids(first: Sequence[int], second: Sequence[int], *, name: str) -> None:
    for position, (one, two) in enumerate(zip_longest(first, second)):
        if one != two:
            raise UsageError(
                f"expected the same tokens of {name} from both tokenizers, got {one} and {two} at position {position}; "
                "compare a model with the one that it was made from"
            )


def _token_bytes(text: str, tokenizer: Any, count: int) -> Any:
    """Bytes from the end of the token before to the end of each token: int64 [count]; their sum is that of the text."""
    if not getattr(tokenizer, "is_fast", False):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"][:count]
        return np.array([len(tokenizer.decode([one]).encode()) for one in ids], dtype=np.int64)
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"][:count]
    ends = np.maximum.accumulate(np.array([end for _, end in offsets], dtype=np.int64))
    points = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
    widths = 1 + (points >= 0x80).astype(np.int64) + (points >= 0x800) + (points >= 0x10000)
    at = np.concatenate([[0], np.cumsum(widths)])[ends]
    return np.diff(at, prepend=0)
