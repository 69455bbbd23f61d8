"""Every error that w3pack raises on purpose.

Each message is one sentence that says what was expected, what came and what to do. The class decides the exit code of
the command line (README, "Exit codes").
"""

from __future__ import annotations


class W3PackError(Exception):
    """Base of every error raised on purpose; its `exit_code` is what the command line returns."""

    exit_code = 1


class UsageError(W3PackError):
    """The arguments contradict each other, name something that is not there, or ask for what cannot be."""

    exit_code = 2


class UnsupportedError(W3PackError):
    """The model, tensor shape or source format is sound but not one that w3pack handles."""

    exit_code = 3


class CheckpointError(W3PackError):
    """The checkpoint on disk is damaged, incomplete or does not fit its own description."""

    exit_code = 4


class ResourceError(W3PackError):
    """Memory or disk space does not suffice, or a file cannot be written."""

    exit_code = 5


class VerificationError(W3PackError):
    """The files are readable but are not what the manifest, or the source, says they are."""

    exit_code = 6
