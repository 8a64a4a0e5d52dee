"""What the machine can do, measured in the same rounds: memcpy, plain O_DIRECT, bare gRPC.

These are the yardsticks that the bars divide by. They run in trainer processes, between the
systems' saves, and know nothing of formats, checksums or budgets: each is the least that one
could possibly do with the same bytes.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import statistics
import sys
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.state import MADV_POPULATE_WRITE, map_memory, memory_bytes

if TYPE_CHECKING:
    from harness.state import State, StateSpec

MIB = 1 << 20
MEMCPY_PASSES = 3
"""Their median is the round's figure: one pass of a fraction of a second is easily disturbed."""
O_DIRECT_VARIANTS = ((1, 4), (1, 16), (4, 4), (4, 16))
"""Threads x MiB per write."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A yardstick: its name, and the trainer process that runs it."""

    name: str
    trainer: str


MEMCPY = Probe("memcpy", "ours")
O_DIRECT = [Probe(f"o_direct:{threads}x{mib}MiB", "probe") for threads, mib in O_DIRECT_VARIANTS]
GRPC_STREAM = Probe("grpc_stream", "probe")
PROBES = {probe.name: probe for probe in (MEMCPY, *O_DIRECT, GRPC_STREAM)}


def memcpy_seconds(spec: StateSpec, state: State) -> float:
    """Time one copy of the state, a memmove a tensor, into a shared mapping that is warm.

    The mapping is the client's own arena where it is large enough: the same pages that a save
    fills. How fast a page is written depends on how the host backs it, by a factor of two here, so
    another mapping would be another yardstick every time.
    """
    places = _arena_places()
    if sum(size for _, size in places) >= memory_bytes(spec):
        return _copy_seconds(state, places)
    fd = os.memfd_create("stall-memcpy", os.MFD_CLOEXEC)
    os.posix_fallocate(fd, 0, memory_bytes(spec))
    with mmap.mmap(fd, memory_bytes(spec)) as memory:
        os.close(fd)
        memory.madvise(MADV_POPULATE_WRITE)
        first_byte = ctypes.c_char.from_buffer(memory)
        places = [(ctypes.addressof(first_byte), memory_bytes(spec))]
        taken_s = [_copy_seconds(state, places) for _ in range(MEMCPY_PASSES + 1)]
        del first_byte  # a mapping with a view into it cannot be closed
    return statistics.median(taken_s[1:])


def _arena_places() -> list[tuple[int, int]]:
    """Return (address, bytes) of the arena segments that this process has mapped."""
    attach = sys.modules.get("shardwright.attach")
    connections = [] if attach is None else list(attach._connections.values())
    sessions = [connection._session for connection in connections if connection._session]
    return [
        (segment.address, segment.size)
        for session in sessions
        for segment in session.arena.segments
    ]


def _copy_seconds(state: State, places: list[tuple[int, int]]) -> float:
    left = iter(places)
    start_s = time.perf_counter()
    address, room = next(left)
    for tensor in state.values():
        source, nbytes = tensor.data_ptr(), tensor.nbytes
        while nbytes:
            if not room:
                address, room = next(left)
            count = min(nbytes, room)
            ctypes.memmove(address, source, count)
            address, room, source, nbytes = (
                address + count,
                room - count,
                source + count,
                nbytes - count,
            )
    return time.perf_counter() - start_s


def o_direct_seconds(spec: StateSpec, name: str, path: str) -> float:
    """Write the state's memory to a new file with O_DIRECT, fsync once; the file is removed."""
    threads, _, mib = name.removeprefix("o_direct:").removesuffix("MiB").partition("x")
    block_bytes = int(mib) * MIB
    memory = memoryview(map_memory(spec))
    offsets = iter(range(0, len(memory), block_bytes))
    failures: list[OSError] = []
    lock = threading.Lock()
    start_s = time.perf_counter()
    file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_DIRECT, 0o600)

    def write_blocks() -> None:
        while True:
            with lock:
                offset = next(offsets, None)
            if offset is None:
                return
            block = memory[offset : offset + block_bytes]
            try:
                written = os.pwrite(file, block, offset)
            except OSError as error:
                failures.append(error)
                return
            if written != len(block):
                failures.append(OSError(f"short write at {offset}: {written} of {len(block)}"))
                return

    try:
        workers = [threading.Thread(target=write_blocks) for _ in range(int(threads))]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        os.fsync(file)
        taken_s = time.perf_counter() - start_s
    finally:
        os.close(file)
        os.unlink(path)
    if failures:
        raise failures[0]
    return taken_s
