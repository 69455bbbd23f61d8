"""The ladder of calibrated quantisation as Markdown, from the JSON of `measure_calibrated.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Table = Callable[[list[str], list[list[str]]], str]
BASE = "nf3 absmax g128"


def section(document: dict[str, Any], table: Table, *, where: str) -> str:
    """Every method on every text, with the ratio of its KL to that of NF3 in groups of 128.

    Args:
        table: columns and rows -> Markdown.
        where: versions and processor.
    """
    results, texts = document["results"], list(document["texts"])
    base = next((row["texts"] for row in results if row["method"] == BASE), None)
    columns = ["method", "bits/weight", "processor minutes"]
    columns += [f"{text}: {figure}" for text in texts for figure in ("perplexity", "KL", "of NF3's", "p99 KL", "top-1")]
    rows = []
    for result in results:
        bits, seconds = result["bits_per_weight"], result.get("quantize_cpu_seconds")
        row = [
            result["method"],
            "-" if bits is None else f"{bits:.3f}",
            "-" if seconds is None else f"{seconds / 60:.1f}",
        ]
        for text in texts:
            found = result["texts"][text]
            ratio = "-" if base is None or bits is None else f"{found['kl_mean'] / base[text]['kl_mean']:.3f}"
            row += [
                f"{found['perplexity']:.2f}",
                f"{found['kl_mean']:.4f}",
                ratio,
                f"{found['kl_p99']:.2f}",
                f"{100 * found['top1_agreement']:.1f} %",
            ]
        rows.append(row)
    calibration = document["calibration"]
    gains = [
        f"{result['method']}: {tuning['before']:.4f} -> {tuning['after']:.4f} in {tuning['steps']} steps"
        for result in results
        if (tuning := result.get("tuning"))
    ]
    stage = f"KL of the last stage's own held-out windows: {'; '.join(gains)}. " if gains else ""
    return (
        f"### {document['model']['file']}\n\n"
        f"KL(source || quantised) in nats for each token, windows of {document['window']} tokens, {document['compute']}; "
        "the row `source` shows the noise floor. Calibrated on "
        f"{calibration['samples']} x {calibration['length']} tokens of: {', '.join(calibration['texts'])}. Time is that of all "
        "threads, reading the texts included, on a machine that was busy with other work: half of it, on two idle cores, is the "
        f"least that a run takes. {stage}{where}.\n\n{table(columns, rows)}\n`{' '.join(document['command'])}`\n"
    )


def summary(document: dict[str, Any], table: Table) -> str:
    """What each stage is worth, in a few lines for README.md."""
    results, texts = document["results"], list(document["texts"])
    base = next((row for row in results if row["method"] == BASE), None)
    chosen = [row for row in results if row["method"] == BASE or row["method"].startswith("w3pack")]
    if base is None or len(chosen) < 2:
        return ""
    rows = []
    for result in chosen:
        row = [result["method"], f"{result['bits_per_weight']:.3f}"]
        for text in texts:
            found = result["texts"][text]
            row.append(f"{found['perplexity']:.1f} / {found['kl_mean']:.3f}")
            row.append(f"{100 * (found['kl_mean'] / base['texts'][text]['kl_mean'] - 1):+.0f} %")
        rows.append(row)
    source = next(row for row in results if row["method"] == "source")
    columns = ["method", "bits/weight"]
    for text in texts:
        columns += [f"{text} (source {source['texts'][text]['perplexity']:.1f}): perplexity / KL", "KL"]
    calibration = document["calibration"]
    return (
        f"Calibrated on {calibration['samples']} x {calibration['length']} tokens of other text, {document['model']['file']}, "
        f"{'all' if len(texts) > 2 else 'both'} texts unseen, each stage of `--effort` beside NF3:\n\n{table(columns, rows)}\n"
    )
