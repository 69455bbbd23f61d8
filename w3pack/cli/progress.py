"""Progress on stderr, and only where somebody is looking."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm


@contextmanager
def bar(*, total: int, unit: str, quiet: bool) -> Iterator[Callable[[str, int], None]]:
    """A tqdm bar fed with (name, amount); silent when quiet or when stderr is no terminal."""
    hidden = quiet or not sys.stderr.isatty()
    with tqdm(total=total, unit=unit, unit_scale=True, disable=hidden, file=sys.stderr, smoothing=0.1) as shown:

        def advance(name: str, amount: int) -> None:
            shown.set_postfix_str(name[-40:], refresh=False)
            shown.update(amount)

        yield advance


def quiet_libraries() -> None:
    """Keep transformers' and the hub's own bars and advice off the terminal, unless logs were asked for."""
    if os.environ.get("W3PACK_LOG", "").lower() in ("debug", "info"):
        return
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "0" if sys.stderr.isatty() else "1")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="transformers")


def quiet_loading() -> None:
    """`quiet_libraries`, and no bar while transformers reads weights."""
    quiet_libraries()
    from w3pack.integrations.logs import hide_bars

    hide_bars()
