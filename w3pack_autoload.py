"""Teaches transformers about w3pack checkpoints as soon as transformers is imported.

The wheel carries `w3pack.pth`, which Python's `site` executes at start-up; it calls `start` here. Nothing is imported
until some program imports `transformers.quantizers.auto` itself; then the two classes are registered. `w3pack autoload off`
switches this off for an environment by leaving a marker file beside this module; `import w3pack` still registers.

This module stands outside the package, and imports next to nothing, because every start of Python pays for it.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec
    from types import ModuleType

TARGET = "transformers.quantizers.auto"
MARKER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "w3pack_autoload.off")


def _register() -> None:
    from w3pack.integrations.registration import register

    register()


class _Loader:
    """Runs the real loader, then registers."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        try:
            _register()
        except Exception as error:  # a broken w3pack must not keep transformers from being imported
            import warnings

            warnings.warn(f"w3pack could not register with transformers: {error}", stacklevel=2)


class _Finder:
    """Wraps the loader of one module, once."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != TARGET:
            return None
        from importlib.machinery import PathFinder

        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)  # type: ignore[assignment]  # a loader by its methods, not by its base
        return spec


def install() -> None:
    """Register now if transformers is there already, else when it comes. Safe to call twice."""
    if TARGET in sys.modules:
        _register()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def start() -> None:
    """What `w3pack.pth` calls: `install`, unless switched off for this environment."""
    if not os.path.exists(MARKER):
        install()
