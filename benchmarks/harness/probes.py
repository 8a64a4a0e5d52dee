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
    """Time a copy of the state, one memmove a tensor, into a shared mapping that is warm.

    The mapping lives no longer than this: memory that idle processes hold makes the kernel start
    writing the peers' dirty pages earlier.
    """
    fd = os.memfd_create("stall-memcpy", os.MFD_CLOEXEC)
    os.posix_fallocate(fd, 0, memory_bytes(spec))
    with mmap.mmap(fd, memory_bytes(spec)) as memory:
        os.close(fd)
        memory.madvise(MADV_POPULATE_WRITE)
        first_byte = ctypes.c_char.from_buffer(memory)
        taken_s = [
            _copy_seconds(state, ctypes.addressof(first_byte)) for _ in range(MEMCPY_PASSES + 1)
        ]
        del first_byte  # a mapping with a view into it cannot be closed
    return statistics.median(taken_s[1:])


def _copy_seconds(state: State, place: int) -> float:
    start_s = time.perf_counter()
    for tensor in state.values():
        nbytes = tensor.nbytes
        ctypes.memmove(place, tensor.data_ptr(), nbytes)
        place += nbytes
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
