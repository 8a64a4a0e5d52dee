"""The hot path: shard bytes from the trainer's memory to their place in a slot.

From the writer's layout `build_schedule` computes once per structure which pieces of which shards
lie in which window; `stage` then copies window by window, called by `api` on the trainer's thread.
Sends nothing, and never touches the gaps between shards of a shared window: the writer fills them.
"""

from __future__ import annotations

import ctypes
import hashlib
import sys
from array import array
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from shardwright_proto.limits import SAVE_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwright.arena import Slot
    from shardwright.capture import Capture

_SMALL_BYTES_MAX: Final = 64 << 10
_BATCH: Final = 20_000

# For small pieces. ctypes.memmove lets go of the GIL around every call: with another busy Python
# thread each of 100,000 calls could then wait a switch interval (5 ms) to get it back.
_memmove_small = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ctypes.cast(ctypes.CDLL(None).memmove, ctypes.c_void_p).value or 0
)


@dataclass(frozen=True, slots=True)
class Window:
    """What one window of one file holds of the shards.

    Small shards that lie in it whole are three parallel columns; every other piece is a tuple
    (shard, first byte in the shard, offset in the window, byte count).
    """

    file: int
    window: int
    begin: int  # of its first shard byte
    end: int  # after its last shard byte
    nbytes: int  # shard bytes; less than end - begin when there are gaps
    shards: array[int]
    offsets: array[int]
    counts: array[int]
    pieces: tuple[tuple[int, int, int, int], ...]


@dataclass(frozen=True, slots=True)
class Schedule:
    """All windows with shard bytes, files in order, windows in order."""

    layout_digest: bytes
    windows: tuple[Window, ...]


class LayoutError(ValueError):
    """The writer's layout does not fit the plan: a bug of the writer, or another version of it."""


def build_schedule(
    offsets: bytes, files: bytes, nbytes: Sequence[int], window_bytes: int
) -> Schedule:
    """Cut the shards of a layout (proto Layout's columns) into windows. Raises LayoutError."""
    offset_of = _column("Q", offsets, len(nbytes))
    file_of = _column("I", files, len(nbytes)) if files else array("I", bytes(4 * len(nbytes)))
    order: Sequence[int] = range(len(nbytes))
    if files:
        order = sorted(order, key=lambda shard: (file_of[shard], offset_of[shard]))
    elif any(map(int.__gt__, offset_of, offset_of[1:])):
        order = sorted(order, key=offset_of.__getitem__)
    builder = _Builder(window_bytes)
    for shard in order:
        if nbytes[shard]:
            builder.add(shard, file_of[shard], offset_of[shard], nbytes[shard])
    return Schedule(layout_digest(offsets, files), builder.finish())


def layout_digest(offsets: bytes, files: bytes) -> bytes:
    """Return what tells two layouts of one plan apart."""
    digest = hashlib.sha256(offsets)
    digest.update(files)
    return digest.digest()


def _column(code: str, data: bytes, count: int) -> array[int]:
    column = array(code)
    if len(data) != count * column.itemsize:
        raise LayoutError(f"layout column of {len(data)} bytes for {count} shards")
    column.frombytes(data)
    if sys.byteorder == "big":
        column.byteswap()
    return column


class _Builder:
    """Collects the window that is being cut, and the finished ones."""

    def __init__(self, window_bytes: int) -> None:
        self._window_bytes = window_bytes
        self._windows: list[Window] = []
        self._file = 0
        self._window = -1
        self._end = 0  # of the last shard, in its file
        self._start()

    def add(self, shard: int, file: int, offset: int, count: int) -> None:
        if file != self._file:
            self._close()
            self._file, self._window, self._end = file, -1, 0
        if offset < self._end or offset + count > SAVE_BYTES_MAX:
            raise LayoutError(f"layout puts shard {shard} over another one or out of bounds")
        self._end = offset + count
        window, at = divmod(offset, self._window_bytes)
        if window != self._window:
            self._close()
            self._window = window
        if count <= _SMALL_BYTES_MAX and at + count <= self._window_bytes:
            self._shards.append(shard)
            self._offsets.append(at)
            self._counts.append(count)
            self._extend(at, count)
            return
        done = 0
        while done < count:
            if at == self._window_bytes:
                self._close()
                self._window, at = self._window + 1, 0
            piece = min(count - done, self._window_bytes - at)
            self._pieces.append((shard, done, at, piece))
            self._extend(at, piece)
            done, at = done + piece, at + piece

    def finish(self) -> tuple[Window, ...]:
        self._close()
        return tuple(self._windows)

    def _extend(self, at: int, count: int) -> None:
        if not self._nbytes:
            self._first = at
        self._last = at + count
        self._nbytes += count

    def _start(self) -> None:
        self._shards, self._offsets, self._counts = array("I"), array("I"), array("I")
        self._pieces: list[tuple[int, int, int, int]] = []
        self._first = self._last = self._nbytes = 0

    def _close(self) -> None:
        if self._nbytes:
            self._windows.append(
                Window(
                    self._file,
                    self._window,
                    self._first,
                    self._last,
                    self._nbytes,
                    self._shards,
                    self._offsets,
                    self._counts,
                    tuple(self._pieces),
                )
            )
            self._start()


def copy_window(window: Window, address: int, capture: Capture, *, zero_gaps: bool) -> None:
    """Copy every shard byte of `window` to its place in the slot at `address`."""
    if zero_gaps and window.nbytes != window.end - window.begin:
        ctypes.memset(address + window.begin, 0, window.end - window.begin)
    if capture.sources:
        _copy_asking(window, address, capture)
        return
    addresses = capture.addresses
    for shard, begin, offset, count in window.pieces:
        ctypes.memmove(address + offset, addresses[shard] + begin, count)
    for start in range(0, len(window.shards), _BATCH):
        stop = start + _BATCH  # between batches other threads may have the GIL
        deque(
            map(
                _memmove_small,
                map(address.__add__, window.offsets[start:stop]),
                map(addresses.__getitem__, window.shards[start:stop]),
                window.counts[start:stop],
            ),
            maxlen=0,
        )


def _copy_asking(window: Window, address: int, capture: Capture) -> None:
    """Like copy_window, when some shards have no bytes in host memory as they are to be stored."""
    addresses, sources = capture.addresses, capture.sources
    for shard, begin, offset, count in window.pieces:
        if shard in sources:
            sources[shard].copy_into(address + offset, begin, count)
        else:
            ctypes.memmove(address + offset, addresses[shard] + begin, count)
    for shard, offset, count in zip(window.shards, window.offsets, window.counts, strict=True):
        if shard in sources:
            sources[shard].copy_into(address + offset, 0, count)
        else:
            _memmove_small(address + offset, addresses[shard], count)


class WindowSink(Protocol):
    """Where staged windows go: the save's stream."""

    def wait_slot(self) -> Slot:
        """Return a slot to fill. Raises ShardwrightError when the save has ended."""

    def window_staged(self, window: Window, slot: Slot) -> None:
        """Take a filled slot over. Raises ShardwrightError when the save has ended."""

    def slot_unused(self, slot: Slot) -> None:
        """Take back a slot that could not be filled."""


def stage(capture: Capture, schedule: Schedule, sink: WindowSink, *, zero_gaps: bool) -> None:
    """Copy every window of a save; on return the captured tensors may change."""
    _check_addresses(capture)
    for window in schedule.windows:
        slot = sink.wait_slot()
        try:
            copy_window(window, slot.address, capture, zero_gaps=zero_gaps)
        except BaseException:
            sink.slot_unused(slot)
            raise
        sink.window_staged(window, slot)


def _check_addresses(capture: Capture) -> None:
    if 0 in capture.addresses:
        for shard, address in enumerate(capture.addresses):
            known = address or not capture.nbytes[shard] or shard in capture.sources
            assert known, f"capture gave no address for {capture.names[shard]!r}"
