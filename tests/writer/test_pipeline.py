"""The pipeline between slots and files: any order of windows, failures, restored windows."""

from __future__ import annotations

import os
import random
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pytest

from shardwright_writer.arena import anonymous_buffer
from shardwright_writer.crc import crc32, window_crc
from shardwright_writer.formats import get_format
from shardwright_writer.formats.base import FilePlan, Plan
from shardwright_writer.formats.image import FileImage
from shardwright_writer.pipeline import Pipeline
from shardwright_writer.refusal import Reason, Refusal
from shardwright_writer.storage.posix import PosixFolder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from shardwright_writer.storage.base import WritableFile

WINDOW = 1 << 20
WAIT_S = 30.0


@dataclass
class Events:
    """Records what the pipeline says."""

    crcs: dict[tuple[int, int], NDArray[np.uint32]] = field(default_factory=dict)
    durable: dict[tuple[int, int], int] = field(default_factory=dict)
    refusals: list[Refusal] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)
    idle: threading.Event = field(default_factory=threading.Event)

    def record_crcs(self, file: int, window: int, values: NDArray[np.uint32]) -> None:
        self.crcs[file, window] = values

    def windows_durable(self, file: int, windows: list[tuple[int, int]]) -> None:
        self.durable.update({(file, window): crc for window, crc in windows})

    def data_durable(self) -> None:
        self.done.set()

    def failed(self, refusal: Refusal) -> None:
        self.refusals.append(refusal)

    def drained(self) -> None:
        self.idle.set()


class Case:
    """A torch zip of random shards, and the windows that a client would have staged."""

    def __init__(self, folder: Path, sizes: list[int], sync_bytes: int = 2 * WINDOW) -> None:
        rng = np.random.default_rng(0)
        self.data = [rng.bytes(size) for size in sizes]
        plan = Plan(
            "torch",
            [f"t{index}" for index in range(len(sizes))],
            ["uint8"] * len(sizes),
            [(size,) for size in sizes],
            np.array(sizes, np.int64),
            {},
            0,
        )
        kind = get_format("torch")
        self.file_plan: FilePlan = kind.files(plan, kind.layout(plan), b"pickle", "a.pt", "").files[
            0
        ]
        self.image = FileImage(self.file_plan)
        self.folder = PosixFolder(
            os.open(folder, os.O_RDONLY), str(folder), os.getuid(), os.getgid()
        )
        self.events = Events()
        self.pool = ThreadPoolExecutor(4)
        self.sync_bytes = sync_bytes

    def pipeline(self, file: WritableFile) -> Pipeline:
        parts = [(self.file_plan, self.image, file)]
        return Pipeline(parts, WINDOW, len(self.data), self.events, self.pool, self.sync_bytes)

    def windows(self) -> list[int]:
        return [int(window) for window in self.image.shard_windows(WINDOW)]

    def slot(self, window: int) -> memoryview:
        buffer = anonymous_buffer(WINDOW)
        pieces = self.image.pieces(window * WINDOW, (window + 1) * WINDOW)
        rows = zip(pieces.shard, pieces.begin, pieces.nbytes, pieces.first_in_shard, strict=True)
        for shard, begin, count, first in rows:
            buffer[begin : begin + count] = self.data[shard][first : first + count]
        return buffer

    def check(self, path: Path) -> None:
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None
            for index, data in enumerate(self.data):
                assert archive.read(f"archive/data/{index}") == data
            assert archive.read("archive/data.pkl") == b"pickle"


@pytest.fixture
def case(tmp_path: Path) -> Iterator[Case]:
    made = Case(tmp_path, [3 * WINDOW + 17, 1, 0, 999, 2 * WINDOW, WINDOW // 2, 5])
    yield made
    made.pool.shutdown()


@pytest.mark.parametrize("seed", range(8))
def test_windows_in_any_order_make_the_same_right_file(
    case: Case, tmp_path: Path, seed: int
) -> None:
    pipeline = case.pipeline(case.folder.create("out", 0o600))
    windows = case.windows()
    random.Random(seed).shuffle(windows)
    pipeline.start()
    for window in windows:
        pipeline.submit(0, window, case.slot(window))
    assert case.events.done.wait(WAIT_S)
    case.check(tmp_path / "out")
    assert set(case.events.durable) == {(0, window) for window in windows}
    assert [int(crc) for crc in pipeline.crcs] == [crc32(data) for data in case.data]


def test_a_file_without_any_shard_byte_is_written_too(tmp_path: Path) -> None:
    case = Case(tmp_path, [0, 0])
    case.pipeline(case.folder.create("out", 0o600)).start()
    assert case.events.done.wait(WAIT_S)
    case.check(tmp_path / "out")


def test_restored_windows_are_not_written_and_count_for_the_crcs(
    case: Case, tmp_path: Path
) -> None:
    windows = case.windows()
    first = case.pipeline(case.folder.create("out", 0o600))
    for window in windows:
        first.submit(0, window, case.slot(window))
    assert case.events.done.wait(WAIT_S)
    recorded = dict(case.events.crcs)
    (tmp_path / "again").write_bytes((tmp_path / "out").read_bytes()[: len(windows) * WINDOW])
    case.events.done.clear()
    second = case.pipeline(case.folder.reopen("again"))
    for window in windows[::2]:
        second.restore(0, window, recorded[0, window])
    for window in windows[1::2]:
        second.submit(0, window, case.slot(window))
    assert case.events.done.wait(WAIT_S)
    case.check(tmp_path / "again")


def test_the_acknowledged_crc_is_that_of_the_piece_crcs(case: Case) -> None:
    pipeline = case.pipeline(case.folder.create("out", 0o600))
    for window in case.windows():
        pipeline.submit(0, window, case.slot(window))
    assert case.events.done.wait(WAIT_S)
    for key, crc in case.events.durable.items():
        assert crc == window_crc(case.events.crcs[key])


class FailingFile:
    """Fails one operation with a refusal, as a full disk would."""

    def __init__(self, file: WritableFile, operation: str) -> None:
        self.name, self.inode = file.name, file.inode
        self._file, self._operation = file, operation

    def write_at(self, buffer: memoryview, offset: int) -> None:
        self._fail("write_at", offset)
        self._file.write_at(buffer, offset)

    def read_at(self, buffer: memoryview, offset: int) -> int:
        return self._file.read_at(buffer, offset)

    def sync_data(self) -> None:
        self._fail("sync_data", WINDOW)
        self._file.sync_data()

    def finish(self, size: int) -> None:
        self._fail("finish", WINDOW)
        self._file.finish(size)

    def close(self) -> None:
        self._file.close()

    def _fail(self, operation: str, offset: int) -> None:
        if operation == self._operation and offset >= WINDOW:
            raise Refusal(Reason.NO_SPACE, f"{operation} failed")


@pytest.mark.parametrize("operation", ["write_at", "sync_data", "finish"])
def test_a_failing_file_fails_the_save_once_and_drains(tmp_path: Path, operation: str) -> None:
    case = Case(tmp_path, [8 * WINDOW], sync_bytes=WINDOW)
    pipeline = case.pipeline(FailingFile(case.folder.create("out", 0o600), operation))
    for window in case.windows():
        pipeline.submit(0, window, case.slot(window))
    assert case.events.idle.wait(WAIT_S)
    assert [refusal.reason for refusal in case.events.refusals] == [Reason.NO_SPACE]
    assert not case.events.done.is_set()
    case.pool.shutdown()


def test_after_stop_no_task_touches_memory(case: Case) -> None:
    pipeline = case.pipeline(case.folder.create("out", 0o600))
    windows = case.windows()
    pipeline.submit(0, windows[0], case.slot(windows[0]))
    assert pipeline.stop(WAIT_S)
    assert case.events.idle.wait(WAIT_S)
    before = case.slot(windows[1])
    copy = bytes(before)
    pipeline.submit(0, windows[1], before)
    case.pool.shutdown(wait=True)
    assert bytes(before) == copy
    assert not case.events.done.is_set()


def test_flush_acknowledges_a_batch_that_is_not_full(tmp_path: Path) -> None:
    case = Case(tmp_path, [4 * WINDOW], sync_bytes=64 * WINDOW)
    pipeline = case.pipeline(case.folder.create("out", 0o600))
    window = case.windows()[0]
    written = threading.Event()
    pipeline.submit(0, window, case.slot(window))
    for _ in range(1000):
        pipeline.flush()
        if written.wait(0.01) or (0, window) in case.events.durable:
            break
    assert (0, window) in case.events.durable
    pipeline.stop(WAIT_S)
    case.pool.shutdown()
