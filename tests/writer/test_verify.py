"""`verify` on good checkpoints, on every kind of damage, and on files that lie."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
import tracemalloc
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import safetensors.torch
import torch

from shardwright_writer.inspection.source import PIECE_BYTES
from shardwright_writer.verify import Problem, Report, verify_path

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from shardwright_writer.formats.base import Plan, SavePlan

    Write = Callable[..., SavePlan]
    TensorsPlan = Callable[..., tuple[Plan, list[bytes]]]
    ObjectPlan = Callable[[object], tuple[Plan, list[bytes], bytes]]

FLIPS = 200


def tensors(count: int = 12) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    found: dict[str, torch.Tensor] = {
        f"layer.{index}.weight": torch.randn(5 + index, 7, generator=generator)
        for index in range(count)
    }
    return found | {"mask": torch.tensor([True, False, True]), "empty": torch.empty(0, 4)}


@pytest.fixture
def make(
    tmp_path: Path, reference_write: Write, tensors_plan: TensorsPlan, object_plan: ObjectPlan
) -> Callable[[str], tuple[Path, SavePlan]]:
    """Write "zip", "safetensors" or "sharded" with its manifest; return its root and plan."""

    def write(kind: str, folder: Path | None = None) -> tuple[Path, SavePlan]:
        target = folder or tmp_path
        if kind == "zip":
            plan, blobs, skeleton = object_plan({**tensors(), "step": 3, "text": "x" * 500})
            save = reference_write(target, plan, blobs, skeleton=skeleton, with_manifest=True)
            return target / "model.pt", save
        bytes_max = 900 if kind == "sharded" else 0
        plan, blobs = tensors_plan("safetensors", tensors(), {"format": "pt"}, bytes_max)
        save = reference_write(
            target, plan, blobs, file_name="model.safetensors", with_manifest=True
        )
        return target / (save.index[0] if save.index else save.files[0].name), save

    return write


KINDS = ["zip", "safetensors", "sharded"]


def flip(path: Path, at: int, mask: int = 0x40) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ mask]))


def only(report: Report) -> Problem:
    assert len(report.problems) == 1, report.problems
    return report.problems[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_good_checkpoint_is_good_by_file_by_manifest_and_by_folder(
    make: Callable[[str], tuple[Path, SavePlan]], kind: str
) -> None:
    root, save = make(kind)
    file_name = "model.pt" if kind == "zip" else "model.safetensors"
    manifest = root.with_name(f"{file_name}.shardwright.json")
    names = {file.name for file in save.files} | {root.name}
    for path in (root, root.parent, manifest):
        report = verify_path(path)
        assert report.problems == ()
        assert report.notes == ()
        assert set(report.files) == names
        assert report.tensors == sum(len(file.shards) for file in save.files)
        assert report.bytes_checked == sum((root.parent / name).stat().st_size for name in names)
    for file in save.files:
        assert verify_path(root.parent / file.name).ok


@pytest.mark.parametrize("kind", KINDS)
def test_two_hundred_random_flips_are_all_found_and_named(
    make: Callable[[str], tuple[Path, SavePlan]], kind: str
) -> None:
    root, save = make(kind)
    paths = sorted({root, *(root.parent / file.name for file in save.files)})
    sizes = [path.stat().st_size for path in paths]
    chooser = random.Random(kind)
    for _ in range(FLIPS):
        path = chooser.choices(paths, sizes)[0]
        at = chooser.randrange(path.stat().st_size)
        mask = 1 << chooser.randrange(8)
        flip(path, at, mask)
        report = verify_path(root)
        assert not report.ok, (path.name, at, mask)
        problem = only(report)
        assert problem.file == path.name
        assert problem.start <= at < problem.stop, (problem, at)
        assert problem.name
        flip(path, at, mask)
    assert verify_path(root).ok


@pytest.mark.parametrize("kind", ["zip", "sharded"])
def test_every_single_byte_of_a_small_container_is_covered(
    make: Callable[[str], tuple[Path, SavePlan]], kind: str
) -> None:
    root, save = make(kind)
    file = save.files[0]
    path = root.parent / file.name
    ends = (file.literal_offset + np.diff(file.literal_start)).tolist()
    places = [
        at
        for start, stop in zip(file.literal_offset.tolist(), ends, strict=True)
        for at in range(start, stop, 1 if stop - start < 200 else 7)
    ]
    for at in places:
        flip(path, at, 1 << at % 8)
        report = verify_path(path)
        flip(path, at, 1 << at % 8)
        problem = only(report)
        assert problem.start <= at < problem.stop
    assert verify_path(path).ok


def test_the_flipped_tensor_is_named(make: Callable[[str], tuple[Path, SavePlan]]) -> None:
    root, save = make("sharded")
    file = save.files[1]
    flip(root.parent / file.name, file.size - 1)
    problem = only(verify_path(root))
    assert problem.file == file.name
    assert problem.name.startswith("layer.")
    assert "do not match their CRC-32" in problem.what


def test_flips_in_the_container_are_named(make: Callable[[str], tuple[Path, SavePlan]]) -> None:
    root, save = make("zip")
    (file,) = save.files
    content = root.read_bytes()
    entry = content.index(b"PK\1\2")
    expected = {
        3: ("storage.0", "local header of archive/data/0"),
        int(file.shard_offset[0] + file.shard_nbytes[0]) + 5: ("storage.0", "data descriptor"),
        entry + 20: ("directory", "entry of archive/data/0 (tensor 'storage.0')"),
        file.size - 1: ("directory", "end record"),
        content.index(b"little"): ("archive/byteorder", "content"),
        content.index(b"archive/data.pkl") + 300: ("archive/data.pkl", "objects"),
    }
    for at, (name, words) in expected.items():
        flip(root, at)
        problem = only(verify_path(root))
        assert problem.name == name
        assert words in problem.what
        flip(root, at)
    root, save = make("safetensors")
    header = save.files[0].literal_blob
    for at, words in {
        1: "length of the header",
        header.index(b"format"): "metadata",
        header.index(b"layer.3."): "entry of tensor 'layer.3.weight'",
    }.items():
        flip(root, at)
        problem = only(verify_path(root))
        assert (problem.name, words in problem.what) == ("header", True), problem
        flip(root, at)


def test_a_flip_in_the_index_names_its_line(
    make: Callable[[str], tuple[Path, SavePlan]],
) -> None:
    root, _ = make("sharded")
    at = root.read_bytes().index(b"layer.4.weight")
    flip(root, at)
    problem = only(verify_path(root.parent))
    assert (problem.file, problem.name) == (root.name, "index")
    assert "layer.4.weight" in problem.what


def test_a_missing_and_a_cut_file_are_named(make: Callable[[str], tuple[Path, SavePlan]]) -> None:
    root, save = make("sharded")
    first, second = (root.parent / file.name for file in save.files[:2])
    first.unlink()
    os.truncate(second, save.files[1].size - 1)
    report = verify_path(root)
    by_file = {(problem.file, problem.name): problem for problem in report.problems}
    assert by_file[first.name, "file"].what == "the file is missing"
    assert "was written with" in by_file[second.name, "file"].what
    assert any(name.startswith("layer.") for file, name in by_file if file == second.name)
    assert {problem.file for problem in report.problems} == {first.name, second.name}


def test_bytes_behind_the_end_are_found(make: Callable[[str], tuple[Path, SavePlan]]) -> None:
    root, save = make("zip")
    with root.open("ab") as file:
        file.write(b"more")
    problem = only(verify_path(root))
    assert (problem.start, problem.stop) == (save.files[0].size, save.files[0].size + 4)


def test_after_a_crash_before_the_rename_the_old_entry_is_used(
    make: Callable[[str], tuple[Path, SavePlan]], tmp_path: Path
) -> None:
    root, _ = make("zip")
    aside = tmp_path / "aside"
    shutil.copy2(root, aside)
    root.rename(tmp_path / "old")
    make("zip")  # the new manifest holds both entries
    (tmp_path / "old").replace(root)
    assert verify_path(root).ok
    # Copied elsewhere there are no inodes to go by, and both entries fit in size.
    copy = tmp_path / "copy"
    copy.mkdir()
    shutil.copy(aside, copy / "model.pt")
    shutil.copy(tmp_path / "model.pt.shardwright.json", copy)
    assert verify_path(copy).ok
    flip(copy / "model.pt", 1000)
    assert not verify_path(copy).ok


def test_a_zip_that_another_program_wrote_over_is_checked_by_its_own_crcs(
    make: Callable[[str], tuple[Path, SavePlan]],
) -> None:
    root, _ = make("zip")
    torch.save({"other": torch.ones(10)}, root)
    report = verify_path(root)
    assert report.ok
    assert any("another program has rewritten it" in note for note in report.notes)
    flip(root, root.read_bytes().index(np.ones(10, np.float32).tobytes()))
    assert not verify_path(root).ok


def test_a_damaged_manifest_is_reported_and_not_relied_on(
    make: Callable[[str], tuple[Path, SavePlan]],
) -> None:
    root, _ = make("zip")
    manifest = root.with_name("model.pt.shardwright.json")
    flip(manifest, manifest.stat().st_size // 2)
    for path in (root, root.parent, manifest):
        report = verify_path(path)
        assert (only(report).file, only(report).name) == (manifest.name, "manifest")
        assert root.name in report.files


# --- without a manifest -----------------------------------------------------------------------


def test_without_a_manifest_every_flip_in_our_zip_is_still_found(
    make: Callable[[str], tuple[Path, SavePlan]],
) -> None:
    root, _ = make("zip")
    root.with_name("model.pt.shardwright.json").unlink()
    good = verify_path(root)
    assert good.ok
    assert "own CRC-32s" in good.notes[0]
    chooser = random.Random(1)
    for _ in range(FLIPS):
        at, mask = chooser.randrange(root.stat().st_size), 1 << chooser.randrange(8)
        flip(root, at, mask)
        assert not verify_path(root).ok, at
        flip(root, at, mask)


def test_a_stock_zip_is_checked_and_a_flip_in_its_data_named(tmp_path: Path) -> None:
    path = tmp_path / "stock.pt"
    value = torch.arange(3000)
    torch.save({"a": value, "b": torch.empty(0), "c": torch.ones(3)}, path)
    report = verify_path(path)
    assert report.ok, report.problems
    flip(path, path.read_bytes().index(bytes(value.untyped_storage())) + 17)
    assert only(verify_path(path)).name == "stock/data/0"


def test_without_a_manifest_safetensors_structure_is_checked_and_said_to_be_all(
    make: Callable[[str], tuple[Path, SavePlan]],
) -> None:
    root, save = make("sharded")
    root.with_name("model.safetensors.shardwright.json").unlink()
    for path in (root, root.parent):
        report = verify_path(path)
        assert report.ok
        assert any("no checksums" in note for note in report.notes)
    index = json.loads(root.read_text())
    names = list(index["weight_map"])
    index["weight_map"][names[0]] = save.files[1].name
    root.write_text(json.dumps(index))
    assert f"tensor {names[0]!r} is in {save.files[0].name}" in only(verify_path(root)).what
    (root.parent / save.files[0].name).unlink()
    assert only(verify_path(root)).file == save.files[0].name


def test_a_stock_safetensors_file_has_good_structure(tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    safetensors.torch.save_file(tensors(), path)
    assert verify_path(path).ok
    os.truncate(path, path.stat().st_size - 1)
    assert only(verify_path(path)).name == "header"


def test_a_folder_with_nothing_to_verify_is_no_success(tmp_path: Path) -> None:
    assert only(verify_path(tmp_path)).name == "folder"
    with pytest.raises(FileNotFoundError):
        verify_path(tmp_path / "absent.pt")


def test_a_pipe_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.pt")
    assert "not a regular file" in only(verify_path(tmp_path / "x.pt")).what


# --- files that lie ---------------------------------------------------------------------------


@pytest.mark.parametrize("with_manifest", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_garbage_is_a_finding_and_never_a_crash(
    make: Callable[[str], tuple[Path, SavePlan]], kind: str, with_manifest: bool
) -> None:
    root, save = make(kind)
    if not with_manifest:
        for path in root.parent.glob("*.shardwright.json"):
            path.unlink()
    path = root.parent / save.files[0].name
    good = path.read_bytes()
    chooser = random.Random(kind)
    for _ in range(150):
        bad = bytearray(good)
        for _ in range(chooser.randrange(1, 4)):
            where = chooser.choice([0, len(bad) - 120, chooser.randrange(len(bad))])
            at = max(0, where + chooser.randrange(120) - 10)
            bad[at : at + 8] = struct.pack("<Q", chooser.getrandbits(chooser.randrange(1, 65)))
        if chooser.random() < 0.2:
            del bad[chooser.randrange(len(bad)) :]
        path.write_bytes(bad)
        report = verify_path(root)
        if with_manifest and bytes(bad) != good:
            assert not report.ok


def sparse(path: Path, size: int, parts: dict[int, bytes]) -> Path:
    with path.open("wb") as file:
        os.truncate(file.fileno(), size)
        for at, part in parts.items():
            os.pwrite(file.fileno(), part, at)
    return path


def end_records(size: int, count: int, nbytes: int, offset: int) -> bytes:
    zip64 = struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, count, count, nbytes, offset)
    locator = struct.pack("<IIQI", 0x07064B50, 0, size - 98, 1)
    short = (0xFFFF, 0xFFFF, 2**32 - 1, 2**32 - 1)
    return zip64 + locator + struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, *short, 0)


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("header.safetensors", {0: struct.pack("<Q", 90_000_000) + b"{"}),
        ("header.safetensors", {0: struct.pack("<Q", 2**63)}),
        ("model.safetensors.index.json", {0: b"{"}),
        (
            "directory.pt",
            {0: b"PK\3\4", (1 << 30) - 98: end_records(1 << 30, 1 << 20, (1 << 30) - 98 - 64, 64)},
        ),
        (
            "directory.pt",
            {0: b"PK\3\4", (1 << 30) - 98: end_records(1 << 30, 2**60, 2**62, 2**63)},
        ),
    ],
)
def test_a_size_that_lies_allocates_little(
    tmp_path: Path, name: str, parts: dict[int, bytes]
) -> None:
    path = sparse(tmp_path / name, 1 << 30, parts)
    tracemalloc.start()
    try:
        assert not verify_path(path).ok
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < PIECE_BYTES


def test_a_large_file_is_checked_in_bounded_memory(
    tmp_path: Path, reference_write: Write, tensors_plan: TensorsPlan
) -> None:
    value = {"w": torch.arange(96 << 17, dtype=torch.int64)}
    plan, blobs = tensors_plan("safetensors", value)
    reference_write(
        tmp_path, plan, blobs, file_name="m.safetensors", with_manifest=True, window_bytes=16 << 20
    )
    tracemalloc.start()
    try:
        assert verify_path(tmp_path).ok
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 * PIECE_BYTES


def test_the_report_adds_up() -> None:
    one = Report(("a",), 1, 2, (), ("n",))
    problem = Problem("b", "w", 0, 1, "x")
    total: Any = one + Report(("b",), 3, 4, (problem,))
    assert total == Report(("a", "b"), 4, 6, (problem,), ("n",))
    assert not total.ok
