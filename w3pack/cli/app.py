"""The `w3pack` command: one sentence and an exit code for everything that can go wrong."""

from __future__ import annotations

import logging
import os
import sys
import traceback
from typing import Annotated

import typer

from w3pack import __version__
from w3pack.cli import autoload, generate, inspect, quantize, verify
from w3pack.errors import W3PackError

EXIT_UNEXPECTED = 1
EXIT_RESOURCE = 5
EXIT_INTERRUPTED = 130

app = typer.Typer(
    name="w3pack",
    help="3-bit lookup-table checkpoints: quantise, look inside, verify, generate.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
app.command("quantize")(quantize.command)
app.command("inspect")(inspect.command)
app.command("verify")(verify.command)
app.command("generate")(generate.command)
app.command("autoload")(autoload.command)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point: run the command and turn every failure into a sentence on stderr and an exit code."""
    level = os.environ.get("W3PACK_LOG", "warning").upper()
    logging.basicConfig(
        level=getattr(logging, level, logging.WARNING), stream=sys.stderr, format="%(name)s: %(message)s"
    )
    try:
        app()
    except W3PackError as error:
        _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        _fail("interrupted; unfinished work can be continued with --resume", EXIT_INTERRUPTED)
    except MemoryError:
        _fail("expected enough memory, got none left; close other programs or use a machine with more", EXIT_RESOURCE)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(0)
    except Exception as error:  # noqa: BLE001 - the last resort: a sentence instead of a traceback
        if "out of memory" in str(error).lower() or "can't allocate memory" in str(error).lower():
            _fail("expected enough memory, got none left; use --device cpu or a machine with more", EXIT_RESOURCE)
        if os.environ.get("W3PACK_LOG", "").lower() == "debug":
            traceback.print_exc()
        line = (str(error).splitlines() or [""])[0]
        _fail(
            f"unexpected {type(error).__name__}: {line}; run again with W3PACK_LOG=debug and report it", EXIT_UNEXPECTED
        )


def _fail(message: str, code: int) -> None:
    typer.echo(f"w3pack: {message}", err=True)
    sys.exit(code)
