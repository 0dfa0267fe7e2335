"""A model packed once: a folder with `model.ktplan`, mapped at every later start.

`write_folder` fills a draft beside the folder (.NAME.part) and renames it when all is written, so
that nothing half-written is ever found under the final name.  Weights are packed one after another
straight into the file: the model need not fit into memory.  A draft that was interrupted keeps its
finished weights, and the same call goes on behind them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ktgraph.errors import UnsupportedInputError

if TYPE_CHECKING:
    from ktgraph.stages import Lowered

PLAN = "model.ktplan"
_REPORTS = ("quantize.txt", "placement.txt", "memory.txt")  # of the passes, beside the weights
_RESTART = ("context", "cache_rows", "threads")  # options that packed weights do not depend on


def plan_in(path: object) -> Path | None:
    """The .ktplan that a path means: the file itself, or a folder that holds model.ktplan."""
    if not isinstance(path, (str, Path)):
        return None
    path = Path(path)
    if path.suffix == ".ktplan" and path.is_file():
        return path
    return path / PLAN if (path / PLAN).is_file() else None


def check_restart(path: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """Options that may change at a start from packed weights; raises for any other that is given.

    `given` holds names and values; None means that nothing was asked for.
    """
    asked = {name: value for name, value in given.items() if value is not None}
    fixed = sorted(asked.keys() - set(_RESTART))
    if not fixed:
        return asked
    shown = ", ".join(f"{name}={asked[name]!r}" for name in fixed)
    raise UnsupportedInputError(
        f"{path} holds weights that are packed already: {shown} cannot change now. "
        f"{', '.join(_RESTART)} can; for the rest pack the model again "
        "(ktgraph quantize MODEL -o DIR)"
    )


def check_folder(folder: Path, *, overwrite: bool = False) -> None:
    """Raise UnsupportedInputError where a packed model cannot be written to `folder`."""
    if not folder.absolute().parent.is_dir():
        raise UnsupportedInputError(f"{folder}: there is no folder {folder.parent}: make it first")
    if not os.path.lexists(folder):
        return
    if not folder.is_dir():
        raise UnsupportedInputError(f"{folder} is a file: give the name of a new folder")
    if not any(folder.iterdir()):
        return
    if not (folder / PLAN).is_file():
        raise UnsupportedInputError(
            f"{folder} holds other files, and no {PLAN}: give the name of a new folder"
        )
    if not overwrite:
        raise UnsupportedInputError(
            f"{folder} holds a packed model: give another name, or replace it with --overwrite"
        )


def write_folder(
    lowered: Lowered,
    folder: str | Path,
    *,
    overwrite: bool = False,
    say: Callable[[str], None] | None = None,
) -> Path:
    """Pack the weights of a lowered model into a folder; gives the folder.

    overwrite: replace a packed model that is there; the old one stays until the new one is whole.
    say: is told when it goes on behind weights that an interrupted call finished, and where an
        interrupt leaves them.
    Raises UnsupportedInputError, DiskSpaceError, and errors of the checkpoint.
    """
    from ktgraph.runtime.planfile_draft import DraftBusyError, is_resumable

    folder = Path(folder).absolute()
    check_folder(folder, overwrite=overwrite)
    draft = folder.with_name(f".{folder.name}.part")
    draft.mkdir(exist_ok=True)
    try:
        lowered.save(draft / PLAN, resume=True, say=say)
        for name in _REPORTS:
            text = lowered.context.artifacts.get(name)
            (draft / name).unlink(missing_ok=True)  # of an interrupted call with other options
            if text:
                (draft / name).write_text(text, encoding="utf-8")
        _put(draft, folder)
    except DraftBusyError:  # all that is there is another process's
        raise
    except BaseException:
        if not is_resumable(draft / PLAN):
            shutil.rmtree(draft, ignore_errors=True)
        elif say is not None:
            say(f"stopped: the same command goes on from here; to give it up delete {draft}")
        raise
    return folder


def _put(draft: Path, folder: Path) -> None:
    """Rename; a folder that is replaced steps aside first, and comes back when that fails."""
    if not folder.exists() or not any(folder.iterdir()):
        draft.replace(folder)
        return
    old = folder.with_name(f".{folder.name}.old.{os.getpid()}")
    folder.replace(old)
    try:
        draft.replace(folder)
    except OSError:
        old.replace(folder)
        raise
    shutil.rmtree(old)


__all__ = ["PLAN", "check_folder", "check_restart", "plan_in", "write_folder"]
