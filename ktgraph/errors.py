"""The base of ktgraph's own errors, and how any error a user can cause is shown in one message."""

from __future__ import annotations

import errno
from numbers import Integral
from pathlib import Path


class KtgraphError(Exception):
    """Something the user can put right: the message says what, expected against got, next step.

    Modules whose errors also fit a built-in class (`ValueError`, `OSError`) may derive from that
    alone; `user_message` recognises every error class that ktgraph defines.
    """


class UnsupportedInputError(KtgraphError, ValueError):
    """A model, prompt or argument of a kind that ktgraph does not take."""


class ContextLimitError(KtgraphError, ValueError):
    """A prompt or a batch that does not fit into the cache the model was compiled with."""


class MemoryBudgetError(KtgraphError, MemoryError):
    """A model that does not fit into the memory that is free, said before anything is loaded."""


def path_of(name: str, given: object) -> Path:
    """What a user gave as a path; raises UnsupportedInputError for anything else."""
    if isinstance(given, (str, Path)):
        return Path(given)
    raise UnsupportedInputError(f"{name}={given!r}: expected a path")


def is_whole(value: object) -> bool:
    """Whether a user gave a whole number; numpy's count, True does not."""
    return type(value) is not bool and isinstance(value, Integral)


def is_full(error: BaseException) -> bool:
    """Whether a file could not be written for want of room: the disk's, or a limit's."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def user_message(error: BaseException) -> str | None:
    """The text to show for an error instead of a traceback, None for a fault in ktgraph itself.

    Shown: errors of classes that ktgraph defines, files that cannot be opened, and missing memory.
    """
    if isinstance(error, KtgraphError) or _is_ours(error):
        return str(error)
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror or type(error).__name__}"
    if is_full(error):  # written to a file that is open knows no name
        return f"{error}: a file could not be written; make room on its disk and run this again"
    return None


def _is_ours(error: BaseException) -> bool:
    return type(error).__module__.split(".")[0] == "ktgraph"
