"""A .ktplan while it is written: finished weights stay when that stops, and are not packed again.

Beside the draft lies a journal: the digest of all that its bytes follow from, and a line for each
finished weight with the checksum up to there.  Going on reads the finished bytes once, against the
checksum: what a power cut lost is packed anew.
"""

from __future__ import annotations

import fcntl
import logging
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray

from ktgraph.errors import KtgraphError
from ktgraph.runtime.operands import WeightUse
from ktgraph.runtime.planfile import ALIGN, PACKED, PackedPlace, PlanFileError, Samples

log = logging.getLogger("ktgraph")

_PAD_ID = 0xD935  # the extra field by which archives are aligned

Packed = Iterable[tuple[WeightUse, torch.Tensor]]
WeightsFrom = Callable[[int], Packed]  # the weights from a number on, each asked for in its turn


class DraftBusyError(PlanFileError):
    """Another process writes the file."""


@dataclass
class Draft:
    """A file that takes the place of `path` when it is whole.

    key: of what its bytes follow from; None for a draft that nobody goes on with.
    """

    path: Path
    key: str | None = None
    finished: int = 0  # weights whose bytes are on the disk
    checksum: int = 0  # of packed.bin up to there

    @property
    def file(self) -> Path:
        name = f".{self.path.name}"
        return self.path.with_name(f"{name}.{os.getpid()}" if self.key is None else f"{name}.part")

    @property
    def journal(self) -> Path:
        return self.file.with_name(f"{self.file.name}.done")

    @contextmanager
    def opened(self) -> Generator[IO[bytes]]:
        """The file, which is renamed at the end; after a failure it stays if going on pays."""
        is_there = self.file.exists()
        with self.file.open("r+b" if is_there else "w+b") as file:
            self._lock(file)
            self._read_journal()
            try:
                yield file
                file.truncate()
                file.flush()
                os.fsync(file.fileno())
                self.file.replace(self.path)
                self.journal.unlink(missing_ok=True)
            except BaseException as error:
                is_wrong = isinstance(error, KtgraphError)  # and would be again
                if self.key is None or self.finished == 0 or is_wrong:
                    self.file.unlink(missing_ok=True)
                    self.journal.unlink(missing_ok=True)
                raise

    def _lock(self, file: IO[bytes]) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._busy() from None
        except OSError as error:  # a file system without locks
            log.info("%s is not locked: %s", self.file, error)
        if not self._is_at_its_name(file):  # its owner made it the finished file meanwhile
            raise self._busy()

    def _busy(self) -> DraftBusyError:
        return DraftBusyError(
            f"{self.path}: another process writes it now ({self.file}): wait for it, or give "
            "another name"
        )

    def _is_at_its_name(self, file: IO[bytes]) -> bool:
        try:
            return os.path.samestat(os.fstat(file.fileno()), self.file.stat())
        except FileNotFoundError:
            return False

    def _read_journal(self) -> None:
        try:
            head, *lines = self.journal.read_text(encoding="ascii").split("\n")
            if head == self.key and len(lines) > 1:
                self.finished, self.checksum = (int(n) for n in lines[-2].split())
        except (OSError, ValueError):
            self.finished = self.checksum = 0
        if self.finished == 0 and self.key is not None:
            self.journal.write_text(f"{self.key}\n", encoding="ascii")

    def add(self, checksum: int) -> None:
        """Note that one more weight is written."""
        self.finished, self.checksum = self.finished + 1, checksum
        if self.key is not None:
            with self.journal.open("a", encoding="ascii") as journal:
                journal.write(f"{self.finished} {checksum}\n")

    def start_anew(self) -> None:
        self.finished = self.checksum = 0
        if self.key is not None:
            self.journal.write_text(f"{self.key}\n", encoding="ascii")


class PackedMember:
    """packed.bin, written into an archive in place so that it can be gone on with."""

    def __init__(self, archive: zipfile.ZipFile, draft: Draft, places: Sequence[PackedPlace]):
        self.archive: Any = archive  # the stubs know no start_dir
        self.draft = draft
        self.places = places
        self.samples = Samples()
        self.file: IO[bytes] = self.archive.fp
        self.info: Any = zipfile.ZipInfo(PACKED)
        self.info.CRC = self.info.compress_size = 0  # known at the end
        self.info.header_offset = self.archive.start_dir
        head = self.info.header_offset + 30 + len(PACKED) + 20  # with the 64-bit size field
        pad = -(head + 4) % ALIGN
        self.info.extra = struct.pack("<HH", _PAD_ID, pad) + bytes(pad)

    def write(self, weights: WeightsFrom, bytes_of: Callable[[torch.Tensor], NDArray[np.uint8]]):
        """Every weight that is not finished; the archive goes on behind the last."""
        self._write_header()
        begin = self.file.tell()
        self._check_finished(begin)
        checksum, first = self.draft.checksum, self.draft.finished
        self.archive.start_dir = begin + sum(map(_padded, self.places[:first]))
        self.file.seek(self.archive.start_dir)
        for place, (use, tensor) in zip(self.places[first:], weights(first), strict=True):
            data = bytes_of(tensor)
            assert (place.key, place.nbytes) == (use.key, data.size)
            self.samples.add(data)
            gap = bytes(_padded(place) - place.nbytes)
            self.file.write(data.data)
            self.file.write(gap)
            self.file.flush()
            checksum = zlib.crc32(gap, zlib.crc32(data.data, checksum))
            self.archive.start_dir = self.file.tell()  # after an error it writes its end there
            self.draft.add(checksum)
        self._end(begin, checksum)

    def _write_header(self) -> None:
        self.file.seek(self.info.header_offset)
        self.file.write(self.info.FileHeader(zip64=True))

    def _check_finished(self, begin: int) -> None:
        """Read what is there: its checksum must be the journal's."""
        if not self.draft.finished:
            return
        checksum, places = 0, self.places[: self.draft.finished]
        nbytes = sum(map(_padded, places))
        if begin + nbytes <= os.fstat(self.file.fileno()).st_size:
            held = np.memmap(self.draft.file, np.uint8, "r", begin, (nbytes,))
            for place in places:
                self.samples.add(held[place.offset : place.offset + place.nbytes])
                end = place.offset + _padded(place)
                checksum = zlib.crc32(held[place.offset : end].data, checksum)
        if checksum != self.draft.checksum:
            self.draft.start_anew()
            self.samples = Samples()

    def _end(self, begin: int, checksum: int) -> None:
        end = self.file.tell()
        self.info.CRC = checksum
        self.info.file_size = self.info.compress_size = end - begin
        self._write_header()
        self.file.seek(end)
        self.archive.filelist.append(self.info)
        self.archive.NameToInfo[self.info.filename] = self.info


def _padded(place: PackedPlace) -> int:
    return -(-place.nbytes // ALIGN) * ALIGN


def is_resumable(path: Path) -> bool:
    """Whether a draft of the file waits to be gone on with, or the file itself."""
    return Draft(path, "").file.exists() or path.exists()


__all__ = ["Draft", "DraftBusyError", "Packed", "PackedMember", "WeightsFrom", "is_resumable"]
