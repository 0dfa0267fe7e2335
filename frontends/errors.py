"""`UnsupportedModelError`, and finding the line of a model's source that an export failed at."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from types import FrameType, TracebackType

from torch import nn

from ktgraph.errors import UnsupportedInputError


class UnsupportedModelError(UnsupportedInputError):
    """A model that cannot be traced: says what, where, and what to do next."""


@dataclass(frozen=True)
class Blame:
    """The innermost module of the model whose own source was running when tracing failed."""

    path: str
    cls: str
    file: str
    line: int
    source: str

    def __str__(self) -> str:
        where = f"{self.path} ({self.cls}), {self.file}:{self.line}"
        return f"{where}: `{self.source}`" if self.source else where


def blame(error: BaseException, model: nn.Module) -> Blame | None:
    """The innermost frame whose first argument is a module of `model`, None when there is none."""
    paths = {id(module): name for name, module in model.named_modules()}
    found: Blame | None = None
    trace = error.__traceback__
    while trace is not None:
        module = _first_argument(trace.tb_frame)
        if isinstance(module, nn.Module) and id(module) in paths and not _is_torch(trace):
            found = _blame(trace, paths[id(module)], module)
        trace = trace.tb_next
    return found


def _first_argument(frame: FrameType) -> object:
    names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
    return frame.f_locals.get(names[0]) if names else None


def _is_torch(trace: TracebackType) -> bool:
    name = str(trace.tb_frame.f_globals.get("__name__", ""))
    return name.split(".")[0] in ("torch", "ktgraph") or name.startswith("transformers.utils.")


def _blame(trace: TracebackType, path: str, module: nn.Module) -> Blame:
    file, line = trace.tb_frame.f_code.co_filename, trace.tb_lineno
    summary = traceback.extract_tb(trace, limit=1)[0]
    return Blame(path or "the model itself", type(module).__name__, file, line, summary.line or "")


def export_failed(error: Exception, model: nn.Module) -> UnsupportedModelError:
    """One message for any failure inside torch.export."""
    reason = next((ln.strip() for ln in str(error).splitlines() if ln.strip()), "no message")
    where = blame(error, model)
    at = f" at {where}" if where else ""
    hint = ""
    if "data-dependent" in str(error) or "unbacked" in str(error).lower():
        hint = (
            "That line's control flow depends on tensor values: rewrite it without Python "
            "branches or loops over tensor contents. "
        )
    return UnsupportedModelError(
        f"{type(model).__name__} cannot be traced: torch.export failed{at}.\n"
        f"  cause: {type(error).__name__}: {reason}\n"
        f"  next: {hint}If the class is a variant of a supported one, check that its attention "
        "goes through transformers' AttentionInterface and its experts through ExpertsInterface."
    )
