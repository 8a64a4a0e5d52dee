"""The torch zip against its judges: torch.load, zipfile, unzip; and its layout by itself."""

from __future__ import annotations

import io
import math
import os
import shutil
import struct
import subprocess
import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.serialization import config as serialization_config

from shardwright_writer.crc import crc32
from shardwright_writer.formats import get_format, torch_zip, zip_bytes
from shardwright_writer.formats.base import Plan
from shardwright_writer.formats.image import FileImage

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from shardwright_writer.formats.base import FilePlan, SavePlan

    Write = Callable[..., SavePlan]
    ObjectPlan = Callable[[object], tuple[Plan, list[bytes], bytes]]

FORM = get_format("torch")


def sizes_plan(sizes: list[int]) -> Plan:
    count = len(sizes)
    return Plan(
        "torch", [""] * count, ["uint8"] * count, [()] * count, np.array(sizes, np.int64), {}, 0
    )


def file_of(sizes: list[int], skeleton: bytes = b"pickle") -> FilePlan:
    plan = sizes_plan(sizes)
    (file,) = FORM.files(plan, FORM.layout(plan), skeleton, "a.pt", "").files
    return file


def sample_object() -> dict[str, Any]:
    shared = torch.arange(1000, dtype=torch.float32)
    return {
        "weights": torch.randn(300, 41),
        "half": torch.randn(7).to(torch.bfloat16),
        "fp8": torch.arange(16, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "empty": torch.empty(0, 5),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "whole": shared,
        "view": shared[10:20],
        "step": 12,
        "nested": [{"bool": torch.tensor([True, False])}, "text"],
    }


def assert_same(found: Any, wanted: Any) -> None:
    assert type(found) is type(wanted)
    if isinstance(wanted, torch.Tensor):
        assert found.dtype == wanted.dtype
        assert found.shape == wanted.shape
        assert bytes(found.untyped_storage()) == bytes(wanted.untyped_storage())
    elif isinstance(wanted, dict):
        assert list(found) == list(wanted)
        for key in wanted:
            assert_same(found[key], wanted[key])
    elif isinstance(wanted, list):
        for one, other in zip(found, wanted, strict=True):
            assert_same(one, other)
    else:
        assert found == wanted


@pytest.fixture
def saved(tmp_path: Path, reference_write: Write, object_plan: ObjectPlan) -> Path:
    plan, blobs, skeleton = object_plan(sample_object())
    reference_write(tmp_path, plan, blobs, skeleton=skeleton, window_bytes=4096)
    return tmp_path / "model.pt"


@pytest.fixture
def wanted() -> dict[str, Any]:
    torch.manual_seed(0)
    return sample_object()


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("mmap", [True, False])
def test_torch_load_reads_it(
    saved: Path, wanted: dict[str, Any], weights_only: bool, mmap: bool
) -> None:
    found = torch.load(saved, weights_only=weights_only, mmap=mmap)
    assert_same(found, wanted)
    assert found["whole"].untyped_storage().data_ptr() == found["view"].untyped_storage().data_ptr()


def test_torch_load_reads_it_from_memory(saved: Path, wanted: dict[str, Any]) -> None:
    assert_same(torch.load(io.BytesIO(saved.read_bytes()), weights_only=True), wanted)


def test_torch_load_maps_it_to_meta_and_fake_tensors_at_true_offsets(saved: Path) -> None:
    found = torch.load(saved, weights_only=True, map_location="meta")
    offset = found["weights"].untyped_storage()._checkpoint_offset
    real = torch.load(saved, weights_only=True)["weights"]
    raw = saved.read_bytes()[offset : offset + real.nbytes]
    assert raw == bytes(real.untyped_storage())
    with FakeTensorMode():
        assert torch.load(saved, weights_only=True)["weights"].shape == (300, 41)


def test_torch_never_computes_offsets_instead_of_reading_them(
    saved: Path, wanted: dict[str, Any]
) -> None:
    before = serialization_config.load.calculate_storage_offsets
    serialization_config.load.calculate_storage_offsets = True
    try:
        assert_same(torch.load(saved, weights_only=True, mmap=True), wanted)
    finally:
        serialization_config.load.calculate_storage_offsets = before


def test_torch_finds_no_unsafe_globals_and_no_torchscript(saved: Path) -> None:
    assert torch.serialization.get_unsafe_globals_in_checkpoint(saved) == []


def test_a_save_without_tensors_loads(
    tmp_path: Path, reference_write: Write, object_plan: ObjectPlan
) -> None:
    plan, blobs, skeleton = object_plan({"step": 3})
    reference_write(tmp_path, plan, blobs, skeleton=skeleton)
    assert torch.load(tmp_path / "model.pt", weights_only=True) == {"step": 3}


def test_zipfile_and_unzip_find_every_record_right(saved: Path) -> None:
    with zipfile.ZipFile(saved) as archive:
        assert archive.testzip() is None
        names = archive.namelist()
        assert names[0] == "archive/data/0"
        assert names[-4:] == [
            "archive/byteorder",
            "archive/version",
            "archive/.data/serialization_id",
            "archive/data.pkl",
        ]
        assert archive.read("archive/version") == b"3\n"
        assert archive.read("archive/byteorder") == b"little"
        assert archive.read("archive/.data/serialization_id").isdigit()
        for info in archive.infolist():
            assert info.compress_type == zipfile.ZIP_STORED
            assert info.flag_bits == (0x808 if info.file_size else 0x800)
    unzip = shutil.which("unzip")
    if unzip:
        subprocess.run([unzip, "-tq", saved], check=True, stdout=subprocess.DEVNULL)


def test_the_crc_is_in_the_descriptor_and_not_in_the_local_header(saved: Path) -> None:
    content = saved.read_bytes()
    with zipfile.ZipFile(saved) as archive:
        for info in archive.infolist():
            crc, packed, nbytes, name, extra = struct.unpack_from(
                "<IIIHH", content, info.header_offset + 14
            )
            assert (crc, packed, nbytes) == (0, 0, 0)
            end = info.header_offset + 30 + name + extra + info.file_size
            if info.file_size:
                size = info.file_size
                descriptor = struct.unpack_from("<IIII", content, end)
                assert descriptor == (0x08074B50, info.CRC, size, size)


def test_every_record_starts_at_a_multiple_of_64(saved: Path) -> None:
    content = saved.read_bytes()
    with zipfile.ZipFile(saved) as archive:
        for info in archive.infolist():
            name, extra = struct.unpack_from("<HH", content, info.header_offset + 26)
            assert (info.header_offset + 30 + name + extra) % 64 == 0


def test_the_skeleton_moves_no_shard_and_equal_saves_are_equal_files() -> None:
    small, large = file_of([5, 0, 70]), file_of([5, 0, 70], b"p" * 100_000)
    assert (small.shard_offset == large.shard_offset).all()
    assert file_of([5, 0, 70]).literal_blob == small.literal_blob


def reference_literals(sizes: list[int], skeleton: bytes) -> dict[int, bytes]:
    """Write the zip the slow way, record by record; return its literals by offset, CRCs zero."""
    literals: dict[int, bytes] = {0: b""}
    directory, at, last = b"", 0, 0
    records: list[tuple[str, int, bytes | None]] = [
        (f"archive/data/{index}", size, None) for index, size in enumerate(sizes)
    ]
    identity = torch_zip.serialization_id(np.array(sizes, np.int64), skeleton)
    for name, content in (
        *torch_zip.SMALL_RECORDS,
        (torch_zip.ID_NAME, identity),
        (torch_zip.PICKLE_NAME, skeleton),
    ):
        records.append((name, len(content), content))
    for name, size, small in records:
        raw, crc = name.encode(), crc32(small) if small else 0
        head = zip_bytes.local_header_bytes(len(raw), size)
        header = zip_bytes.local_header(raw, size, -(at + head) % 64)
        directory += zip_bytes.directory_entry(raw, crc, size, at)
        literals[last] += header + (small or b"")
        at += len(header) + size
        if small is None:
            last = at
            literals.setdefault(last, b"")
        tail = zip_bytes.descriptor(crc, size)
        literals[last] += tail
        at += len(tail)
    literals[last] += directory + zip_bytes.directory_end(len(records), len(directory), at)
    return literals


SIZES = st.one_of(
    st.lists(st.one_of(st.just(0), st.integers(0, 300)), max_size=130),
    st.lists(
        st.sampled_from([0, 1, 64, 2**32 - 2, 2**32 - 1, 2**32, 2**40]), min_size=1, max_size=30
    ),
)


@given(SIZES, st.binary(min_size=1, max_size=200))
@settings(max_examples=150, deadline=None)
def test_the_vectorised_file_equals_one_written_record_by_record(
    sizes: list[int], skeleton: bytes
) -> None:
    file = file_of(sizes, skeleton)
    wanted = reference_literals(sizes, skeleton)
    assert set(file.literal_offset.tolist()) == set(wanted)
    for index, offset in enumerate(file.literal_offset.tolist()):
        start, stop = file.literal_start[index : index + 2]
        assert file.literal_blob[start:stop] == wanted[offset]


@given(SIZES)
@settings(max_examples=100, deadline=None)
def test_every_byte_belongs_to_one_shard_or_literal(sizes: list[int]) -> None:
    file = file_of(sizes)
    ranges = list(zip(file.shard_offset.tolist(), file.shard_nbytes.tolist(), strict=True))
    assert all(offset % 64 == 0 for offset, _ in ranges)
    ranges += zip(file.literal_offset.tolist(), np.diff(file.literal_start).tolist(), strict=True)
    end = 0
    for offset, nbytes in sorted(ranges):
        assert offset == end
        end += nbytes
    assert end == file.size
    assert file.shard_nbytes.tolist() == sizes
    assert (np.diff(file.hole_offset) >= 4).all()


def test_a_hundred_thousand_records_are_all_found() -> None:
    count = 100_000
    file = file_of([8] * count)
    starts = dict(zip(file.literal_offset.tolist(), file.literal_start.tolist(), strict=False))
    directory_end = file.literal_blob[-22:]
    assert struct.unpack_from("<HH", directory_end, 8) == (0xFFFF, 0xFFFF)
    assert struct.unpack_from("<QQ", file.literal_blob, len(file.literal_blob) - 98 + 24) == (
        count + 4,
        count + 4,
    )
    assert len(starts) == count + 1


def test_sizes_and_offsets_from_4_gib_on_use_zip64_fields() -> None:
    big = 2**32
    file = file_of([8, big, 8])
    assert file.shard_offset.tolist()[2] > big
    image = FileImage(file)
    window = 4096
    start = file.size - file.size % window
    assert file.size - start > 600  # the whole directory is in the last window
    buffer = memoryview(bytearray(window))
    crcs = np.array([1, 2, 3], np.uint32)
    image.fill(buffer, start, crcs)
    tail = bytes(buffer[: file.size - start])
    first = tail.index(b"PK\1\2")
    entries = []
    while tail[first : first + 4] == b"PK\1\2":
        fields = struct.unpack_from("<IHHHHHHIIIHHHHHII", tail, first)
        name_at = first + 46
        extra_at = name_at + fields[10]
        name = tail[name_at:extra_at].decode()
        entries.append((name, fields, tail[extra_at : extra_at + fields[11]]))
        first = extra_at + fields[11]
    (_, small, no_extra), (_, large, sizes), (_, far, offset) = entries[:3]
    assert small[7:10] == (1, 8, 8) and no_extra == b""
    assert large[7:10] == (2, 0xFFFFFFFF, 0xFFFFFFFF)
    assert struct.unpack("<HHQQ", sizes) == (1, 16, big, big)
    assert far[7:10] == (3, 8, 8) and far[16] == 0xFFFFFFFF
    kind, nbytes, header = struct.unpack("<HHQ", offset)
    assert (kind, nbytes) == (1, 8)
    assert header == int(file.shard_offset[1]) + big + 24


@pytest.mark.heavy
def test_torch_and_zip_tools_read_a_tensor_of_more_than_4_gib(
    tmp_path: Path, object_plan: ObjectPlan
) -> None:
    numel = (2**32 + 2**20) // 4
    small = {"big": torch.zeros(1), "last": torch.arange(5)}
    _, (_, last), skeleton = object_plan(small)
    # The stock pickle of small tensors, with the big one's sizes: BININT takes four bytes.
    one, count = b"K\x01tq", b"J" + struct.pack("<i", numel) + b"tq"
    shape, big_shape = b"K\x01\x85q", b"J" + struct.pack("<i", numel) + b"\x85q"
    assert skeleton.count(one) == 1
    skeleton = skeleton.replace(one, count, 1).replace(shape, big_shape, 1)
    plan = sizes_plan([numel * 4, len(last)])
    (file,) = FORM.files(plan, FORM.layout(plan), skeleton, "a.pt", "").files
    zeros = 0
    block = bytes(1 << 24)
    for start in range(0, numel * 4, len(block)):
        zeros = crc32(block[: min(len(block), numel * 4 - start)], zeros)
    crcs = np.array([zeros, crc32(last)], np.uint32)
    path = tmp_path / "big.pt"
    image = FileImage(file)
    with path.open("wb") as out:
        os.truncate(out.fileno(), file.size)
        for window in image.literal_windows(4096).tolist():
            start = window * 4096
            buffer = bytearray(min(4096, file.size - start))
            pieces = image.pieces(start, start + len(buffer))
            for row in np.flatnonzero(pieces.shard == 1).tolist():
                begin = int(pieces.begin[row])
                buffer[begin : begin + len(last)] = last
            image.fill(memoryview(buffer), start, crcs)
            os.pwrite(out.fileno(), buffer, start)
    found = torch.load(path, weights_only=True, mmap=True)
    assert found["big"].shape == (numel,)
    assert not found["big"][-1000:].any()
    assert found["last"].tolist() == [0, 1, 2, 3, 4]
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    unzip = shutil.which("unzip")
    if unzip:
        subprocess.run([unzip, "-tq", path], check=True, stdout=subprocess.DEVNULL)
    assert math.isclose(path.stat().st_blocks * 512, 0, abs_tol=1 << 20)
