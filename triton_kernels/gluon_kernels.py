"""Kernels in Gluon, Triton's language of explicit layouts: loaded when one is first needed.

Gluon is experimental, and a release of Triton may rename its parts.  So no other file imports it,
or a file written in it, and every kernel of this kind has one in plain Triton beside it.
"""

from __future__ import annotations

import logging
from functools import cache
from importlib import import_module
from types import ModuleType

import triton

log = logging.getLogger("ktgraph")


@cache
def gluon_kernel(file: str, op: str) -> ModuleType | None:
    """The module of a kernel for an op; None, with a warning, where this Triton cannot have it."""
    try:
        return import_module(f"ktgraph.triton_kernels.{file}")
    except (ImportError, AttributeError) as error:
        log.warning(
            "ktgraph: %s is slower than it could be: its kernel for this GPU (%s) is written in "
            "Gluon as Triton 3.6 to 3.9 have it, and Triton %s has another (%s)",
            op,
            file,
            triton.__version__,
            error,
        )
        return None


__all__ = ["gluon_kernel"]
