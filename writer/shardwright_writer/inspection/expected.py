"""What a file's container must look like, byte for byte, given its shards: and where it does not.

The formats are pure functions, so the bytes between the tensors can be made again from the
manifest's rows and compared. `zip_container` and `safetensors_container` make an `Expected`; this
module compares. Reads tensor bytes only where they share a block with others, and judges none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from shardwright_writer.inspection.source import Problem

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shardwright_writer.formats.image import FileImage
    from shardwright_writer.inspection.source import Source

_BLOCK_BYTES: Final = 256 << 10
_PROBLEMS_MAX: Final = 1000


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of container bytes that has a name of its own."""

    name: str
    start: int
    stop: int
    what: str


class Naming(Protocol):
    """Finds out whose a container byte is."""

    def part_at(self, offset: int) -> Part:
        """Return the part that holds the literal byte at this file offset."""


@dataclass(frozen=True, slots=True)
class Expected:
    """A file's literal bytes, the CRCs for its holes, and the names of its parts."""

    image: FileImage
    crcs: NDArray[np.uint32]
    naming: Naming


def differences(source: Source, expected: Expected) -> list[Problem]:
    """Return every part of the container that differs from what it must be."""
    problems: list[Problem] = []
    known_until = 0  # bytes before this are in a part that was reported
    for window in expected.image.literal_windows(_BLOCK_BYTES).tolist():
        start = window * _BLOCK_BYTES
        nbytes = min(_BLOCK_BYTES, expected.image.size - start)
        found = np.frombuffer(source.read(start, nbytes), np.uint8)
        wanted = found.copy()
        expected.image.fill(wanted.data, start, expected.crcs)
        for offset in (np.flatnonzero(found != wanted) + start).tolist():
            if offset < known_until:
                continue
            part = expected.naming.part_at(offset)
            known_until = max(part.stop, offset + 1)
            what = f"{part.what} is not what was written (first at byte {offset})"
            problems.append(Problem(source.name, part.name, part.start, part.stop, what))
            if len(problems) >= _PROBLEMS_MAX:
                return problems
    return problems
