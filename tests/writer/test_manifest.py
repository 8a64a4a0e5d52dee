"""The manifest: what it says, which older entry it keeps, and what it does not believe."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from shardwright_writer import manifest
from shardwright_writer.crc import crc32
from shardwright_writer.formats import get_format
from shardwright_writer.formats.base import Plan

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def entry_of(
    save_id: str = "a",
    inode: int = 10,
    bytes_max: int = 40,
    names: tuple[str, ...] = ("w", 'b",\n"shards":[', "é\ud800"),
) -> manifest.Entry:
    count = len(names)
    plan = Plan(
        "safetensors",
        list(names),
        ["float32"] * count,
        [(3, 2), *[(6,)] * count][:count],
        np.full(count, 24, np.int64),
        {"format": "pt"},
        bytes_max,
    )
    kind = get_format("safetensors")
    ascii_plan = replace(plan, names=[f"t{index}" for index in range(count)])
    layout = kind.layout(ascii_plan)
    save_plan = kind.files(ascii_plan, layout, b"", "model.safetensors", "")
    return manifest.build_entry(
        save_id=save_id,
        step=7,
        world_size=2,
        plan=plan,
        layout=layout,
        save_plan=save_plan,
        inodes=list(range(inode, inode + len(save_plan.files) + (save_plan.index is not None))),
        shard_crcs=np.arange(count, dtype=np.uint32) + np.uint32(2**32 - 5),
        literal_crcs=list(range(len(save_plan.files))),
        created="2024-01-02T03:04:05+00:00",
    )


def in_place(entry: manifest.Entry, **changes: int) -> dict[str, tuple[int, int]]:
    return {
        file.name: (file.inode + changes.get("inode", 0), file.nbytes + changes.get("nbytes", 0))
        for file in entry.head.files
    }


def ids(document: bytes) -> list[str]:
    return [head.save_id for head in manifest.parse(document).heads]


def test_what_was_built_is_parsed_again() -> None:
    entry = entry_of()
    document = manifest.parse(manifest.merge(entry, None))
    found = document.entry(0)
    assert found.head == entry.head == document.heads[0]
    assert (found.names, found.dtypes, found.shapes) == (entry.names, entry.dtypes, entry.shapes)
    for column in ("file_of_shard", "offset", "nbytes", "crc32"):
        assert getattr(found, column).tolist() == getattr(entry, column).tolist()
    root = found.head.files[-1]
    assert found.head.root == root.name == "model.safetensors.index.json"
    assert (root.inode, root.literal_crc32) == (13, None)
    assert root.crc32 is not None


def test_the_document_is_plain_json_with_the_agreed_fields() -> None:
    document = json.loads(manifest.merge(entry_of(), None))
    assert document["shardwright_manifest"] == 1
    (save,) = document["saves"]
    assert save["columns"] == ["name", "dtype", "shape", "file", "offset", "nbytes", "crc32"]
    assert save["shards"][0][:3] == ["w", "float32", [3, 2]]
    assert save["created"] == "2024-01-02T03:04:05+00:00"
    assert (save["step"], save["world_size"], save["metadata"]) == (7, 2, {"format": "pt"})
    assert set(save["files"][0]) == {"name", "bytes", "inode", "crc32", "literal_crc32"}


def test_a_save_without_tensors_has_a_manifest() -> None:
    entry = entry_of(names=())
    assert manifest.parse(manifest.merge(entry, None)).entry(0).names == []


def test_the_entry_of_the_file_in_place_is_kept_and_no_other() -> None:
    first, second, third = (
        entry_of(save_id, inode) for save_id, inode in (("a", 10), ("b", 20), ("c", 30))
    )
    document = manifest.merge(second, manifest.merge(first, None), in_place(first))
    assert ids(document) == ["b", "a"]
    # A crash before the rename: "a" is still in place when "c" comes.
    assert ids(manifest.merge(third, document, in_place(first))) == ["c", "a"]
    assert ids(manifest.merge(third, document, in_place(second))) == ["c", "b"]
    # Copied to another file system: inodes are new and sizes equal, so both may be it.
    assert ids(manifest.merge(third, document, in_place(first, inode=999))) == ["c", "b", "a"]
    assert ids(manifest.merge(third, document, in_place(first, inode=999, nbytes=1))) == ["c"]
    assert ids(manifest.merge(third, document, {})) == ["c"]
    assert ids(manifest.merge(third, document)) == ["c", "b", "a"]


def test_the_root_decides_which_entry_describes_a_folder() -> None:
    old = entry_of("old", 1)
    new = entry_of("new", 5)
    # New shards are in place, their index is not yet.
    files = in_place(new) | {old.head.root: (4, old.head.files[-1].nbytes)}
    assert manifest.best_matches([new.head, old.head], files) == [1]


def test_publishing_again_does_not_repeat_the_entry() -> None:
    entry = entry_of("a")
    document = manifest.merge(entry, None)
    assert manifest.merge(entry, document, in_place(entry)) == document


@pytest.mark.parametrize(
    "old",
    [
        b"",
        b"\0\xff garbage",
        b"{}",
        b"[" * 100_000,
        b'{"shardwright_manifest":2,"crc32":[],"saves":[\n]}\n',
        b'{"shardwright_manifest":1,"crc32":[],"saves":[\n]}',
        b'{"shardwright_manifest":1,"crc32":"x","saves":[\n]}\n',
        b'{"shardwright_manifest":1,"crc32":[0],"saves":[\n\n]}\n',
        b"null\n",
    ],
)
def test_a_missing_or_broken_old_manifest_costs_nothing(old: bytes) -> None:
    assert ids(manifest.merge(entry_of("new"), old)) == ["new"]
    with pytest.raises(manifest.ManifestError):
        manifest.parse(old)


def test_every_flipped_byte_is_noticed() -> None:
    document = manifest.merge(entry_of("b"), manifest.merge(entry_of("a"), None))
    for at in range(len(document)):
        flipped = bytearray(document)
        flipped[at] ^= 1 << random.Random(at).randrange(8)
        try:
            found = manifest.parse(bytes(flipped))
        except manifest.ManifestError:
            continue
        # Only blanks between lines may change without a trace.
        assert found == manifest.parse(document)


def tampered(change: Callable[[dict[str, Any]], None]) -> manifest.Document:
    """Return a document whose one entry was changed and sealed again, as an attacker would."""
    save = json.loads(manifest.merge(entry_of(), None))["saves"][0]
    change(save)
    shards = json.dumps(save.pop("shards")).encode()
    head = json.dumps(save, separators=(",", ":")).encode()
    line = head[:-1] + b',"shards":' + shards.replace(b" ", b"") + b"}"
    crc = crc32(line)
    first = b'{"shardwright_manifest":1,"crc32":[%d],"saves":[\n' % crc
    return manifest.parse(first + line + b"\n]}\n")


def set_shard(column: int, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(save: dict[str, Any]) -> None:
        save["shards"][1][column] = value

    return change


def set_file(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(save: dict[str, Any]) -> None:
        save["files"][0][key] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        set_shard(2, 5),
        set_shard(2, ["x"]),
        set_shard(3, 99),
        set_shard(3, -1),
        set_shard(4, -8),
        set_shard(4, 2**62),
        set_shard(4, 2**70),
        set_shard(4, "many"),
        set_shard(5, 2**61),
        set_shard(5, -1),
        set_shard(6, 2**32),
        set_shard(6, None),
        set_file("name", "../../etc/passwd"),
        set_file("name", ".."),
        set_file("bytes", -1),
        set_file("bytes", 2**70),
        set_file("inode", None),
        lambda save: save["shards"][0].pop(),
        lambda save: save["shards"].append(save["shards"][0]),
        lambda save: save.update(files=None),
        lambda save: save.update(metadata=[1]),
        lambda save: save.pop("root"),
    ],
)
def test_nothing_out_of_bounds_is_believed(change: Callable[[dict[str, Any]], None]) -> None:
    with pytest.raises(manifest.ManifestError):
        tampered(change).entry(0)


def test_the_untampered_document_is_believed() -> None:
    assert tampered(lambda save: None).entry(0).names[0] == "w"


def test_the_reference_manifest_of_a_real_save_matches_its_files(
    tmp_path: Path, reference_write: Callable[..., Any]
) -> None:
    plan = Plan("torch", ["w"], ["int8"], [(3,)], np.array([3], np.int64), {}, 0)
    reference_write(tmp_path, plan, [b"abc"], skeleton=b"pkl", with_manifest=True)
    (head,) = manifest.parse((tmp_path / "model.pt.shardwright.json").read_bytes()).heads
    facts = (tmp_path / "model.pt").stat()
    assert manifest.best_matches([head], {"model.pt": (facts.st_ino, facts.st_size)}) == [0]
