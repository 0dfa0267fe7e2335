"""Host memory that a GPU's copy engine reads: registered with the driver while somebody uses it.

The driver registers whole pages and counts them by address, not by who owns them.  A copy from
memory of which some pages are registered and some are not is refused ("invalid argument"), and so
is a registration over pages that an earlier owner left registered.  So only memory that has its
pages to itself is registered (`empty_packed` and .ktplan files give such memory), and the
registration ends before the memory does.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from weakref import WeakValueDictionary

import torch

from ktgraph.runtime.gpu.driver import DriverError, register_host, unregister_host


class Pinned:
    """A tensor's pages, registered until this object goes; it keeps the tensor until then.

    One registration, however large: a copy that crosses from one into another is refused too.
    begin, end: addresses.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self.begin = self.end = memory.data_ptr()
        if self.begin % mmap.PAGESIZE:
            raise DriverError("it does not begin at a page of its own")
        nbytes = -(-memory.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        register_host(self.begin, nbytes)
        self.end += nbytes

    def __del__(self) -> None:
        if self.end > self.begin:
            with suppress(DriverError):  # the driver may be gone at the end of the process
                unregister_host(self.begin)


_in_use: WeakValueDictionary[int, Pinned] = WeakValueDictionary()  # by address


def registration_of(memory: torch.Tensor) -> Pinned | None:
    """The registration that a tensor's first byte lies in."""
    at = memory.data_ptr()
    return next((p for p in list(_in_use.values()) if p.begin <= at < p.end), None)


def pin(memory: torch.Tensor) -> Pinned:
    """The registration of a tensor's pages, shared by all who hold it or a part of it.

    Raises DriverError with the driver's reason, or where the tensor shares its first page or only a
    part of it is registered.
    """
    found = registration_of(memory)
    if found is None:
        found = _in_use[memory.data_ptr()] = Pinned(memory)
    if found.end < memory.data_ptr() + memory.nbytes:
        raise DriverError("a part of it is registered already")
    return found


__all__ = ["Pinned", "pin", "registration_of"]
