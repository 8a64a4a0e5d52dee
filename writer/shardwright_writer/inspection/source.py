"""A file under inspection: read in pieces of 16 MiB, checksummed by ranges, never trusted.

Used by the rest of `inspection` and by `verify`. Knows no format.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from shardwright_writer.crc import crc32

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from shardwright_writer.formats.base import Int64s

PIECE_BYTES: Final = 16 << 20


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong. name: the tensor, the record, or a part of the container."""

    file: str
    name: str
    start: int  # the range of the file that it is about, bytes
    stop: int
    what: str


class NotAFileError(OSError):
    """The path is a folder, a pipe or a device."""


class Source:
    """An open regular file of a known size. One piece of it is in memory at a time."""

    def __init__(self, path: Path) -> None:
        # Non-blocking: opening somebody's pipe must not wait for its writer.
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        facts = os.fstat(self._fd)
        if not stat.S_ISREG(facts.st_mode):
            os.close(self._fd)
            raise NotAFileError(f"{path} is not a regular file")
        self.name = path.name
        self.size = facts.st_size
        self.inode = facts.st_ino

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._fd)

    def read(self, start: int, nbytes: int) -> bytes:
        """Return the bytes of [start, start + nbytes) that the file has. nbytes: the caller's."""
        if start < 0 or start >= self.size:
            return b""
        parts: list[bytes] = []
        nbytes = min(nbytes, self.size - start)
        while nbytes > 0 and (part := os.pread(self._fd, nbytes, start)):
            parts.append(part)
            start += len(part)
            nbytes -= len(part)
        return b"".join(parts)

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, memoryview]]:
        """Yield (offset, bytes) over [start, stop), as far as the file goes.

        The memory is reused: a piece is good until the next one.
        """
        stop = min(stop, self.size)
        buffer = memoryview(bytearray(max(0, min(PIECE_BYTES, stop - start))))
        while start < stop:
            count = os.preadv(self._fd, [buffer[: stop - start]], start)
            if count == 0:
                return  # cut off while we read; what is missing will not match its CRC
            yield start, buffer[:count]
            start += count

    def range_crc(self, start: int, stop: int) -> int:
        """Return the CRC-32 of [start, stop)."""
        value = 0
        for _, piece in self.pieces(start, stop):
            value = crc32(piece, value)
        return value

    def crcs(self, begins: Int64s, ends: Int64s) -> tuple[Int64s, int]:
        """Return the CRC-32 of every range and that of all bytes between them, in one pass.

        Ranges ascend and do not overlap; what lies past the end of the file counts as absent.
        """
        edges = np.zeros(2 * len(begins) + 2, np.int64)
        edges[1:-1:2], edges[2::2] = begins, ends
        edges[-1] = max(self.size, int(edges[-2]))
        bounds = edges.tolist()
        values = [0] * len(begins)
        between = 0
        segment = 0  # segment k is [bounds[k], bounds[k + 1]); odd ones are ranges
        for at, piece in self.pieces(0, self.size):
            stop = at + len(piece)
            while segment < len(bounds) - 1:
                low, high = max(bounds[segment], at), min(bounds[segment + 1], stop)
                if high > low:
                    part = piece[low - at : high - at]
                    if segment % 2:
                        values[segment // 2] = crc32(part, values[segment // 2])
                    else:
                        between = crc32(part, between)
                if bounds[segment + 1] > stop:
                    break
                segment += 1
        return np.array(values, np.int64), between
