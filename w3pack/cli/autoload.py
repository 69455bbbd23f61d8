"""`w3pack autoload`"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from w3pack.errors import ResourceError


class State(StrEnum):
    """Values of the argument."""

    on = "on"
    off = "off"
    status = "status"


def command(state: Annotated[State, typer.Argument(help="on, off, or status.")] = State.status) -> None:
    """Turn automatic registration with transformers on or off in this environment.

    Example: `w3pack autoload off`
    """
    import w3pack_autoload

    marker = Path(w3pack_autoload.MARKER)
    try:
        if state is State.on:
            marker.unlink(missing_ok=True)
        elif state is State.off:
            marker.touch()
    except OSError as error:
        raise ResourceError(
            f"expected to write {marker}, got: {error.strerror}; run as the environment's owner"
        ) from error
    typer.echo("off" if marker.exists() else "on")
