"""Inline chunks on the wire, encoded and decoded by hand: the bytes are copied once, not thrice.

The encoding is protobuf's own of `SaveRequest.inline_chunk` (tests compare them), so a peer in
another language needs none of this. Both sides hand these functions to gRPC as (de)serialisers;
everything but inline chunks goes through the generated code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_CHUNK_TAG: Final = 5 << 3 | 2  # SaveRequest.inline_chunk
_DATA_TAG: Final = 4 << 3 | 2
_CRC_TAG: Final = 5 << 3 | 5
_VARINT_TAGS: Final = {1 << 3: "file", 2 << 3: "window", 3 << 3: "offset", 6 << 3: "last"}
_UINT32_MAX: Final = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class InlineBytes:
    """One InlineChunk; data is a view into the received message."""

    file: int
    window: int
    offset: int
    data: memoryview
    crc32: int
    last: bool


def encode_chunk(chunk: InlineBytes) -> bytes:
    """Return the serialised SaveRequest. Copies the data once."""
    head = b"".join(
        bytes((number << 3,)) + _varint(value)
        for number, value in ((1, chunk.file), (2, chunk.window), (3, chunk.offset))
        if value
    )
    size = len(chunk.data)
    if size:
        head += bytes((_DATA_TAG,)) + _varint(size)
    tail = bytes((_CRC_TAG,)) + chunk.crc32.to_bytes(4, "little") if chunk.crc32 else b""
    if chunk.last:
        tail += bytes((6 << 3, 1))
    start = bytes((_CHUNK_TAG,)) + _varint(len(head) + size + len(tail))
    return b"".join((start, head, chunk.data, tail))


def decode_chunk(message: bytes) -> InlineBytes | None:
    """Return the InlineChunk that a SaveRequest consists of, or None for anything else.

    None means: let protobuf parse it, and judge it. Copies nothing.
    """
    if not message or message[0] != _CHUNK_TAG:
        return None
    values = {"file": 0, "window": 0, "offset": 0, "last": 0, "crc32": 0}
    data = memoryview(b"")
    try:
        size, at = _read_varint(message, 1)
        if at + size != len(message):
            return None
        while at < len(message):
            tag = message[at]
            at += 1
            if tag in _VARINT_TAGS:
                values[_VARINT_TAGS[tag]], at = _read_varint(message, at)
            elif tag == _DATA_TAG:
                count, at = _read_varint(message, at)
                data, at = memoryview(message)[at : at + count], at + count
                if len(data) != count:
                    return None
            elif tag == _CRC_TAG:
                values["crc32"], at = int.from_bytes(message[at : at + 4], "little"), at + 4
            else:
                return None
    except IndexError:
        return None
    if at != len(message) or max(values.values()) > _UINT32_MAX:
        return None
    last = values.pop("last")
    return InlineBytes(data=data, last=bool(last), **values)


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
        if shift > 63:
            raise IndexError("varint of more than 64 bits")
