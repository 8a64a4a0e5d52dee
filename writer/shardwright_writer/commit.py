"""Publication: durable temporary files become the checkpoint, in an order a crash cannot break.

    1. manifest   new entry + the entry of what is visible now; temporary, synced, renamed
    2. data files of a sharded save, under names that no visible index uses; folder synced
    3. root       one rename: before it the old checkpoint is visible, after it the new one
    4. folder synced; only then are old shards removed and the save reported

Called by `save` on a pool thread when every byte is durable; may run again from any step after a
crash (`Publication` is rebuilt from the journal). Does not write tensor bytes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwright_proto.limits import BLOCK_BYTES, MANIFEST_SUFFIX
from shardwright_writer import formats
from shardwright_writer.arena import anonymous_buffer
from shardwright_writer.refusal import Reason, Refusal

if TYPE_CHECKING:
    from shardwright_writer.storage.base import Folder

_MANIFEST_BYTES_MAX = 1 << 30
_INDEX_BYTES_MAX = 256 << 20


@dataclass(frozen=True, slots=True)
class PublishedFile:
    """One file on its way from its temporary to its final name."""

    temporary_name: str
    name: str
    inode: int


@dataclass(frozen=True, slots=True)
class Publication:
    """Everything step 1 to 4 need. files: root last; root may be the index."""

    file_name: str  # what the user asked for, e.g. model.safetensors
    files: list[PublishedFile]
    manifest: bytes
    manifest_temporary_name: str
    mode: int
    superseded: list[str]  # what an older save of this root left under other names


def read_manifest(folder: Folder, file_name: str) -> bytes | None:
    """Return the manifest beside the target now, if there is one."""
    return folder.read(file_name + MANIFEST_SUFFIX, _MANIFEST_BYTES_MAX)


def publish(folder: Folder, publication: Publication) -> None:
    """Do steps 1 to 4 (without the removal). Raises Refusal; the old checkpoint then stays."""
    write_small(folder, publication.manifest_temporary_name, publication.manifest, publication.mode)
    folder.rename(publication.manifest_temporary_name, publication.file_name + MANIFEST_SUFFIX)
    *parts, root = publication.files
    try:
        for part in parts:
            _rename_once(folder, part)
        folder.sync()
        _rename_once(folder, root)
    except Refusal:
        _withdraw(folder, parts)
        raise
    folder.sync()


def write_small(folder: Folder, name: str, content: bytes, mode: int) -> int:
    """Make a new small file durable under name, replacing a leftover; return its inode."""
    folder.remove(name)
    file = folder.create(name, mode)
    try:
        padded = -(-max(len(content), 1) // BLOCK_BYTES) * BLOCK_BYTES
        buffer = anonymous_buffer(padded)
        buffer[: len(content)] = content
        file.write_at(buffer, 0)
        file.finish(len(content))
        return file.inode
    finally:
        file.close()


def superseded(
    folder: Folder, format_name: str, file_name: str, names: list[str], recorded: set[str]
) -> list[str]:
    """Return the files of the save that is visible now and will not be after publication.

    Must be asked before the root is renamed: the old index says which shards are the old save's.
    recorded: what the old manifest names; a crash may have left the old index replaced already.
    """
    found = folder.read(f"{file_name}.index.json", _INDEX_BYTES_MAX)
    try:
        index = json.loads(found or b"{}")
        recorded = recorded | set(map(str, index.get("weight_map", {}).values()))
    except (ValueError, AttributeError, RecursionError):
        pass  # no index, or not one of ours: nothing more is known to be old
    kind = formats.get_format(format_name)
    return kind.superseded(list(folder.names()), file_name, names, recorded)


def _withdraw(folder: Folder, parts: list[PublishedFile]) -> None:
    """The root was not renamed: nobody names these files, so they are only litter."""
    for part in parts:
        there = folder.stat(part.name)
        if there is not None and there.inode == part.inode:
            folder.remove(part.name)


def _rename_once(folder: Folder, file: PublishedFile) -> None:
    if folder.stat(file.temporary_name) is not None:
        folder.rename(file.temporary_name, file.name)
        return
    # A server that died after this rename did it; nobody else may have.
    there = folder.stat(file.name)
    if there is None or there.inode != file.inode:
        raise Refusal(
            Reason.IO_ERROR,
            f"temporary file {file.temporary_name!r} of {file.name!r} has vanished from"
            f" {folder.path}",
            "something removed it; the previous checkpoint, if any, is untouched; save again",
        )
