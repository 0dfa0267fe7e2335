"""Host memory that a GPU copies from: whole pages of one owner, registered while it lives."""

from __future__ import annotations

import gc
import mmap
from types import SimpleNamespace

import pytest
import torch

from ktgraph.cpu_kernels import empty_packed
from ktgraph.runtime.gpu import pinning
from ktgraph.runtime.gpu.cuda import CudaDevice
from ktgraph.runtime.gpu.driver import DriverError

PAGE = mmap.PAGESIZE


class Driver:
    """What a CUDA driver holds: registrations of whole pages, none over another."""

    def __init__(self) -> None:
        self.held: dict[int, int] = {}

    def register(self, address: int, nbytes: int) -> None:
        assert address % PAGE == 0
        assert nbytes % PAGE == 0
        for begin, size in self.held.items():
            if address < begin + size and begin < address + nbytes:
                raise DriverError("already mapped")
        self.held[address] = nbytes

    def unregister(self, address: int) -> None:
        del self.held[address]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(pinning, "register_host", made.register)
    monkeypatch.setattr(pinning, "unregister_host", made.unregister)
    return made


def _bytes(nbytes: int) -> torch.Tensor:
    return torch.as_tensor(empty_packed(nbytes))


@pytest.mark.parametrize("nbytes", [1, 100, PAGE, PAGE + 1, 3 << 20])
def test_packed_memory_has_its_pages_to_itself(nbytes: int) -> None:
    held = [empty_packed(nbytes) for _ in range(5)]
    begins = [a.ctypes.data for a in held]
    assert all(b % PAGE == 0 for b in begins)
    pages = [p for b in begins for p in range(b, b + max(nbytes, 1), PAGE)]
    assert len(pages) == len(set(pages))


def test_small_neighbours_are_registered_apart(driver: Driver) -> None:
    weights = [_bytes(n) for n in (70, PAGE + 70, 5000, 64)]
    pinned = [pinning.pin(w) for w in weights]
    assert sorted(driver.held.values()) == [PAGE, PAGE, 2 * PAGE, 2 * PAGE]
    assert {w.data_ptr() for w in weights} == set(driver.held)
    del pinned


def test_registration_ends_before_the_memory(driver: Driver) -> None:
    """Else the next owner of these pages can neither register them nor copy from some of them."""
    pinned = pinning.pin(_bytes(3 * PAGE))
    assert driver.held
    del pinned
    gc.collect()
    assert not driver.held
    for _ in range(20):  # the same addresses come back
        pinned = pinning.pin(_bytes(3 * PAGE))
        assert len(driver.held) == 1
        del pinned


def test_holders_share_a_registration(driver: Driver) -> None:
    weight = _bytes(100)
    first, second = pinning.pin(weight), pinning.pin(weight)
    assert first is second
    del first
    assert driver.held
    del second
    assert not driver.held


def test_pages_of_others_are_refused(driver: Driver) -> None:
    whole = _bytes(PAGE)
    with pytest.raises(DriverError, match="page of its own"):
        pinning.pin(whole[64:])
    assert not driver.held


def test_a_registration_is_shared_only_by_what_it_covers(driver: Driver) -> None:
    """A copy of a whole whose first pages alone are registered would be refused."""
    whole = _bytes(3 * PAGE)
    part = pinning.pin(whole[:PAGE])
    with pytest.raises(DriverError, match="a part of it is registered already"):
        pinning.pin(whole)
    assert pinning.pin(whole[8:10]) is part
    del part
    pinned = pinning.pin(whole)
    assert pinning.pin(whole[PAGE:]) is pinned
    assert driver.held == {whole.data_ptr(): 3 * PAGE}


def test_a_device_holds_what_another_registered(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch calls such memory pinned; but the registration must not end with the other device."""
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: bool(driver.held))
    first, second = (SimpleNamespace(_pinned=list[pinning.Pinned]()) for _ in range(2))
    weight = _bytes(PAGE)
    for device in (first, second):
        assert CudaDevice.pin(device, weight) == ""  # type: ignore[arg-type]
    first._pinned.clear()
    assert driver.held
    second._pinned.clear()
    assert not driver.held
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: True)  # by torch
    assert CudaDevice.pin(first, weight) == ""  # type: ignore[arg-type]
    assert not driver.held


def test_a_refusal_leaves_nothing_registered(driver: Driver) -> None:
    weight = _bytes(5 * PAGE)
    driver.register(weight.data_ptr() + 4 * PAGE, PAGE)
    with pytest.raises(DriverError, match="already mapped"):
        pinning.pin(weight)
    assert list(driver.held) == [weight.data_ptr() + 4 * PAGE]


def test_memory_of_any_size_is_one_registration(driver: Driver) -> None:
    """A copy from one registration into the next would be refused."""
    pinned = pinning.pin(_bytes((64 << 20) + 1))
    assert list(driver.held.values()) == [(64 << 20) + PAGE]
    del pinned


@pytest.mark.gpu
def test_models_one_after_another_copy_from_reused_pages() -> None:
    """What a driver refuses: pages that an earlier owner left registered."""
    for size in (3 * PAGE + 64, 9 * PAGE, 2 * PAGE + 8, 5 * PAGE) * 3:
        weight, target = _bytes(size), torch.empty(size, dtype=torch.uint8, device="cuda")
        weight.fill_(size % 251)
        pinned = pinning.pin(weight)
        target.copy_(weight, non_blocking=True)
        torch.cuda.synchronize()
        assert bool((target == size % 251).all())
        del pinned
