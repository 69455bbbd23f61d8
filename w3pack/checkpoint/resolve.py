"""What the user typed -> a folder or GGUF file on this machine."""

from __future__ import annotations

import os
import re
from pathlib import Path

from w3pack.errors import CheckpointError, ResourceError, UsageError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?(@[\w./-]+)?")
_WANTED = [
    "*.safetensors",
    "*.json",
    "*.txt",
    "*.model",
    "*.jinja",
    "*.py",
    "*.md",
    "*.tiktoken",
    "LICENSE*",
    "NOTICE*",
]


def resolve(model: str) -> Path:
    """A local folder or `.gguf` file as it is; a hub id (`org/name` or `org/name@revision`) downloaded to the hub's cache.

    Raises:
        UsageError: neither an existing path nor anything that could be a hub id.
        CheckpointError: the hub knows no such model, or a file that is neither a folder nor GGUF.
        ResourceError: the hub cannot be reached.
    """
    path = Path(os.path.expanduser(model))  # unlike Path.expanduser, it leaves the name of an unknown user alone
    if model.strip() and os.path.isdir(path):
        return path
    if model.strip() and os.path.exists(path):
        if path.suffix != ".gguf":
            raise CheckpointError(
                f"expected a checkpoint folder or a .gguf file, got {path}; pass the folder that holds it"
            )
        return path
    if model.endswith(".gguf") or model.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(model):
        raise UsageError(
            f"expected a folder, a .gguf file or a hub id, got {model!r}, which does not exist; check the path"
        )
    return _download(model)


def _download(model: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    repository, _, revision = model.partition("@")
    try:
        return Path(snapshot_download(repository, revision=revision or None, allow_patterns=_WANTED))
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise CheckpointError(
            f"expected a local folder or a hub id, got {model!r}, which is neither; check the name, or log in for a gated model"
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise ResourceError(
            f"expected to download {model} from the hub, which could not be reached ({type(error).__name__}), and there is no "
            "such folder here; check the connection or the path"
        ) from error
