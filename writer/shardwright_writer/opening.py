"""What opening a save does to the target folder: checks it, lays the files out, creates them.

Blocking functions over values, called on pool threads by `save` (new files) and `recovery` (files
of a dead server). Hold no state and know no client.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shardwright_writer import formats
from shardwright_writer.arena import anonymous_buffer
from shardwright_writer.crc import piece_crcs, window_crc
from shardwright_writer.formats.image import FileImage
from shardwright_writer.names import belongs_to, leftovers
from shardwright_writer.refusal import Reason, Refusal
from shardwright_writer.windows import WindowTable

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from shardwright_writer.formats.base import Plan, SavePlan, ShardLayout
    from shardwright_writer.spec import SaveSpec
    from shardwright_writer.storage.base import Folder, WritableFile


@dataclass(frozen=True, slots=True)
class Opening:
    """A save's files, laid out; `files` is empty until they are open on disk."""

    save_plan: SavePlan
    images: list[FileImage]
    table: WindowTable
    tag: str
    files: list[WritableFile]


def check_target(
    folder: Folder, spec: SaveSpec, bytes_total: int, live_saves: frozenset[str]
) -> list[str]:
    """Raise Refusal if the save cannot go there. Sweeps what dead saves left; returns the names."""
    swept = leftovers(folder, live_saves)
    for name in swept:
        folder.remove(name)
    existing = folder.stat(spec.file_name)
    if existing is not None and not existing.is_regular:
        raise Refusal(
            Reason.BAD_REQUEST,
            f"{folder.path}/{spec.file_name} exists and is not a regular file",
            "choose another path; nothing was touched",
        )
    free = folder.free_bytes()
    if free < bytes_total:
        raise Refusal(
            Reason.NO_SPACE,
            f"{folder.path} has {free} bytes free and the save needs {bytes_total} [ENOSPC]",
            "free space and save again; nothing was written",
        )
    return swept


def lay_out(
    spec: SaveSpec,
    plan: Plan,
    layout: ShardLayout,
    skeleton: bytes,
    window_bytes: int,
    tag: str,
) -> Opening:
    """Compute the files of a save. Equal arguments give equal files, in any server."""
    kind = formats.get_format(plan.format)
    save_plan = kind.files(plan, layout, skeleton, spec.file_name, tag)
    images = [FileImage(file) for file in save_plan.files]
    table = WindowTable(list(zip(save_plan.files, images, strict=True)), window_bytes)
    return Opening(save_plan, images, table, tag, [])


def choose_tag(folder: Folder, spec: SaveSpec, plan: Plan, layout: ShardLayout) -> str:
    """Return "" when the plain names of the save's shards are free, else this save's own tag."""
    tag = own_tag(spec, layout)
    if not tag:
        return ""  # one file: no need to list the folder
    plain = set(formats.get_format(plan.format).shard_names(spec.file_name, layout.file_count, ""))
    return tag if plain & set(folder.names()) else ""


def own_tag(spec: SaveSpec, layout: ShardLayout) -> str:
    """Return what makes the names of several shards this save's alone; one file needs nothing."""
    return spec.save_id[:8] if layout.file_count > 1 else ""


def open_files(folder: Folder, spec: SaveSpec, opening: Opening, *, reopen: bool) -> Opening:
    """Create the temporary files, or open those of an earlier server. On failure none is left."""
    files: list[WritableFile] = []
    try:
        for index in range(len(opening.save_plan.files)):
            name = spec.temporary_name(index)
            if reopen:
                files.append(folder.reopen(name))
                continue
            folder.remove(name)  # ours: an earlier server died before its journal was kept
            files.append(folder.create(name, spec.mode))
    except Refusal:
        for file in files:
            file.close()
            folder.remove(file.name)
        raise
    return replace(opening, files=files)


def discard(folder: Folder, spec: SaveSpec, files: list[WritableFile]) -> None:
    """Close and remove everything of a save that has failed, its index and manifest too."""
    for file in files:
        file.close()
    for name in folder.names():
        if belongs_to(name, spec.save_id):
            folder.remove(name)


def read_back(
    opening: Opening, window_bytes: int, claimed: Sequence[tuple[int, int, int]]
) -> list[tuple[int, NDArray[np.uint32]]]:
    """Read windows that should be durable, (file, window, CRC) each; return (row, piece CRCs).

    Raises Refusal for one whose bytes do not match: only what is proved counts.
    """
    buffer = anonymous_buffer(window_bytes)
    proved = []
    for file, window, crc in claimed:
        row = opening.table.row(file, window)
        start = window * window_bytes
        opening.files[file].read_at(buffer, start)
        values = piece_crcs(buffer, opening.images[file].pieces(start, start + window_bytes))
        if window_crc(values) != crc:
            raise Refusal(
                Reason.CORRUPT,
                f"window {window} of {opening.files[file].name!r} is not what was acknowledged"
                " before the writer died",
                "save again; the previous checkpoint is untouched",
            )
        proved.append((row, values))
    return proved
