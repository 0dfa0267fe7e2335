"""Counters that the programs of a launch count up, and its last program sets back to zero."""

from __future__ import annotations

import torch
import triton

_LEAST = 1 << 14
_zeros: dict[tuple[torch.device, int, int], torch.Tensor] = {}


def counters(count: int, device: torch.device) -> torch.Tensor:
    """i32[count or more] zeros, which every launch leaves at zero.

    Each stream has its own: launches of one follow each other, those of two may run at once.  They
    outlive graphs, and so are refused while one is captured, in whose memory they would lie.
    """
    key = (device, _stream(device), max(_LEAST, triton.next_power_of_2(count)))
    if key not in _zeros:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("run this size once on this stream before capturing a graph")
        _zeros[key] = torch.zeros(key[2], dtype=torch.int32, device=device)
    return _zeros[key]


def _stream(device: torch.device) -> int:
    """The handle of torch's current stream."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


__all__ = ["counters"]
