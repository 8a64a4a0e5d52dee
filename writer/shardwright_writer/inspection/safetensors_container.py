"""Inspection of safetensors files and indexes: against the manifest, or by their structure alone.

The container has no CRC, so without a manifest only its structure can be checked, and the caller
says so. Used by `verify`. Judges no tensor byte.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from shardwright_writer.formats.base import Plan, UnsupportedError
from shardwright_writer.formats.image import FileImage
from shardwright_writer.formats.safetensors import (
    DTYPES,
    HEADER_BYTES_MAX,
    METADATA_KEY,
    Safetensors,
    header_entries,
)
from shardwright_writer.inspection.expected import Expected, Part
from shardwright_writer.inspection.source import Problem

if TYPE_CHECKING:
    from shardwright_writer.inspection.source import Source
    from shardwright_writer.manifest import Entry

INDEX_BYTES_MAX: Final = 256 << 20

_BITS: Final = dict(DTYPES.values()) | {"F6_E2M3": 6, "F6_E3M2": 6}


class StructureError(Exception):
    """Stock readers would refuse the file; the message says why."""


def expect(source: Source, entry: Entry, rows: list[int]) -> Expected | None:
    """Return the literals of the file that holds these rows of the entry.

    None when this writer lays these tensors out in another way.
    """
    part = Plan(
        format="safetensors",
        names=[entry.names[row] for row in rows],
        dtypes=[entry.dtypes[row] for row in rows],
        shapes=[entry.shapes[row] for row in rows],
        nbytes=entry.nbytes[rows],
        metadata=entry.head.metadata,
        shard_bytes_max=0,
    )
    form = Safetensors()
    try:
        form.check(part)
        layout = form.layout(part)
    except UnsupportedError:
        return None
    plan = form.files(part, layout, b"", source.name, "").files[0]
    if plan.size != source.size or (layout.offset_of_shard != entry.offset[rows]).any():
        return None
    order = plan.shards.tolist()
    header_bytes = len(plan.literal_blob)
    begins = (plan.shard_offset - header_bytes).tolist()
    entries = [len(text.encode()) + 1 for text in header_entries(part, order, begins)]
    head = plan.literal_blob.rstrip(b" ")
    first = len(head) - sum(entries)
    starts = list(accumulate(entries, initial=first))
    naming = _HeaderNaming([part.names[row] for row in order], starts, header_bytes)
    return Expected(FileImage(plan), np.zeros(len(rows), np.uint32), naming)


@dataclass(frozen=True, slots=True)
class _HeaderNaming:
    names: list[str]
    starts: list[int]  # of every tensor's entry, and the end of the last
    header_bytes: int

    def part_at(self, offset: int) -> Part:
        index = bisect_right(self.starts, offset) - 1
        if offset < 8:
            return Part("header", 0, 8, "the length of the header")
        if index < 0:
            return Part("header", 8, self.starts[0], "the metadata in the header")
        if index >= len(self.names):
            return Part("header", self.starts[-1], self.header_bytes, "the padding of the header")
        start, stop = self.starts[index : index + 2]
        return Part("header", start, stop, f"the entry of tensor {self.names[index]!r}")


def read_header(source: Source) -> dict[str, tuple[int, int]]:
    """Return the tensors' (offset, end) in the file, by name. Raises StructureError."""
    length = int.from_bytes(source.read(0, 8), "little")
    if source.size < 8 or length > min(source.size - 8, HEADER_BYTES_MAX):
        raise StructureError(f"the header length {length} does not fit the file")
    # A damaged length is found here, before up to 100 MB of tensor bytes are taken for JSON.
    if source.read(8, 1) != b"{" or source.read(7 + length, 1) not in (b"}", b" "):
        raise StructureError(f"there is no header of {length} bytes")
    header = _parse_json(source.read(8, length), "the header")
    tensors: dict[str, tuple[int, int]] = {}
    for name, facts in header.items():
        if name == METADATA_KEY:
            if not all(isinstance(value, str) for value in _require_dict(facts).values()):
                raise StructureError("the metadata holds something that is no string")
        else:
            begin, end = _tensor_range(name, facts)
            tensors[name] = (8 + length + begin, 8 + length + end)
    end = 8 + length
    for name, (start, stop) in sorted(tensors.items(), key=lambda item: item[1]):
        if start != end:
            raise StructureError(f"tensor {name!r} does not begin where the one before it ends")
        end = stop
    if end != source.size:
        raise StructureError(f"tensors end at byte {end} and the file at {source.size}")
    return tensors


def inspect(source: Source) -> tuple[int, list[Problem]]:
    """Check a file's structure; return how many tensors it has, and what is wrong."""
    try:
        return len(read_header(source)), []
    except StructureError as error:
        length = int.from_bytes(source.read(0, 8), "little")
        return 0, [Problem(source.name, "header", 0, min(8 + length, source.size), str(error))]


def read_index(source: Source) -> tuple[int | None, dict[str, str]]:
    """Return total_size and weight map. Raises StructureError."""
    if source.size > INDEX_BYTES_MAX:
        raise StructureError(f"an index of {source.size} bytes")
    index = _parse_json(source.read(0, source.size), "the index")
    weight_map = _require_dict(index.get("weight_map"))
    for name, file in weight_map.items():
        if not isinstance(file, str) or file in ("", ".", "..") or "/" in file or "\0" in file:
            raise StructureError(f"tensor {name!r} is said to be in {file!r}")
    total = _require_dict(index.get("metadata", {})).get("total_size")
    if total is not None and not isinstance(total, (int, float)):
        raise StructureError("total_size is no number")
    return None if total is None else int(total), weight_map


def _tensor_range(name: str, facts: object) -> tuple[int, int]:
    known = _require_dict(facts)
    dtype: Any = known.get("dtype")
    shape: Any = known.get("shape")
    offsets: Any = known.get("data_offsets")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise StructureError(f"tensor {name!r} has shape {shape!r} and offsets {offsets!r}")
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise StructureError(f"tensor {name!r} has the unknown dtype {dtype!r}")
    begin, end = offsets
    if (end - begin) * 8 != _product(shape) * _BITS[dtype]:
        raise StructureError(f"tensor {name!r} of {dtype} {shape} has {end - begin} bytes")
    return begin, end


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(
        type(value) is int and 0 <= value < 1 << 62 for value in values
    )


def _product(shape: list[int]) -> int:
    """Return the number of elements, or something too large for any file."""
    if 0 in shape:
        return 0
    product = 1
    for size in shape:
        product *= size
        if product > 1 << 62:
            break
    return product


def _require_dict(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise StructureError(f"{str(value)[:60]!r} where an object should be")
    return value


def _parse_json(text: bytes, what: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise StructureError(f"{what} has a name twice")
        return found

    try:
        return _require_dict(json.loads(text.decode(), object_pairs_hook=unique))
    except (ValueError, RecursionError) as error:
        raise StructureError(f"{what} is not JSON: {error}") from None
