"""The conductor's handles on its child processes: trainers and writer daemons.

Starts them with this tree's sources, waits for them with deadlines, and ends them by pid. What
they print goes to log files whose last lines are quoted when something fails.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.state import StateSpec

BENCHMARKS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
REPOSITORY = os.path.dirname(BENCHMARKS)
SOURCES = [BENCHMARKS, *(os.path.join(REPOSITORY, part) for part in ("client", "writer", "proto"))]
LOG_LINES_QUOTED = 6
STOP_S_MAX = 60.0
START_S_MAX = 30.0
POLL_S = 0.02


class ChildError(Exception):
    """A child process failed, ended or went silent; the message quotes its log."""


def environment(**extra: str) -> dict[str, str]:
    """Make the environment of a child: this tree's sources come first."""
    path = os.pathsep.join([*SOURCES, *filter(None, [os.environ.get("PYTHONPATH")])])
    kept = {name: value for name, value in os.environ.items() if name != "SHARDWRIGHT_ENDPOINT"}
    return {**kept, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore", **extra}


def log_tail(path: str) -> str:
    """Read the last lines of a log."""
    try:
        with open(path, errors="replace") as file:
            return " | ".join(file.read().splitlines()[-LOG_LINES_QUOTED:])
    except OSError:
        return ""


def stop(process: subprocess.Popen[bytes], first: signal.Signals) -> None:
    """Ask a process to end; kill it when it does not."""
    if process.poll() is None:
        process.send_signal(first)
    try:
        process.wait(STOP_S_MAX)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class TrainerProcess:
    """A trainer: one process with the state, answering one command at a time."""

    def __init__(self, name: str, spec: StateSpec, logs: str, endpoint: str, inline: bool) -> None:
        self.name = name
        self.log = os.path.join(logs, f"trainer-{name}.log")
        their_commands, self._commands = os.pipe()
        self._replies, their_replies = os.pipe()
        arguments = {
            "state": asdict(spec), "commands": their_commands, "replies": their_replies
        }  # fmt: skip
        inherited = [their_commands, their_replies, *([spec.fd] if spec.fd >= 0 else [])]
        extra = {"SHARDWRIGHT_ENDPOINT": endpoint} if endpoint else {}
        if inline:
            extra["SHARDWRIGHT_TRANSPORT"] = "inline"
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "harness.trainer", json.dumps(arguments)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=inherited,
                env=environment(**extra),
            )  # fmt: skip
        os.close(their_commands)
        os.close(their_replies)

    def ask(self, op: str, timeout_s: float, **arguments: object) -> dict[str, Any]:
        """Have one command done. Raises ChildError, with the process killed if it went silent."""
        try:
            os.write(self._commands, json.dumps({"op": op, **arguments}).encode() + b"\n")
        except BrokenPipeError:
            status = self.process.wait(STOP_S_MAX)
            raise ChildError(f"trainer {self.name} has ended with status {status}") from None
        deadline_s = time.monotonic() + timeout_s
        line = b""
        while not line.endswith(b"\n"):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not select.select([self._replies], [], [], left_s)[0]:
                self.process.kill()
                raise ChildError(f"trainer {self.name}: no answer to {op} in {timeout_s:g} s")
            piece = os.read(self._replies, 1 << 16)
            if not piece:
                status = self.process.wait()
                raise ChildError(
                    f"trainer {self.name} ended with status {status}; {log_tail(self.log)}"
                )
            line += piece
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise ChildError(reply["error"])
        return reply

    def close(self) -> None:
        """Let it close its systems, then end it."""
        try:
            if self.process.poll() is None:
                self.ask("close", STOP_S_MAX)
        except ChildError:
            pass  # its systems are abandoned: the process ends now
        finally:
            os.close(self._commands)
            os.close(self._replies)
            try:
                self.process.wait(STOP_S_MAX)
            except subprocess.TimeoutExpired:
                stop(self.process, signal.SIGTERM)


class WriterProcess:
    """A writer daemon with a budget, listening on a socket of its own."""

    def __init__(self, name: str, budget_bytes: int, root: str, logs: str, run: str) -> None:
        self.name = name
        self.budget_bytes = budget_bytes
        self.log = os.path.join(logs, f"writer-{name}.log")
        self.socket_path = os.path.join(run, f"{name}.sock")
        command = [
            sys.executable, "-m", "shardwright_writer.cli", "serve", "--node-local",
            "--socket", self.socket_path, "--memory-budget", str(budget_bytes), "--root", root,
        ]  # fmt: skip
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment()
            )
        self._wait_until_it_serves()

    @property
    def endpoint(self) -> str:
        """What SHARDWRIGHT_ENDPOINT is set to."""
        return f"unix://{self.socket_path}"

    def _wait_until_it_serves(self) -> None:
        deadline_s = time.monotonic() + START_S_MAX
        while time.monotonic() < deadline_s:
            if self.process.poll() is not None:
                raise ChildError(
                    f"writer {self.name} ended with status {self.process.returncode}: "
                    + log_tail(self.log)
                )
            if self._answers():
                return
            select.select([], [], [], POLL_S)
        stop(self.process, signal.SIGTERM)
        raise ChildError(f"writer {self.name} does not answer after {START_S_MAX:g} s")

    def _answers(self) -> bool:
        """Ask for its status: the socket is there before the server behind it is."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            probe.settimeout(START_S_MAX)
            try:
                probe.connect(self.socket_path)
                probe.send(b'{"op":"status","seq":1}')
                reply = probe.recv(1 << 16)
            except OSError:
                return False
        return bool(reply) and json.loads(reply).get("ok") is True

    def close(self) -> None:
        """Drain and end it."""
        stop(self.process, signal.SIGTERM)
