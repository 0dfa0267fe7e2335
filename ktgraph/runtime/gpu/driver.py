"""The few calls of the CUDA driver that torch does not offer; libcuda is opened when first needed.

CUDA driver API, "Stream Memory Operations": they can be captured into a CUDA graph.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

_GEQ = 0  # CU_STREAM_WAIT_VALUE_GEQ: go on when *address >= value (modulo 2^32)


class DriverError(RuntimeError):
    """A call of the CUDA driver that failed; the message names it and the driver's reason."""


@cache
def _library() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DriverError(f"the CUDA driver is missing: {error}") from error


def _call(name: str, *arguments: Any) -> None:
    status: int = getattr(_library(), name)(*arguments)
    if status:
        reason = ctypes.c_char_p()
        _library().cuGetErrorString(status, ctypes.byref(reason))
        shown = reason.value.decode() if reason.value else f"error {status}"
        raise DriverError(f"{name}: {shown}")


def wait_value(stream: int, address: int, value: int) -> None:
    """The stream goes on once the uint32 at a device-visible address is at least `value`."""
    _call(
        "cuStreamWaitValue32_v2",
        ctypes.c_void_p(stream),
        ctypes.c_uint64(address),
        ctypes.c_uint32(value),
        ctypes.c_uint(_GEQ),
    )


def register_host(address: int, nbytes: int) -> None:
    """Pin pages of this process, so that copies from them run at the link's full rate."""
    portable = 1  # CU_MEMHOSTREGISTER_PORTABLE
    _call(
        "cuMemHostRegister_v2",
        ctypes.c_void_p(address),
        ctypes.c_size_t(nbytes),
        ctypes.c_uint(portable),
    )


def unregister_host(address: int) -> None:
    """End what `register_host` began at this address."""
    _call("cuMemHostUnregister", ctypes.c_void_p(address))


__all__ = [
    "DriverError",
    "register_host",
    "unregister_host",
    "wait_value",
]
