"""transformers' own output."""

from __future__ import annotations


def hide_bars() -> None:
    """No progress bars from transformers in this process."""
    from transformers.utils import logging

    logging.disable_progress_bar()
