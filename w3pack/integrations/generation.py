"""Text from a packed checkpoint, through transformers."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from w3pack.errors import CheckpointError, UsageError
from w3pack.pipeline.fused import holds_fused, open_fused
from w3pack.pipeline.packed import open_packed


@dataclass(frozen=True)
class Generation:
    """Generated text, the number of new tokens, and seconds for the prompt and for the rest."""

    text: str
    prompt_tokens: int
    new_tokens: int
    first_token_seconds: float
    decode_seconds: float

    @property
    def tokens_per_second(self) -> float:
        """New tokens after the first for each second."""
        return (self.new_tokens - 1) / self.decode_seconds if self.decode_seconds and self.new_tokens > 1 else 0.0


def generate(
    folder: Path,
    prompt: str,
    *,
    new_tokens: int = 64,
    chat: bool = False,
    temperature: float = 0.0,
    seed: int = 0,
    device: str = "cpu",
    on_text: Callable[[str], None] | None = None,
) -> Generation:
    """Continue `prompt` (or answer it, with `chat`).

    Args:
        folder: a packed checkpoint.
        new_tokens: at most this many new tokens.
        chat: put the prompt through the tokenizer's chat template.
        temperature: 0 decodes greedily; above 0 samples.
        on_text: told of each piece of text as it comes.

    Raises:
        CheckpointError: not a packed checkpoint, damaged, or without a tokenizer.
        UsageError: `chat` for a tokenizer that has no chat template.
    """
    (open_fused if holds_fused(folder) else open_packed)(folder)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"expected a tokenizer in {folder}, got none that loads; copy the tokenizer's files there"
        ) from error
    if chat and not tokenizer.chat_template:
        raise UsageError("expected a tokenizer with a chat template for --chat, got one without; leave the option out")
    model = AutoModelForCausalLM.from_pretrained(folder, device_map=device if device != "cpu" else None)
    if chat:
        encoded = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        encoded = tokenizer(prompt, return_tensors="pt")
    encoded = encoded.to(model.device)
    times: list[float] = []

    class Streamer(TextStreamer):  # type: ignore[misc]  # transformers is not typed
        def put(self, value: torch.Tensor) -> None:
            times.append(time.monotonic())
            super().put(value)

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            if on_text is not None and text:
                on_text(text)

    torch.manual_seed(seed)
    started = time.monotonic()
    sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    with torch.inference_mode():
        output = model.generate(
            **encoded,
            max_new_tokens=new_tokens,
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
            streamer=Streamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
            **sampling,
        )
    prompt_tokens = encoded["input_ids"].shape[1]
    new = output[0, prompt_tokens:]
    first = times[1] if len(times) > 1 else time.monotonic()
    return Generation(
        text=tokenizer.decode(new, skip_special_tokens=True),
        prompt_tokens=prompt_tokens,
        new_tokens=len(new),
        first_token_seconds=first - started,
        decode_seconds=(times[-1] - first) if len(times) > 1 else 0.0,
    )
