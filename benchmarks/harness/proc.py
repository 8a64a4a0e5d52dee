"""What /proc says about processes and the machine's memory, cheap enough to ask every 10 ms.

Used by the meter (which samples) and the conductor (CPU seconds, idle memory). Standard library
only, so that the sampling process stays small. It does not read smaps_rollup: that walks every
page table entry, 63 ms for 4 GiB of mappings here, while statm costs 3 us and meminfo 10 us.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
STATM_BYTES = 256
MEMINFO_BYTES = 8192
STAT_BLOCK_BYTES = 512
SHARED_PREFIXES = ("/memfd:", "/dev/shm/")
HARNESS_PREFIX = "/memfd:stall-"
"""The state itself, and the yardsticks' buffers: they cost every system the same."""


def descendants(root: int) -> list[int]:
    """Find the live process tree; a process that ends meanwhile is left out."""
    found = [root]
    for pid in found:  # grows while it is walked
        try:
            for thread in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                    found.extend(int(child) for child in file.read().split())
        except OSError:  # noqa: PERF203 - each process may end at any time
            continue
    return found


def tree_cpu_s(roots: Iterable[int]) -> float:
    """User + system seconds of the trees, with the children that were waited for (10 ms steps)."""
    ticks = 0
    for root in roots:
        for pid in descendants(root):
            try:
                with open(f"/proc/{pid}/stat", "rb") as file:
                    fields = file.read().rsplit(b")", 1)[1].split()
            except OSError:
                continue
            ticks += sum(int(field) for field in fields[11:15])  # utime stime cutime cstime
    return ticks / TICKS_PER_S


def resident_bytes(pid: int) -> int:
    """VmRSS of one process; 0 once it is gone."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * PAGE_BYTES
    except OSError:
        return 0


def mapped_files(pid: int) -> set[str]:
    """Paths of the files that a process has mapped."""
    try:
        with open(f"/proc/{pid}/maps") as file:
            rows = [line.split(None, 5) for line in file]
    except OSError:
        return set()
    return {row[5].strip() for row in rows if len(row) == 6 and row[5].startswith("/")}


@dataclass(frozen=True, slots=True)
class Memory:
    """One sample. anon_bytes and shared_bytes are of the watched trees.

    Shared memory is every memfd and /dev/shm file that a process of the trees holds open, counted
    once, by its allocated blocks, whoever maps it; the harness's own are left out. The kernel
    keeps dirty pages by machine only: dirty_bytes is Dirty + Writeback of all of it, and
    machine_shared_bytes is its Shmem, which shows what a system might hold without a descriptor.
    """

    anon_bytes: int
    shared_bytes: int
    dirty_bytes: int
    machine_shared_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """What counts: all but the cross-check."""
        return self.anon_bytes + self.shared_bytes + self.dirty_bytes


def shared_bytes(pids: Iterable[int]) -> int:
    """Sum the shared memory files that processes hold open, each once."""
    blocks: dict[tuple[int, int], int] = {}
    for pid in pids:
        try:
            for fd in os.listdir(f"/proc/{pid}/fd"):
                path = f"/proc/{pid}/fd/{fd}"
                target = os.readlink(path)
                if target.startswith(SHARED_PREFIXES) and not target.startswith(HARNESS_PREFIX):
                    status = os.stat(path)
                    blocks[status.st_dev, status.st_ino] = status.st_blocks
        except OSError:  # noqa: PERF203 - processes end and descriptors close at any time
            continue
    return sum(blocks.values()) * STAT_BLOCK_BYTES


class MemoryReader:
    """Reads `Memory` samples of some process trees through descriptors that stay open."""

    def __init__(self, roots: Iterable[int]) -> None:
        self._roots = list(roots)
        self._statm: dict[int, int] = {}
        self._shared_bytes = 0
        self._meminfo = os.open("/proc/meminfo", os.O_RDONLY | os.O_CLOEXEC)
        self.refresh()

    def refresh(self) -> None:
        """Look again which processes the trees consist of, and what they share (milliseconds)."""
        alive = {pid for root in self._roots for pid in descendants(root)}
        for pid in self._statm.keys() - alive:
            os.close(self._statm.pop(pid))
        for pid in alive - self._statm.keys():
            try:
                self._statm[pid] = os.open(f"/proc/{pid}/statm", os.O_RDONLY | os.O_CLOEXEC)
            except OSError:  # noqa: PERF203 - it ended between the two looks
                continue
        self._shared_bytes = shared_bytes(alive)

    def sample(self) -> Memory:
        """Take one sample (some 30 us); shared memory is that of the last refresh."""
        kib = {b"Shmem": 0, b"Dirty": 0, b"Writeback": 0}
        for line in os.pread(self._meminfo, MEMINFO_BYTES, 0).splitlines():
            name, _, rest = line.partition(b":")
            if name in kib:
                kib[name] = int(rest.split()[0])
        return Memory(
            anon_bytes=self._anon_bytes(),
            shared_bytes=self._shared_bytes,
            dirty_bytes=(kib[b"Dirty"] + kib[b"Writeback"]) * 1024,
            machine_shared_bytes=kib[b"Shmem"] * 1024,
        )

    def close(self) -> None:
        """Give the descriptors back."""
        for fd in (self._meminfo, *self._statm.values()):
            os.close(fd)
        self._statm.clear()

    def _anon_bytes(self) -> int:
        pages = 0
        for statm in self._statm.values():
            try:
                fields = os.pread(statm, STATM_BYTES, 0).split()
            except ProcessLookupError:
                continue
            if len(fields) > 2:
                pages += int(fields[1]) - int(fields[2])
        return pages * PAGE_BYTES
