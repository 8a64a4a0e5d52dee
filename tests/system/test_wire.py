"""The real daemon on the wire, spoken to by hand: the good case first, then what it refuses."""

from __future__ import annotations

import os
import zipfile
from typing import TYPE_CHECKING, Any

import pytest
from tests.system.raw_client import RawClient, open_message, plan_of, stage, start_save

from shardwright_proto.v1 import writer_pb2 as wire

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.conftest import WriterProcess

TENSORS = {"a": os.urandom(5 << 20), "b": b"", "c": os.urandom(3), "d": os.urandom(1 << 20)}
SKELETON = b"not a pickle, and nobody here minds"


@pytest.fixture
def client(writer: WriterProcess, tmp_path: Path) -> Iterator[RawClient]:
    made = RawClient(writer.socket)
    assert made.target(tmp_path)["ok"]
    yield made
    made.close()


def test_a_save_is_committed_and_everything_is_in_the_file(
    client: RawClient, tmp_path: Path
) -> None:
    stream = client.open_stream()
    offsets = start_save(stream, TENSORS, SKELETON)
    for window in stage(client, TENSORS, offsets):
        stream.send(window_ready=wire.WindowReady(window=window, slot=window, generation=1))
    stream.send(finish=wire.Finish())
    kinds = []
    for kind, message in stream.all():
        kinds.append(kind)
        if kind == "committed":
            assert list(message.files) == ["out.pt"]
    assert kinds[-1] == "committed" and "captured" in kinds and "acks" in kinds
    with zipfile.ZipFile(tmp_path / "out.pt") as archive:
        assert archive.testzip() is None
        assert [archive.read(f"archive/data/{i}") for i in range(4)] == list(TENSORS.values())
        assert archive.read("archive/data.pkl") == SKELETON
    assert (tmp_path / "out.pt").stat().st_mode & 0o777 == 0o644
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.pt", "out.pt.shardwright.json"]


def refused(client: RawClient, **fields: Any) -> wire.Failed:
    stream = client.open_stream()
    stream.send(open=open_message(plan_of(TENSORS), SKELETON, **fields))
    failed: wire.Failed = stream.receive("failed")
    return failed


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"file_name": "../out.pt"}, "not one path component"),
        ({"file_name": ""}, "not one path component"),
        ({"file_name": "x" * 300}, "more than 200 bytes"),
        ({"save_id": "../../etc/passwd"}, "32 lower-case hex"),
        ({"target_id": "other"}, "unknown target folder"),
        ({"rank": 3}, "rank 3 of 1"),
        ({"skeleton_bytes": 1 << 40}, "pickled Python objects"),
    ],
)
def test_a_bad_open_is_refused_in_words(
    client: RawClient, fields: dict[str, Any], words: str
) -> None:
    assert words in refused(client, **fields).message


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"nbytes": [1]}, "differ in length"),
        ({"dtypes": b"\7" * 4}, "dtype index"),
        ({"dims": [1]}, "do not add up"),
        ({"nbytes": [1 << 63, 0, 0, 0]}, "out of range"),
        ({"format": "parquet"}, "format 'parquet'"),
    ],
)
def test_a_bad_plan_is_refused_in_words(
    client: RawClient, fields: dict[str, Any], words: str
) -> None:
    plan = plan_of(TENSORS, **fields)
    stream = client.open_stream()
    stream.send(open=open_message(plan, SKELETON))
    stream.receive("need_plan")
    stream.send(plan_chunk=wire.PlanChunk(data=plan, last=True))
    assert words in stream.receive("failed").message


def test_a_plan_that_is_not_what_its_digest_says_is_refused(client: RawClient) -> None:
    stream = client.open_stream()
    stream.send(open=open_message(plan_of(TENSORS), SKELETON))
    stream.receive("need_plan")
    stream.send(plan_chunk=wire.PlanChunk(data=b"something else", last=True))
    assert "digest" in stream.receive("failed").message


@pytest.mark.parametrize(
    ("ready", "words"),
    [
        ({"window": 99, "slot": 0}, "holds no shard"),
        ({"file": 7, "window": 0, "slot": 0}, "holds no shard"),
        ({"window": 0, "slot": 4_000_000_000}, "not in this client's arena"),
    ],
)
def test_a_bad_window_fails_the_save_and_leaves_nothing(
    client: RawClient, tmp_path: Path, ready: dict[str, int], words: str
) -> None:
    stream = client.open_stream()
    start_save(stream, TENSORS, SKELETON)
    stream.send(window_ready=wire.WindowReady(**ready))
    assert words in stream.receive("failed").message
    client.sock.close()


def test_finish_before_every_window_was_sent_is_refused(client: RawClient) -> None:
    stream = client.open_stream()
    start_save(stream, TENSORS, SKELETON)
    stream.send(finish=wire.Finish())
    assert "missing" in stream.receive("failed").message


def test_a_stream_without_a_token_is_refused(client: RawClient) -> None:
    client.attached["token"] = "guessed"
    with pytest.raises(Exception, match="unknown token"):
        refused(client)


def test_a_folder_outside_the_roots_is_refused(client: RawClient, short_path: Path) -> None:
    answer = client.target(short_path, "outside")
    assert not answer["ok"] and answer["reason"] == "PERMISSION" and "--root" in answer["hint"]


def test_another_wire_version_is_refused_with_both_numbers(writer: WriterProcess) -> None:
    client = RawClient(writer.socket, wire=99)
    client.sock.close()
    answer = client.attached
    assert not answer["ok"] and "99" in answer["message"]
