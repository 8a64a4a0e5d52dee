from __future__ import annotations

import ctypes
import fcntl
import os
import threading
from dataclasses import dataclass

import pytest

from shardwright.arena import Arena, map_segment, private_arena

WINDOW = 4096
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


@dataclass(eq=False)
class User:
    stopped: bool = False


def sealed_memfd(size: int, seals: int = SEALS) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def acquire_in_thread(arena: Arena, user: User, results: list[object]) -> threading.Thread:
    thread = threading.Thread(target=lambda: results.append(arena.acquire(user, 10)))
    thread.start()
    while not any(waiter.user is user for waiter in list(arena._waiters)):
        assert thread.is_alive()
    return thread


def test_every_slot_is_its_own_memory_and_every_use_has_its_own_generation() -> None:
    arena = private_arena(WINDOW, 4)
    slots = [arena.acquire(User(), 0) for _ in range(4)]
    assert arena.acquire(User(), 0) is None
    addresses = set()
    for slot in slots:
        assert slot is not None
        assert slot.generation == 1
        addresses.add(slot.address)
        arena.release(slot)
    assert len(addresses) == 4
    again = arena.acquire(User(), 0)
    assert again is not None and again.generation == 2


def test_a_slot_released_twice_is_a_bug() -> None:
    arena = private_arena(WINDOW, 1)
    slot = arena.acquire(User(), 0)
    assert slot is not None
    arena.release(slot)
    other = arena.acquire(User(), 0)
    with pytest.raises(AssertionError):
        arena.release(slot)
    assert other is not None


def test_waiters_are_served_in_the_order_they_came() -> None:
    arena = private_arena(WINDOW, 1)
    slot = arena.acquire(User(), 0)
    assert slot is not None
    order: list[int] = []
    threads = []

    def wait(number: int, user: User) -> None:
        mine = arena.acquire(user, 10)
        assert mine is not None
        order.append(number)
        arena.release(mine)

    for number in range(5):
        user = User()
        threads.append(threading.Thread(target=wait, args=(number, user)))
        threads[-1].start()
        while not any(waiter.user is user for waiter in list(arena._waiters)):
            assert threads[-1].is_alive()
    arena.release(slot)
    for thread in threads:
        thread.join(10)
    assert order == [0, 1, 2, 3, 4]


def test_a_stopped_user_is_woken_and_gets_nothing_from_then_on() -> None:
    arena = private_arena(WINDOW, 1)
    slot = arena.acquire(User(), 0)
    assert slot is not None
    user, results = User(), []  # type: ignore[var-annotated]
    thread = acquire_in_thread(arena, user, results)
    user.stopped = True
    arena.interrupt(user)
    thread.join(10)
    assert results == [None]
    arena.release(slot)
    assert arena.acquire(user, 0) is None
    assert arena.acquire(User(), 0) is not None


def test_a_wait_that_times_out_leaves_no_place_in_the_queue() -> None:
    arena = private_arena(WINDOW, 1)
    slot = arena.acquire(User(), 0)
    assert slot is not None
    assert arena.acquire(User(), 0.01) is None
    arena.release(slot)
    assert arena.acquire(User(), 0) is not None


def test_an_interrupted_wait_loses_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = private_arena(WINDOW, 1)
    slot = arena.acquire(User(), 0)
    assert slot is not None

    def interrupted(self: threading.Event, timeout: float | None = None) -> bool:
        assert slot is not None
        arena.release(slot)  # at this very moment: the waiter has it, and must give it back
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Event, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            arena.acquire(User(), 1)
    assert arena.acquire(User(), 0) is not None


def test_who_does_not_wait_does_not_overtake_who_does() -> None:
    arena = private_arena(WINDOW, 1)
    slot = arena.acquire(User(), 0)
    assert slot is not None
    results: list[object] = []
    thread = acquire_in_thread(arena, User(), results)
    assert arena.acquire(User(), 0) is None
    arena.release(slot)
    thread.join(10)
    assert results[0] is not None


def test_segments_that_come_later_serve_who_waits() -> None:
    arena = Arena(WINDOW)
    user, results = User(), []  # type: ignore[var-annotated]
    thread = acquire_in_thread(arena, user, results)
    arena.add(map_segment(0, 7, 2 * WINDOW, sealed_memfd(2 * WINDOW)))
    thread.join(10)
    assert results[0].index == 7
    arena.release(results[0])
    arena.retire()


def test_a_segment_is_the_writers_memory() -> None:
    fd = sealed_memfd(2 * WINDOW)
    other = os.dup(fd)
    arena = Arena(WINDOW)
    arena.add(map_segment(0, 0, 2 * WINDOW, fd))
    slots = [arena.acquire(User(), 0) for _ in range(2)]
    for slot in slots:
        assert slot is not None
        ctypes.memset(slot.address, 65 + slot.index, WINDOW)
    assert os.pread(other, 2 * WINDOW, 0) == b"A" * WINDOW + b"B" * WINDOW
    for slot in slots:
        assert slot is not None
        arena.release(slot)
    arena.retire()
    os.close(other)


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_GROW, fcntl.F_SEAL_SHRINK])
def test_memory_that_could_shrink_under_us_is_not_mapped(seals: int) -> None:
    fd = sealed_memfd(WINDOW, seals)
    with pytest.raises(ValueError, match="sealed"):
        map_segment(0, 0, WINDOW, fd)
    os.close(fd)


def test_memory_of_another_size_than_announced_is_not_mapped() -> None:
    fd = sealed_memfd(WINDOW)
    for size in (2 * WINDOW, WINDOW - 1, 0, -WINDOW):
        with pytest.raises(ValueError, match="bytes"):
            map_segment(0, 0, size, fd)
    os.close(fd)


def test_a_file_that_is_no_memfd_is_not_mapped() -> None:
    read_fd, write_fd = os.pipe()
    with pytest.raises(ValueError, match="sealed"):
        map_segment(0, 0, WINDOW, read_fd)
    os.close(read_fd)
    os.close(write_fd)


def test_a_retired_arena_keeps_its_memory_until_the_last_slot_is_back() -> None:
    fd = sealed_memfd(WINDOW)
    arena = Arena(WINDOW)
    arena.add(map_segment(0, 0, WINDOW, fd))
    slot = arena.acquire(User(), 0)
    assert slot is not None
    arena.retire()
    assert arena.acquire(User(), 0) is None
    ctypes.memset(slot.address, 1, WINDOW)  # would crash if it were unmapped
    assert is_mapped(slot.address)
    arena.release(slot)
    assert not is_mapped(slot.address)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_populating_twice_costs_nothing_and_changes_nothing() -> None:
    arena = private_arena(WINDOW, 4)
    slot = arena.acquire(User(), 0)
    assert slot is not None
    ctypes.memset(slot.address, 7, WINDOW)
    arena.populate()
    arena.populate()
    assert ctypes.string_at(slot.address, WINDOW) == b"\7" * WINDOW


def test_a_forked_child_has_neither_the_mapping_nor_the_descriptor() -> None:
    fd = sealed_memfd(WINDOW)
    arena = Arena(WINDOW)
    arena.add(map_segment(0, 0, WINDOW, fd))
    address = arena.segments[0].address
    pid = os.fork()
    if pid == 0:
        mapped = is_mapped(address)
        arena.close_fds()
        os._exit(1 if mapped or arena.segments[0].fd != -1 else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert is_mapped(address)
    os.fstat(fd)
    arena.retire()


def is_mapped(address: int) -> bool:
    with open("/proc/self/maps") as maps:
        for line in maps:
            start, _, end = line.split()[0].partition("-")
            if int(start, 16) <= address < int(end, 16):
                return True
    return False
