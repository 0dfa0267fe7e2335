"""Errors of a plan that runs."""

from __future__ import annotations


class ExecutionError(RuntimeError):
    """An op failed while a plan ran; the message names its line in the IR."""


__all__ = ["ExecutionError"]
