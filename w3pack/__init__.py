"""w3pack: 3-bit lookup-table checkpoints and the runtime that executes them.

Importing this package makes transformers able to load w3pack checkpoints (now, or when transformers is imported later)
and does nothing else: no torch import, no CUDA context, no compilation.
"""

from __future__ import annotations

__version__ = "0.1.0"

from w3pack_autoload import install as _install

_install()
