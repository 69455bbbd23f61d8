"""`w3pack generate`"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from w3pack.cli.progress import quiet_loading
from w3pack.cli.values import pick_device


def command(
    checkpoint: Annotated[Path, typer.Argument(help="A folder that w3pack wrote.")],
    prompt: Annotated[str, typer.Argument(help="Text to continue.")],
    new_tokens: Annotated[int, typer.Option("-n", "--new-tokens", min=1, help="At most this many new tokens.")] = 64,
    chat: Annotated[bool, typer.Option("--chat", help="Treat the prompt as a chat message.")] = False,
    temperature: Annotated[float, typer.Option(min=0, help="0: greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed when sampling.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="No timing on stderr.")] = False,
) -> None:
    """Generate text with a packed checkpoint.

    Example: `w3pack generate qwen3-w3 "Once upon a time" -n 64`
    """
    quiet_loading()
    from w3pack.integrations.generation import generate

    pending = "" if chat else prompt  # shown with the first text, so that a failure finds a clean line

    def show(text: str) -> None:
        nonlocal pending
        sys.stdout.write(pending + text)
        sys.stdout.flush()
        pending = ""

    if sys.stderr.isatty() and not quiet:
        typer.echo("loading; the first token also unpacks every matrix", err=True)
    result = generate(
        checkpoint, prompt, new_tokens=new_tokens, chat=chat, temperature=temperature, seed=seed,
        device=pick_device(device), on_text=show,
    )  # fmt: skip
    show("\n")
    if not quiet:
        typer.echo(
            f"{result.new_tokens} tokens, first after {result.first_token_seconds:.2f} s, then {result.tokens_per_second:.1f} tokens/s",
            err=True,
        )
