"""What to build: a file of the kernels folder, an entry point and its defines; and where that folder is."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from w3pack.errors import ResourceError, UsageError

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class KernelText:
    """One kernel to build; two with the same defines in another order are equal."""

    #: Relative to the kernels folder, with forward slashes.
    file: str
    #: Name of the `extern "C" __global__` function.
    entry: str
    #: Kept sorted by name.
    defines: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        """Sort the defines.

        Raises:
            UsageError: a file outside the folder, or a name that C++ or the preprocessor would not take.
        """
        path = PurePosixPath(self.file)
        if path.suffix != ".cu" or path.is_absolute() or ".." in path.parts or not self.file.isprintable():
            raise UsageError(
                f"expected a .cu file inside the kernels folder, got {self.file!r}; name it relative to it"
            )
        names = [name for name, _ in self.defines]
        for name in (self.entry, *names):
            if not _NAME.fullmatch(name):
                raise UsageError(f"expected an identifier in the kernel text of {self.file}, got {name!r}; rename it")
        if len(set(names)) != len(names):
            raise UsageError(f"expected each define of {self.entry} once, got {names}; remove the repeated ones")
        defines = tuple(sorted((name, int(value)) for name, value in self.defines))
        object.__setattr__(self, "defines", defines)

    def __str__(self) -> str:
        return " ".join([f"{self.file}:{self.entry}", *(f"{name}={value}" for name, value in self.defines)])


def kernels_folder() -> Path:
    """Folder of the device code: `w3pack/kernels` of an installed wheel, else `kernels/` at the top of the checkout.

    Raises:
        ResourceError: there is neither.
    """
    package = Path(__file__).resolve().parents[1]
    if (package / "kernels").is_dir():
        return package / "kernels"
    checkout = package.parent
    # Beside an installed w3pack lies site-packages, where `kernels` would be somebody else's package.
    if (checkout / "pyproject.toml").is_file() and (checkout / "kernels").is_dir():
        return checkout / "kernels"
    raise ResourceError(f"expected the device code in {package / 'kernels'}, got no such folder; reinstall w3pack")


def render(text: KernelText, folder: Path) -> str:
    """The program that NVRTC gets: the defines as lines, then the file, its own line numbers kept for messages.

    Raises:
        ResourceError: the file is not there or not readable.
    """
    path = folder / text.file
    try:
        body = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ResourceError(f"expected the kernel text {path}, got: {error}; reinstall w3pack") from error
    defines = "".join(f"#define {name} {value}\n" for name, value in text.defines)
    return f'{defines}#line 1 "{text.file}"\n{body}'


def folder_digest(folder: Path) -> str:
    """SHA-256 over names and bytes of every `.cuh` and `.cu` of the folder, any of which a kernel can include.

    Raises:
        ResourceError: one of them is not readable.
    """
    digest = hashlib.sha256()
    try:
        for path in sorted(path for path in folder.rglob("*.cu*") if path.suffix in {".cu", ".cuh"}):
            for part in (path.relative_to(folder).as_posix().encode(), path.read_bytes()):
                digest.update(len(part).to_bytes(8, "little") + part)
    except OSError as error:
        raise ResourceError(f"expected readable device code in {folder}, got: {error}; reinstall w3pack") from error
    return digest.hexdigest()
