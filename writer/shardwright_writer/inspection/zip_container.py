"""Inspection of a torch zip that the manifest describes: every byte but the shards' is known.

Everything follows from the shards' sizes and CRCs except `data.pkl`, whose size is what is left
of the file and whose CRC stands in it twice. Used by `verify`; `zip_reading` inspects zips that
nothing describes. Judges no shard and parses no pickle.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shardwright_writer.formats import torch_zip, zip_bytes
from shardwright_writer.formats.base import FilePlan
from shardwright_writer.formats.image import FileImage
from shardwright_writer.inspection.expected import Expected, Part
from shardwright_writer.inspection.source import Problem

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from shardwright_writer.formats.base import Int64s
    from shardwright_writer.formats.torch_zip import Frame
    from shardwright_writer.inspection.source import Source

_NO_ID = b"0" * torch_zip.ID_BYTES


def expect(
    source: Source, names: Sequence[str], nbytes: Int64s, crcs: NDArray[np.uint32]
) -> tuple[Expected | None, list[Problem]]:
    """Return the file's literals and what is wrong with the pickle.

    None when no file of this size can hold these shards as this writer lays them out.
    """
    offsets = torch_zip.data_offsets(nbytes)
    draft = torch_zip.frame(nbytes, offsets, torch_zip.PickleFacts(1, 0, _NO_ID))
    pickle_bytes = source.size - draft.size + 1
    if not 1 <= pickle_bytes < zip_bytes.WIDE:
        return None, []
    facts, problems = _pickle_facts(source, nbytes, draft, pickle_bytes)
    frame = torch_zip.frame(nbytes, offsets, facts)
    assert frame.size == source.size
    # To the image the pickle is one more shard: nothing to fill, nothing to compare.
    pickle_offset = frame.tail_headers[-1][2]
    plan = FilePlan(
        name=source.name,
        size=frame.size,
        shards=np.arange(len(nbytes) + 1),
        shard_offset=np.append(offsets, pickle_offset),
        shard_nbytes=np.append(nbytes, pickle_bytes),
        literal_blob=b"".join(frame.blob_parts),
        literal_offset=frame.literal_offset,
        literal_start=frame.literal_start,
        hole_offset=frame.hole_offset,
        hole_shard=frame.hole_shard,
    )
    naming = _ZipNaming(names, offsets, offsets + nbytes, frame)
    return Expected(FileImage(plan), crcs, naming), problems


def _pickle_facts(
    source: Source, nbytes: Int64s, draft: Frame, pickle_bytes: int
) -> tuple[torch_zip.PickleFacts, list[Problem]]:
    """Find out which CRC the pickle was written with, and whether it still has it."""
    start = draft.tail_headers[-1][2]
    stop = start + pickle_bytes
    digest = hashlib.blake2b(digest_size=8)
    for _, piece in source.pieces(start, stop):
        digest.update(piece)
    found = source.range_crc(start, stop)
    entry = int(draft.entry_offset[-1]) + pickle_bytes - 1
    stored = [
        _u32(source, stop + zip_bytes.DESCRIPTOR_CRC_AT),
        _u32(source, entry + zip_bytes.DIRECTORY_CRC_AT),
    ]
    if found in stored:
        # Whatever differs is then a damaged descriptor or entry, and will be found as such.
        identity = torch_zip.serialization_id_of(nbytes, digest.digest())
        return torch_zip.PickleFacts(pickle_bytes, found, identity), []
    what = "its bytes do not match the CRC-32 in the container: the objects beside the tensors"
    problem = Problem(source.name, torch_zip.PICKLE_NAME, start, stop, what)
    identity = source.read(draft.tail_headers[-2][2], torch_zip.ID_BYTES)
    return torch_zip.PickleFacts(pickle_bytes, stored[0], identity), [problem]


def _u32(source: Source, offset: int) -> int:
    (value,) = struct.unpack("<I", source.read(offset, 4).ljust(4, b"\0"))
    return int(value)


@dataclass(frozen=True, slots=True)
class _ZipNaming:
    names: Sequence[str]
    offsets: Int64s
    ends: Int64s
    frame: Frame

    def part_at(self, offset: int) -> Part:
        frame = self.frame
        if offset >= frame.directory_offset:
            return self._directory_part(offset)
        if offset >= frame.tail_headers[0][1]:
            return self._tail_part(offset)
        following = int(self.offsets.searchsorted(offset, side="right"))
        if following:
            end = int(self.ends[following - 1])
            nbytes = end - int(self.offsets[following - 1])
            stop = end + zip_bytes.descriptor_bytes(nbytes)
            if offset < stop:
                what = f"the data descriptor of archive/data/{following - 1}"
                return Part(self.names[following - 1], end, stop, what)
        else:
            stop = 0
        what = f"the local header of archive/data/{following}"
        return Part(self.names[following], stop, int(self.offsets[following]), what)

    def _tail_part(self, offset: int) -> Part:
        for name, header, data, nbytes in reversed(self.frame.tail_headers):
            if offset >= data + nbytes:
                stop = data + nbytes + zip_bytes.descriptor_bytes(nbytes)
                return Part(name, data + nbytes, stop, f"the data descriptor of {name}")
            if offset >= data:
                return Part(name, data, data + nbytes, f"the content of {name}")
            if offset >= header:
                return Part(name, header, data, f"the local header of {name}")
        raise AssertionError("an offset before the tail")

    def _directory_part(self, offset: int) -> Part:
        entries, end = self.frame.entry_offset, self.frame.directory_end
        if offset >= end:
            return Part("directory", end, self.frame.size, "the end record of the directory")
        index = int(entries.searchsorted(offset, side="right")) - 1
        stop = int(entries[index + 1]) if index + 1 < len(entries) else end
        tail = index - len(self.names)
        if tail >= 0:
            record = self.frame.tail_headers[tail][0]
        else:
            record = f"archive/data/{index} (tensor {self.names[index]!r})"
        what = f"the directory entry of {record}"
        return Part("directory", int(entries[index]), stop, what)
