"""Exit, SIGTERM and fork, each in a process of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from typing import TYPE_CHECKING

import pytest
import torch
from tests.client.test_stream import is_right

import shardwright

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.client.fake_writer import FakeWriter

PRELUDE = """
import logging, os, signal, sys, time
logging.basicConfig(format="%(message)s")
import torch
import shardwright
state = {"a": torch.arange(30000.0), "b": torch.ones(7)}
target = sys.argv[1]
def say(word):
    print(word, flush=True)
"""
STATE = {"a": torch.arange(30000.0), "b": torch.ones(7)}


class Program:
    """A trainer that runs `code` after PRELUDE."""

    def __init__(self, code: str, target: Path, **settings: str) -> None:
        environment = {
            **os.environ,
            **settings,
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        self.process = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + textwrap.dedent(code), str(target)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started_s = time.monotonic()

    def hear(self, word: str) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        if line != word:
            self.process.kill()
            raise AssertionError(f"{line!r} instead of {word!r}: {self.process.communicate()[1]}")

    def end(self, timeout_s: float = 30) -> tuple[int, str]:
        """Return the exit status and what it wrote to stderr."""
        try:
            _, errors = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"it hangs: {self.process.communicate()[1]}") from None
        # gRPC says so itself, at any fork beside a call: a fact, and no trouble of ours.
        lines = [line for line in errors.splitlines(True) if "fork_posix.cc" not in line]
        return self.process.returncode, "".join(lines)

    def lives(self, for_s: float = 0.4) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(for_s)
        return self.process.poll() is None


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "a.pt"


@pytest.fixture
def held(fake: FakeWriter) -> Iterator[FakeWriter]:
    """A writer that makes nothing durable until hold_acks is cleared."""
    fake.hold_acks.set()
    yield fake
    fake.hold_acks.clear()


def is_committed(fake: FakeWriter) -> bool:
    (save,) = fake.saves.values()
    return is_right(save, STATE)


# --- exit -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ending", "status"),
    [("", 0), ("sys.exit(3)", 3), ("raise RuntimeError('training diverged')", 1)],
)
def test_exit_waits_for_the_commit(
    held: FakeWriter, target: Path, ending: str, status: int
) -> None:
    program = Program(f"shardwright.async_save(state, target); say('saved')\n{ending}", target)
    program.hear("saved")
    assert program.lives()
    held.hold_acks.clear()
    assert program.end()[0] == status
    assert is_committed(held)


def test_exit_does_not_wait_longer_than_bytes_move(held: FakeWriter, target: Path) -> None:
    program = Program(
        "shardwright.async_save(state, target).captured(10); say('saved')",
        target,
        SHARDWRIGHT_EXIT_STALL_S="0.5",
    )
    program.hear("saved")
    started = time.monotonic()
    status, errors = program.end()
    assert status == 0 and 0.4 < time.monotonic() - started < 5
    assert "left to the writer" in errors


def test_exit_does_not_wait_longer_than_its_cap(held: FakeWriter, target: Path) -> None:
    program = Program(
        "shardwright.async_save(state, target); say('saved')",
        target,
        SHARDWRIGHT_EXIT_WAIT_S="0.5",
    )
    program.hear("saved")
    assert program.end(8)[0] == 0


def test_exit_after_everything_is_durable_is_immediate_and_silent(
    fake: FakeWriter, target: Path
) -> None:
    program = Program("shardwright.save(state, target, on_error='raise'); say('saved')", target)
    program.hear("saved")
    started = time.monotonic()
    assert program.end() == (0, "")
    assert time.monotonic() - started < 3


def test_exit_completes_a_save_whose_server_has_just_died(held: FakeWriter, target: Path) -> None:
    program = Program("shardwright.async_save(state, target).captured(10); say('saved')", target)
    program.hear("saved")
    held.kill_server()
    assert program.lives(0.2)
    held.start_server()
    held.hold_acks.clear()
    assert program.end()[0] == 0
    assert is_committed(held)


# --- SIGTERM --------------------------------------------------------------------------------------

TRAIN = "save = shardwright.async_save(state, target); say('saved')\nwhile True: time.sleep(0.05)"


def test_sigterm_waits_for_the_commit_and_then_ends_the_process_as_ever(
    held: FakeWriter, target: Path
) -> None:
    program = Program(TRAIN, target)
    program.hear("saved")
    program.process.terminate()
    assert program.lives()
    held.hold_acks.clear()
    assert program.end()[0] == -signal.SIGTERM
    assert is_committed(held)


def test_sigterm_without_anything_pending_ends_the_process_at_once(
    fake: FakeWriter, target: Path
) -> None:
    program = Program(TRAIN.replace("async_save", "save"), target)
    program.hear("saved")
    program.process.terminate()
    assert program.end(5)[0] == -signal.SIGTERM


def test_sigterm_can_be_left_alone(held: FakeWriter, target: Path) -> None:
    program = Program(TRAIN, target, SHARDWRIGHT_SIGTERM="0")
    program.hear("saved")
    program.process.terminate()
    assert program.end(5)[0] == -signal.SIGTERM
    held.hold_acks.clear()
    assert not target.exists()


def test_a_second_sigterm_does_not_wait(held: FakeWriter, target: Path) -> None:
    program = Program(TRAIN, target)
    program.hear("saved")
    program.process.terminate()
    assert program.lives()
    program.process.terminate()
    assert program.end(5)[0] == -signal.SIGTERM


def test_the_users_own_handler_is_called_after_the_commit(held: FakeWriter, target: Path) -> None:
    program = Program(
        f"""
        def handler(number, frame):
            say("theirs" if os.path.exists(target) else "too early")
            sys.exit(5)
        signal.signal(signal.SIGTERM, handler)
        {TRAIN.splitlines()[0]}
        {TRAIN.splitlines()[1]}
        """,
        target,
    )
    program.hear("saved")
    program.process.terminate()
    assert program.lives()
    held.hold_acks.clear()
    program.hear("theirs")
    assert program.end()[0] == 5


def test_an_ignored_sigterm_stays_ignored(fake: FakeWriter, target: Path) -> None:
    program = Program(
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        shardwright.save(state, target)
        os.kill(os.getpid(), signal.SIGTERM)
        say("alive")
        """,
        target,
    )
    program.hear("alive")
    assert program.end()[0] == 0


@pytest.mark.parametrize("call", ["save", "async_save"])
def test_sigterm_in_the_middle_of_a_save_lets_that_save_commit_first(
    held: FakeWriter, target: Path, call: str
) -> None:
    held.lease_bytes = 2 * held.window_bytes  # smaller than the state: staging has to wait
    program = Program(
        f"say('saving'); shardwright.{call}(state, target); say('returned'); time.sleep(60)",
        target,
        SHARDWRIGHT_ARENA_BYTES=str(held.lease_bytes),
    )
    program.hear("saving")
    assert program.lives(1.0)
    program.process.terminate()
    assert program.lives()
    held.hold_acks.clear()
    assert program.end()[0] == -signal.SIGTERM
    assert is_committed(held)


def test_sigterm_ends_a_wait_that_would_last_for_ever(held: FakeWriter, target: Path) -> None:
    program = Program(
        "say('saved'); shardwright.async_save(state, target).committed(); say('over')",
        target,
        SHARDWRIGHT_EXIT_WAIT_S="0.5",
        SHARDWRIGHT_EXIT_STALL_S="0.5",
    )
    program.hear("saved")
    assert program.lives(1.0)
    program.process.terminate()
    assert program.end(10)[0] == -signal.SIGTERM


def test_saving_from_another_thread_than_the_main_one_works(fake: FakeWriter, target: Path) -> None:
    program = Program(
        """
        import threading
        thread = threading.Thread(target=shardwright.save, args=(state, target))
        thread.start(); thread.join(); say("saved")
        """,
        target,
    )
    program.hear("saved")
    assert program.end()[0] == 0
    assert is_committed(fake)


# --- fork -----------------------------------------------------------------------------------------


def test_a_forked_child_inherits_nothing_and_waits_for_nothing(
    held: FakeWriter, target: Path
) -> None:
    program = Program(
        """
        def ours():
            links = []
            for fd in os.listdir("/proc/self/fd"):
                try:
                    links.append(os.readlink(f"/proc/self/fd/{fd}"))
                except OSError:
                    pass
            maps = open("/proc/self/maps").read().count("memfd:fake")
            memfds = [link for link in links if "memfd:fake" in link]
            folders = [link for link in links if link == os.path.dirname(target)]
            return maps, len(memfds), len(folders)
        save = shardwright.async_save(state, target)
        before = ours()
        assert all(before), before
        pid = os.fork()
        if pid == 0:
            assert ours() == (0, 0, 0), ours()
            assert save.done() and save.committed() is False and "forked" in str(save.error)
            assert shardwright.drain() is True
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
            sys.exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert ours() == before and not save.done()
        say("forked")
        assert save.committed(20)
        """,
        target,
    )
    program.hear("forked")
    held.hold_acks.clear()
    assert program.end() == (0, "")
    assert is_committed(held)


def test_a_forked_child_that_saves_makes_its_own_connection(fake: FakeWriter, target: Path) -> None:
    program = Program(
        """
        shardwright.save(state, target, on_error="raise")
        pid = os.fork()
        if pid == 0:
            shardwright.save(state, target + ".child", on_error="raise", timeout_s=20)
            sys.exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        shardwright.save(state, target + ".again", on_error="raise")
        """,
        target,
    )
    assert program.end()[0] == 0
    assert len({request["client_id"] for request in fake.attaches}) == 2
    assert len({request["pid"] for request in fake.attaches}) == 2
    for save in fake.saves.values():
        assert is_right(save, STATE)


def test_dataloader_workers_come_and_go_while_saves_are_under_way(
    fake: FakeWriter, target: Path
) -> None:
    program = Program(
        """
        from torch.utils.data import DataLoader
        shardwright.prepare(state)
        for epoch in range(3):
            for batch in DataLoader(range(40), batch_size=10, num_workers=2):
                save = shardwright.async_save(state, target, on_error="raise")
        assert save.committed(20)
        """,
        target,
    )
    status, errors = program.end(60)
    # gRPC itself says "skipping fork() handlers" when a stream is open: that is as it should be.
    ours = [line for line in errors.splitlines() if "fork_posix" not in line]
    assert (status, ours) == (0, [])


# --- in this process ------------------------------------------------------------------------------


def test_guards_outside_of_the_main_thread_are_not_counted() -> None:
    from shardwright import lifecycle

    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with lifecycle.guard():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    assert inside.wait(10)
    assert lifecycle._process.guards == 0
    leave.set()
    thread.join()


def test_saves_that_have_ended_are_not_waited_for(fake: FakeWriter, target: Path) -> None:
    from shardwright import lifecycle

    shardwright.save(STATE, target, on_error="raise")
    assert lifecycle.pending() == []
    assert lifecycle.wait_for_pending(0, 0) == []
