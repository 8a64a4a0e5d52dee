"""The manifest `<file_name>.shardwright.json`: what every byte of a checkpoint should be.

    {"shardwright_manifest": 1, "crc32": [one per entry line], "saves": [
    {newest entry},
    {the entry of what was visible when the newest was published}
    ]}

Published before the root is renamed, so at any crash point one entry describes what is visible.
An entry is one line and its shards come last in it: `merge` carries an old entry over without
parsing its rows. Used by `publication` (build, merge) and `verify` (parse). Opens no file.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cache
from importlib import metadata
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from shardwright_writer.crc import crc32

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from shardwright_writer.formats.base import Int64s, Plan, SavePlan, ShardLayout

VERSION: Final = 1
COLUMNS: Final = ("name", "dtype", "shape", "file", "offset", "nbytes", "crc32")

_SHARDS_KEY: Final = b',"shards":['  # cannot occur inside a JSON string: its quotes are escaped
_UNMATCHED_KEPT: Final = 2


class ManifestError(Exception):
    """The document is damaged, or of a version this writer does not know."""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file of a save. literal_crc32: of all bytes that are no tensor's, in file order."""

    name: str
    nbytes: int
    inode: int
    crc32: int | None  # of the whole file, for an index
    literal_crc32: int | None


@dataclass(frozen=True, slots=True)
class Head:
    """An entry without its shards."""

    save_id: str
    step: int
    world_size: int
    created: str
    writer_version: str
    format: str
    root: str
    metadata: dict[str, str]
    files: tuple[FileRecord, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """One save: its head and its shards as parallel columns, in plan order."""

    head: Head
    names: list[str]
    dtypes: list[str]
    shapes: list[tuple[int, ...]]
    file_of_shard: Int64s
    offset: Int64s
    nbytes: Int64s
    crc32: NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Document:
    """A manifest whose shards are parsed only when asked for. Newest entry first."""

    heads: list[Head]
    lines: list[bytes]

    def entry(self, index: int) -> Entry:
        """Return the whole entry that heads[index] begins. Raises ManifestError."""
        return _parse_entry(self.lines[index])


def build_entry(
    *,
    save_id: str,
    step: int,
    world_size: int,
    plan: Plan,
    layout: ShardLayout,
    save_plan: SavePlan,
    inodes: Sequence[int],
    shard_crcs: NDArray[np.uint32],
    literal_crcs: Sequence[int],
    created: str | None = None,
) -> Entry:
    """Describe a finished save. inodes: of its files in order, the index last."""
    assert len(inodes) == len(save_plan.files) + (save_plan.index is not None)
    files = [
        FileRecord(file.name, file.size, inode, None, literal_crc)
        for file, inode, literal_crc in zip(save_plan.files, inodes, literal_crcs, strict=False)
    ]
    if save_plan.index is not None:
        name, content = save_plan.index
        files.append(FileRecord(name, len(content), inodes[len(files)], crc32(content), None))
    head = Head(
        save_id=save_id,
        step=step,
        world_size=world_size,
        created=created or datetime.now(timezone.utc).isoformat(timespec="seconds"),
        writer_version=_writer_version(),
        format=plan.format,
        root=files[-1].name,
        metadata=plan.metadata,
        files=tuple(files),
    )
    return Entry(
        head,
        plan.names,
        plan.dtypes,
        plan.shapes,
        layout.file_of_shard,
        layout.offset_of_shard,
        plan.nbytes,
        shard_crcs,
    )


def merge(
    new_entry: Entry,
    old_document: bytes | None,
    in_place: Mapping[str, tuple[int, int]] | None = None,
) -> bytes:
    """Return the document to publish before new_entry's root is renamed.

    in_place: (inode, size) of names in the folder now. The old entries that describe those stay;
    without in_place the newest two do. A missing or damaged old document costs nothing.
    """
    lines = [_encode(new_entry)]
    try:
        old = parse(old_document) if old_document else Document([], [])
    except ManifestError:
        old = Document([], [])
    if in_place is None:
        matching = list(range(len(old.heads)))[:_UNMATCHED_KEPT]
    else:
        matching = best_matches(old.heads, in_place)
    # The save's own id is there already when its publication is done again after a crash.
    own = new_entry.head.save_id
    lines += [old.lines[index] for index in matching if old.heads[index].save_id != own]
    crcs = [crc32(line) for line in lines]
    head = b'{"shardwright_manifest":%d,"crc32":%s,"saves":[\n' % (VERSION, _compact(crcs))
    return head + b",\n".join(lines) + b"\n]}\n"


def parse(document: bytes) -> Document:
    """Read a manifest. Raises ManifestError; trusts nothing in the document."""
    lines = _entry_lines(document)
    return Document([_parse_head(line) for line in lines], lines)


def best_matches(heads: Sequence[Head], in_place: Mapping[str, tuple[int, int]]) -> list[int]:
    """Return which entries describe the files in place: by inode, else by size; ties all.

    Empty when none does. in_place: (inode, size) by name.
    """
    scores = [_score(head, in_place) for head in heads]
    best = max(scores, default=(0, 0, 0, 0))
    return [index for index, score in enumerate(scores) if score == best] if any(best) else []


def _score(head: Head, in_place: Mapping[str, tuple[int, int]]) -> tuple[int, int, int, int]:
    """Rank by the root, since it says which shards count; then by all files."""
    score = [0, 0, 0, 0]
    for file in head.files:
        inode, size = in_place.get(file.name, (0, -1))
        same = (inode == file.inode != 0, size == file.nbytes)
        for at, matches in enumerate(same):
            score[at] += matches and file.name == head.root
            score[2 + at] += matches
    return score[0], score[1], score[2], score[3]


def _encode(entry: Entry) -> bytes:
    head = entry.head
    fixed = {
        "save_id": head.save_id,
        "step": head.step,
        "world_size": head.world_size,
        "created": head.created,
        "writer_version": head.writer_version,
        "format": head.format,
        "root": head.root,
        "metadata": head.metadata,
        "files": [
            {
                "name": file.name,
                "bytes": file.nbytes,
                "inode": file.inode,
                "crc32": file.crc32,
                "literal_crc32": file.literal_crc32,
            }
            for file in head.files
        ],
        "columns": COLUMNS,
    }
    rows = zip(
        entry.names,
        entry.dtypes,
        entry.shapes,
        entry.file_of_shard.tolist(),
        entry.offset.tolist(),
        entry.nbytes.tolist(),
        entry.crc32.tolist(),
        strict=True,
    )
    return _compact(fixed)[:-1] + _SHARDS_KEY + _compact(list(rows))[1:] + b"}"


def _compact(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _entry_lines(document: bytes) -> list[bytes]:
    """Return the entries' lines, checked against their CRCs."""
    first, *lines = document.split(b"\n")
    try:
        head = json.loads(first + b"]}")
        version, crcs = head["shardwright_manifest"], head["crc32"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ManifestError("not a shardwright manifest, or its first line is damaged") from None
    if version != VERSION:
        raise ManifestError(f"manifest version {version!r}; this writer knows {VERSION}")
    if not isinstance(crcs, list) or lines[len(crcs) :] != [b"]}", b""]:
        raise ManifestError("the manifest is cut off, or was reformatted")
    entries = [line.removesuffix(b",") for line in lines[: len(crcs)]]
    if [crc32(entry) for entry in entries] != crcs:
        raise ManifestError("an entry does not match its CRC-32")
    return entries


def _parse_head(line: bytes) -> Head:
    text, found, _ = line.partition(_SHARDS_KEY)
    if not found:
        raise ManifestError("an entry has no shards")
    try:
        return _head_from(json.loads(text + b"}"))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ManifestError(f"an entry is malformed: {type(error).__name__} {error}") from None


def _parse_entry(line: bytes) -> Entry:
    try:
        content = json.loads(line)
        head = _head_from(content)
        rows = content["shards"]
        columns = list(zip(*rows, strict=True)) if rows else [()] * len(COLUMNS)
        names, dtypes, shapes, files, offsets, sizes, crcs = columns
        entry = Entry(
            head,
            list(map(str, names)),
            list(map(str, dtypes)),
            [tuple(map(int, shape)) for shape in shapes],
            np.array(files, np.int64),
            np.array(offsets, np.int64),
            np.array(sizes, np.int64),
            np.array(crcs, np.uint32),
        )
    except (
        ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError,
    ) as error:  # fmt: skip
        raise ManifestError(f"an entry is malformed: {type(error).__name__} {error}") from None
    _check_places(entry)
    return entry


def _head_from(content: dict[str, Any]) -> Head:
    files = tuple(
        FileRecord(
            name=str(file["name"]),
            nbytes=int(file["bytes"]),
            inode=int(file["inode"]),
            crc32=None if file["crc32"] is None else int(file["crc32"]),
            literal_crc32=None if file["literal_crc32"] is None else int(file["literal_crc32"]),
        )
        for file in content["files"]
    )
    for file in files:
        if file.name in ("", ".", "..") or "/" in file.name or "\0" in file.name:
            raise ValueError(f"file name {file.name!r} leaves the folder")
        if not 0 <= file.nbytes < 1 << 62:
            raise ValueError(f"file {file.name!r} has {file.nbytes} bytes")
    return Head(
        save_id=str(content["save_id"]),
        step=int(content["step"]),
        world_size=int(content["world_size"]),
        created=str(content["created"]),
        writer_version=str(content["writer_version"]),
        format=str(content["format"]),
        root=str(content["root"]),
        metadata={str(key): str(value) for key, value in content["metadata"].items()},
        files=files,
    )


def _check_places(entry: Entry) -> None:
    """Every shard lies inside its file and no two overlap. Raises ManifestError."""
    files = np.array([file.nbytes for file in entry.head.files], np.int64)
    of, offset, nbytes = entry.file_of_shard, entry.offset, entry.nbytes
    if not len(of):
        return
    good = bool((of >= 0).all() and (of < len(files)).all())
    good = good and bool((offset >= 0).all() and (nbytes >= 0).all())
    good = good and bool((nbytes <= files[of]).all() and (offset <= files[of] - nbytes).all())
    if good:
        real = np.flatnonzero(nbytes)
        order = real[np.lexsort((offset[real], of[real]))]
        ends = offset[order] + nbytes[order]
        apart = (ends[:-1] <= offset[order][1:]) | (of[order][:-1] != of[order][1:])
        good = bool(apart.all())
    if not good:
        raise ManifestError("shards overlap or lie outside their file")


@cache
def _writer_version() -> str:
    try:
        return metadata.version("shardwright")
    except metadata.PackageNotFoundError:
        return "unpackaged"  # run from a source tree
