"""The process around the saves: exit, SIGTERM, fork.

`handle` registers saves here while they live; `api` enters `guard` in every public call. At exit
and on SIGTERM pending saves are waited for as long as bytes move, then left to the writer. Never
touches a save except to look at it.

A signal handler runs inside whatever the main thread was doing, perhaps with one of our locks
held. So it does nothing inside a guard but take note; the guard's exit does the work.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any, Final

from shardwright import config

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from shardwright.handle import PendingSave

_log = logging.getLogger("shardwright")
_SLICE_S: Final = 0.25


class _Process:
    """What this process knows of its saves; a forked child starts with a new one."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.pending: dict[str, PendingSave] = {}
        self.guards = 0  # of the main thread
        self.noted: FrameType | None = None
        self.has_noted = False
        self.deadline_s = float("inf")
        self.handling = False
        self.hooked = False
        self.previous: Any = None
        self.changed = threading.Event()  # only ever waited for outside of guards


_process = _Process()


# --- the registry of pending saves -----------------------------------------------------------


def add(save: PendingSave) -> None:
    """A save begins: from now on exit waits for it."""
    with _process.lock:
        _process.pending[save.save_id] = save
        first, _process.hooked = not _process.hooked, True
    if first:
        _hook()


def discard(save: PendingSave) -> None:
    """A save has ended."""
    with _process.lock:
        _process.pending.pop(save.save_id, None)
    _process.changed.set()


def pending() -> list[PendingSave]:
    """Return the saves that have not ended, oldest first."""
    # No lock, because SIGTERM's handler asks too: list() of a dict is one step under the GIL.
    return list(_process.pending.values())


def deadline_s() -> float:
    """Until when (monotonic) anything may be waited for; infinite unless SIGTERM came."""
    return _process.deadline_s


@contextlib.contextmanager
def guard() -> Iterator[None]:
    """Keep SIGTERM's work out of a section that takes our locks."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _process.guards += 1
    try:
        yield
    finally:
        _process.guards -= 1
        if _process.guards == 0 and _process.has_noted:
            _process.has_noted = False
            _terminate(_process.noted)


# --- waiting ----------------------------------------------------------------------------------


def wait_for_pending(wait_s: float, stall_s: float) -> list[PendingSave]:
    """Wait for pending saves while bytes move, at most wait_s; return those that are left."""
    process = _process
    now_s = time.monotonic()
    end_s, seen, moved_s = now_s + wait_s, None, now_s
    while saves := pending():
        now_s = time.monotonic()
        figures = [(save.save_id, save.figures) for save in saves]
        if figures != seen:
            seen, moved_s = figures, now_s
        left_s = min(end_s, moved_s + stall_s) - now_s
        if left_s <= 0:
            return saves
        process.changed.wait(min(left_s, _SLICE_S))
        process.changed.clear()
    return []


def _wait_at_end() -> None:
    settings = config.get()
    left = wait_for_pending(settings.exit_wait_s, settings.exit_stall_s)
    for save in left:
        if save.is_captured:
            _log.warning("left to the writer, which commits it by itself: %r", save)
        else:
            _log.warning("not captured when the process ended, so it is lost: %r", save)


# --- exit, SIGTERM, fork ----------------------------------------------------------------------


def _hook() -> None:
    # Before atexit's callbacks: by then Python has joined threads and starts no new ones.
    register: Any = getattr(threading, "_register_atexit", None)
    try:
        if register is None:
            raise RuntimeError
        register(_at_exit)
    except RuntimeError:  # too late for it: the interpreter already shuts down
        import atexit

        atexit.register(_at_exit)
    hook_sigterm()


def hook_sigterm() -> None:
    """Chain our SIGTERM handler before the one that is there, unless the settings say no."""
    if not config.get().sigterm or threading.current_thread() is not threading.main_thread():
        return
    previous = signal.getsignal(signal.SIGTERM)
    # None: a handler that is not Python's. SIG_IGN: nobody wants to be stopped.
    if previous is not None and previous not in (signal.SIG_IGN, _on_sigterm):
        _process.previous = previous
        signal.signal(signal.SIGTERM, _on_sigterm)


def _at_exit() -> None:
    _wait_at_end()
    from shardwright import attach

    attach.close_all()


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    process = _process
    if process.handling:  # a second SIGTERM: somebody does not want to wait
        _chain(frame)
    elif process.guards:
        process.has_noted, process.noted = True, frame
        process.deadline_s = time.monotonic() + config.get().exit_wait_s
    else:
        _terminate(frame)


def _terminate(frame: FrameType | None) -> None:
    _process.handling = True
    try:
        _wait_at_end()
    finally:
        _process.handling = False
        _process.deadline_s = float("inf")
    _chain(frame)


def _chain(frame: FrameType | None) -> None:
    previous = _process.previous
    if callable(previous):
        previous(signal.SIGTERM, frame)
        return
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)


def _after_fork_in_child() -> None:
    global _process
    inherited, _process = _process, _Process()
    for save in list(inherited.pending.values()):
        save.fail_in_child()
    if inherited.hooked and signal.getsignal(signal.SIGTERM) is _on_sigterm:
        # A worker that saves nothing must die of SIGTERM as if we were not here.
        signal.signal(signal.SIGTERM, inherited.previous)
    config.forget()


os.register_at_fork(after_in_child=_after_fork_in_child)
