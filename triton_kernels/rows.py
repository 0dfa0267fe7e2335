"""`Rows`: an operand [..., D] as rows that two strides address, so that views need no copy."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rows:
    """Row r begins at (r // inner) * outer_stride + (r % inner) * inner_stride."""

    count: int
    inner: int
    outer_stride: int
    inner_stride: int

    @staticmethod
    def of(x: torch.Tensor) -> Rows:
        """Raises ValueError when three or more strides would be needed."""
        if x.shape[-1] > 1 and x.stride(-1) != 1:
            raise ValueError(f"last axis of {tuple(x.shape)} has stride {x.stride(-1)}, not 1")
        axes = _merged(x)
        if len(axes) > 2:
            raise ValueError(f"{tuple(x.shape)} with strides {x.stride()} needs over two strides")
        (outer, outer_stride), (inner, inner_stride) = [(1, 0)] * (2 - len(axes)) + axes
        return Rows(outer * inner, inner, outer_stride, inner_stride)


def _merged(x: torch.Tensor) -> list[tuple[int, int]]:
    """(size, stride) of the leading axes, those of size 1 left out and dense neighbours joined."""
    axes: list[tuple[int, int]] = []
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        if size == 1:
            continue
        if axes and axes[-1][1] == size * stride:
            axes[-1] = (axes[-1][0] * size, stride)
        else:
            axes.append((size, stride))
    return axes


def tile_rows(count: int, width: int, elements: int) -> int:
    """Rows of a program that covers about `elements` of rows of `width`; 1 when rows are few.

    `width` is a power of two.  While there are fewer rows than multiprocessors a program per row
    is fastest: nothing is gained by letting one wait for another.
    """
    if count <= 128:
        return 1
    return max(1, elements // width)


__all__ = ["Rows", "tile_rows"]
