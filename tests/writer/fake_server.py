"""A test double of the server: obeys its clients, so that a test can make it do and die anything.

    fake_server.py BEHAVIOUR --control-fd N --lock-fd N --config JSON

BEHAVIOUR: "normal"; "stubborn" (neither SIGTERM nor its
supervisor's end ends it); "broken" (exits with 3 at once);
"gives-up" (says that it drains, and exits with 4);
"gate:FIFO" (generations after the first are ready only once somebody opened FIFO for writing);
"rude" (sends nonsense to the supervisor in its first generation).
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import sys
from typing import Any

from shardwright_proto.control import receive_message, send_message
from shardwright_writer.fdstore import (
    Client,
    FdStore,
    Restored,
    Start,
    SupervisorGone,
    read_server_arguments,
)


class FakeServer:
    def __init__(self, behaviour: str, arguments: list[str]) -> None:
        self.behaviour = behaviour
        inheritance = read_server_arguments(arguments)
        self.control = socket.socket(fileno=inheritance.control_fd)
        self.supervisor = FdStore(self.control)
        self.facts: dict[str, Any] = {"pid": os.getpid(), "socket": inheritance.config.socket}
        self.kept: dict[str, int] = {}
        self.selector = selectors.DefaultSelector()
        self.signals, self.wakeup = socket.socketpair()
        self.wakeup.setblocking(False)

    def run(self) -> None:
        self.selector.register(self.supervisor, selectors.EVENT_READ, None)
        self.selector.register(self.signals, selectors.EVENT_READ, "signals")
        while True:
            for key, _ in self.selector.select():
                if key.data is None:
                    self.take_events()
                elif key.data == "signals":
                    self.on_sigterm()
                else:
                    self.serve_client(*key.data)

    def take_events(self) -> None:
        for event in self.supervisor.receive():
            match event:
                case Restored(key, fd):
                    self.kept[key] = fd
                case Start(generation, crashes):
                    self.start(generation, crashes)
                case Client(fd, uid, gid, pid):
                    who = {"uid": uid, "gid": gid, "pid": pid}
                    connection = socket.socket(fileno=fd)
                    self.selector.register(connection, selectors.EVENT_READ, (connection, who))
                case SupervisorGone() if self.behaviour == "stubborn":
                    self.selector.unregister(self.supervisor)
                case SupervisorGone():
                    sys.exit(9)

    def start(self, generation: int, crashes: int) -> None:
        self.facts |= {"generation": generation, "crashes": crashes, "restored": list(self.kept)}
        if self.behaviour == "rude" and generation == 1:
            self.control.send(b"nonsense")
        if self.behaviour.startswith("gate:") and generation > 1:
            with open(self.behaviour.removeprefix("gate:")):
                pass
        signal.set_wakeup_fd(self.wakeup.fileno())
        signal.signal(signal.SIGTERM, lambda *_: None)
        self.supervisor.ready()

    def on_sigterm(self) -> None:
        self.signals.recv(100)
        if self.behaviour != "stubborn":
            self.supervisor.stopping()
            sys.exit(4 if self.behaviour == "gives-up" else 0)

    def serve_client(self, connection: socket.socket, who: dict[str, int]) -> None:
        received = receive_message(connection)
        if received is None:
            self.selector.unregister(connection)
            connection.close()
            return
        message, fds = received
        answer: dict[str, Any] = {"seq": message["seq"], **self.facts, "client": who}
        match message:
            case {"op": "store", "keys": keys}:
                for key, fd in zip(keys, fds, strict=True):
                    self.kept[key] = fd
                    self.supervisor.store(key, fd)
            case {"op": "drop", "key": key}:
                os.close(self.kept.pop(key))
                self.supervisor.drop(key)
            case {"op": "read", "key": key}:
                answer["text"] = os.pread(self.kept[key], 100, 0).decode()
            case {"op": "store_and_die", "key": key}:
                self.supervisor.store(key, fds[0])
                os.kill(os.getpid(), signal.SIGKILL)
            case {"op": "pause"}:
                os.kill(os.getpid(), signal.SIGSTOP)
        send_message(connection, answer)


if __name__ == "__main__":
    if sys.argv[1] == "broken":
        sys.exit(3)
    FakeServer(sys.argv[1], sys.argv[2:]).run()
