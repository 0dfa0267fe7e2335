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
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self._address = 0
        address = memory.data_ptr()
        if address % mmap.PAGESIZE:
            raise DriverError("it does not begin at a page of its own")
        self.nbytes = -(-memory.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        register_host(address, self.nbytes)
        self._address = address

    def __del__(self) -> None:
        if self._address:
            with suppress(DriverError):  # the driver may be gone at the end of the process
                unregister_host(self._address)


_in_use: WeakValueDictionary[int, Pinned] = WeakValueDictionary()  # by address


def pin(memory: torch.Tensor) -> Pinned:
    """The registration of a tensor's pages, shared by all who hold it.

    Raises DriverError with the driver's reason, or where the tensor shares its first page or only a
    part of it is registered.
    """
    found = _in_use.get(memory.data_ptr())
    if found is None:
        found = _in_use[memory.data_ptr()] = Pinned(memory)
    if found.nbytes < memory.nbytes:
        raise DriverError(
            f"its first {found.nbytes} bytes are registered already, for a part of it"
        )
    return found


__all__ = ["Pinned", "pin"]
