"""The client's slots: windows of shared memory that the writer made, or of private memory.

`attach` adds segments, `stage` takes slots and fills them, `stream` gives them back when the
writer has acknowledged them. The inline road has the same slots in private memory. Does not know
what a slot holds, and speaks to nobody.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import threading
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from shardwright_proto.limits import BLOCK_BYTES

_libc = ctypes.CDLL(None, use_errno=True)  # its calls run without the GIL
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

_PROT_READ_WRITE = 0x3
_MAP_SHARED = 0x01
_MAP_PRIVATE_ANONYMOUS = 0x22
_MAP_FAILED = ctypes.c_void_p(-1).value
_MADV_DONTFORK = 10
_MADV_POPULATE_WRITE = 23
_POPULATE_BYTES = 64 << 20
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class SlotUser(Protocol):
    """Who waits for slots. `stopped` is set before `Arena.interrupt`, and never unset."""

    stopped: bool


@dataclass(frozen=True, slots=True)
class Slot:
    """One window's memory, for one use: generation grows by one with every use."""

    index: int
    address: int
    generation: int


@dataclass(slots=True)
class Segment:
    """Consecutive slots in one mapping. fd: the memfd, kept for a later writer; -1: none."""

    segment_id: int
    first_slot: int
    size: int
    fd: int
    address: int
    shared: bool
    populated: bool = False


class _Waiter:
    __slots__ = ("ready", "slot", "user")

    def __init__(self, user: SlotUser) -> None:
        self.user = user
        self.ready = threading.Event()
        self.slot: Slot | None = None


class Arena:
    """Free slots, handed out first come, first served. Thread-safe."""

    def __init__(self, window_bytes: int) -> None:
        self.window_bytes = window_bytes
        self.segments: list[Segment] = []
        self.slot_count = 0
        self.retired = False
        self._lock = threading.Lock()
        self._free: deque[tuple[int, int]] = deque()  # (slot, address)
        self._generations: dict[int, int] = {}
        self._waiters: deque[_Waiter] = deque()
        self._in_use = 0

    @property
    def bytes_total(self) -> int:
        """How much memory the arena has by now."""
        return sum(segment.size for segment in self.segments)

    def add(self, segment: Segment) -> None:
        """Take a mapped segment into use."""
        count = segment.size // self.window_bytes
        with self._lock:
            self.segments.append(segment)
            self.slot_count += count
            for index in range(count):
                slot = segment.first_slot + index
                self._generations[slot] = 0
                self._free.append((slot, segment.address + index * self.window_bytes))
            self._serve()

    def acquire(self, user: SlotUser, timeout_s: float) -> Slot | None:
        """Return a free slot; None when `user` was stopped, the arena retired, or time is up."""
        with self._lock:
            if user.stopped or self.retired:
                return None
            if self._free and not self._waiters:
                return self._take()
            if timeout_s <= 0:
                return None
            waiter = _Waiter(user)
            self._waiters.append(waiter)
        try:
            waiter.ready.wait(timeout_s)
        except BaseException:  # KeyboardInterrupt: the slot must not go with it
            self._withdraw(waiter, keep=False)
            raise
        return self._withdraw(waiter, keep=True)

    def release(self, slot: Slot) -> None:
        """The writer is done with the slot: the next in line gets it."""
        with self._lock:
            self._put_back(slot)

    def interrupt(self, user: SlotUser) -> None:
        """Wake whoever waits for slots on behalf of `user`; they get None."""
        with self._lock:
            for waiter in [waiter for waiter in self._waiters if waiter.user is user]:
                self._waiters.remove(waiter)
                waiter.ready.set()

    def populate(self) -> None:
        """Map every page now instead of at the first copy into it. Runs without the GIL."""
        for segment in list(self.segments):
            if not segment.populated:
                segment.populated = True
                for start in range(0, segment.size, _POPULATE_BYTES):
                    count = min(_POPULATE_BYTES, segment.size - start)
                    # Fails before Linux 5.14: pages are then mapped one by one, as they are used.
                    _libc.madvise(segment.address + start, count, _MADV_POPULATE_WRITE)

    def retire(self) -> None:
        """Hand out nothing any more; the memory goes when the last slot is back."""
        with self._lock:
            self.retired = True
            while self._waiters:
                self._waiters.popleft().ready.set()
            if self._in_use == 0:
                self._unmap()

    def close_fds(self) -> None:
        """Close the memfds: in a forked child, which has inherited them but not the mappings."""
        for segment in self.segments:
            if segment.fd >= 0:
                os.close(segment.fd)
                segment.fd = -1

    def _withdraw(self, waiter: _Waiter, *, keep: bool) -> Slot | None:
        with self._lock:
            if not waiter.ready.is_set():
                self._waiters.remove(waiter)
            slot = waiter.slot
            if slot is None or (keep and not waiter.user.stopped and not self.retired):
                return slot
            self._put_back(slot)
            return None

    def _serve(self) -> None:
        while self._free and self._waiters:
            waiter = self._waiters.popleft()
            waiter.slot = self._take()
            waiter.ready.set()

    def _take(self) -> Slot:
        index, address = self._free.popleft()
        self._generations[index] += 1
        self._in_use += 1
        return Slot(index, address, self._generations[index])

    def _put_back(self, slot: Slot) -> None:
        assert self._generations[slot.index] == slot.generation, "slot was released twice"
        self._in_use -= 1
        if self.retired:
            if self._in_use == 0:
                self._unmap()
            return
        self._free.appendleft((slot.index, slot.address))  # its pages are mapped: use it first
        self._serve()

    def _unmap(self) -> None:
        self.close_fds()
        self._free.clear()
        for segment in self.segments:
            # Private memory stays: a thread of gRPC may still be reading a slot of a broken
            # stream. Shared slots are only touched by who holds them.
            if segment.shared:
                _libc.munmap(segment.address, segment.size)
        self.segments.clear()


def map_segment(segment_id: int, first_slot: int, size: int, fd: int) -> Segment:
    """Map a memfd of the writer's, after checking that it cannot shrink under us. Keeps fd.

    Raises OSError when it cannot be mapped, ValueError when it is not what the writer says.
    """
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        seals = 0
    if seals & _SEALS != _SEALS:
        raise ValueError(f"arena segment {segment_id} is not a sealed memfd")
    if size <= 0 or size % BLOCK_BYTES or os.fstat(fd).st_size != size:
        raise ValueError(f"arena segment {segment_id} does not have {size} bytes")
    return Segment(segment_id, first_slot, size, fd, _map(size, _MAP_SHARED, fd), shared=True)


def private_arena(window_bytes: int, slot_count: int) -> Arena:
    """Return slots in private memory, for the inline road. Raises OSError."""
    size = window_bytes * slot_count
    arena = Arena(window_bytes)
    address = _map(size, _MAP_PRIVATE_ANONYMOUS, -1)
    arena.add(Segment(0, 0, size, -1, address, shared=False))
    return arena


def _map(size: int, flags: int, fd: int) -> int:
    # Not mmap.mmap: a forked child does not have the mapping (DONTFORK), and the object's
    # destructor would there unmap whatever lies at that address by then.
    address = _libc.mmap(None, size, _PROT_READ_WRITE, flags, fd, 0)
    if address is None or address == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"mmap of {size} bytes: {os.strerror(code)}")
    _libc.madvise(address, size, _MADV_DONTFORK)
    return int(address)
