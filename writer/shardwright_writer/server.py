"""The server process: event loop, pools, gRPC; started by the supervisor, replaced when it dies.

startup (take back what an earlier server left) -> serve -> drain. Dies with the supervisor.
Imports no torch, unpickles nothing, and does no data work on the event loop.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import logging
import os
import secrets
import signal
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import grpc

from shardwright_proto import limits
from shardwright_writer import fdstore
from shardwright_writer.arena import ArenaBudget
from shardwright_writer.clients import Clients
from shardwright_writer.handshake import Handshake
from shardwright_writer.logs import configure_logging
from shardwright_writer.recovery import recover
from shardwright_writer.refusal import Reason, Refusal
from shardwright_writer.saves import Pools, Saves
from shardwright_writer.service import WriterService
from shardwright_writer.status import render_json

if TYPE_CHECKING:
    from shardwright_writer.config import Config

_log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_WATCH_PERIOD_S = 1.0
_RESERVE_BYTES_MIN, _RESERVE_BYTES_MAX = 16 << 20, 64 << 20


def main(arguments: list[str]) -> int:
    """Run the server until drained; return its exit status."""
    faulthandler.enable()
    inheritance = fdstore.read_server_arguments(arguments)
    _die_with_supervisor(inheritance.supervisor_pid)
    configure_logging(inheritance.config.log_format, "server")
    os.umask(0o077)
    return asyncio.run(Server(inheritance).run())


class Server:
    """Owns everything; lives as long as the process."""

    def __init__(self, inheritance: fdstore.Inheritance) -> None:
        self._config: Config = inheritance.config
        self._fds = fdstore.FdStore(socket.socket(fileno=inheritance.control_fd))
        self._pools = Pools(
            io=ThreadPoolExecutor(self._config.io_threads, "io"),
            admin=ThreadPoolExecutor(4, "admin"),
            inline=ThreadPoolExecutor(2, "inline"),
        )
        self._restored: dict[str, int] = {}
        self._started = asyncio.Event()
        self._stop = asyncio.Event()
        self._status_token = secrets.token_hex(16)
        self._generation = 0
        self._crashes = 0

    async def run(self) -> int:
        """Startup -> serve -> drain."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        self._clients = Clients(
            ArenaBudget(arena_bytes(self._config.memory_budget)),
            self._fds,
            self._pools.admin,
            self._config.roots,
            self._config.reattach_timeout_s,
        )
        self._saves = Saves(self._config, self._clients, self._fds, self._pools)
        loop.add_reader(self._fds.fileno(), self._supervisor_spoke)
        await self._started.wait()
        recover(self._restored, self._clients, self._saves, self._fds)
        server = await self._serve_grpc()
        self._fds.ready()
        watch = loop.create_task(self._watch())
        await self._stop.wait()
        self._fds.stopping()
        drained = await self._saves.drain(self._config.drain_timeout_s)
        watch.cancel()
        await server.stop(grace=1.0)
        _log.info("stopped, %s", "drained" if drained else "saves still under way")
        return 0 if drained else 1

    async def _serve_grpc(self) -> grpc.aio.Server:
        options = [
            ("grpc.max_receive_message_length", limits.MESSAGE_BYTES_MAX),
            ("grpc.max_send_message_length", limits.MESSAGE_BYTES_MAX),
            ("grpc.so_reuseport", 0),
        ]
        server = grpc.aio.server(options=options)
        service = WriterService(self._clients, self._saves, self._status)
        server.add_generic_rpc_handlers((service.handler(),))
        path = self._grpc_path()
        server.add_insecure_port(f"unix:{path}")
        await server.start()
        os.chmod(path, 0o666 if self._config.open_to_others else 0o600)
        return server

    def _grpc_path(self) -> str:
        return f"{self._config.runtime_folder}/grpc.{self._generation}.sock"

    async def _watch(self) -> None:
        """The clock: starved clients, silent storage, what the supervisor has no room for yet."""
        while True:
            await asyncio.sleep(_WATCH_PERIOD_S)
            self._saves.watch()
            if self._fds.wants_write:
                self._fds.flush(0)

    def _supervisor_spoke(self) -> None:
        for event in self._fds.receive():
            match event:
                case fdstore.Restored(key, fd):
                    self._restored[key] = fd
                case fdstore.Start(generation, crashes):
                    self._generation, self._crashes = generation, crashes
                    self._started.set()
                case fdstore.Client(fd, uid, gid, pid):
                    self._accept(fd, uid, gid, pid)
                case fdstore.SupervisorGone():
                    _log.error("the supervisor is gone: exiting, clients will re-attach")
                    os._exit(1)

    def _accept(self, fd: int, uid: int, gid: int, pid: int) -> None:
        facts = {
            "grpc": f"unix:{self._grpc_path()}",
            "generation": self._generation,
            "writer_id": f"{os.getpid()}-{self._generation}",
        }
        sock = socket.socket(fileno=fd)
        Handshake(sock, (uid, gid, pid), self._clients, facts, lambda: self._status_token)

    def _status(self, token: str) -> str:
        if token != self._status_token:
            self._clients.by_token(token)
        return render_json(
            self._config, self._clients, self._saves, self._generation, self._crashes
        )


def arena_bytes(memory_budget: int) -> int:
    """What of the budget may be arena: the rest is for journals, side buffers and plans."""
    reserve = min(max(memory_budget // 8, _RESERVE_BYTES_MIN), _RESERVE_BYTES_MAX)
    if memory_budget <= reserve:
        raise Refusal(Reason.BAD_REQUEST, f"memory budget {memory_budget} is too small")
    return memory_budget - reserve


def _die_with_supervisor(supervisor_pid: int) -> None:
    """Ask the kernel to kill us with it: two writers must never work on one save."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor_pid:  # it died before we asked
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
