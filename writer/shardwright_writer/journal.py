"""A save's journal: what a new server needs to go on with a save whose server died.

One memfd per save, kept by the supervisor beside the arena: the fixed part (who, where, plan,
skeleton) and per window its state, slot and piece CRCs. `save` writes it, `recovery` reads it.
It holds no file bytes: those are in the arena or, once durable, in the temporary files.
"""

from __future__ import annotations

import json
import mmap
import os
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MAGIC = b"SWJRNL01"
_HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("meta", "<u8"),
        ("plan", "<u8"),
        ("skeleton", "<u8"),
        ("windows", "<u8"),
        ("pieces", "<u8"),
    ]
)


class Phase(IntEnum):
    """How far the whole save is; grows only."""

    RECEIVING = 0
    CAPTURED = 1
    PUBLISHING = 2
    COMMITTED = 3


class WindowState(IntEnum):
    """How far one window is; grows only."""

    EXPECTED = 0
    RECEIVED = 1
    DURABLE = 2


class Journal:
    """Typed views over the memfd. Plain stores into shared memory survive SIGKILL at once."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        memory = mmap.mmap(fd, os.fstat(fd).st_size)
        header = np.frombuffer(memory, _HEADER, 1)[0]
        if header["magic"] != _MAGIC:
            raise ValueError("not a shardwright journal")
        at = _HEADER.itemsize

        def take(count: int) -> memoryview:
            nonlocal at
            start, at = at, at + count
            return memoryview(memory)[start:at]

        def array(kind: str, count: int) -> NDArray[Any]:
            nonlocal at
            at = -(-at // 8) * 8
            dtype = np.dtype(kind)
            return np.frombuffer(take(count * dtype.itemsize), dtype)

        self.meta: dict[str, Any] = json.loads(bytes(take(int(header["meta"]))))
        self.plan = take(int(header["plan"]))
        self.skeleton = take(int(header["skeleton"]))
        windows, pieces = int(header["windows"]), int(header["pieces"])
        self._phase = array("<u8", 2)
        self.states: NDArray[np.uint8] = array("<u1", windows)
        self.slots: NDArray[np.uint32] = array("<u4", windows)
        self.generations: NDArray[np.uint64] = array("<u8", windows)
        self.piece_crcs: NDArray[np.uint32] = array("<u4", pieces)
        self.inodes: NDArray[np.uint64] = array("<u8", int(self.meta["file_count"]))

    @classmethod
    def create(
        cls, meta: dict[str, Any], plan: bytes, skeleton: bytes, windows: int, pieces: int
    ) -> Journal:
        """Make the memfd; meta must hold file_count."""
        text = json.dumps(meta).encode()
        fixed = _HEADER.itemsize + len(text) + len(plan) + len(skeleton)
        size = fixed + 8 * 2 + windows * (1 + 4 + 8) + pieces * 4 + 8 * meta["file_count"] + 8 * 8
        fd = os.memfd_create("shardwright-journal", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, size)
            header = np.array(
                [(_MAGIC, len(text), len(plan), len(skeleton), windows, pieces)], _HEADER
            )
            _write_all(fd, header.tobytes() + text)
            _write_all(fd, plan)
            _write_all(fd, skeleton)
            return cls(fd)
        except BaseException:
            os.close(fd)
            raise

    @property
    def size(self) -> int:
        """Bytes of memory, charged to whoever keeps the fd."""
        return os.fstat(self.fd).st_size

    @property
    def phase(self) -> Phase:
        """How far the save is."""
        return Phase(int(self._phase[0]))

    @phase.setter
    def phase(self, phase: Phase) -> None:
        self._phase[0] = phase

    def count_adoption(self) -> int:
        """Return how many servers have taken this save over, this one included."""
        self._phase[1] += 1
        return int(self._phase[1])

    def close(self) -> None:
        """Close the fd; the mapping goes with the last view."""
        os.close(self.fd)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
