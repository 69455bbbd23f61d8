"""Zero-shot tasks through lm-eval's own package, where it is installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from w3pack.errors import UnsupportedError, UsageError
from w3pack.integrations.language_model import open_language_model


def require_harness() -> Any:
    """The package lm_eval; UnsupportedError where it or what it runs transformers with is missing. Asked before any work."""
    try:
        import_module("lm_eval.models.huggingface")
        return import_module("lm_eval")
    except ImportError as error:
        raise UnsupportedError(
            f'expected the package lm_eval for --tasks, which does not import ({error}); pip install "lm_eval[hf]", or leave --tasks out'
        ) from error


def run_tasks(models: Mapping[str, str], tasks: Sequence[str], *, device: str = "cpu", seed: int = 0) -> dict[str, Any]:
    """Every task on every model, one model in memory at a time, as `lm_eval.simple_evaluate` runs it by default.

    Args:
        models: role ("model", "reference") -> model, as for `evaluate_model`.
        tasks: lm-eval's names, such as arc_easy.

    Returns:
        lm-eval's version, and role -> its "results", "versions" and "n-shot".

    Raises:
        UnsupportedError: lm-eval is not installed.
        UsageError: lm-eval knows no such task.
    """
    harness = require_harness()
    wrapper = import_module("lm_eval.models.huggingface").HFLM
    manager = import_module("lm_eval.tasks").TaskManager()
    unknown = [task for task in tasks if not manager.match_tasks([task])]
    if unknown:
        raise UsageError(f"expected tasks that lm-eval knows, got {', '.join(unknown)}; see lm-eval ls tasks")
    found: dict[str, Any] = {"lm_eval": getattr(harness, "__version__", None)}
    for role, name in models.items():
        with open_language_model(name) as opened:
            wrapped = wrapper(pretrained=opened.load(device), tokenizer=opened.tokenizer, batch_size=1)
            result = harness.simple_evaluate(
                model=wrapped,
                tasks=list(tasks),
                task_manager=manager,
                random_seed=seed,
                numpy_random_seed=seed,
                torch_random_seed=seed,
                fewshot_random_seed=seed,
            )
        found[role] = {key: result.get(key, {}) for key in ("results", "versions", "n-shot")}
    return found
