from __future__ import annotations

import itertools
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pytest
import torch
from tests.client.fake_writer import FakeWriter, Save, gaps_are_clean, shard_bytes

import shardwright
from shardwright.errors import SaveCancelledError, SaveFailedError, SaveTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardwright_proto.v1 import writer_pb2 as wire

Road = Literal["shared", "inline"]
ROADS: tuple[Road, ...] = ("shared", "inline")


def state_of(seed: int = 0, count: int = 12) -> dict[str, torch.Tensor]:
    """Tensors from empty to several windows long."""
    generator = torch.Generator().manual_seed(seed)
    return {
        f"t{at}": torch.randn(at * 1700, generator=generator, dtype=torch.float32)
        for at in range(count)
    }


def bytes_of(state: dict[str, torch.Tensor]) -> list[bytes]:
    return [tensor.numpy().tobytes() for tensor in state.values()]


def is_right(save: Save, state: dict[str, torch.Tensor]) -> bool:
    return shard_bytes(save) == bytes_of(state) and gaps_are_clean(save)


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("file_count", [1, 3])
def test_every_byte_arrives(
    fake_factory: Callable[..., FakeWriter], tmp_path: Path, road: Road, file_count: int
) -> None:
    fake = fake_factory(file_count=file_count)
    state = state_of()
    for _ in range(3):
        handle = shardwright.save(state, tmp_path / "a.pt", transport=road, on_error="raise")
        assert is_right(fake.saves[handle.save_id], state)
        assert handle.transport == road
        progress = handle.progress
        assert progress.bytes_total == progress.bytes_staged == progress.bytes_durable
        assert progress.stage == "committed"


def test_the_plan_travels_once_and_so_does_the_layout(fake: FakeWriter, tmp_path: Path) -> None:
    kinds: list[str | None] = []

    def note(save: Save | None, request: wire.SaveRequest) -> None:
        kinds.append(request.WhichOneof("kind"))

    fake.hook = note
    for seed in range(3):
        shardwright.save(state_of(seed), tmp_path / "a.pt", on_error="raise")
    assert kinds.count("plan_chunk") == 1
    assert [message.layout_known for message in fake.opens] == [False, True, True]
    assert kinds.count("skeleton_chunk") == 3


def test_a_plan_that_the_writer_has_forgotten_is_sent_again(
    fake: FakeWriter, tmp_path: Path
) -> None:
    state = state_of()
    shardwright.save(state, tmp_path / "a.pt", on_error="raise")
    fake.structures.clear()
    handle = shardwright.save(state, tmp_path / "b.pt", on_error="raise")
    assert is_right(fake.saves[handle.save_id], state)


@pytest.mark.parametrize("road", ROADS)
def test_a_state_larger_than_the_arena_flows_through_it(
    fake_factory: Callable[..., FakeWriter], tmp_path: Path, road: Road
) -> None:
    fake = fake_factory(lease_bytes=4 << 16)
    state = state_of(count=24)
    handle = shardwright.save(state, tmp_path / "a.pt", transport=road, on_error="raise")
    assert handle.progress.bytes_total > 4 * (4 << 16)
    assert is_right(fake.saves[handle.save_id], state)


def test_tensors_may_change_when_async_save_returns(fake: FakeWriter, tmp_path: Path) -> None:
    fake.hold_acks.set()
    state = state_of()
    before = {name: tensor.clone() for name, tensor in state.items()}
    handle = shardwright.async_save(state, tmp_path / "a.pt", on_error="raise")
    for tensor in state.values():
        tensor.fill_(-1)
    assert handle.captured(timeout_s=10)
    assert not handle.done()
    fake.hold_acks.clear()
    assert handle.committed(timeout_s=10)
    assert is_right(fake.saves[handle.save_id], before)


def test_slots_are_not_used_again_before_their_bytes_are_durable(
    fake_factory: Callable[..., FakeWriter], tmp_path: Path
) -> None:
    """The fake asserts it: a slot in use must not be announced again."""
    fake = fake_factory(lease_bytes=64 << 16)
    states = [state_of(seed, count=8) for seed in range(4)]
    fake.hold_acks.set()
    handles = [
        shardwright.async_save(state, tmp_path / f"{at}.pt", on_error="raise")
        for at, state in enumerate(states)
    ]
    fake.hold_acks.clear()
    for handle, state in zip(handles, states, strict=True):
        assert handle.committed(timeout_s=10)
        assert is_right(fake.saves[handle.save_id], state)


@pytest.mark.parametrize("road", ROADS)
def test_threads_may_save_at_the_same_time_through_one_small_arena(
    fake_factory: Callable[..., FakeWriter], tmp_path: Path, road: Road
) -> None:
    fake = fake_factory(lease_bytes=4 << 16)
    states = [state_of(seed, count=14) for seed in range(4)]
    handles: list[shardwright.PendingSave | None] = [None] * 4

    def work(at: int) -> None:
        handles[at] = shardwright.save(
            states[at], tmp_path / f"{at}.pt", transport=road, on_error="raise"
        )

    threads = [threading.Thread(target=work, args=(at,)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for handle, state in zip(handles, states, strict=True):
        assert handle is not None
        assert is_right(fake.saves[handle.save_id], state)
    assert len(fake.attaches) == 1, "one connection a process"


def test_one_file_is_saved_under_the_umask_of_the_trainer(fake: FakeWriter, tmp_path: Path) -> None:
    handle = shardwright.save({"a": torch.ones(4)}, tmp_path / "a.pt", step=7, on_error="raise")
    (message,) = fake.opens
    lines = Path("/proc/self/status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines)
    assert message.umask == int(status["Umask"], 8)
    assert (message.step, message.rank, message.world_size) == (7, 0, 1)
    assert message.save_id == handle.save_id and message.file_name == "a.pt"
    assert (tmp_path / "a.pt").exists()


@pytest.mark.parametrize("road", ROADS)
def test_a_failure_of_the_writer_reaches_the_caller_and_frees_the_slots(
    fake_factory: Callable[..., FakeWriter], tmp_path: Path, road: Road
) -> None:
    fake = fake_factory(lease_bytes=4 << 16)
    state = state_of(count=20)
    fake.hold_acks.set()

    def fail_at_third(save: Save | None, request: wire.SaveRequest) -> str | None:
        return "fail" if save is not None and len(save.windows_seen) == 2 else None

    fake.hook = fail_at_third
    handle = shardwright.save(state, tmp_path / "a.pt", transport=road)
    assert isinstance(handle.error, SaveFailedError)
    assert handle.error.reason == "NO_SPACE" and "disk is full" in str(handle.error)
    fake.hook = lambda save, request: None
    fake.hold_acks.clear()
    again = shardwright.save(state, tmp_path / "a.pt", transport=road, on_error="raise")
    assert is_right(fake.saves[again.save_id], state)


@pytest.mark.parametrize("op", ["attach", "target"])
def test_a_refused_handshake_request_says_why(fake: FakeWriter, tmp_path: Path, op: str) -> None:
    fake.refuse[op] = ("PERMISSION", "outside of every --root", "add a --root")
    handle = shardwright.save({"a": torch.ones(9)}, tmp_path / "a.pt")
    assert "outside of every --root" in str(handle.error) and "add a --root" in str(handle.error)
    del fake.refuse[op]
    shardwright.save({"a": torch.ones(9)}, tmp_path / "a.pt", on_error="raise")


def test_a_refused_open_says_why(fake: FakeWriter, tmp_path: Path) -> None:
    fake.fail_open = ("BUSY", "1024 saves are under way", "wait for some to end")
    handle = shardwright.save({"a": torch.ones(9)}, tmp_path / "a.pt")
    assert isinstance(handle.error, SaveFailedError) and handle.error.reason == "BUSY"
    fake.fail_open = None
    shardwright.save({"a": torch.ones(9)}, tmp_path / "a.pt", on_error="raise")


def test_a_refused_growth_does_not_stop_the_save(fake: FakeWriter, tmp_path: Path) -> None:
    shardwright.save({"a": torch.ones(9)}, tmp_path / "a.pt", on_error="raise")
    fake.refuse["grow"] = ("BUSY", "nothing left", "")
    state = state_of()
    handle = shardwright.save(state, tmp_path / "b.pt", on_error="raise")
    assert is_right(fake.saves[handle.save_id], state)


def test_a_larger_object_makes_the_arena_grow(
    fake_factory: Callable[..., FakeWriter], tmp_path: Path, configure: Callable[..., object]
) -> None:
    fake = fake_factory(lease_bytes=4096 << 16)
    shardwright.save({"a": torch.ones(9)}, tmp_path / "a.pt", on_error="raise")
    (client,) = fake.clients.values()
    before = client.lease_bytes
    state = {"a": torch.zeros(before // 4 + 1)}
    handle = shardwright.save(state, tmp_path / "b.pt", on_error="raise")
    assert client.lease_bytes > before
    assert is_right(fake.saves[handle.save_id], state)


@pytest.mark.parametrize("road", ROADS)
def test_a_cancelled_save_ends_as_cancelled_and_frees_its_slots(
    fake_factory: Callable[..., FakeWriter], tmp_path: Path, road: Road
) -> None:
    fake = fake_factory()
    fake.hold_acks.set()
    handle = shardwright.async_save(state_of(count=8), tmp_path / "a.pt", transport=road)
    assert handle.cancel() is True
    assert handle.wait_ended(10)
    assert isinstance(handle.error, SaveCancelledError)
    assert handle.committed(timeout_s=1) is False
    fake.hold_acks.clear()
    state = state_of(count=12)
    again = shardwright.save(state, tmp_path / "a.pt", transport=road, on_error="raise")
    assert is_right(fake.saves[again.save_id], state)


def test_a_cancel_that_comes_too_late_changes_nothing(fake: FakeWriter, tmp_path: Path) -> None:
    handle = shardwright.save({"a": torch.ones(9)}, tmp_path / "a.pt")
    assert handle.cancel() is False
    assert handle.committed() and handle.error is None


def test_a_save_that_is_not_durable_in_time_fails_and_says_where_it_stood(
    fake: FakeWriter, tmp_path: Path
) -> None:
    fake.hold_acks.set()
    started = time.monotonic()
    handle = shardwright.save(state_of(count=20), tmp_path / "a.pt", timeout_s=1)
    assert time.monotonic() - started < 5
    assert isinstance(handle.error, SaveTimeoutError)
    assert "timeout_s" in str(handle.error) and "last heard" in str(handle.error)


def test_a_save_of_which_nothing_moves_is_given_up_though_its_writer_speaks(
    fake: FakeWriter, tmp_path: Path, configure: Callable[..., object]
) -> None:
    configure(progress_timeout_s=1.0)
    fake.hold_acks.set()
    handle = shardwright.save(state_of(count=8), tmp_path / "a.pt")
    assert isinstance(handle.error, SaveTimeoutError) and "moved" in str(handle.error)
    fake.hold_acks.clear()


def test_staging_waits_for_a_slot_only_so_long(
    fake_factory: Callable[..., FakeWriter], tmp_path: Path, configure: Callable[..., object]
) -> None:
    configure(slot_timeout_s=1.0)
    fake = fake_factory(lease_bytes=4 << 16)
    fake.hold_acks.set()
    started = time.monotonic()
    handle = shardwright.async_save(state_of(count=20), tmp_path / "a.pt")
    assert time.monotonic() - started < 5
    assert isinstance(handle.error, SaveTimeoutError) and "slot" in str(handle.error)


@pytest.mark.parametrize("road", ROADS)
def test_a_writer_that_says_nothing_is_given_up_and_its_slots_come_back_with_it(
    fake_factory: Callable[..., FakeWriter],
    tmp_path: Path,
    configure: Callable[..., object],
    road: Road,
) -> None:
    configure(stall_timeout_s=1.0, reclaim_pause_s=0.1)
    fake = fake_factory(lease_bytes=4 << 16)
    state = state_of(count=20)
    shardwright.save({"warm": torch.ones(3)}, tmp_path / "w.pt", transport=road, on_error="raise")
    fake.silent.set()
    started = time.monotonic()
    handle = shardwright.save(state, tmp_path / "a.pt", transport=road)
    assert time.monotonic() - started < 6
    assert "has said nothing" in str(handle.error)
    fake.silent.clear()
    again = shardwright.save(state, tmp_path / "b.pt", transport=road, on_error="raise")
    assert is_right(fake.saves[again.save_id], state)
    assert not (tmp_path / "a.pt").exists()


def test_a_writer_without_shared_memory_of_the_right_kind_is_served_inline(
    fake_factory: Callable[..., FakeWriter], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fake = fake_factory()
    fake.seals = 0
    state = state_of()
    for at in range(2):
        handle = shardwright.save(state, tmp_path / f"{at}.pt", on_error="raise")
        assert handle.transport == "inline"
        assert is_right(fake.saves[handle.save_id], state)
    assert len([record for record in caplog.records if "inline" in record.getMessage()]) == 1


def test_inline_chunks_stay_below_the_message_limit_and_cover_a_window_in_order(
    fake_factory: Callable[..., FakeWriter], tmp_path: Path
) -> None:
    fake = fake_factory(window_bytes=4 << 20, lease_bytes=64 << 20)
    chunks: list[tuple[int, int, int, bool]] = []

    def note(save: Save | None, request: wire.SaveRequest) -> None:
        if request.WhichOneof("kind") == "inline_chunk":
            chunk = request.inline_chunk
            chunks.append((chunk.window, chunk.offset, len(chunk.data), chunk.last))

    fake.hook = note
    state = {"a": torch.arange(2_500_000, dtype=torch.float32)}
    handle = shardwright.save(state, tmp_path / "a.pt", transport="inline", on_error="raise")
    assert is_right(fake.saves[handle.save_id], state)
    assert max(count for _, _, count, _ in chunks) <= 2 << 20
    for (window, offset, count, last), after in itertools.pairwise(chunks):
        assert after[:2] == ((window + 1, 0) if last else (window, offset + count))
