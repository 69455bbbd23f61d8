"""`w3pack eval`"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from w3pack.cli import render_eval
from w3pack.cli.progress import bar, quiet_loading
from w3pack.cli.values import pick_device


def command(
    model: Annotated[
        str, typer.Argument(help="A folder that w3pack wrote, any checkpoint folder, .gguf file or hub id.")
    ],
    reference: Annotated[str | None, typer.Option(help="What it was made from: compare token by token.")] = None,
    dataset: Annotated[
        list[Path] | None,
        typer.Option(help="Text: .txt, .jsonl or .parquet. Repeatable. Default: Python's help topics."),
    ] = None,
    field: Annotated[str, typer.Option(help="Where a .jsonl or .parquet record holds its text.")] = "text",
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of each text.")] = 8192,
    window: Annotated[int, typer.Option(min=3, help="Tokens that a model sees at once.")] = 512,
    tasks: Annotated[str | None, typer.Option(help="lm-eval tasks, with commas; needs the package lm_eval.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Seed of --tasks; the texts need none.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    json: Annotated[
        bool, typer.Option("--json", help="Everything, with digests and versions, as JSON on stdout.")
    ] = False,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="No progress bar.")] = False,
) -> None:
    """Measure a model on texts: perplexity and, with --reference, how far its answers are from the source's.

    Example: `w3pack eval qwen3-w3 --reference Qwen/Qwen3-0.6B --dataset book.txt`
    """
    quiet_loading()
    from w3pack.integrations.evaluation import CHARACTERS_PER_TOKEN, evaluate_model
    from w3pack.integrations.harness import require_harness, run_tasks
    from w3pack.pipeline.texts import default_text, read_text

    if tasks:
        require_harness()
    enough = CHARACTERS_PER_TOKEN * tokens
    texts = [read_text(path, field=field, characters=enough) for path in dataset or ()] or [default_text(enough)]
    chosen = pick_device(device)
    with ExitStack() as stack:
        found = evaluate_model(
            model, reference=reference, texts=texts, tokens=tokens, window=window, device=chosen, seed=seed,
            progress=lambda total: stack.enter_context(bar(total=total, unit="window", quiet=quiet or json)),
        ).to_dict()  # fmt: skip
    if tasks:
        roles = {"model": model} | ({"reference": reference} if reference is not None else {})
        found["tasks"] = run_tasks(roles, [task.strip() for task in tasks.split(",")], device=chosen, seed=seed)
    render_eval.evaluation(found, as_json=json)
