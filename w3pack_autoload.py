"""Teaches transformers about w3pack checkpoints as soon as transformers is imported.

The wheel carries `w3pack.pth`, which Python's `site` executes at start-up; it calls `install` here. Nothing is imported
until some program imports `transformers.quantizers.auto` itself; then the two classes are registered. `w3pack autoload off`
switches this off for an environment by leaving a marker file beside this module; `import w3pack` still registers.

This module stands outside the package so that starting Python does not import the package.
"""

import importlib.abc
import importlib.machinery
import sys
from pathlib import Path

TARGET = "transformers.quantizers.auto"
MARKER = Path(__file__).with_name("w3pack_autoload.off")


def _register():
    from w3pack.integrations.registration import register

    register()


class _Loader(importlib.abc.Loader):
    """Runs the real loader, then registers."""

    def __init__(self, loader):
        self._loader = loader

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        self._loader.exec_module(module)
        try:
            _register()
        except Exception as error:  # a broken w3pack must not keep transformers from being imported
            import warnings

            warnings.warn(f"w3pack could not register with transformers: {error}", stacklevel=2)


class _Finder(importlib.abc.MetaPathFinder):
    """Wraps the loader of one module, once."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname != TARGET:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


def install():
    """Register now if transformers is there already, else when it comes. Safe to call twice."""
    if TARGET in sys.modules:
        _register()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def start():
    """What `w3pack.pth` calls: `install`, unless switched off for this environment."""
    if not MARKER.exists():
        install()
