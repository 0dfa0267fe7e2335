"""A stack of experts for libraries that pack from one dense tensor, without its memory.

Expert e of the stack is the same physical memory as source e % n: what the library packs from it
are physical copies of its own.
"""

from __future__ import annotations

import ctypes
import mmap
import os

import torch
from torch import Tensor

_MAP_SHARED, _MAP_FIXED, _PROT_READ = 1, 0x10, 1
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
]  # fmt: skip
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class AliasedStack:
    """[count, ...] made of the rows of `source` [n, ...] in turn; each must be whole pages."""

    def __init__(self, source: Tensor, count: int) -> None:
        each = source[0].nbytes
        if each % mmap.PAGESIZE:
            raise ValueError(f"an expert has {each} bytes, not a multiple of {mmap.PAGESIZE}")
        self.nbytes = count * each
        handle = os.memfd_create("experts")
        os.truncate(handle, source.nbytes)
        flat = source.contiguous().view(torch.uint8).flatten().numpy()
        with mmap.mmap(handle, source.nbytes) as memory:
            memory.write(memoryview(flat))
        self.data = self._map(0, self.nbytes, _MAP_SHARED, handle, 0)  # reserves the addresses
        for i in range(count):
            place, offset = self.data + i * each, i % len(source) * each
            self._map(place, each, _MAP_SHARED | _MAP_FIXED, handle, offset)
        os.close(handle)

    @staticmethod
    def _map(place: int, size: int, flags: int, handle: int, offset: int) -> int:
        found = _libc.mmap(place, size, _PROT_READ, flags, handle, offset)
        if found in (None, ctypes.c_void_p(-1).value):
            raise OSError(ctypes.get_errno(), "mmap of a stack of experts failed")
        return int(found)

    def close(self) -> None:
        _libc.munmap(self.data, self.nbytes)
