"""Fixtures for every test: short folders for sockets, markers, and the real daemon."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from shardwright_proto.control import ask

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

READY_TIMEOUT_S = 60.0
END_TIMEOUT_S = 60.0


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("root") and os.geteuid() != 0:
        pytest.skip("needs to be root: it acts as several users")


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder whose path leaves room for a unix socket's name within its 107 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="sw-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


@dataclass
class WriterProcess:
    """`writer serve --node-local` as a user starts it."""

    process: subprocess.Popen[bytes]
    socket: str
    root: Path
    log_path: Path
    expected_exit_status: int = 0
    may_leave: set[str] = field(default_factory=set)

    @property
    def endpoint(self) -> str:
        return f"unix://{self.socket}"

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def server_pid(self) -> int:
        """Return the pid of the server process, which is the supervisor's only child."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        (pid,) = children.split()
        return int(pid)

    def kill_server(self, number: signal.Signals = signal.SIGKILL) -> int:
        pid = self.server_pid()
        os.kill(pid, number)
        return pid

    def is_ready(self) -> bool:
        """Whether a server answers: clients that come earlier are held, so this may wait."""
        try:
            answer = ask(self.socket, "status", READY_TIMEOUT_S)
        except OSError:
            return False
        return answer is not None and answer.get("ok") is True

    def wait_ready(self) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not self.is_ready():
            if self.process.poll() is not None:
                pytest.fail(f"the writer ended with status {self.process.returncode}:\n{self.log}")
            if time.monotonic() > deadline:
                pytest.fail(f"the writer was not ready within {READY_TIMEOUT_S} s:\n{self.log}")
            time.sleep(0.01)

    def status(self) -> dict[str, Any]:
        """Return what `writer status --json` prints."""
        result = subprocess.run(
            [*WRITER, "status", "--socket", self.socket, "--json"],
            capture_output=True,
            text=True,
            check=True,
        )
        status: dict[str, Any] = json.loads(result.stdout)
        return status

    def terminate(self) -> int:
        """Drain and return the exit status."""
        self.process.terminate()
        return self.process.wait(END_TIMEOUT_S)


WRITER = (sys.executable, "-m", "shardwright_writer.cli")


@pytest.fixture
def writer_factory(short_path: Path, tmp_path: Path) -> Iterator[Callable[..., WriterProcess]]:
    """Start writers: `writer_factory(memory_budget="256MiB", arguments=[...], name="w")`.

    At the end each is drained; it must exit with 0 (or its expected_exit_status) and leave no
    process, socket or temporary file.
    """
    with writers_in(short_path, tmp_path) as start:
        yield start


@pytest.fixture(scope="session")
def session_writer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WriterProcess]:
    """One writer for many tests, with every test's tmp_path below its root."""
    folder = Path(tempfile.mkdtemp(prefix="sw-", dir="/tmp"))
    with writers_in(folder, tmp_path_factory.getbasetemp()) as start:
        writer = start(name="session")
        writer.root = folder  # other tests make temporary files below the base on purpose
        yield writer
    shutil.rmtree(folder)


@contextlib.contextmanager
def writers_in(folder: Path, default_root: Path) -> Iterator[Callable[..., WriterProcess]]:
    """Yield what starts writers whose sockets and logs are in folder; end them all afterwards."""
    writers: list[WriterProcess] = []

    def start(
        *,
        name: str = "w",
        root: Path | None = None,
        memory_budget: str = "256MiB",
        arguments: tuple[str, ...] | list[str] = (),
        wait: bool = True,
    ) -> WriterProcess:
        root = root or default_root
        socket_path = str(folder / f"{name}.sock")
        log_path = folder / f"{name}.{len(writers)}.log"
        command = [
            *(*WRITER, "serve", "--node-local", "--socket", socket_path),
            *("--memory-budget", memory_budget, "--root", str(root), *arguments),
        ]
        with log_path.open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        writers.append(WriterProcess(process, socket_path, root, log_path))
        if wait:
            writers[-1].wait_ready()
        return writers[-1]

    yield start
    try:
        for writer in writers:
            _end(writer)
        for writer in writers:
            _check_nothing_is_left(writer)
    finally:
        for writer in writers:
            if writer.process.poll() is None:
                writer.process.kill()
                writer.process.wait()
            print(f"--- log of the writer at {writer.socket}\n{writer.log}")


@pytest.fixture
def writer(writer_factory: Callable[..., WriterProcess]) -> WriterProcess:
    """One ready writer with tmp_path as its root."""
    return writer_factory()


def _end(writer: WriterProcess) -> None:
    if writer.process.poll() is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            writer.terminate()
    assert writer.process.returncode == writer.expected_exit_status, "the writer's exit status"


def _check_nothing_is_left(writer: WriterProcess) -> None:
    deadline = time.monotonic() + 5
    while _processes_with(writer.socket):  # a killed supervisor's server is just being killed
        assert time.monotonic() < deadline, "processes of the writer are left"
        time.sleep(0.01)
    if writer.expected_exit_status == 0:
        for suffix in ("", ".d", ".lock"):
            assert not os.path.lexists(writer.socket + suffix), f"{writer.socket}{suffix} is left"
    left = {path.name for path in writer.root.rglob(".*.swtmp")} - writer.may_leave
    assert not left, f"temporary files are left: {left}"


def _processes_with(text: str) -> list[int]:
    """Return the processes that name text on their command line, ourselves left out."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            with contextlib.suppress(OSError):
                if text.encode() in (folder / "cmdline").read_bytes():
                    found.append(int(folder.name))
    return found
