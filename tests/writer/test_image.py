"""The image: any windows give the same file, and no shard byte is touched."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright_writer.crc import crc32
from shardwright_writer.formats import get_format
from shardwright_writer.formats.base import FilePlan, Plan
from shardwright_writer.formats.image import FileImage

if TYPE_CHECKING:
    from collections.abc import Callable


@st.composite
def file_plans(draw: st.DrawFn) -> FilePlan:
    """Any file: shards, literals, holes, in any order, some empty, indices shuffled."""
    parts = draw(
        st.lists(st.tuples(st.booleans(), st.one_of(st.just(0), st.integers(0, 40))), max_size=25)
    )
    shards: list[tuple[int, int]] = []
    literals: list[tuple[int, int]] = []
    at = 0
    for is_shard, nbytes in parts:
        if is_shard:
            shards.append((at, nbytes))
        elif nbytes:
            literals.append((at, nbytes))
        at += nbytes
    indices = draw(st.permutations(range(len(shards) + 2)))[: len(shards)]
    blob = draw(st.binary(min_size=(n := sum(size for _, size in literals)), max_size=n))
    holes: list[tuple[int, int]] = []
    for offset, nbytes in literals:
        place = draw(st.integers(0, 5))
        while shards and place + 4 <= nbytes:
            holes.append((offset + place, draw(st.sampled_from(indices))))
            place += 4 + draw(st.integers(0, 9))

    def column(values: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return np.array(values, np.int64)

    return FilePlan(
        name="f",
        size=at,
        shards=column(list(indices)),
        shard_offset=column([offset for offset, _ in shards]),
        shard_nbytes=column([nbytes for _, nbytes in shards]),
        literal_blob=blob,
        literal_offset=column([offset for offset, _ in literals]),
        literal_start=np.cumsum([0, *(nbytes for _, nbytes in literals)]),
        hole_offset=column([offset for offset, _ in holes]),
        hole_shard=column([shard for _, shard in holes]),
    )


CRCS = np.arange(1, 64, dtype=np.uint32) * np.uint32(0x01030507)


def wanted_image(plan: FilePlan, shard_byte: int) -> bytes:
    """Put the file together byte by byte."""
    image = bytearray([shard_byte]) * plan.size
    for index, offset in enumerate(plan.literal_offset.tolist()):
        start, stop = plan.literal_start[index : index + 2].tolist()
        image[offset : offset + stop - start] = plan.literal_blob[start:stop]
    for offset, shard in zip(plan.hole_offset.tolist(), plan.hole_shard.tolist(), strict=True):
        image[offset : offset + 4] = int(CRCS[shard]).to_bytes(4, "little")
    return bytes(image)


@given(file_plans(), st.integers(1, 70))
@settings(max_examples=300, deadline=None)
def test_windows_of_any_size_give_the_same_file(plan: FilePlan, window: int) -> None:
    image = FileImage(plan)
    wanted = wanted_image(plan, 0xEE)
    content = bytearray()
    for index in range(image.window_count(window)):
        buffer = memoryview(bytearray(b"\xee" * window))
        image.fill(buffer, index * window, CRCS)
        content += buffer
    assert content[: plan.size] == wanted
    assert not any(content[plan.size :])
    assert len(content) - plan.size < window


@given(file_plans(), st.integers(0, 900), st.integers(0, 200))
@settings(max_examples=300, deadline=None)
def test_any_range_is_filled_alone(plan: FilePlan, start: int, nbytes: int) -> None:
    buffer = memoryview(bytearray(b"\xee" * nbytes))
    FileImage(plan).fill(buffer, start, CRCS)
    wanted = wanted_image(plan, 0xEE)[start : start + nbytes]
    assert bytes(buffer) == wanted.ljust(nbytes, b"\0")


@given(file_plans(), st.integers(1, 70))
@settings(max_examples=200, deadline=None)
def test_pieces_are_the_shard_bytes_in_file_order(plan: FilePlan, window: int) -> None:
    image = FileImage(plan)
    seen: list[tuple[int, int, int]] = []
    with_shards = []
    for index in range(image.window_count(window)):
        start = index * window
        pieces = image.pieces(start, start + window)
        assert (pieces.nbytes > 0).all()
        if len(pieces):
            with_shards.append(index)
        columns = (pieces.shard, pieces.begin, pieces.nbytes, pieces.first_in_shard)
        for shard, begin, nbytes, first in zip(*(c.tolist() for c in columns), strict=True):
            assert begin >= 0 and begin + nbytes <= window
            seen += [(shard, first + at, start + begin + at) for at in range(nbytes)]
    rows = zip(
        plan.shards.tolist(), plan.shard_offset.tolist(), plan.shard_nbytes.tolist(), strict=True
    )
    assert seen == [
        (shard, at, offset + at) for shard, offset, nbytes in rows for at in range(nbytes)
    ]
    assert image.shard_windows(window).tolist() == with_shards


@given(file_plans(), st.integers(1, 70))
@settings(max_examples=200, deadline=None)
def test_literal_windows_are_those_with_a_literal_byte(plan: FilePlan, window: int) -> None:
    wanted = {
        (offset + at) // window
        for offset, nbytes in zip(
            plan.literal_offset.tolist(), np.diff(plan.literal_start).tolist(), strict=True
        )
        for at in range(nbytes)
    }
    assert FileImage(plan).literal_windows(window).tolist() == sorted(wanted)


@given(file_plans())
@settings(max_examples=100, deadline=None)
def test_the_literal_crc_is_that_of_all_bytes_that_are_no_shards(plan: FilePlan) -> None:
    image = wanted_image(plan, 0)
    is_literal = bytearray(plan.size)
    for offset, nbytes in zip(
        plan.literal_offset.tolist(), np.diff(plan.literal_start).tolist(), strict=True
    ):
        is_literal[offset : offset + nbytes] = b"\1" * nbytes
    wanted = crc32(bytes(byte for byte, literal in zip(image, is_literal, strict=True) if literal))
    assert FileImage(plan).literal_crc(CRCS) == wanted


def test_a_hole_that_a_window_cuts_gets_both_halves() -> None:
    plan = Plan("torch", [""], ["uint8"], [()], np.array([5], np.int64), {}, 0)
    form = get_format("torch")
    (file,) = form.files(plan, form.layout(plan), b"x", "f", "").files
    image = FileImage(file)
    crcs = np.array([0x04030201], np.uint32)
    hole = int(file.hole_offset[0])
    for cut in range(5):
        left, right = memoryview(bytearray(hole + cut)), memoryview(bytearray(100))
        image.fill(left, 0, crcs)
        image.fill(right, hole + cut, crcs)
        assert (bytes(left) + bytes(right))[hole : hole + 4] == b"\1\2\3\4"


def test_runs_of_equal_gaps_are_filled_like_any_others(
    reference_assemble: Callable[..., bytes],
) -> None:
    count = 2500
    sizes = np.full(count, 8, np.int64)
    sizes[700:900:2] = 500
    plan = Plan("torch", [""] * count, ["uint8"] * count, [()] * count, sizes, {}, 0)
    form = get_format("torch")
    (file,) = form.files(plan, form.layout(plan), b"pickle" * 999, "f", "").files
    blobs = [index.to_bytes(2, "little") * (size // 2) for index, size in enumerate(sizes.tolist())]
    results = [
        reference_assemble(file, blobs, np.zeros(count, np.uint32), window)
        for window in (1 << 20, 65536, 4096, 777)
    ]
    assert results[1:] == results[:-1]
