"""The `torch` format: the zip that stock `torch.load` reads, tensors first and `data.pkl` last.

    archive/data/0 .. n-1               shards, in plan order, data aligned to 64 bytes
    archive/byteorder, version, .data/serialization_id, data.pkl
    central directory, end records

The order makes every shard's place depend on the plan alone; a zip is read by its directory, so
torch does not mind. There is no `.format_version` and no `.storage_alignment`: they would invite
torch to compute offsets from its own record order (`calculate_storage_offsets`) instead of
reading them. Called through `formats`; `verify` uses `frame` to know what a file must hold. Does
not look into the pickle.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from shardwright_writer.crc import crc32
from shardwright_writer.formats import zip_bytes
from shardwright_writer.formats.base import FilePlan, SavePlan, ShardLayout

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from numpy.typing import NDArray

    from shardwright_writer.formats.base import Int64s, Plan

_PREFIX: Final = b"archive/data/"
SMALL_RECORDS: Final = (("archive/byteorder", b"little"), ("archive/version", b"3\n"))
ID_NAME: Final = "archive/.data/serialization_id"
PICKLE_NAME: Final = "archive/data.pkl"
ID_BYTES: Final = 40


@dataclass(frozen=True, slots=True)
class PickleFacts:
    """What the frame needs to know of `data.pkl` without holding it."""

    nbytes: int
    crc32: int
    serialization_id: bytes


@dataclass(frozen=True, slots=True)
class Frame:
    """All bytes of the file but the shards' and the pickle's, as literals.

    The last two literals are what lies before the pickle and what lies behind it; holes are the
    shards' CRCs, as in FilePlan. tail_headers: (record name, header offset, data offset, bytes)
    of the records behind the shards.
    """

    size: int
    blob_parts: list[bytes]
    literal_offset: Int64s
    literal_start: Int64s
    hole_offset: Int64s
    hole_shard: Int64s
    directory_offset: int
    directory_end: int
    entry_offset: Int64s  # of every directory entry in the file, shards first
    tail_headers: list[tuple[str, int, int, int]]


class TorchZip:
    """See the module's docstring."""

    name = "torch"

    def check(self, plan: Plan) -> None:
        """Refuse nothing: records are bytes, whatever their dtype and name."""

    def layout(self, plan: Plan) -> ShardLayout:
        """Place every shard behind its local header."""
        count = len(plan.nbytes)
        return ShardLayout(1, np.zeros(count, np.int64), data_offsets(plan.nbytes), None)

    def files(
        self, plan: Plan, layout: ShardLayout, skeleton: bytes, file_name: str, shard_tag: str
    ) -> SavePlan:
        """Return the one file. The shard tag is for formats that make several."""
        del shard_tag
        facts = PickleFacts(len(skeleton), crc32(skeleton), serialization_id(plan.nbytes, skeleton))
        it = frame(plan.nbytes, layout.offset_of_shard, facts)
        *before, behind = it.blob_parts
        # The pickle lies between the last two literals: here the three become one.
        starts = np.append(it.literal_start[:-2], it.literal_start[-1] + len(skeleton))
        file = FilePlan(
            name=file_name,
            size=it.size,
            shards=np.arange(len(plan.nbytes), dtype=np.int64),
            shard_offset=layout.offset_of_shard,
            shard_nbytes=plan.nbytes,
            literal_blob=b"".join([*before, skeleton, behind]),
            literal_offset=it.literal_offset[:-1],
            literal_start=starts,
            hole_offset=it.hole_offset,
            hole_shard=it.hole_shard,
        )
        return SavePlan([file], None)

    def shard_names(self, file_name: str, count: int, tag: str) -> list[str]:
        """Return the file's own name: there is never a second one."""
        del tag
        assert count == 1
        return [file_name]

    def superseded(
        self,
        names: Sequence[str],
        file_name: str,
        kept: Collection[str],
        recorded: Collection[str] = (),
    ) -> list[str]:
        """Return nothing: the new file has replaced the old one under its name."""
        del names, file_name, kept, recorded
        return []


def data_offsets(nbytes: Int64s) -> Int64s:
    """Return where each record's data begins: aligned, one behind the other."""
    if not len(nbytes):
        return np.zeros(0, np.int64)
    heads = _head_bytes(nbytes)
    steps = zip_bytes.align(nbytes[:-1] + _descriptor_bytes(nbytes[:-1]) + heads[1:])
    offsets = np.empty(len(nbytes), np.int64)
    offsets[0] = zip_bytes.align(heads[:1])[0]
    np.cumsum(steps, out=offsets[1:])
    offsets[1:] += offsets[0]
    return offsets


def serialization_id(nbytes: Int64s, skeleton: bytes) -> bytes:
    """Return 40 digits that equal saves share: 20 from the sizes, 20 from the pickle."""
    return serialization_id_of(nbytes, hashlib.blake2b(skeleton, digest_size=8).digest())


def serialization_id_of(nbytes: Int64s, skeleton_digest: bytes) -> bytes:
    """Return the same from the pickle's 8-byte BLAKE2b digest."""
    sizes = hashlib.blake2b(nbytes.astype("<i8").tobytes(), digest_size=8).digest()
    halves = (int.from_bytes(digest, "little") for digest in (sizes, skeleton_digest))
    return b"".join(b"%020d" % half for half in halves)


def frame(nbytes: Int64s, offsets: Int64s, facts: PickleFacts) -> Frame:
    """Build every byte that belongs to no shard and not to the pickle."""
    count = len(nbytes)
    descriptors = _descriptor_bytes(nbytes)
    ends = offsets + nbytes
    headers = np.concatenate([np.zeros(1, np.int64), ends + descriptors])  # count + 1: the tail's
    literal_offset = np.concatenate([np.zeros(1, np.int64), ends])
    starts = np.zeros(count + 1, np.int64)
    np.cumsum(offsets - literal_offset[:-1], out=starts[1:])

    last_descriptor = int(descriptors[-1]) if count else 0
    blob = np.zeros(int(starts[-1]) + last_descriptor, np.uint8)
    header_places = starts[:-1] + headers[:-1] - literal_offset[:-1]
    _put_headers(blob, header_places, nbytes, offsets - headers[:-1])
    _put_descriptors(blob, starts[1:], nbytes)

    before, records, directory_offset = _tail(int(headers[-1]), facts)
    behind = [zip_bytes.descriptor(facts.crc32, facts.nbytes)]
    directory, entries = _directory(nbytes, headers[:-1], records, facts)
    behind += [directory, zip_bytes.directory_end(len(entries), len(directory), directory_offset)]
    parts = [blob.tobytes(), before, b"".join(behind)]

    real = np.flatnonzero(nbytes)
    entries += directory_offset
    pickle_end = records[-1][2] + facts.nbytes
    split = len(parts[0]) + len(parts[1])
    return Frame(
        size=pickle_end + len(parts[2]),
        blob_parts=parts,
        literal_offset=np.append(literal_offset, pickle_end),
        literal_start=np.append(starts, [split, split + len(parts[2])]),
        hole_offset=np.concatenate(
            [
                ends[real] + zip_bytes.DESCRIPTOR_CRC_AT,
                entries[real] + zip_bytes.DIRECTORY_CRC_AT,
            ]
        ),
        hole_shard=np.concatenate([real, real]),
        directory_offset=directory_offset,
        directory_end=directory_offset + len(directory),
        entry_offset=entries,
        tail_headers=records,
    )


def _tail(at: int, facts: PickleFacts) -> tuple[bytes, list[tuple[str, int, int, int]], int]:
    """Return the bytes from `at` to the pickle, the tail's records, the directory's offset."""
    parts: list[bytes] = []
    records: list[tuple[str, int, int, int]] = []
    contents = [*SMALL_RECORDS, (ID_NAME, facts.serialization_id), (PICKLE_NAME, None)]
    for name, content in contents:
        nbytes = facts.nbytes if content is None else len(content)
        raw = name.encode()
        head = zip_bytes.local_header_bytes(len(raw), nbytes)
        padding = -(at + head) % zip_bytes.ALIGNMENT
        records.append((name, at, at + head + padding, nbytes))
        parts.append(zip_bytes.local_header(raw, nbytes, padding))
        if content is not None:
            parts += [content, zip_bytes.descriptor(crc32(content), nbytes)]
        at += head + padding + nbytes + zip_bytes.descriptor_bytes(nbytes)
    return b"".join(parts), records, at


def _directory(
    nbytes: Int64s,
    headers: Int64s,
    tail: list[tuple[str, int, int, int]],
    facts: PickleFacts,
) -> tuple[bytes, Int64s]:
    """Return the central directory and where in it each entry begins."""
    count = len(nbytes)
    wide, far = nbytes >= zip_bytes.WIDE, headers >= zip_bytes.WIDE
    sizes = 46 + _name_bytes(count) + 16 * wide + 8 * far + 4 * (wide | far)
    places = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
    blob = np.zeros(int(places[-1]), np.uint8)
    for rows, digits in _groups(np.arange(count), [wide, far, nbytes == 0]):
        first = int(rows[0])
        entry = zip_bytes.directory_entry(
            _record_name(first), 0, int(nbytes[first]), int(headers[first])
        )
        name_at = 46 + len(_PREFIX)
        columns = _digit_columns(name_at, digits, rows)
        extra_at = name_at + digits + 4
        if wide[first]:
            columns += [(extra_at, 8, nbytes[rows]), (extra_at + 8, 8, nbytes[rows])]
            extra_at += 16
        else:
            columns += [(20, 4, nbytes[rows]), (24, 4, nbytes[rows])]
        columns.append((extra_at, 8, headers[rows]) if far[first] else (42, 4, headers[rows]))
        zip_bytes.put(blob, places[rows], entry, columns)
    crcs = [crc32(content) for _, content in SMALL_RECORDS]
    crcs += [crc32(facts.serialization_id), facts.crc32]
    entries = [
        zip_bytes.directory_entry(name.encode(), crc, size, header)
        for (name, header, _, size), crc in zip(tail, crcs, strict=True)
    ]
    tail_places = places[-1] + np.cumsum([0, *(len(entry) for entry in entries[:-1])])
    return b"".join([blob.tobytes(), *entries]), np.concatenate([places[:-1], tail_places])


def _put_headers(
    blob: NDArray[np.uint8], places: Int64s, nbytes: Int64s, header_bytes: Int64s
) -> None:
    wide = nbytes >= zip_bytes.WIDE
    for rows, digits in _groups(np.arange(len(nbytes)), [wide, nbytes == 0]):
        first = int(rows[0])
        template = zip_bytes.local_header(_record_name(first), int(nbytes[first]), 0)
        padding = header_bytes[rows] - len(template)
        columns = _digit_columns(30 + len(_PREFIX), digits, rows)
        columns.append((28, 2, padding + (24 if wide[first] else 4)))
        columns.append((len(template) - 2, 2, padding))
        zip_bytes.put(blob, places[rows], template, columns)


def _put_descriptors(blob: NDArray[np.uint8], places: Int64s, nbytes: Int64s) -> None:
    wide = nbytes >= zip_bytes.WIDE
    for rows, width in (
        (np.flatnonzero(~wide & (nbytes > 0)), 4),
        (np.flatnonzero(wide), 8),
    ):
        if len(rows):
            template = zip_bytes.descriptor(0, int(nbytes[rows[0]]))
            sizes = nbytes[rows]
            columns = [(8, width, sizes), (8 + width, width, sizes)]
            zip_bytes.put(blob, places[rows], template, columns)


def _groups(rows: Int64s, traits: list[NDArray[np.bool_]]) -> Iterator[tuple[Int64s, int]]:
    """Yield (rows, digits) whose names are equally long and whose traits are equal."""
    kinds = _name_bytes(len(rows))
    for trait in traits:
        kinds = kinds * 2 + trait
    for kind in np.unique(kinds):
        found = np.flatnonzero(kinds == kind)
        yield found, int(kind >> len(traits)) - len(_PREFIX)


def _digit_columns(at: int, digits: int, rows: Int64s) -> list[tuple[int, int, Int64s]]:
    return [
        (at + digit, 1, rows // 10 ** (digits - 1 - digit) % 10 + ord("0"))
        for digit in range(digits)
    ]


def _record_name(index: int) -> bytes:
    return _PREFIX + str(index).encode()


def _name_bytes(count: int) -> Int64s:
    """Return the length of every shard record's name."""
    sizes = np.full(count, len(_PREFIX) + 1, np.int64)
    power = 10
    while power < count:
        sizes[power:] += 1
        power *= 10
    return sizes


def _head_bytes(nbytes: Int64s) -> Int64s:
    return 34 + _name_bytes(len(nbytes)) + 20 * (nbytes >= zip_bytes.WIDE)


def _descriptor_bytes(nbytes: Int64s) -> Int64s:
    return np.where(nbytes == 0, 0, np.where(nbytes >= zip_bytes.WIDE, 24, 16)).astype(np.int64)
