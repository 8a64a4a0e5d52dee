"""The writer dies at every message; what then becomes of the save, the slots, and the trainer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest
import torch
from tests.client import fake_writer
from tests.client.test_stream import ROADS, Road, is_right, state_of

import shardwright
from shardwright.errors import SaveFailedError, WriterUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.client.fake_writer import FakeWriter, Save

    from shardwright_proto.v1 import writer_pb2 as wire

MESSAGES = 11
"""Open, PlanChunk, SkeletonChunk, seven windows, Finish: what a save of `state_of` sends."""


class DiesAt:
    """Kills the server at its n-th message, and starts the next one a little later."""

    def __init__(self, fake: FakeWriter, at: int, action: str) -> None:
        self.fake, self.at, self.action = fake, at, action
        self.seen = 0
        self.dead = threading.Event()
        self._lock = threading.Lock()

    def __call__(self, save: Save | None, request: wire.SaveRequest) -> str | None:
        with self._lock:
            self.seen += 1
            if self.seen != self.at:
                return None
        if self.action != "break":
            self.dead.set()
        return self.action

    def restart(self) -> None:
        if self.dead.wait(10):
            self.fake._up_again_after_death()


def restarting(fake: FakeWriter, at: int, action: str) -> DiesAt:
    hook = DiesAt(fake, at, action)
    fake.hook = hook
    if action != "break":
        threading.Thread(target=hook.restart, daemon=True).start()
    return hook


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("action", ["die", "break", "die and forget"])
@pytest.mark.parametrize("at", range(1, MESSAGES + 1))
def test_a_save_commits_though_its_stream_breaks_at_any_message(
    fake_factory: Callable[..., FakeWriter], tmp_path: Path, at: int, action: str, road: Road
) -> None:
    fake = fake_factory()
    if action == "die and forget":
        fake.hold_acks.set()  # nothing is durable yet: then everything can be sent again
    hook = restarting(fake, at, action)
    state = state_of(seed=at)
    before = {name: tensor.clone() for name, tensor in state.items()}
    handle = shardwright.async_save(state, tmp_path / "a.pt", transport=road, on_error="raise")
    for tensor in state.values():
        tensor.fill_(-1)  # nothing may be copied from the trainer again
    if action == "die and forget":
        assert hook.dead.wait(10)
        fake.hold_acks.clear()
    assert handle.committed(timeout_s=20)
    assert hook.seen > at, "it did break"
    assert is_right(fake.saves[handle.save_id], before)
    progress = handle.progress
    assert progress.bytes_staged == progress.bytes_total, "nothing is staged twice"


@pytest.mark.parametrize("road", ROADS)
def test_a_save_larger_than_the_arena_goes_on_after_the_server_died(
    fake_factory: Callable[..., FakeWriter], tmp_path: Path, road: Road
) -> None:
    fake = fake_factory(lease_bytes=4 << 16)
    restarting(fake, 9, "die")
    state = state_of(count=24)
    handle = shardwright.save(state, tmp_path / "a.pt", transport=road, on_error="raise")
    assert is_right(fake.saves[handle.save_id], state)
    resumed = fake.opens[-1]
    assert resumed.resume and resumed.save_id == handle.save_id


def test_windows_that_the_writer_has_are_not_sent_again(fake: FakeWriter, tmp_path: Path) -> None:
    state = state_of()
    shardwright.save(state, tmp_path / "a.pt", on_error="raise")
    fake.hold_acks.set()
    handle = shardwright.async_save(state, tmp_path / "b.pt", on_error="raise")
    assert handle.captured(timeout_s=10)
    save = fake.saves[handle.save_id]
    seen = list(save.windows_seen)
    fake.kill_server()
    fake.start_server()
    fake.hold_acks.clear()
    assert handle.committed(timeout_s=10)
    assert save.windows_seen == seen and len(seen) == len(set(seen))


def test_a_forgetful_writer_is_told_what_was_durable(fake: FakeWriter, tmp_path: Path) -> None:
    """It cannot check it, so the save fails: but by name, and at once."""
    state = state_of()

    def hold_after_three(save: Save | None, request: wire.SaveRequest) -> None:
        if save is not None and len(save.windows_seen) == 3:
            fake.hold_acks.set()

    fake.hook = hold_after_three
    handle = shardwright.async_save(state, tmp_path / "a.pt")
    assert handle.captured(timeout_s=10)
    save = fake.saves[handle.save_id]
    durable = dict(save.durable)
    assert 0 < len(durable) < len(save.expected)
    fake.kill_server(forget=True)
    fake.start_server()
    assert handle.committed(timeout_s=10) is False
    assert isinstance(handle.error, SaveFailedError)
    claimed = fake.opens[-1]
    assert claimed.resume
    assert {(d.file, d.window): d.crc32 for d in claimed.durable} == durable
    assert list(claimed.temporary_names) == [f".{handle.save_id}.0.swtmp"]
    fake.hook = lambda save, request: None
    fake.hold_acks.clear()
    again = shardwright.save(state, tmp_path / "a.pt", on_error="raise")
    assert is_right(fake.saves[again.save_id], state)


def test_the_same_arena_serves_after_every_kind_of_death(fake: FakeWriter, tmp_path: Path) -> None:
    state = state_of()
    for round_number in range(4):
        handle = shardwright.save(state, tmp_path / "a.pt", on_error="raise")
        assert is_right(fake.saves[handle.save_id], state)
        fake.kill_server(forget=round_number % 2 == 1)
        fake.start_server()
    held = [request["held"] for request in fake.attaches]
    assert held[0] == [] and all(ids == held[1] for ids in held[1:]) and held[1]
    assert {request["window_bytes"] for request in fake.attaches[1:]} == {fake.window_bytes}
    assert len({request["client_id"] for request in fake.attaches}) == 1
    assert fake.offers and all(ids == held[1] for ids in fake.offers)


def test_a_writer_that_cannot_take_the_arena_over_gets_a_new_client(
    fake: FakeWriter, tmp_path: Path
) -> None:
    state = state_of()
    shardwright.save(state, tmp_path / "a.pt", on_error="raise")
    fake.refuse["offer"] = ("BUSY", "the budget is smaller now", "")
    fake.kill_server(forget=True)
    fake.start_server()
    failed = shardwright.save(state, tmp_path / "b.pt")
    assert "arena" in str(failed.error)
    handle = shardwright.save(state, tmp_path / "c.pt", on_error="raise")
    assert is_right(fake.saves[handle.save_id], state)
    assert len({request["client_id"] for request in fake.attaches}) == 2


def test_another_layout_from_the_next_server_is_noticed_before_it_tears_the_file(
    fake: FakeWriter, tmp_path: Path
) -> None:
    state = state_of()
    shardwright.save(state, tmp_path / "a.pt", on_error="raise")
    fake.kill_server(forget=True)
    fake.layout_seed = 2
    fake.start_server()
    failed = shardwright.save(state, tmp_path / "b.pt")
    assert "layout" in str(failed.error)
    assert not (tmp_path / "b.pt").exists()
    handle = shardwright.save(state, tmp_path / "c.pt", on_error="raise")
    assert is_right(fake.saves[handle.save_id], state)


def test_a_server_that_dies_at_every_attempt_is_given_up(fake: FakeWriter, tmp_path: Path) -> None:
    def poison(save: Save | None, request: wire.SaveRequest) -> str | None:
        return "break" if request.WhichOneof("kind") == "skeleton_chunk" else None

    fake.hook = poison
    handle = shardwright.save({"a": torch.ones(9)}, tmp_path / "a.pt")
    assert "broke off" in str(handle.error)


@pytest.mark.parametrize("road", ROADS)
def test_training_does_not_wait_for_a_dead_server_while_slots_are_free(
    fake_factory: Callable[..., FakeWriter], tmp_path: Path, road: Road
) -> None:
    fake = fake_factory(lease_bytes=64 << 16)
    state = state_of()
    shardwright.save(state, tmp_path / "a.pt", transport=road, on_error="raise")
    fake.kill_server()
    started = time.monotonic()
    handle = shardwright.async_save(state, tmp_path / "b.pt", transport=road, on_error="raise")
    assert time.monotonic() - started < 1
    fake.start_server()
    assert handle.committed(timeout_s=10)
    assert is_right(fake.saves[handle.save_id], state)


def test_training_does_not_wait_long_for_a_writer_that_is_gone(
    fake_factory: Callable[..., FakeWriter], tmp_path: Path, configure: Callable[..., object]
) -> None:
    configure(connect_timeout_s=1.0, stall_timeout_s=3.0)
    fake = fake_factory(lease_bytes=4 << 16)
    state = state_of(count=20)
    shardwright.save(state, tmp_path / "a.pt", on_error="raise")
    fake.stop()
    started = time.monotonic()
    first = shardwright.async_save(state, tmp_path / "b.pt")  # larger than the arena
    assert time.monotonic() - started < 4
    assert isinstance(first.error, WriterUnavailableError)
    started = time.monotonic()
    second = shardwright.async_save(state, tmp_path / "c.pt")
    assert time.monotonic() - started < 0.5, "it is known to be gone"
    assert isinstance(second.error, WriterUnavailableError)


def test_a_captured_save_is_not_taken_back_when_its_writer_is_silent(
    fake: FakeWriter, tmp_path: Path, configure: Callable[..., object]
) -> None:
    configure(stall_timeout_s=1.0, reclaim_pause_s=0.1)
    fake.hold_acks.set()
    state = state_of()
    handle = shardwright.async_save(state, tmp_path / "a.pt")
    assert handle.captured(timeout_s=10)
    fake.silent.set()
    assert handle.wait_ended(10)
    assert "had everything" in str(handle.error)
    fake.silent.clear()
    fake.hold_acks.clear()
    save = fake.saves[handle.save_id]
    deadline = time.monotonic() + 10
    while save.verdict is None and time.monotonic() < deadline:
        threading.Event().wait(0.02)
    assert save.verdict is not None and save.verdict.WhichOneof("kind") == "committed"


@pytest.mark.faults
def test_supervisor_and_server_killed_together_cost_nothing_when_nothing_was_released(
    short_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start() -> subprocess.Popen[bytes]:
        command = [sys.executable, fake_writer.__file__, str(short_path)]
        paths = os.pathsep.join(path for path in sys.path if path)
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": paths}
        )
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        return process

    monkeypatch.setenv("SHARDWRIGHT_ENDPOINT", f"unix://{short_path}/writer.sock")
    processes = [start()]
    try:
        state = state_of()
        shardwright.save(state, tmp_path / "a.pt", on_error="raise")
        processes[0].send_signal(signal.SIGSTOP)  # it takes nothing of the next save
        handle = shardwright.async_save(state, tmp_path / "b.pt", on_error="raise")
        processes[0].kill()
        processes[0].wait()
        processes.append(start())
        assert handle.committed(timeout_s=20)
        assert (tmp_path / "b.pt").read_bytes() == (tmp_path / "a.pt").read_bytes()
    finally:
        for process in processes:
            process.kill()
            process.communicate()
