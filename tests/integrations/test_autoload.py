"""Starting Python with w3pack installed costs nothing, and transformers knows w3pack whichever is imported first."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import w3pack_autoload
from w3pack.integrations.registration import register

#: Undoes what a .pth of an installed w3pack has done, so that each program starts from nothing.
FRESH = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__module__ != "w3pack_autoload"]
sys.modules.pop("w3pack_autoload", None)
"""


def copy_of_autoload(folder: Path) -> ModuleType:
    """The module as if installed in `folder`, apart from the one that is in use."""
    path = folder / "w3pack_autoload.py"
    path.write_bytes(Path(w3pack_autoload.__file__).read_bytes())
    spec = importlib.util.spec_from_file_location("autoload_copy", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_start_imports_next_to_nothing(python: Callable[[str], str]) -> None:
    printed = python(
        FRESH
        + """
before = set(sys.modules)
import w3pack_autoload
w3pack_autoload.start()
print(sorted({name.partition(".")[0] for name in set(sys.modules) - before}))
import w3pack
print(sorted({name.partition(".")[0] for name in set(sys.modules) - before}))
"""
    ).splitlines()
    started, imported = (set(ast.literal_eval(line)) for line in printed)
    assert started <= {"w3pack_autoload"} | set(sys.stdlib_module_names)
    assert imported <= {"w3pack_autoload", "w3pack"} | set(sys.stdlib_module_names)


def test_registers_when_transformers_comes(python: Callable[[str], str]) -> None:
    printed = python(
        FRESH
        + """
import w3pack_autoload
w3pack_autoload.start()
w3pack_autoload.start()
import w3pack
assert "transformers" not in sys.modules and "torch" not in sys.modules
assert len([finder for finder in sys.meta_path if type(finder).__module__ == "w3pack_autoload"]) == 1
from transformers.quantizers import auto
print(auto.AUTO_QUANTIZER_MAPPING["w3pack"].__name__, auto.AUTO_QUANTIZATION_CONFIG_MAPPING["w3pack"].__name__)
assert not [finder for finder in sys.meta_path if type(finder).__module__ == "w3pack_autoload"]
w3pack_autoload.install()  # again, now that transformers is there
"""
    )
    assert printed.split() == ["W3HfQuantizer", "W3QuantizationConfig"]


def test_a_broken_registration_only_warns(python: Callable[[str], str]) -> None:
    printed = python(
        FRESH
        + """
import warnings
sys.modules["w3pack.integrations.registration"] = None
import w3pack_autoload
w3pack_autoload.start()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from transformers.quantizers import auto
assert "w3pack" not in auto.AUTO_QUANTIZER_MAPPING and "gptq" in auto.AUTO_QUANTIZER_MAPPING
print([str(warning.message) for warning in caught if "w3pack" in str(warning.message)])
# mended, in the other order: transformers is there when w3pack comes
del sys.modules["w3pack.integrations.registration"]
import w3pack
w3pack_autoload.install()
assert "w3pack" in auto.AUTO_QUANTIZER_MAPPING
"""
    )
    (message,) = ast.literal_eval(printed.splitlines()[0])
    assert message.startswith("w3pack could not register with transformers:")


def test_importing_the_quantizer_first_registers_it(python: Callable[[str], str]) -> None:
    printed = python(
        FRESH
        + """
import warnings
warnings.simplefilter("error")
from w3pack.integrations.hf_quantizer import W3HfQuantizer  # imports transformers half-way through itself
from transformers.quantizers import auto
print(auto.AUTO_QUANTIZER_MAPPING["w3pack"] is W3HfQuantizer)
"""
    )
    assert printed.split() == ["True"]


def test_registering_twice_is_harmless() -> None:
    from transformers.quantizers import auto

    register()
    first = auto.AUTO_QUANTIZER_MAPPING["w3pack"]
    register()
    assert auto.AUTO_QUANTIZER_MAPPING["w3pack"] is first


def test_marker_file_switches_it_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = copy_of_autoload(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.delitem(sys.modules, copy.TARGET, raising=False)
    known = list(sys.meta_path)
    marker = tmp_path / "w3pack_autoload.off"
    assert str(copy.MARKER) == str(marker)
    marker.touch()
    copy.start()
    assert sys.meta_path == known
    marker.unlink()
    copy.start()
    assert [type(finder).__name__ for finder in sys.meta_path if finder not in known] == ["_Finder"]


def test_install_ignores_the_marker_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = copy_of_autoload(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.delitem(sys.modules, copy.TARGET, raising=False)
    Path(copy.MARKER).touch()
    copy.install()  # what `import w3pack` calls
    assert isinstance(sys.meta_path[0], copy._Finder)


def test_finder_leaves_other_modules_alone(tmp_path: Path) -> None:
    finder = copy_of_autoload(tmp_path)._Finder()
    assert finder.find_spec("transformers.quantizers", None) is None
    assert finder.find_spec("json", None) is None
