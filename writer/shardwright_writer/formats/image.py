"""A file's image, window by window: which bytes are shards, and all the bytes that are not.

Built once per FilePlan; `pipeline` fills windows and finds their pieces with it, `windows` counts
them. Knows no format and does no I/O; never touches a byte that belongs to a shard.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from shardwright_writer.crc import crc32

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardwright_writer.formats.base import FilePlan, Int64s

_HOLE_BYTES: Final = 4
_SLACK: Final = _HOLE_BYTES - 1
_CRC_CHUNK_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class Pieces:
    """The shard bytes of a file range, in file order; parallel columns, one row a piece."""

    shard: Int64s  # index in the save's plan
    begin: Int64s  # offset inside the range
    nbytes: Int64s  # never 0
    first_in_shard: Int64s  # offset of the piece inside its shard

    def __len__(self) -> int:
        return len(self.shard)


class FileImage:
    """Literals, holes and shards of one file, searchable by offset. Immutable, thread-safe."""

    def __init__(self, plan: FilePlan) -> None:
        self.size = plan.size
        real = plan.shard_nbytes > 0
        self._shard = plan.shards[real]
        self._shard_begin = plan.shard_offset[real]
        self._shard_end = self._shard_begin + plan.shard_nbytes[real]
        self._blob = plan.literal_blob
        self._literal_begin = plan.literal_offset
        self._literal_end = plan.literal_offset + np.diff(plan.literal_start)
        self._literal_start = plan.literal_start
        # A hole lies inside one literal, so its place in the blob is as good as that in the file.
        literal = np.searchsorted(plan.literal_offset, plan.hole_offset, side="right") - 1
        shift = plan.literal_start[:-1] - plan.literal_offset
        self._hole_place = plan.hole_offset + shift[literal]
        self._hole_shard = plan.hole_shard

    def fill(self, buffer: memoryview, start: int, crcs: NDArray[np.uint32]) -> None:
        """Write every literal byte of file range [start, start + len(buffer)) into buffer.

        Holes get their CRC from crcs[plan index]; bytes past the end of the file become zero.
        """
        stop = start + len(buffer)
        if stop > self.size:
            past = max(self.size - start, 0)
            buffer[past:] = bytes(len(buffer) - past)
            stop = self.size
        first = int(self._literal_end.searchsorted(start, side="right"))
        last = int(self._literal_begin.searchsorted(stop, side="left"))
        if first >= last:
            return
        begins = self._literal_begin[first:last]
        tos: Int64s = np.maximum(begins, start)
        untils: Int64s = np.minimum(self._literal_end[first:last], stop)
        places = self._literal_start[first:last] + (tos - begins)
        place = int(places[0])
        end = int(places[-1] + (untils[-1] - tos[-1]))
        source = self._filled(place, end, crcs)
        _copy(source, places - place, untils - tos, buffer, tos - start)

    def pieces(self, start: int, stop: int) -> Pieces:
        """Return the shard bytes in file range [start, stop)."""
        first = int(self._shard_end.searchsorted(start, side="right"))
        last = int(self._shard_begin.searchsorted(stop, side="left"))
        rows = slice(first, max(first, last))
        begins = self._shard_begin[rows]
        froms = np.maximum(begins, start)
        return Pieces(
            shard=self._shard[rows],
            begin=froms - start,
            nbytes=np.minimum(self._shard_end[rows], stop) - froms,
            first_in_shard=froms - begins,
        )

    def window_count(self, window_bytes: int) -> int:
        """Return how many windows cover the file."""
        return -(-self.size // window_bytes)

    def shard_windows(self, window_bytes: int) -> Int64s:
        """Return the windows that hold at least one shard byte, ascending."""
        return _windows(self._shard_begin, self._shard_end, window_bytes)

    def literal_windows(self, window_bytes: int) -> Int64s:
        """Return the windows that hold at least one literal byte, ascending."""
        real = self._literal_end > self._literal_begin
        return _windows(self._literal_begin[real], self._literal_end[real], window_bytes)

    def literal_crc(self, crcs: NDArray[np.uint32]) -> int:
        """Return the CRC-32 of all literal bytes in file order, holes filled."""
        value = 0
        for at in range(0, len(self._blob), _CRC_CHUNK_BYTES):
            end = min(at + _CRC_CHUNK_BYTES, len(self._blob))
            value = crc32(self._filled(at, end, crcs), value)
        return value

    def _filled(self, place: int, end: int, crcs: NDArray[np.uint32]) -> memoryview:
        """Return blob[place:end] with its holes filled, also those that the edges cut."""
        first = int(self._hole_place.searchsorted(place - _HOLE_BYTES, side="right"))
        last = int(self._hole_place.searchsorted(end, side="left"))
        blob = memoryview(self._blob)[place:end]
        if first >= last:
            return blob
        # Slack on both sides lets a cut hole be written whole; it is left out of the result.
        filled = np.empty(end - place + 2 * _SLACK, np.uint8)
        filled[_SLACK : _SLACK + end - place] = blob
        at = self._hole_place[first:last] - (place - _SLACK)
        values = crcs[self._hole_shard[first:last]]
        for byte in range(_HOLE_BYTES):
            filled[at + byte] = (values >> np.uint32(8 * byte)).astype(np.uint8)
        return filled.data[_SLACK : _SLACK + end - place]


def _windows(begins: Int64s, ends: Int64s, window_bytes: int) -> Int64s:
    """Return the windows that ranges touch; ranges ascend, do not overlap, are not empty."""
    first = begins // window_bytes
    last = (ends - 1) // window_bytes
    # Only a range's first window can be shared: with the range before it.
    shared = np.zeros(len(first), np.int64)
    shared[1:] = first[1:] == last[:-1]
    counts = last - first + 1 - shared
    starts = np.cumsum(counts) - counts
    return np.repeat(first + shared - starts, counts) + np.arange(int(counts.sum()))


def _copy(
    source: memoryview, froms: Int64s, sizes: Int64s, target: memoryview, tos: Int64s
) -> None:
    """Copy many pieces that lie one behind the other in source, and apart in target.

    Pieces of equal size and distance go as one matrix: 100,000 equal tensors make 100,000
    equal gaps.
    """
    breaks = np.ones(len(froms), np.bool_)
    steps = np.diff(tos)
    breaks[1:] = sizes[1:] != sizes[:-1]
    breaks[2:] |= steps[1:] != steps[:-1]
    heads = np.flatnonzero(breaks)
    counts = np.diff(np.append(heads, len(froms)))
    columns = (heads, counts, sizes[heads], froms[heads], tos[heads])
    for head, count, size, at, to in zip(*(column.tolist() for column in columns), strict=True):
        if count == 1:
            target[to : to + size] = source[at : at + size]
            continue
        distance = int(steps[head])
        shape = (count, size)
        into = np.ndarray(shape, np.uint8, target, to, (distance, 1))
        into[:] = np.ndarray(shape, np.uint8, source, at, (size, 1))
