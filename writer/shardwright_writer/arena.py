"""Shared memory between ranks and writer: sealed memfd segments, leased within one budget.

`ArenaBudget` bounds what all clients hold; a `Lease` is one client's segments cut into slots of
one window each. Used by `clients` (leases) and `save` (slots). Does not know what a slot holds.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from dataclasses import dataclass, field

from shardwright_proto.limits import (
    BLOCK_BYTES,
    SEGMENT_BYTES_MAX,
    WINDOW_BYTES_MAX,
    WINDOW_BYTES_MIN,
)
from shardwright_writer.refusal import Reason, Refusal

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MADV_POPULATE_WRITE = 23
_POPULATE_BYTES = 64 << 20
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_SLOTS_MIN = 4
_LATE_BYTES_MAX = 32 << 20


@dataclass(frozen=True, slots=True)
class Segment:
    """bytes of shared memory holding slots first_slot, first_slot + 1, ... of one lease."""

    segment_id: int
    first_slot: int
    size: int
    fd: int
    memory: memoryview


class ArenaBudget:
    """What all leases may hold together, fixed at start.

    The last part is for latecomers: only leases of the fewest windows may come from it, so that
    one large job leaves room for another to save, slowly.
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.bytes_leased = 0
        self._bytes_late = min(bytes_max // 8, _LATE_BYTES_MAX)

    def grant(
        self,
        want_bytes: int,
        ranks: int,
        window_bytes: int = 0,
        window_bytes_max: int = WINDOW_BYTES_MAX,
    ) -> tuple[int, int]:
        """Reserve a lease; return (lease bytes, window bytes).

        A rank gets what it wants up to its share, so that the ranks of a node that come later find
        theirs; want_bytes = 0 asks for the whole share. window_bytes: as an earlier lease had them.
        """
        free = self.bytes_max - self.bytes_leased
        usual = self.bytes_max - self._bytes_late
        limit = max(0, min(usual // max(1, ranks), free - self._bytes_late))
        size = min(want_bytes or limit, limit)
        window = window_bytes or min(window_bytes_for(size), window_bytes_max)
        slots = min(-(-size // window), limit // window)
        if slots < _SLOTS_MIN:
            slots = min(_SLOTS_MIN, free // window)
        if slots < 1:
            raise Refusal(
                Reason.BUSY,
                f"no arena memory left: {self.bytes_leased} of {self.bytes_max} bytes are leased",
                "raise --memory-budget, or set LOCAL_WORLD_SIZE so that ranks share it",
            )
        self.bytes_leased += slots * window
        return slots * window, window

    def extend(self, lease_bytes: int, want_bytes: int, ranks: int, window_bytes: int) -> int:
        """Reserve more for a lease that is too small; return the bytes added, perhaps 0."""
        usual = self.bytes_max - self._bytes_late
        room = min(want_bytes, usual // max(1, ranks)) - lease_bytes
        more = max(0, min(room, usual - self.bytes_leased)) // window_bytes * window_bytes
        self.bytes_leased += more
        return more

    def give_back(self, lease_bytes: int) -> None:
        """Return a lease's bytes."""
        self.bytes_leased -= lease_bytes
        assert self.bytes_leased >= 0


def window_bytes_for(lease_bytes: int) -> int:
    """An eighth of the lease, as a power of two, within the limits (DESIGN, windows)."""
    eighth = max(lease_bytes // 8, WINDOW_BYTES_MIN)
    return min(1 << (eighth.bit_length() - 1), WINDOW_BYTES_MAX)


@dataclass(slots=True)
class Lease:
    """One client's slots. Grows by segments, never shrinks while the client lives."""

    lease_bytes: int
    window_bytes: int
    segments: list[Segment] = field(default_factory=list)
    users: dict[int, tuple[str, int, int]] = field(default_factory=dict)
    """Slot -> (save_id, file, window) that its bytes belong to, until durable."""

    @property
    def slot_count(self) -> int:
        """How many windows the lease holds."""
        return self.lease_bytes // self.window_bytes

    def plan_segments(self) -> list[tuple[int, int, int]]:
        """Return (segment_id, first_slot, bytes) of the segments the lease still lacks."""
        per_segment = max(1, SEGMENT_BYTES_MAX // self.window_bytes)
        have = sum(segment.size for segment in self.segments) // self.window_bytes
        next_id = max((segment.segment_id for segment in self.segments), default=-1) + 1
        missing = []
        while have < self.slot_count:
            count = min(per_segment, self.slot_count - have)
            missing.append((next_id, have, count * self.window_bytes))
            have += count
            next_id += 1
        return missing

    def slot(self, slot: int) -> memoryview:
        """Return the slot's memory. Raises Refusal for a slot the client does not hold."""
        for segment in self.segments:
            index = slot - segment.first_slot
            if 0 <= index < segment.size // self.window_bytes:
                start = index * self.window_bytes
                return segment.memory[start : start + self.window_bytes]
        raise Refusal(Reason.BAD_REQUEST, f"slot {slot} is not in this client's arena")


def create_segment(segment_id: int, first_slot: int, size: int) -> Segment:
    """Make, populate and seal a segment; its pages are charged to this process. Blocks.

    Raises Refusal when the memory is not there.
    """
    fd = os.memfd_create("shardwright-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        os.posix_fallocate(fd, 0, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        return _map(segment_id, first_slot, size, fd)
    except OSError as error:
        os.close(fd)
        raise Refusal(
            Reason.BUSY,
            f"cannot allocate {size} bytes of arena: {error.strerror}",
            "the machine or the container has less memory than --memory-budget",
        ) from None


def adopt_segment(segment_id: int, first_slot: int, size: int, fd: int) -> Segment:
    """Map a segment that another process made, after checking that it cannot shrink under us."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        seals = 0
    wanted = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    if seals & wanted != wanted or os.fstat(fd).st_size != size or size % BLOCK_BYTES or not size:
        raise Refusal(
            Reason.BAD_REQUEST,
            f"offered segment {segment_id} is not a sealed memfd of {size} bytes",
        )
    return _map(segment_id, first_slot, size, fd)


def anonymous_buffer(size: int) -> memoryview:
    """Page-aligned private memory, for what O_DIRECT writes and no slot holds."""
    return memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def _map(segment_id: int, first_slot: int, size: int, fd: int) -> Segment:
    mapping = mmap.mmap(fd, size)
    # Not mmap.madvise: it would hold the GIL for half a second per GiB.
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    for start in range(0, size, _POPULATE_BYTES):
        count = min(_POPULATE_BYTES, size - start)
        if _libc.madvise(address + start, count, _MADV_POPULATE_WRITE) != 0:
            break  # before Linux 5.14: pages are then faulted in one by one as they are used
    return Segment(segment_id, first_slot, size, fd, memoryview(mapping))
