"""The zip dialect we write, record by record: headers, descriptors, directory, end records.

The scalar functions are the one description of these bytes; `put` stamps what they return into a
blob at 100,000 places at once, with the columns that vary. Used by `torch_zip`. Knows nothing of
torch, of plans, or of what a record holds.

Records are STORED, with data descriptors (the CRC comes after the data), so that a file can be
written front to back; zip64 fields appear only where a size or an offset needs them.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from shardwright_writer.formats.base import Int64s

WIDE: Final = 0xFFFFFFFF
"""Sizes and offsets from here on live in zip64 fields."""

ALIGNMENT: Final = 64
"""Of every record's data within the file, as torch has it: mmap loading hands out views."""

DESCRIPTOR_CRC_AT: Final = 4
DIRECTORY_CRC_AT: Final = 16

_LOCAL = struct.Struct("<IHHHHHIIIHH")
_ENTRY = struct.Struct("<IHHHHHHIIIHHHHHII")
_DOS_DATE = 0x21  # 1980-01-01, the first date there is: equal saves have equal bytes
_UTF8 = 0x0800
_HAS_DESCRIPTOR = 0x0008


def align(offsets: Int64s) -> Int64s:
    """Round up to ALIGNMENT."""
    return -(-offsets // ALIGNMENT) * ALIGNMENT


def local_header_bytes(name_bytes: int, nbytes: int) -> int:
    """Return the size of a local header before padding."""
    return _LOCAL.size + name_bytes + (20 if nbytes >= WIDE else 0) + 4


def local_header(name: bytes, nbytes: int, padding: int) -> bytes:
    """Return a local header with `padding` bytes after it, in an extra field as torch's."""
    wide = nbytes >= WIDE
    size = WIDE if wide else 0
    extra = struct.pack("<HHQQ", 1, 16, 0, 0) if wide else b""
    extra += b"FB" + struct.pack("<H", padding) + bytes(padding)
    fixed = _LOCAL.pack(
        0x04034B50, _version(wide), _flags(nbytes), 0, 0, _DOS_DATE, 0, size, size,
        len(name), len(extra),
    )  # fmt: skip
    return fixed + name + extra


def descriptor_bytes(nbytes: int) -> int:
    """Return the size of what follows a record's data: an empty record has no descriptor."""
    return 0 if nbytes == 0 else 24 if nbytes >= WIDE else 16


def descriptor(crc32: int, nbytes: int) -> bytes:
    """Return what follows a record's data."""
    if nbytes == 0:
        return b""
    return struct.pack("<IIQQ" if nbytes >= WIDE else "<IIII", 0x08074B50, crc32, nbytes, nbytes)


def directory_entry(name: bytes, crc32: int, nbytes: int, header_offset: int) -> bytes:
    """Return a record's entry in the central directory."""
    extra = b""
    if nbytes >= WIDE:
        extra += struct.pack("<QQ", nbytes, nbytes)
    if header_offset >= WIDE:
        extra += struct.pack("<Q", header_offset)
    if extra:
        extra = struct.pack("<HH", 1, len(extra)) + extra
    size = min(nbytes, WIDE)
    version = _version(bool(extra))
    fixed = _ENTRY.pack(
        0x02014B50, version, version, _flags(nbytes), 0, 0, _DOS_DATE, crc32, size, size,
        len(name), len(extra), 0, 0, 0, 0, min(header_offset, WIDE),
    )  # fmt: skip
    return fixed + name + extra


def directory_end(records: int, directory_bytes: int, directory_offset: int) -> bytes:
    """Return the end records. The zip64 ones are always there, as torch writes them."""
    end_offset = directory_offset + directory_bytes
    zip64 = struct.pack(
        "<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, records, records,
        directory_bytes, directory_offset,
    )  # fmt: skip
    locator = struct.pack("<IIQI", 0x07064B50, 0, end_offset, 1)
    few = min(records, 0xFFFF)
    size, offset = min(directory_bytes, WIDE), min(directory_offset, WIDE)
    return zip64 + locator + struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, few, few, size, offset, 0)


def put(
    blob: NDArray[np.uint8],
    places: Int64s,
    template: bytes,
    columns: Sequence[tuple[int, int, Int64s]],
) -> None:
    """Stamp template into a zeroed blob at all places; columns are (at, width, values).

    A column's values replace `width` bytes, little endian. Byte by byte over all places: that is
    one scalar store per byte and needs no index matrix of the blob's size.
    """
    varies = bytearray(len(template))
    for at, width, values in columns:
        for byte in range(width):
            blob[places + (at + byte)] = (values >> (8 * byte)) & 0xFF
            varies[at + byte] = 1
    for at, byte in enumerate(template):
        if byte and not varies[at]:
            blob[places + at] = byte


def _version(wide: bool) -> int:
    return 45 if wide else 20


def _flags(nbytes: int) -> int:
    return _UTF8 | (_HAS_DESCRIPTOR if nbytes else 0)
