"""Counters of launches: zeros that each stream has for itself."""

from __future__ import annotations

import pytest
import torch

from ktgraph.triton_kernels import counters as module
from ktgraph.triton_kernels.counters import counters

CPU = torch.device("cpu")


def test_they_are_zeros_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_zeros", {})
    few = counters(1, CPU)
    assert not few.any()
    assert counters(7, CPU) is few
    many = counters(1 << 15, CPU)
    assert many.numel() >= 1 << 15
    assert many.data_ptr() != few.data_ptr()


def test_streams_do_not_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of two models may run at once on one GPU."""
    monkeypatch.setattr(module, "_zeros", {})
    found: list[int] = []
    for stream in (1, 2, 1):
        monkeypatch.setattr(module, "_stream", lambda device, at=stream: at)
        found.append(counters(1, CPU).data_ptr())
    assert found[0] == found[2] != found[1]
