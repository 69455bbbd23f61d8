"""The tokenizer of a GGUF file, built from its vocabulary with the tokenizers package.

transformers can do this too (`AutoTokenizer.from_pretrained(..., gguf_file=...)`), but differently in each release:
5.17 gives llama files bos as their eos and Gemma other pieces and no bos, and neither 5.17 nor 5.24 splits SmolLM2's
digits. So the pieces are put together here, the same under every release, and a `tokenizer.ggml.pre` that is not in the
tables below is refused, not guessed.
"""

from __future__ import annotations

from typing import Any

from w3pack.checkpoint.gguf_header import GgufHeader
from w3pack.errors import CheckpointError, UnsupportedError

_CONTROL, _USER_DEFINED = 3, 4
_SPACE = "\u2581"
_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = frozenset({"qwen2", "deepseek-r1-qwen"})
_LLAMA3 = frozenset({"llama-bpe", "llama3", "llama-v3"})
_GPT2 = frozenset({"gpt-2"})
_SMOLLM = frozenset({"smollm"})
_BYTE_LEVEL = _QWEN2 | _LLAMA3 | _GPT2 | _SMOLLM
#: Phi-3's control tokens swallow the spaces after them, except these.
_PHI3_PLAIN = frozenset({"<unk>", "<s>", "<|endoftext|>"})


def special_ids(header: GgufHeader) -> dict[str, int]:
    """ "bos", "eos", "eot", "unk", "pad" -> token id, for those that the file names."""
    keys = {"bos": "bos", "eos": "eos", "eot": "eot", "unk": "unknown", "pad": "padding"}
    present = {name: key for name, key in keys.items() if f"tokenizer.ggml.{key}_token_id" in header.metadata}
    return {name: header.integer(f"tokenizer.ggml.{key}_token_id") for name, key in present.items()}


def build_tokenizer(header: GgufHeader) -> Any:
    """The `tokenizers.Tokenizer` that the file describes.

    Raises:
        UnsupportedError: a kind of vocabulary or of pre-tokenizer that w3pack does not build.
        CheckpointError: the vocabulary contradicts itself.
    """
    tokens = header.strings("tokenizer.ggml.tokens")
    kind = header.text("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer = _byte_level(header, tokens)
    elif kind == "llama":
        tokenizer = _sentencepiece(header, tokens)
    else:
        raise UnsupportedError(
            f"expected a vocabulary of kind gpt2 or llama in {header.path.name}, got {kind[:40]!r}; use the model's"
            " safetensors checkpoint instead"
        )
    _add_tokens(tokenizer, header, tokens)
    _frame(tokenizer, header, tokens, bos=kind == "llama" or _pre(header) in _LLAMA3)
    return tokenizer


def _pre(header: GgufHeader) -> str:
    value = header.metadata.get("tokenizer.ggml.pre", "")
    return value if isinstance(value, str) else ""


def _byte_level(header: GgufHeader, tokens: list[str]) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pre = _pre(header)
    if pre not in _BYTE_LEVEL:
        raise UnsupportedError(
            f"expected tokenizer.ggml.pre of {header.path.name} to be one of {', '.join(sorted(_BYTE_LEVEL))}, got"
            f" {pre[:40]!r}; use the model's safetensors checkpoint instead"
        )
    merges = [_pair(header, merge) for merge in header.strings("tokenizer.ggml.merges")]
    vocabulary = _vocabulary(header, tokens)
    model = _bpe(models, header, vocabulary, merges, ignore_merges=pre in _LLAMA3)
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.ByteLevel()
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in _GPT2:
        tokenizer.pre_tokenizer = whole
        return tokenizer
    if pre in _SMOLLM:
        # Digits first: ByteLevel alone keeps "1990" together, which this vocabulary was not trained on.
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, whole])
        return tokenizer
    split = _QWEN2_SPLIT if pre in _QWEN2 else _LLAMA3_SPLIT
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    if pre in _QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _sentencepiece(header: GgufHeader, tokens: list[str]) -> Any:
    """Sentencepiece BPE: merges follow from the vocabulary, bytes stand in for what it cannot spell."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    gemma = header.architecture.startswith("gemma")
    if gemma:
        # Runs of spaces are stored as spaces; the normalizer will have replaced those before the lookup.
        tokens[:] = [_SPACE * len(token) if " " in token and not token.strip(" ") else token for token in tokens]
    vocabulary = _vocabulary(header, tokens)
    if gemma:
        priority = [-float(number) for number in range(len(tokens))]
    else:
        priority = header.numbers("tokenizer.ggml.scores")
        if len(priority) != len(tokens):
            raise CheckpointError(
                f"expected {len(tokens)} token scores in {header.path.name}, got {len(priority)}; download or"
                " convert it again"
            )
    unknown = special_ids(header).get("unk")
    model = _bpe(
        models,
        header,
        vocabulary,
        _merges(tokens, vocabulary, priority),
        unk_token=tokens[unknown] if unknown is not None and unknown < len(tokens) else None,
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    prefix = bool(header.metadata.get("tokenizer.ggml.add_space_prefix", not gemma))
    spell = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    replace = normalizers.Replace(" ", _SPACE)
    if prefix:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replace])
        spell.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = replace
    if gemma:
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence(spell)
    return tokenizer


def _merges(tokens: list[str], vocabulary: dict[str, int], priority: list[float]) -> list[tuple[str, str]]:
    """Each way to cut a token into two tokens, best token first; sentencepiece joins the pair whose result is best."""
    order = sorted(range(len(tokens)), key=lambda number: (-priority[number], number))
    merges: list[tuple[str, str]] = []
    for number in order:
        token = tokens[number]
        cuts = [
            (vocabulary[token[:at]], vocabulary[token[at:]])
            for at in range(1, min(len(token), 256))
            if token[:at] in vocabulary and token[at:] in vocabulary
        ]
        merges.extend((tokens[left], tokens[right]) for left, right in sorted(cuts))
    return merges


def _bpe(
    models: Any, header: GgufHeader, vocabulary: dict[str, int], merges: list[tuple[str, str]], **options: Any
) -> Any:
    try:
        return models.BPE(vocab=vocabulary, merges=merges, **options)
    except Exception as error:  # tokenizers raises plain Exception, nothing narrower
        raise CheckpointError(
            f"expected a vocabulary that spells its own merges in {header.path.name}, got: {str(error)[:80]};"
            " download or convert it again"
        ) from error


def _pair(header: GgufHeader, merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if not left or not right:
        raise CheckpointError(
            f"expected merges of two tokens in {header.path.name}, got {merge[:40]!r}; download or convert it again"
        )
    return left, right


def _vocabulary(header: GgufHeader, tokens: list[str]) -> dict[str, int]:
    vocabulary = {token: number for number, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens) or not tokens:
        raise CheckpointError(
            f"expected distinct tokens in {header.path.name}, {len(tokens) - len(vocabulary)} of {len(tokens)} repeat"
            " another; download or convert it again"
        )
    return vocabulary


def _add_tokens(tokenizer: Any, header: GgufHeader, tokens: list[str]) -> None:
    """Control tokens become special, user-defined ones are matched whole like them but stay visible text."""
    from tokenizers import AddedToken

    types = header.numbers("tokenizer.ggml.token_type")
    phi3 = header.architecture == "phi3"
    marked = [(token, kind) for token, kind in zip(tokens, types, strict=False) if token]
    known = {tokens[number] for number in special_ids(header).values() if number < len(tokens)}
    control = [token for token, kind in marked if kind == _CONTROL or token in known]
    tokenizer.add_special_tokens(
        [
            AddedToken(token, normalized=False, special=True, rstrip=phi3 and token not in _PHI3_PLAIN)
            for token in control
        ]
    )
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized=False, special=False)
            for token, kind in marked
            if kind == _USER_DEFINED and token not in known
        ]
    )


def _frame(tokenizer: Any, header: GgufHeader, tokens: list[str], *, bos: bool) -> None:
    """Put bos before and eos after a text, as the file says; sentencepiece and llama 3 add bos if it says nothing."""
    from tokenizers import processors

    ids = special_ids(header)
    first = bool(header.metadata.get("tokenizer.ggml.add_bos_token", bos)) and "bos" in ids
    last = bool(header.metadata.get("tokenizer.ggml.add_eos_token", False)) and "eos" in ids
    used = {name: ids[name] for name, wanted in (("bos", first), ("eos", last)) if wanted}
    if any(number >= len(tokens) for number in ids.values()):
        raise CheckpointError(
            f"expected special tokens inside the vocabulary of {header.path.name}, got {ids}; download or"
            " convert it again"
        )
    if not used:
        return
    before = [tokens[used["bos"]]] if first else []
    after = [tokens[used["eos"]]] if last else []
    pair = [f"{token}:1" for token in before] + ["$B:1"] + [f"{token}:1" for token in after]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *pair],
        special_tokens=[(tokens[number], number) for number in used.values()],
    )
