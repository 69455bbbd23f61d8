"""The `w3pack` command: one sentence and an exit code for everything that can go wrong."""

from __future__ import annotations

import functools
import io
import logging
import os
import sys
import traceback
from collections.abc import Callable
from typing import Annotated, Any

import typer

from w3pack import __version__
from w3pack.cli import autoload, bench, doctor, fuse_gateup, generate, import_, inspect, quantize, tune, verify
from w3pack.cli import eval as eval_command
from w3pack.errors import W3PackError

EXIT_UNEXPECTED = 1
EXIT_USAGE = 2
EXIT_RESOURCE = 5
EXIT_INTERRUPTED = 130
#: The class of every complaint of the option parser, which typer takes from click or from its own copy of it.
_USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]

app = typer.Typer(
    name="w3pack",
    help="3-bit lookup-table checkpoints: quantise, look inside, verify, generate, measure.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def _guarded(command: Callable[..., None]) -> Callable[..., None]:
    """Take interruptions and closed pipes before typer, which ends the process without a word."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
            sys.stdout.flush()
        except KeyboardInterrupt as error:
            raise _InterruptedRun from error
        except BrokenPipeError:  # the reader, such as `head`, has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

    return run


class _InterruptedRun(W3PackError):
    """Ctrl-C."""

    exit_code = EXIT_INTERRUPTED

    def __str__(self) -> str:
        return "interrupted, and nothing half-written was left as output; if a file was finished, the same command with --resume goes on from there"


for _command in (
    quantize,
    import_,
    fuse_gateup,
    inspect,
    verify,
    eval_command,
    generate,
    bench,
    tune,
    doctor,
    autoload,
):
    app.command(_command.__name__.rpartition(".")[2].rstrip("_").replace("_", "-"))(_guarded(_command.command))


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
    levels = logging.getLevelNamesMapping()
    level = levels.get(os.environ.get("W3PACK_LOG", "warning").upper(), logging.WARNING)
    logging.basicConfig(level=level, stream=sys.stderr, format="%(name)s: %(message)s")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a name that the terminal cannot show ends no finished run
    try:
        code = app(standalone_mode=False)
    except W3PackError as error:
        _fail(str(error), error.exit_code)
    except _USAGE_ERROR as error:
        _fail_usage(error)
    except (KeyboardInterrupt, typer.Abort):
        _fail(str(_InterruptedRun()), EXIT_INTERRUPTED)
    except MemoryError:
        _fail("expected enough memory, got none left; close other programs or use a machine with more", EXIT_RESOURCE)
    except OSError as error:
        what = error.filename if error.filename is not None else "a file"
        _fail(f"expected to use {what}, got: {error.strerror or error}; check the path and the disk", EXIT_RESOURCE)
    except Exception as error:  # noqa: BLE001 - the last resort: a sentence instead of a traceback
        if "out of memory" in str(error).lower() or "can't allocate memory" in str(error).lower():
            _fail("expected enough memory, got none left; use --device cpu or a machine with more", EXIT_RESOURCE)
        if os.environ.get("W3PACK_LOG", "").lower() == "debug":
            traceback.print_exc()
        line = (str(error).splitlines() or [""])[0][:300]
        _fail(
            f"unexpected {type(error).__name__}: {line}; run again with W3PACK_LOG=debug and report it", EXIT_UNEXPECTED
        )
    sys.exit(code if isinstance(code, int) else 0)


def _fail_usage(error: Exception) -> None:
    """What the option parser found, as one line; for a bare `w3pack` the help, which the parser sends as its message."""
    message = getattr(error, "format_message", lambda: str(error))()
    if not message.strip() or "Usage:" in message:
        typer.echo(message or "w3pack: expected a command, got none; see w3pack --help", err=True)
        sys.exit(EXIT_USAGE)
    path = getattr(getattr(error, "ctx", None), "command_path", "w3pack")
    _fail(f"{message.strip().rstrip('.')}; see {path} --help", EXIT_USAGE)


def _fail(message: str, code: int) -> None:
    # one line, and nothing that a terminal obeys: names in hostile files may hold anything
    line = "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in message)
    typer.echo(f"w3pack: {line}", err=True)
    sys.exit(code)
