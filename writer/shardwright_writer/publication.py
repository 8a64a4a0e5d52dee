"""From a save whose bytes are durable to what `commit` publishes: manifest, index, names.

Called on a pool thread by `save` and, after a crash, by `recovery`: everything is recomputed from
plan and CRCs, so that both give the same result. Renames nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwright_writer import commit, manifest
from shardwright_writer.commit import Publication, PublishedFile

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from shardwright_writer.formats.base import Plan, ShardLayout
    from shardwright_writer.opening import Opening
    from shardwright_writer.spec import SaveSpec
    from shardwright_writer.storage.base import Folder


@dataclass(frozen=True, slots=True)
class Written:
    """A save's files, whole and durable under temporary names."""

    spec: SaveSpec
    plan: Plan
    layout: ShardLayout
    opening: Opening
    inodes: list[int]
    crcs: NDArray[np.uint32]


def prepare_publication(folder: Folder, written: Written) -> Publication:
    """Write the index (if the format has one) under a temporary name and build the manifest."""
    spec, save_plan = written.spec, written.opening.save_plan
    files = [
        PublishedFile(spec.temporary_name(index), plan.name, inode)
        for index, (plan, inode) in enumerate(zip(save_plan.files, written.inodes, strict=True))
    ]
    index_bytes = None
    if save_plan.index is not None:
        name, index_bytes = save_plan.index
        temporary = spec.temporary_name(len(files))
        inode = commit.write_small(folder, temporary, index_bytes, spec.mode)
        files.append(PublishedFile(temporary, name, inode))
    entry = manifest.build_entry(
        save_id=spec.save_id,
        step=spec.step,
        world_size=spec.world_size,
        plan=written.plan,
        layout=written.layout,
        save_plan=save_plan,
        inodes=[file.inode for file in files],
        shard_crcs=written.crcs,
        literal_crcs=[image.literal_crc(written.crcs) for image in written.opening.images],
    )
    old_manifest = commit.read_manifest(folder, spec.file_name)
    in_place = _files_in_place(folder, old_manifest)
    names = [file.name for file in files]
    return Publication(
        file_name=spec.file_name,
        files=files,
        manifest=manifest.merge(entry, old_manifest, in_place),
        manifest_temporary_name=spec.temporary_name("m"),
        mode=spec.mode,
        superseded=commit.superseded(
            folder, written.plan.format, spec.file_name, names, set(in_place)
        ),
    )


def _files_in_place(folder: Folder, old_manifest: bytes | None) -> dict[str, tuple[int, int]]:
    """Return (inode, size) of the files that the old manifest speaks of, as they are now."""
    try:
        heads = manifest.parse(old_manifest).heads if old_manifest else []
    except manifest.ManifestError:
        return {}
    names = {file.name for head in heads for file in head.files if "/" not in file.name}
    stats = {name: folder.stat(name) for name in names}
    return {name: (stat.inode, stat.size) for name, stat in stats.items() if stat is not None}
