"""The process that must not die: it owns the socket and the descriptors, and restarts the server.

Entered from the command line by exec. One thread, one loop, standard library alone: it accepts,
checks who connects, passes the connection on, keeps copies of the descriptors that the server
stores, and starts a new server when one has died and was reaped. It parses nothing that a client
sends, knows no save, and touches no file of one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import selectors
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING, Final

from shardwright_proto.control import ControlProtocolError, Message, receive_message
from shardwright_writer.config import Config
from shardwright_writer.fdstore import STORED_MAX, Start
from shardwright_writer.listener import (
    ListenerError,
    close_listener,
    name_holders,
    open_listener,
    take_lock,
)
from shardwright_writer.logs import configure_logging
from shardwright_writer.server_process import ServerProcess, spawn_server
from shardwright_writer.waiting_room import WaitingRoom

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

BACKOFF_S: Final = (0.0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0)
READY_BACKOFF_S_MAX: Final = 0.4
"""A server that was ready had clients, and training may wait for the next one (2 s at most)."""
HEALTHY_AFTER_S: Final = 60.0
START_ATTEMPTS_MAX: Final = 6
"""If no server ever became ready, another start will not help: say so and end."""
KILL_TIMEOUT_S: Final = 10.0
"""A process that SIGKILL does not end sits in the kernel; its lock keeps successors out."""

SERVER: Final = (sys.executable, "-m", "shardwright_writer.server")

logger = logging.getLogger(__name__)


class Supervisor:
    """One writer's supervisor. `run` returns the exit status."""

    def __init__(self, config: Config, lock_fd: int, server_command: Sequence[str]) -> None:
        self._config = config
        self._lock_fd = lock_fd
        self._server_command = tuple(server_command)
        self._signals = _watch_signals()  # before there is a socket that a signal would leave
        self._listener = open_listener(config)
        self._waiting = WaitingRoom(config)
        self._selector = selectors.DefaultSelector()
        self._stored: dict[str, int] = {}
        self._server: ServerProcess | None = None
        self._generation = 0
        self._crashes = 0
        self._crashes_in_row = 0
        self._ever_ready = False
        self._start_at_s: float | None = time.monotonic()
        self._drain_until_s: float | None = None
        self._kill_until_s: float | None = None
        self._exit_status: int | None = None

    def run(self) -> int:
        """Serve until a signal ends it. The signals are this process's while it runs."""
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._signals[0], selectors.EVENT_READ, self._take_signals)
        logger.info("listening at %s", self._config.socket)
        try:
            while self._exit_status is None:
                timeout_s = self._tick()
                self._pump()
                for key, _ in self._selector.select(timeout_s):
                    handler: Callable[[], None] = key.data
                    handler()
        finally:
            self._close()
        return self._exit_status

    def _accept(self) -> None:
        self._waiting.accept(self._listener)

    # --- time ---------------------------------------------------------------------------------

    def _tick(self) -> float | None:
        """Do what is due, and return the seconds until something else is."""
        now_s = time.monotonic()
        if self._start_at_s is not None and now_s >= self._start_at_s:
            self._start_server()
        if self._drain_until_s is not None and now_s >= self._drain_until_s:
            self._drain_until_s = None
            self._kill(f"not drained within {self._config.drain_timeout_s:g} s")
        if self._kill_until_s is not None and now_s >= self._kill_until_s:
            logger.error("the killed server does not end (it sits in the kernel): leaving it")
            self._exit_status = 1
        if self._exit_status is not None:
            return 0.0
        deadlines = [self._start_at_s, self._drain_until_s, self._kill_until_s]
        due_s = min((deadline for deadline in deadlines if deadline is not None), default=None)
        return None if due_s is None else max(0.0, due_s - now_s)

    # --- the server ---------------------------------------------------------------------------

    def _start_server(self) -> None:
        self._start_at_s = None
        self._generation += 1
        try:
            server = spawn_server(
                self._server_command,
                Start(self._generation, self._crashes),
                config=self._config,
                lock_fd=self._lock_fd,
                stored=self._stored,
            )
        except OSError as error:
            what = f"server {self._generation} cannot be started ({error})"
            self._plan_restart(what, lived_s=0.0, was_ready=False)
            return
        self._server = server
        self._selector.register(server.sock, selectors.EVENT_READ, self._read_server)
        name_holders(self._lock_fd, server.pid)
        logger.info(
            "started server %d (pid %d), %d descriptors to restore",
            *(server.generation, server.pid, len(self._stored)),
        )

    def _pump(self) -> None:
        """Send what the server has room for; watch for room only while something waits."""
        server = self._server
        if server is None or server.broken:
            return
        sent = server.send_outgoing()
        if sent and server.ready and not server.stopping:
            sent = self._waiting.forward(server.sock)
        events = selectors.EVENT_READ if sent else selectors.EVENT_READ | selectors.EVENT_WRITE
        if self._selector.get_key(server.sock).events != events:
            self._selector.modify(server.sock, events, self._read_server)

    def _read_server(self) -> None:
        """Take everything the server has sent: also what it sent just before it died."""
        server = self._server
        while server is not None and not server.broken:
            try:
                received = receive_message(server.sock)
            except BlockingIOError:
                return
            except ControlProtocolError as error:
                self._kill_broken(f"broke its protocol: {error}")
                return
            except ConnectionResetError:
                received = None
            if received is None:
                server.broken = True
                self._selector.unregister(server.sock)
            else:
                self._obey(server, *received)

    def _obey(self, server: ServerProcess, message: Message, fds: list[int]) -> None:
        match message, fds:
            case {"cmd": "store", "key": str(key)}, [fd] if len(self._stored) < STORED_MAX:
                self._drop(key)
                self._stored[key] = fd
            case {"cmd": "drop", "key": str(key)}, []:
                self._drop(key)
            case {"cmd": "ready"}, []:
                server.ready = self._ever_ready = True
                logger.info(
                    "server %d ready after %.2f s, %d clients waited",
                    *(server.generation, time.monotonic() - server.started_s, len(self._waiting)),
                )
                if self._drain_until_s is not None:
                    server.signal(signal.SIGTERM)  # earlier it had no handler for it
            case {"cmd": "stopping"}, []:
                server.stopping = True
            case _:
                for fd in fds:
                    os.close(fd)
                self._kill_broken(f"sent {message.get('cmd')!r} with {len(fds)} descriptors")

    def _drop(self, key: str) -> None:
        fd = self._stored.pop(key, None)
        if fd is not None:
            os.close(fd)

    def _kill_broken(self, why: str) -> None:
        assert self._server is not None
        logger.error("server %d %s: killing it", self._server.generation, why)
        if not self._server.broken:
            self._server.broken = True
            self._selector.unregister(self._server.sock)
        self._server.signal(signal.SIGKILL)

    # --- signals and ends ---------------------------------------------------------------------

    def _take_signals(self) -> None:
        for number in self._signals[0].recv(4096):
            if number == signal.SIGCHLD:
                self._reap()
            elif number in {signal.SIGTERM, signal.SIGINT}:
                self._stop(signal.Signals(number))

    def _stop(self, number: signal.Signals) -> None:
        if self._kill_until_s is not None:
            return
        if self._drain_until_s is not None:
            if number == signal.SIGINT:
                self._kill("interrupted a second time")
            return
        logger.info("%s: draining for up to %g s", number.name, self._config.drain_timeout_s)
        self._drain_until_s = time.monotonic() + self._config.drain_timeout_s
        if self._server is not None and self._server.ready:
            self._server.signal(signal.SIGTERM)
        elif self._server is None and not self._stored:
            self._exit_status = 0  # between two servers, with nothing left of any save

    def _kill(self, why: str) -> None:
        self._start_at_s = None
        if self._server is None:
            logger.error("%s: ending with no server up", why)
            self._exit_status = 1
            return
        logger.error("%s: killing server %d", why, self._server.generation)
        self._kill_until_s = time.monotonic() + KILL_TIMEOUT_S
        self._server.signal(signal.SIGKILL)

    def _reap(self) -> None:
        """Reap every child: as a container's first process we inherit orphans, too."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if self._server is not None and pid == self._server.pid:
                    self._server_ended(self._server, os.waitstatus_to_exitcode(status))

    def _server_ended(self, server: ServerProcess, code: int) -> None:
        server.reaped = True
        self._read_server()  # what it stored just before its end counts
        if not server.broken:
            self._selector.unregister(server.sock)
        server.close()
        self._server = None
        name_holders(self._lock_fd, None)
        lived_s = time.monotonic() - server.started_s
        end = f"status {code}" if code >= 0 else signal.Signals(-code).name
        what = (
            f"server {server.generation} (pid {server.pid}) ended with {end} after {lived_s:.1f} s"
        )
        if self._kill_until_s is not None:
            logger.error("%s", what)
            self._exit_status = 1
        elif self._drain_until_s is not None and code == 0:
            logger.info("%s: drained", what)
            self._exit_status = 0
        elif self._drain_until_s is not None and server.stopping and code > 0:
            logger.error("%s: it gave up draining", what)
            self._exit_status = 1
        else:
            self._plan_restart(what, lived_s=lived_s, was_ready=server.ready)

    def _plan_restart(self, what: str, *, lived_s: float, was_ready: bool) -> None:
        """Start the next one soon. While draining too: journaled saves can still be finished."""
        self._crashes += 1
        self._crashes_in_row = 1 if lived_s >= HEALTHY_AFTER_S else self._crashes_in_row + 1
        if self._drain_until_s is not None and not self._stored:
            logger.error("%s while draining, with nothing to finish", what)
            self._exit_status = 1
        elif not self._ever_ready and self._crashes >= START_ATTEMPTS_MAX:
            logger.error("%s, and none was ever ready: giving up", what)
            self._exit_status = 1
        else:
            delay_s = BACKOFF_S[min(self._crashes_in_row, len(BACKOFF_S)) - 1]
            if was_ready:
                delay_s = min(delay_s, READY_BACKOFF_S_MAX)
            self._start_at_s = time.monotonic() + delay_s
            logger.error("%s: starting the next in %.1f s", what, delay_s)

    def _close(self) -> None:
        signal.set_wakeup_fd(-1)
        self._waiting.close()
        for key in list(self._stored):
            self._drop(key)
        self._selector.close()
        close_listener(self._config, self._listener, keep_lock=self._server is not None)
        for sock in self._signals:
            sock.close()


def run_supervisor(config: Config, server_command: Sequence[str] = SERVER) -> int:
    """Own config.socket and keep a server behind it until a signal comes; return the exit status.

    0: drained. 1: killed, gave up, or never had the socket. Main thread only.
    """
    configure_logging(config.log_format, "supervisor")
    _raise_descriptor_limit()
    try:
        lock_fd = take_lock(config)
        try:
            name_holders(lock_fd, None)
            return Supervisor(config, lock_fd, server_command).run()
        finally:
            os.close(lock_fd)
    except ListenerError as error:
        logger.error("%s", error)  # noqa: TRY400 - the message says it all
        return 1


def _raise_descriptor_limit() -> None:
    """Every arena, journal, folder and waiting client is one; the server inherits the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * STORED_MAX if hard == resource.RLIM_INFINITY else min(hard, 2 * STORED_MAX)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _watch_signals() -> tuple[socket.socket, socket.socket]:
    """Turn signals into bytes: (the end to read, the end that the interpreter writes)."""
    read, write = socket.socketpair()
    read.setblocking(False)
    write.setblocking(False)
    signal.set_wakeup_fd(write.fileno(), warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, lambda _number, _frame: None)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    return read, write


def main() -> int:
    """Run as `python -m shardwright_writer.supervisor CONFIG_JSON`."""
    return run_supervisor(Config.from_json(sys.argv[1]))


if __name__ == "__main__":
    sys.exit(main())
