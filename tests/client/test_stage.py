from __future__ import annotations

import ctypes
import random
import threading
import time
from array import array
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.arena import Slot
from shardwright.capture import Capture
from shardwright.stage import LayoutError, Schedule, Window, build_schedule, copy_window, stage

if TYPE_CHECKING:
    from collections.abc import Sequence

WINDOW = 4096


class Reversed:
    """A source whose bytes are not in memory as they are to be stored."""

    def __init__(self, content: bytes) -> None:
        self.nbytes = len(content)
        self._content = content

    def copy_into(self, address: int, begin: int, count: int) -> None:
        ctypes.memmove(address, self._content[::-1][begin : begin + count], count)


def capture_of(contents: list[bytes], reverse: Sequence[int] = ()) -> Capture:
    """Return a capture of these bytes; those of `reverse` are given by sources, reversed."""
    buffers = [ctypes.create_string_buffer(content, len(content) + 1) for content in contents]
    sources: dict[int, Any] = {at: Reversed(contents[at][::-1]) for at in reverse if contents[at]}
    return Capture(
        plan=b"",
        plan_digest=b"",
        skeleton=b"",
        addresses=[
            0 if at in sources or not contents[at] else ctypes.addressof(buffer)
            for at, buffer in enumerate(buffers)
        ],
        nbytes=[len(content) for content in contents],
        sources=sources,
        names=[f"t{at}" for at in range(len(contents))],
        keepalive=buffers,
        bytes_total=sum(map(len, contents)),
    )


def columns(offsets: list[int], files: list[int]) -> tuple[bytes, bytes]:
    return array("Q", offsets).tobytes(), array("I", files).tobytes() if any(files) else b""


class Collector:
    """A sink that keeps every window's memory."""

    def __init__(self, fill: int) -> None:
        self.fill = fill
        self.windows: dict[tuple[int, int], bytes] = {}
        self.order: list[tuple[int, int]] = []
        self.unused = 0
        self.buffer = ctypes.create_string_buffer(WINDOW)

    def wait_slot(self) -> Slot:
        ctypes.memset(self.buffer, self.fill, WINDOW)
        return Slot(0, ctypes.addressof(self.buffer), 1)

    def window_staged(self, window: Window, slot: Slot) -> None:
        self.windows[window.file, window.window] = ctypes.string_at(slot.address, WINDOW)
        self.order.append((window.file, window.window))

    def slot_unused(self, slot: Slot) -> None:
        self.unused += 1


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[bytes], list[int], list[int]]:
    """Return shards, their offsets and files: any order, any gaps, some of many windows."""
    sizes = draw(st.lists(st.integers(0, 3 * WINDOW) | st.integers(0, 64), max_size=30))
    dice = random.Random(draw(st.integers(0, 1 << 16)))
    file_count = draw(st.integers(1, 3))
    ends = [0] * file_count
    offsets, files = [0] * len(sizes), [0] * len(sizes)
    for shard in dice.sample(range(len(sizes)), len(sizes)):
        file = dice.randrange(file_count)
        offsets[shard] = ends[file] + dice.choice([0, 0, 1, 63, WINDOW, 2 * WINDOW])
        files[shard] = file
        ends[file] = offsets[shard] + sizes[shard]
    return [dice.randbytes(size) for size in sizes], offsets, files


@given(layouts(), st.booleans(), st.data())
def test_every_byte_gets_to_its_place_and_no_other_byte_is_touched(
    layout: tuple[list[bytes], list[int], list[int]], zero_gaps: bool, data: st.DataObject
) -> None:
    contents, offsets, files = layout
    from_sources = data.draw(st.sets(st.sampled_from(range(len(contents))))) if contents else set()
    captured = capture_of(contents, sorted(from_sources))
    schedule = build_schedule(*columns(offsets, files), captured.nbytes, WINDOW)
    sink = Collector(fill=0xAA)
    stage(captured, schedule, sink, zero_gaps=zero_gaps)
    assert sink.order == sorted(sink.order)
    expected: dict[tuple[int, int], bytearray] = {}
    for content, offset, file in zip(contents, offsets, files, strict=True):
        for at, byte in enumerate(content, offset):
            key = (file, at // WINDOW)
            expected.setdefault(key, bytearray(b"\xaa" * WINDOW))[at % WINDOW] = byte
    if zero_gaps:
        clear_gaps(expected, contents, offsets, files)
    assert sink.windows == expected


def clear_gaps(
    expected: dict[tuple[int, int], bytearray],
    contents: list[bytes],
    offsets: list[int],
    files: list[int],
) -> None:
    for key, image in expected.items():
        places = [
            at % WINDOW
            for content, offset, file in zip(contents, offsets, files, strict=True)
            for at in range(offset, offset + len(content))
            if (file, at // WINDOW) == key
        ]
        for at in set(range(min(places), max(places))) - set(places):
            image[at] = 0


def test_nothing_to_save_is_no_window() -> None:
    assert build_schedule(b"", b"", [], WINDOW).windows == ()
    assert build_schedule(*columns([5, 9], []), [0, 0], WINDOW).windows == ()


@pytest.mark.parametrize(
    ("offsets", "files", "nbytes"),
    [
        ([0, 3], [0, 0], [4, 4]),  # over each other
        ([0], [0], [4, 4]),  # one too few
        ([0, 8, 16], [0, 0, 0], [4, 4]),  # one too many
        ([1 << 62, 0], [0, 0], [4, 4]),  # out of bounds
    ],
)
def test_a_layout_that_cannot_be_is_refused(
    offsets: list[int], files: list[int], nbytes: list[int]
) -> None:
    with pytest.raises(LayoutError):
        build_schedule(*columns(offsets, files), nbytes, WINDOW)


def test_a_file_column_of_another_length_is_refused() -> None:
    with pytest.raises(LayoutError):
        build_schedule(array("Q", [0, 8]).tobytes(), array("I", [0]).tobytes(), [4, 4], WINDOW)


def test_a_slot_that_could_not_be_filled_is_given_back() -> None:
    class Broken(Reversed):
        def copy_into(self, address: int, begin: int, count: int) -> None:
            raise RuntimeError("no memory")

    captured = capture_of([b"abcd"], [0])
    captured.sources[0] = Broken(b"abcd")
    sink = Collector(0)
    schedule = build_schedule(*columns([0], []), [4], WINDOW)
    with pytest.raises(RuntimeError):
        stage(captured, schedule, sink, zero_gaps=False)
    assert sink.unused == 1 and not sink.windows


def test_an_address_that_is_missing_is_our_bug_and_not_a_crash() -> None:
    captured = capture_of([b"abcd"])
    captured.addresses[0] = 0
    with pytest.raises(AssertionError, match="t0"):
        stage(captured, Schedule(b"", ()), Collector(0), zero_gaps=False)


def test_tiny_shards_do_not_wait_for_the_gil_one_by_one() -> None:
    count, each = 20_000, 8
    content = bytes(count * each)
    buffer = ctypes.create_string_buffer(content, len(content))
    captured = Capture(
        b"", b"", b"", [ctypes.addressof(buffer) + at * each for at in range(count)],
        [each] * count, {}, [], buffer, len(content),
    )  # fmt: skip
    window_bytes = 1 << 20
    schedule = build_schedule(
        array("Q", range(0, 16 * count, 16)).tobytes(), b"", captured.nbytes, window_bytes
    )
    (window,) = schedule.windows
    slot = ctypes.create_string_buffer(window_bytes)
    stop = threading.Event()

    def burn() -> None:
        while not stop.is_set():
            sum(range(1000))

    burner = threading.Thread(target=burn)
    burner.start()
    started = time.monotonic()
    copy_window(window, ctypes.addressof(slot), captured, zero_gaps=False)
    took_s = time.monotonic() - started
    stop.set()
    burner.join()
    # One wait of 5 ms a shard would be 100 s.
    assert took_s < 5
