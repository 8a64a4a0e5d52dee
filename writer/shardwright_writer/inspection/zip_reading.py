"""Inspection of a torch zip that nothing describes: its own directory and its own CRCs.

For files without a manifest, stock ones included. Every number in the file is checked against the
file's size before it is used. Used by `verify`. Unpickles nothing; knows only the zips torch makes:
stored records, one after the other, directory last.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from shardwright_writer.formats import torch_zip
from shardwright_writer.inspection.expected import differences
from shardwright_writer.inspection.source import Problem
from shardwright_writer.inspection.zip_container import expect

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shardwright_writer.inspection.source import Source

_LOCAL: Final = struct.Struct("<IHHHHHIIIHH")
_ENTRY: Final = struct.Struct("<IHHHHHHIIIHHHHHII")
_END: Final = struct.Struct("<IHHHHIIH")
_END64: Final = struct.Struct("<IQHHIIQQQQ")
_LOCATOR: Final = struct.Struct("<IIQI")
_WIDE: Final = 0xFFFFFFFF
_READ_BYTES: Final = 1 << 20
_ENTRY_BYTES_MAX: Final = _ENTRY.size + 3 * 0xFFFF


class _DamageError(Exception):
    """The container cannot be read on from here."""

    def __init__(self, name: str, start: int, stop: int, what: str) -> None:
        super().__init__(what)
        self.name, self.start, self.stop, self.what = name, start, stop, what


@dataclass(frozen=True, slots=True)
class _Record:
    name: str
    flags: int
    crc32: int
    nbytes: int
    header: int


def inspect(source: Source) -> tuple[int, list[Problem]]:
    """Check every record; return how many there are, and what is wrong."""
    problems: list[Problem] = []
    try:
        records = sorted(_directory(source), key=lambda record: record.header)
        places = list(_places(source, records, problems))
    except _DamageError as damage:
        return 0, [Problem(source.name, damage.name, damage.start, damage.stop, damage.what)]
    begins = np.array(places, np.int64)
    ends = begins + np.array([record.nbytes for record in records], np.int64)
    found, _ = source.crcs(begins, ends)
    for record, begin, crc in zip(records, places, found.tolist(), strict=True):
        if crc != record.crc32:
            what = "its bytes do not match the CRC-32 in the directory"
            end = begin + record.nbytes
            problems.append(Problem(source.name, record.name, begin, end, what))
    names = [record.name for record in records]
    if len(set(names)) < len(names) or not any(name.endswith("/data.pkl") for name in names):
        what = "a record is there twice, or there is no data.pkl: not a torch checkpoint"
        problems.append(Problem(source.name, "directory", 0, source.size, what))
    if not problems and _is_ours(names):
        problems = _compare_frame(source, records)
    return len(records), problems


def _is_ours(names: list[str]) -> bool:
    tail = [name for name, _ in torch_zip.SMALL_RECORDS]
    tail += [torch_zip.ID_NAME, torch_zip.PICKLE_NAME]
    return names == [f"archive/data/{index}" for index in range(len(names) - len(tail))] + tail


def _compare_frame(source: Source, records: list[_Record]) -> list[Problem]:
    """Check the bytes that no CRC covers too: what we wrote is known to the last of them."""
    shards = records[: -len(torch_zip.SMALL_RECORDS) - 2]
    nbytes = np.array([record.nbytes for record in shards], np.int64)
    crcs = np.array([record.crc32 for record in shards], np.uint32)
    expected, problems = expect(source, [record.name for record in shards], nbytes, crcs)
    return problems + (differences(source, expected) if expected else [])


def _directory(source: Source) -> Iterator[_Record]:
    """Yield the records of the central directory. Raises _DamageError."""
    count, at, end = _find_directory(source)
    buffer, base = b"", at
    for _ in range(count):
        if base + len(buffer) < min(at + _ENTRY_BYTES_MAX, end):
            buffer, base = source.read(at, min(max(_READ_BYTES, _ENTRY_BYTES_MAX), end - at)), at
        record, size = _entry(buffer, at - base, at, end)
        yield record
        at += size
    if at != end:
        raise _DamageError("directory", at, end, "the directory is longer than its records")


def _find_directory(source: Source) -> tuple[int, int, int]:
    """Return (records, offset, end) of the central directory."""
    size = source.size
    at = size - _END.size
    if at < 0 or source.read(at, 4) != b"PK\5\6":
        raise _DamageError(
            "directory", max(at, 0), size, "no end record: cut off, damaged, or not a torch zip"
        )
    _, disk, disk_start, here, count, nbytes, offset, comment = _END.unpack(
        source.read(at, _END.size)
    )
    if disk or disk_start or comment or here != count:
        raise _DamageError("directory", at, size, "the end record contradicts itself")
    end = at
    locator_at = at - _LOCATOR.size
    if locator_at >= _END64.size:
        kind, _, end64, disks = _LOCATOR.unpack(source.read(locator_at, _LOCATOR.size))
        if kind == 0x07064B50:
            end = locator_at - _END64.size
            if end64 != end or disks != 1:
                raise _DamageError("directory", locator_at, at, "the zip64 locator is damaged")
            short = (count, nbytes, offset)
            count, nbytes, offset = _end64(source, end, short)
    if offset + nbytes != end or count * _ENTRY.size > nbytes:
        raise _DamageError("directory", end, size, "the end record contradicts the file's size")
    return count, offset, end


def _end64(source: Source, at: int, short: tuple[int, int, int]) -> tuple[int, int, int]:
    fields = _END64.unpack(source.read(at, _END64.size))
    kind, size, _, _, disk, disk_start, here, *wide = fields
    count, nbytes, offset = wide
    capped = (min(count, 0xFFFF), min(nbytes, _WIDE), min(offset, _WIDE))
    matches = all(
        value in (cap, limit)
        for value, cap, limit in zip(short, capped, (0xFFFF, _WIDE, _WIDE), strict=True)
    )
    if kind != 0x06064B50 or size != 44 or disk or disk_start or here != count or not matches:
        raise _DamageError("directory", at, at + _END64.size, "the zip64 end record is damaged")
    return count, nbytes, offset


def _entry(buffer: bytes, inside: int, at: int, end: int) -> tuple[_Record, int]:
    """Parse the entry at file offset `at`, which is buffer[inside:]."""
    if end - at < _ENTRY.size or len(buffer) - inside < _ENTRY.size:
        raise _DamageError("directory", at, end, "the directory is cut off")
    fields = _ENTRY.unpack_from(buffer, inside)
    kind, _, _, flags, method, _, _, crc, packed, nbytes, name_bytes, extra_bytes = fields[:12]
    comment_bytes, _, _, _, header = fields[12:]
    size = _ENTRY.size + name_bytes + extra_bytes + comment_bytes
    raw = buffer[inside + _ENTRY.size : inside + _ENTRY.size + name_bytes]
    name = raw.decode("utf-8", "backslashreplace")
    if kind != 0x02014B50 or method or packed != nbytes or size > end - at:
        raise _DamageError(
            "directory", at, min(at + size, end), f"the directory entry of {name!r} is damaged"
        )
    extra_at = inside + _ENTRY.size + name_bytes
    wanted = [value == _WIDE for value in (nbytes, packed, header)]
    wide = _zip64(buffer[extra_at : extra_at + extra_bytes], sum(wanted))
    if wide is None:
        raise _DamageError("directory", at, at + size, f"{name!r} lacks its zip64 sizes")
    values = iter(wide)
    nbytes, packed, header = (
        next(values) if want else value
        for want, value in zip(wanted, (nbytes, packed, header), strict=True)
    )
    if nbytes != packed:
        raise _DamageError("directory", at, at + size, f"{name!r} has two sizes")
    return _Record(name, flags, crc, nbytes, header), size


def _zip64(extra: bytes, count: int) -> tuple[int, ...] | None:
    at = 0
    while count and at + 4 <= len(extra):
        kind, nbytes = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            if nbytes < 8 * count or at + 4 + 8 * count > len(extra):
                return None
            return struct.unpack_from(f"<{count}Q", extra, at + 4)
        at += 4 + nbytes
    return None if count else ()


def _places(source: Source, records: list[_Record], problems: list[Problem]) -> Iterator[int]:
    """Yield where each record's data begins, checking local headers and descriptors."""
    expected = 0
    # A descriptor's width is not written anywhere: what follows it tells.
    nexts = [record.header for record in records[1:]]
    directory_at = _find_directory(source)[1]
    for record, following in zip(records, [*nexts, directory_at], strict=True):
        if record.header != expected:
            what = f"{record.name} does not begin where the record before it ends"
            start, stop = sorted((expected, min(record.header, source.size)))
            raise _DamageError(record.name, start, stop, what)
        data = _local_data(source, record, problems)
        end = data + record.nbytes
        tail = following - end
        if tail not in (0, 16, 24) or (tail == 0) == bool(record.flags & 8 and record.nbytes):
            what = f"the size of {record.name} does not reach the next record"
            raise _DamageError(record.name, record.header, data, what)
        _check_descriptor(source, record, end, tail, problems)
        expected = following
        yield data


def _local_data(source: Source, record: _Record, problems: list[Problem]) -> int:
    at = record.header
    raw = source.read(at, _LOCAL.size)
    if len(raw) < _LOCAL.size:
        raise _DamageError(record.name, at, source.size, "its local header is cut off")
    kind, _, flags, method, _, _, crc, packed, nbytes, name_bytes, extra_bytes = _LOCAL.unpack(raw)
    name = source.read(at + _LOCAL.size, name_bytes).decode("utf-8", "backslashreplace")
    data: int = at + _LOCAL.size + name_bytes + extra_bytes
    same = kind == 0x04034B50 and flags == record.flags and not method and name == record.name
    same = same and crc in (0, record.crc32)
    same = same and {packed, nbytes} <= {0, _WIDE, record.nbytes}
    if not same:
        what = "its local header contradicts the directory"
        problems.append(Problem(source.name, record.name, at, data, what))
    return data


def _check_descriptor(
    source: Source, record: _Record, at: int, nbytes: int, problems: list[Problem]
) -> None:
    if not nbytes:
        return
    fields = struct.unpack("<IIII" if nbytes == 16 else "<IIQQ", source.read(at, nbytes))
    if fields != (0x08074B50, record.crc32, record.nbytes, record.nbytes):
        what = "its data descriptor contradicts the directory"
        problems.append(Problem(source.name, record.name, at, at + nbytes, what))
