from __future__ import annotations

import contextlib
import gc
import logging
import os
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import safetensors.torch
import torch
from tests.client.test_stream import is_right, state_of

import shardwright
from shardwright import attach, config, stage
from shardwright.errors import (
    SaveCancelledError,
    SaveFailedError,
    ShardwrightError,
    UnsupportedObjectError,
    WriterUnavailableError,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.client.fake_writer import FakeWriter

STATE = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}


@pytest.fixture
def nobody(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no writer."""
    monkeypatch.setenv("SHARDWRIGHT_ENDPOINT", f"unix://{short_path}/nobody.sock")


def only_plan(fake: FakeWriter) -> Any:
    (plan,) = fake.structures.values()
    return plan


# --- what goes where ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "asked", "expected"),
    [
        ("model.pt", None, "torch"),
        ("model", None, "torch"),
        ("model.bin", None, "torch"),
        ("model.safetensors", None, "safetensors"),
        ("model.pt", "safetensors", "safetensors"),
        ("model.safetensors", "torch", "torch"),
    ],
)
def test_the_format_is_as_asked_or_guessed_from_the_suffix(
    fake: FakeWriter, tmp_path: Path, name: str, asked: Any, expected: str
) -> None:
    shardwright.save(STATE, tmp_path / name, format=asked, on_error="raise")
    assert only_plan(fake).format == expected


def test_metadata_and_shard_size_travel_in_the_plan(fake: FakeWriter, tmp_path: Path) -> None:
    shardwright.save(
        STATE,
        tmp_path / "m.safetensors",
        metadata={"format": "pt"},
        max_shard_size=1 << 20,
        on_error="raise",
    )
    plan = only_plan(fake)
    assert dict(plan.metadata) == {"format": "pt"} and plan.shard_bytes_max == 1 << 20


@pytest.mark.parametrize("kind", [str, Path, os.fsencode])
def test_a_path_may_be_text_bytes_or_pathlike(
    fake: FakeWriter, tmp_path: Path, kind: Callable[[str], Any]
) -> None:
    handle = shardwright.save(STATE, kind(str(tmp_path / "a.pt")), on_error="raise")
    assert handle.path == str(tmp_path / "a.pt") and (tmp_path / "a.pt").is_file()


def test_a_relative_path_means_the_folder_at_the_call(
    fake: FakeWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fake.hold_acks.set()
    handle = shardwright.async_save(STATE, "sub/../a.pt", on_error="raise")
    monkeypatch.chdir("/")
    fake.hold_acks.clear()
    assert handle.committed(timeout_s=10) and handle.path == str(tmp_path / "a.pt")
    assert (tmp_path / "a.pt").is_file()


def test_missing_folders_are_made(fake: FakeWriter, tmp_path: Path) -> None:
    shardwright.save(STATE, tmp_path / "x/y/z/a.pt", on_error="raise")
    assert (tmp_path / "x/y/z/a.pt").is_file()


@pytest.mark.parametrize(
    "what", ["folder", "fifo", "file as folder", "no name", "long", "not UTF-8"]
)
def test_a_target_that_cannot_be_a_file_is_refused_before_anything_is_sent(
    fake: FakeWriter, tmp_path: Path, what: str
) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "file").write_bytes(b"x")
    paths: dict[str, str | bytes] = {
        "folder": f"{tmp_path}/folder",
        "fifo": f"{tmp_path}/fifo",
        "file as folder": f"{tmp_path}/file/a.pt",
        "no name": "/",
        "long": f"{tmp_path}/{'n' * 201}",
        "not UTF-8": os.fsencode(str(tmp_path)) + b"/\xff.pt",
    }
    before = sorted(os.listdir(tmp_path))
    handle = shardwright.async_save(STATE, paths[what])
    assert isinstance(handle.error, SaveFailedError)
    str(handle.error).encode()  # fit for a log
    with pytest.raises(SaveFailedError):
        shardwright.async_save(STATE, paths[what], on_error="raise")
    assert not fake.opens and sorted(os.listdir(tmp_path)) == before


def test_no_descriptor_is_left_behind(fake: FakeWriter, tmp_path: Path) -> None:
    def target_of(fd: str) -> str:
        with contextlib.suppress(OSError):
            return os.readlink(f"/proc/self/fd/{fd}")
        return ""

    def folder_fds() -> list[str]:
        return [fd for fd in os.listdir("/proc/self/fd") if target_of(fd) == str(tmp_path)]

    ours = fake.clients  # the fake is in this process: its copies are here, too
    for at in range(3):
        shardwright.save(STATE, tmp_path / f"{at}.pt", on_error="raise")
        shardwright.save(lambda: None, tmp_path / "bad.pt")
    theirs = sum(len(client.targets) for client in ours.values()) + len(fake.saves)
    deadline = time.monotonic() + 5
    while len(folder_fds()) > theirs and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    assert len(folder_fds()) == theirs


# --- when it goes wrong ---------------------------------------------------------------------------


def test_without_a_writer_training_goes_on_at_once_and_the_log_says_it_once(
    nobody: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    started = time.monotonic()
    handle = shardwright.async_save(STATE, tmp_path / "a.pt")
    assert time.monotonic() - started < 1
    assert isinstance(handle.error, WriterUnavailableError) and handle.done()
    assert handle.captured() is False and handle.committed() is False
    (record,) = caplog.records
    assert "a.pt" in record.getMessage() and "writer serve" in record.getMessage()
    assert shardwright.save(STATE, tmp_path / "a.pt").error is not None


def test_without_a_writer_and_with_raise_the_waits_raise(nobody: None, tmp_path: Path) -> None:
    handle = shardwright.async_save(STATE, tmp_path / "a.pt", on_error="raise")
    for wait in (handle.captured, handle.committed):
        with pytest.raises(WriterUnavailableError):
            wait()
    with pytest.raises(WriterUnavailableError):
        shardwright.save(STATE, tmp_path / "a.pt", on_error="raise")


def test_a_socket_where_nobody_answers_is_no_writer(
    short_path: Path, tmp_path: Path, configure: Callable[..., object]
) -> None:
    import socket

    configure(connect_timeout_s=0.5)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"{short_path}/w.sock")
        listener.listen(1)
        started = time.monotonic()
        handle = shardwright.async_save(
            STATE, tmp_path / "a.pt", endpoint=f"unix://{short_path}/w.sock"
        )
        assert 0.4 < time.monotonic() - started < 3
    assert isinstance(handle.error, WriterUnavailableError)


@pytest.mark.parametrize("call", [shardwright.save, shardwright.async_save])
def test_without_a_writer_and_with_local_the_trainer_writes_the_stock_file(
    nobody: None, tmp_path: Path, call: Callable[..., shardwright.PendingSave]
) -> None:
    for name in ("m.pt", "m.safetensors"):
        (tmp_path / name).write_bytes(b"old")
        handle = call(STATE, tmp_path / name, on_error="local", metadata=None)
        assert handle.committed() and handle.captured() and handle.error is None
        assert handle.transport == "local" and handle.progress.stage == "committed"
    loaded = torch.load(tmp_path / "m.pt", weights_only=True)
    assert all(torch.equal(loaded[name], STATE[name]) for name in STATE)
    loaded = safetensors.torch.load_file(tmp_path / "m.safetensors")
    assert all(torch.equal(loaded[name], STATE[name]) for name in STATE)
    assert sorted(os.listdir(tmp_path)) == ["m.pt", "m.safetensors"]


def test_with_local_a_save_that_fails_while_its_object_is_at_hand_is_written_here(
    fake: FakeWriter, tmp_path: Path
) -> None:
    fake.fail_open = ("IO_ERROR", "the disk has a scratch", "")
    handle = shardwright.save(STATE, tmp_path / "a.pt", on_error="local")
    assert handle.committed() and handle.transport == "local"
    assert torch.equal(torch.load(tmp_path / "a.pt", weights_only=True)["a"], STATE["a"])


def test_with_local_a_failure_after_async_save_returned_is_a_failure(
    fake: FakeWriter, tmp_path: Path
) -> None:
    """The tensors may have changed by then: they cannot be written any more."""
    fake.hook = lambda save, request: "fail" if request.WhichOneof("kind") == "finish" else None
    handle = shardwright.async_save(STATE, tmp_path / "a.pt", on_error="local")
    assert handle.committed(timeout_s=10) is False and handle.error is not None
    assert not (tmp_path / "a.pt").exists()


@pytest.mark.parametrize("writer", ["fake", "nobody"])
def test_an_object_that_cannot_be_saved_is_an_error_in_every_mode(
    request: pytest.FixtureRequest, tmp_path: Path, writer: str
) -> None:
    request.getfixturevalue(writer)
    bad = {"a": torch.ones(2), "f": lambda: None}
    for mode in ("skip", "local"):
        handle = shardwright.async_save(bad, tmp_path / "a.pt", on_error=mode)
        assert isinstance(handle.error, UnsupportedObjectError)
    with pytest.raises(UnsupportedObjectError):
        shardwright.async_save(bad, tmp_path / "a.pt", on_error="raise")
    assert os.listdir(tmp_path) == []


def test_whatever_the_objects_own_code_raises_does_not_reach_the_training_step(
    fake: FakeWriter, tmp_path: Path
) -> None:
    class Spiteful:
        def __reduce__(self) -> str:
            raise RuntimeError("not today")

    handle = shardwright.async_save({"x": Spiteful()}, tmp_path / "a.pt")
    assert isinstance(handle.error, UnsupportedObjectError) and "not today" in str(handle.error)


@pytest.mark.parametrize(
    "arguments",
    [
        {"transport": "pigeon"},
        {"step": -1},
        {"endpoint": "tcp://somewhere"},
        {"endpoint": "unix:///" + "x" * 200},
        {"format": "hdf5"},
        {"metadata": {"a": "b"}},  # the torch format has no place for it
    ],
)
def test_a_wrong_argument_is_on_the_handle_or_raised(
    fake: FakeWriter, tmp_path: Path, arguments: dict[str, Any]
) -> None:
    handle = shardwright.async_save(STATE, tmp_path / "a.pt", **arguments)
    assert isinstance(handle.error, ShardwrightError)
    with pytest.raises(ShardwrightError):
        shardwright.async_save(STATE, tmp_path / "a.pt", on_error="raise", **arguments)
    local = shardwright.async_save(STATE, tmp_path / "a.pt", on_error="local", **arguments)
    assert local.error is not None and not (tmp_path / "a.pt").exists()


def test_a_wrong_setting_is_an_error_of_the_save_and_names_the_variable(
    fake: FakeWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDWRIGHT_STALL_TIMEOUT_S", "soon")
    config.forget()
    handle = shardwright.async_save(STATE, tmp_path / "a.pt")
    assert "SHARDWRIGHT_STALL_TIMEOUT_S" in str(handle.error)
    assert shardwright.prepare() is False
    monkeypatch.delenv("SHARDWRIGHT_STALL_TIMEOUT_S")
    config.forget()
    assert shardwright.save(STATE, tmp_path / "a.pt").error is None


def test_an_unknown_on_error_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match="ignore"):
        shardwright.async_save(STATE, "a.pt", on_error="ignore")  # type: ignore[arg-type]


def test_on_error_may_come_from_the_environment(
    nobody: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDWRIGHT_ON_ERROR", "raise")
    config.forget()
    with pytest.raises(WriterUnavailableError):
        shardwright.save(STATE, tmp_path / "a.pt")


def test_an_interrupt_while_staging_passes_and_costs_no_slot(
    fake: FakeWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = state_of()
    real, calls = stage.copy_window, []

    def interrupted(*arguments: Any, **options: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        real(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(stage, "copy_window", interrupted)
        with pytest.raises(KeyboardInterrupt):
            shardwright.async_save(state, tmp_path / "a.pt")
    assert shardwright.drain(10)
    for at in range(4):
        handle = shardwright.save(state, tmp_path / f"{at}.pt", on_error="raise", timeout_s=20)
        assert is_right(fake.saves[handle.save_id], state)
    assert not (tmp_path / "a.pt").exists()


def test_a_source_that_cannot_be_copied_fails_the_save_and_not_the_step(
    fake: FakeWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(stage, "copy_window", broken)
        handle = shardwright.async_save(STATE, tmp_path / "a.pt")
    assert isinstance(handle.error, SaveFailedError) and "out of memory" in str(handle.error)
    assert not isinstance(handle.error, SaveCancelledError)
    assert shardwright.save(STATE, tmp_path / "a.pt").error is None


@pytest.mark.parametrize("writer", ["fake", "nobody"])
def test_the_handle_of_a_failed_save_does_not_keep_the_tensors_alive(
    request: pytest.FixtureRequest, tmp_path: Path, writer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Spiteful:
        def __reduce__(self) -> str:
            raise RuntimeError("not today")

    def broken(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("out of memory")

    request.getfixturevalue(writer)
    monkeypatch.setattr(stage, "copy_window", broken)
    for extra in ({}, {"x": Spiteful()}):
        tensor = torch.ones(1000)
        alive = weakref.ref(tensor)
        handle = shardwright.async_save({"a": tensor, **extra}, tmp_path / "a.pt")
        assert handle.error is not None
        del tensor
        gc.collect()
        assert alive() is None


# --- prepare and drain ----------------------------------------------------------------------------


def test_prepare_reserves_as_much_as_the_object_needs_and_maps_it(
    fake_factory: Callable[..., FakeWriter], tmp_path: Path
) -> None:
    fake = fake_factory(lease_bytes=4096 << 16)
    state = {"a": torch.zeros(1 << 20), "b": torch.zeros(1 << 20)}
    assert shardwright.prepare(state) is True
    (client,) = fake.clients.values()
    assert client.lease_bytes > 8 << 20
    (connection,) = attach._connections.values()
    arena = connection.session(0, 1).arena
    assert arena.bytes_total == client.lease_bytes
    assert all(segment.populated for segment in arena.segments)
    handle = shardwright.save(state, tmp_path / "a.pt", on_error="raise")
    assert len(fake.attaches) == 1 and is_right(fake.saves[handle.save_id], state)


def test_prepare_without_an_object_takes_the_whole_share(fake: FakeWriter) -> None:
    assert shardwright.prepare() is True
    (client,) = fake.clients.values()
    assert client.lease_bytes == fake.lease_bytes
    assert fake.attaches[0]["want_bytes"] == 0


def test_prepare_may_be_called_again_for_a_larger_object(
    fake_factory: Callable[..., FakeWriter],
) -> None:
    fake = fake_factory(lease_bytes=4096 << 16)
    assert shardwright.prepare({"a": torch.zeros(10)})
    (client,) = fake.clients.values()
    before = client.lease_bytes
    assert shardwright.prepare({"a": torch.zeros(before // 4)})
    assert client.lease_bytes > before


def test_prepare_waits_a_little_for_a_writer_that_is_just_starting(
    fake_factory: Callable[..., FakeWriter],
    short_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    starting = threading.Timer(0.5, fake_factory)
    starting.start()
    endpoint = f"unix://{short_path}/fake0/writer.sock"
    assert shardwright.prepare(endpoint=endpoint) is True
    starting.join()


def test_prepare_without_a_writer_says_so_in_time(
    nobody: None, configure: Callable[..., object], caplog: pytest.LogCaptureFixture
) -> None:
    configure(connect_timeout_s=0.3)
    started = time.monotonic()
    assert shardwright.prepare(STATE) is False
    assert time.monotonic() - started < 2
    assert len(caplog.records) == 1
    with pytest.raises(WriterUnavailableError):
        shardwright.prepare(STATE, on_error="raise")
    with pytest.raises(UnsupportedObjectError):
        shardwright.prepare({"f": lambda: None}, on_error="raise")


def test_drain_waits_for_every_save(fake: FakeWriter, tmp_path: Path) -> None:
    fake.hold_acks.set()
    handles = [shardwright.async_save(STATE, tmp_path / f"{at}.pt") for at in range(3)]
    assert shardwright.drain(timeout_s=0.2) is False
    threading.Timer(0.2, fake.hold_acks.clear).start()
    assert shardwright.drain(timeout_s=10) is True
    assert all(handle.committed() for handle in handles)
    assert shardwright.drain() is True


# --- what it costs to have it ---------------------------------------------------------------------


def test_importing_costs_little_and_brings_neither_torch_nor_grpc() -> None:
    code = (
        "import sys, time; start = time.perf_counter(); import shardwright;"
        "print(time.perf_counter() - start);"
        "heavy = ('torch', 'grpc', 'google.protobuf', 'numpy');"
        "print([name for name in heavy if name in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    took_s = []
    for _ in range(3):
        result = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env=environment,
        )
        seconds, modules = result.stdout.splitlines()
        assert modules == "[]"
        took_s.append(float(seconds))
    assert min(took_s) < 0.15


def test_the_library_configures_no_logging() -> None:
    assert logging.getLogger("shardwright").handlers == []
    assert logging.getLogger("shardwright").level == logging.NOTSET
