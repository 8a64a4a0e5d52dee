from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from shardwright_proto.control import receive_message, send_message
from shardwright_writer.config import Config

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FAKE_SERVER = str(Path(__file__).with_name("fake_server.py"))
RUN = (
    "import sys; from shardwright_writer.config import Config;"
    "from shardwright_writer.supervisor import run_supervisor;"
    "sys.exit(run_supervisor(Config.from_json(sys.argv[1]), sys.argv[2:]))"
)
PATIENCE_S = 20.0


class FakeClient:
    """A connection to the handshake socket that asks the fake server for things."""

    def __init__(self, path: str) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(PATIENCE_S)
        self.sock.connect(path)

    def send(self, op: str, *fds: int, **fields: Any) -> None:
        send_message(self.sock, {"op": op, "seq": 1, **fields}, fds)

    def receive(self) -> dict[str, Any] | None:
        received = receive_message(self.sock)
        return None if received is None else received[0]

    def ask(self, op: str, *fds: int, **fields: Any) -> dict[str, Any]:
        self.send(op, *fds, **fields)
        answer = self.receive()
        assert answer is not None, "the connection was closed"
        return answer


class Supervised:
    """A supervisor process in front of fake servers, and its log."""

    def __init__(self, config: Config, behaviour: str, log: Path) -> None:
        self.config = config
        self.log = log
        self.clients: list[FakeClient] = []
        arguments = [config.to_json(), sys.executable, FAKE_SERVER, behaviour]
        with log.open("ab") as stderr:
            self.process = subprocess.Popen([sys.executable, "-c", RUN, *arguments], stderr=stderr)

    def wait_for_log(self, pattern: str, count: int = 1) -> None:
        wait_until(lambda: len(re.findall(pattern, self.log.read_text())) >= count, pattern)

    def connect(self) -> FakeClient:
        self.wait_for_log("listening at")
        self.clients.append(FakeClient(self.config.socket))
        return self.clients[-1]

    def server(self) -> dict[str, Any]:
        return self.connect().ask("facts")

    def kill_server(self, number: signal.Signals = signal.SIGKILL) -> int:
        pid: int = self.server()["pid"]
        os.kill(pid, number)
        # Until it is reaped, a connection may still be passed to the dead one and end with it.
        self.wait_for_log(rf"\(pid {pid}\) ended with {number.name}")
        return pid

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {PATIENCE_S} s for {what}"
        time.sleep(0.005)


def is_running(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.fixture
def make_config(short_path: Path) -> Callable[..., Config]:
    def make(**changes: Any) -> Config:
        values: dict[str, Any] = {
            "socket": str(short_path / "w.sock"),
            "memory_budget": 64 << 20,
            "node_local": True,
            "roots": (str(short_path),),
            "drain_timeout_s": PATIENCE_S,
        }
        return Config(**values | changes)

    return make


@pytest.fixture
def supervise(
    make_config: Callable[..., Config], short_path: Path
) -> Iterator[Callable[..., Supervised]]:
    started: list[Supervised] = []

    def start(behaviour: str = "normal", **changes: Any) -> Supervised:
        log = short_path / f"{len(started)}.log"
        started.append(Supervised(make_config(**changes), behaviour, log))
        return started[-1]

    yield start
    for supervised in started:
        for client in supervised.clients:
            client.sock.close()
        if supervised.process.poll() is None:
            supervised.process.send_signal(signal.SIGINT)
            supervised.process.send_signal(signal.SIGCONT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                supervised.process.wait(2)
            supervised.process.kill()
            supervised.process.wait()
        print(supervised.log.read_text())


def memory_file(text: str) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC)
    os.write(fd, text.encode())
    return fd


def test_a_connection_reaches_the_server_with_who_made_it(
    supervise: Callable[..., Supervised],
) -> None:
    facts = supervise().server()
    assert facts["client"] == {"uid": os.getuid(), "gid": os.getgid(), "pid": os.getpid()}
    assert (facts["generation"], facts["crashes"], facts["restored"]) == (1, 0, [])


@pytest.mark.faults
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
def test_a_dead_server_is_replaced_at_once_and_its_end_is_named(
    supervise: Callable[..., Supervised], number: signal.Signals
) -> None:
    supervised = supervise()
    dead = supervised.kill_server(number)
    supervised.wait_for_log(rf"server 1 \(pid {dead}\) ended with {number.name}")
    started_s = time.monotonic()
    facts = supervised.server()
    assert time.monotonic() - started_s < 2
    assert (facts["generation"], facts["crashes"]) == (2, 1)
    assert not is_running(dead)


@pytest.mark.faults
def test_repeated_crashes_are_answered_with_growing_patience(
    supervise: Callable[..., Supervised],
) -> None:
    supervised = supervise()
    for _ in range(4):
        supervised.kill_server()
    supervised.wait_for_log("starting the next in", count=4)
    delays = re.findall(r"starting the next in ([0-9.]+) s", supervised.log.read_text())
    assert delays == ["0.0", "0.1", "0.2", "0.4"]
    assert supervised.server()["crashes"] == 4


@pytest.mark.faults
def test_clients_that_come_while_no_server_is_up_are_served_by_the_next(
    supervise: Callable[..., Supervised], short_path: Path
) -> None:
    gate = short_path / "gate"
    os.mkfifo(gate)
    supervised = supervise(f"gate:{gate}")
    supervised.kill_server()
    supervised.wait_for_log("started server 2")
    clients = [supervised.connect() for _ in range(20)]
    for client in clients:
        client.send("facts")
    poll = select.poll()
    for client in clients:
        poll.register(client.sock, select.POLLIN)
    assert not poll.poll(300)
    with gate.open("w"):
        pass
    answers = [client.receive() for client in clients]
    assert [answer and answer["generation"] for answer in answers] == [2] * 20
    supervised.wait_for_log("20 clients waited")


@pytest.mark.faults
def test_more_waiting_clients_than_the_bound_are_refused_and_gone_ones_make_room(
    supervise: Callable[..., Supervised], short_path: Path
) -> None:
    gate = short_path / "gate"
    os.mkfifo(gate)
    supervised = supervise(f"gate:{gate}")
    supervised.kill_server()
    supervised.wait_for_log("started server 2")
    clients = [supervised.connect() for _ in range(1024)]
    refused = supervised.connect().receive()
    assert refused is not None and (refused["push"], refused["reason"]) == ("refused", "BUSY")
    for client in clients[:10]:
        client.sock.close()
    late = supervised.connect()
    late.send("facts")
    with gate.open("w"):
        pass
    answer = late.receive()
    assert answer is not None and answer["generation"] == 2
    assert clients[-1].ask("facts")["generation"] == 2


@pytest.mark.faults
def test_stored_descriptors_come_back_in_order_with_their_content(
    supervise: Callable[..., Supervised],
) -> None:
    supervised = supervise()
    client = supervised.connect()
    keys = [f"arena/{index}" for index in range(20)]
    fds = [memory_file(key) for key in keys]
    client.ask("store", *fds, keys=keys)
    client.ask("drop", key=keys[3])
    client.ask("store", fds[0], keys=[keys[7]])  # replaces, and goes to the end
    for fd in fds:
        os.close(fd)
    supervised.kill_server()
    again = supervised.connect()
    kept = [key for key in keys if key not in {keys[3], keys[7]}] + [keys[7]]
    assert again.ask("facts")["restored"] == kept
    assert again.ask("read", key=keys[5])["text"] == "arena/5"
    assert again.ask("read", key=keys[7])["text"] == "arena/0"


@pytest.mark.faults
def test_what_a_server_stored_in_its_last_instruction_is_kept(
    supervise: Callable[..., Supervised],
) -> None:
    supervised = supervise()
    for round_number in range(5):
        fd = memory_file(f"save {round_number}")
        supervised.connect().send("store_and_die", fd, key=f"journal/{round_number}")
        os.close(fd)
        supervised.wait_for_log("ended with SIGKILL", count=round_number + 1)
    client = supervised.connect()
    assert client.ask("facts")["restored"] == [f"journal/{number}" for number in range(5)]
    assert client.ask("read", key="journal/4")["text"] == "save 4"


@pytest.mark.faults
def test_more_descriptors_than_fit_the_socket_are_restored(
    supervise: Callable[..., Supervised],
) -> None:
    supervised = supervise()
    client = supervised.connect()
    fd = memory_file("x")
    for first in range(0, 1200, 60):
        keys = [str(number) for number in range(first, first + 60)]
        client.ask("store", *[fd] * 60, keys=keys)
    os.close(fd)
    supervised.kill_server()
    assert supervised.server()["restored"] == [str(number) for number in range(1200)]


@pytest.mark.faults
def test_a_server_that_does_not_read_never_stops_the_supervisor(
    supervise: Callable[..., Supervised],
) -> None:
    supervised = supervise()
    pid = supervised.server()["pid"]
    supervised.connect().send("pause")
    wait_until(lambda: _state(pid) == "T", "the server to stop")
    clients = [supervised.connect() for _ in range(600)]
    for client in clients:
        client.send("facts")
    os.kill(pid, signal.SIGCONT)
    assert all(client.receive() for client in clients)
    assert supervised.end() == 0


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.faults
def test_a_server_that_breaks_the_protocol_is_replaced(
    supervise: Callable[..., Supervised],
) -> None:
    supervised = supervise("rude")
    assert supervised.server()["generation"] == 2
    supervised.wait_for_log("server 1 broke its protocol")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_clean_drain_leaves_nothing_and_exits_zero(
    supervise: Callable[..., Supervised], short_path: Path, number: signal.Signals
) -> None:
    supervised = supervise()
    pid = supervised.server()["pid"]
    assert stat.S_IMODE((short_path / "w.sock.d").stat().st_mode) == 0o700
    assert stat.S_IMODE((short_path / "w.sock").stat().st_mode) == 0o600
    assert supervised.end(number) == 0
    assert not is_running(pid)
    assert [path.name for path in short_path.iterdir()] == ["0.log"]


def test_hangup_is_no_reason_to_end(supervise: Callable[..., Supervised]) -> None:
    supervised = supervise()
    facts = supervised.server()
    supervised.process.send_signal(signal.SIGHUP)
    os.kill(facts["pid"], signal.SIGHUP)
    assert supervised.server()["generation"] == 1


@pytest.mark.faults
def test_a_server_that_does_not_drain_is_killed_at_the_deadline(
    supervise: Callable[..., Supervised],
) -> None:
    supervised = supervise("stubborn", drain_timeout_s=0.3)
    pid = supervised.server()["pid"]
    assert supervised.end() == 1
    assert not is_running(pid)
    assert "not drained within 0.3 s" in supervised.log.read_text()


def test_a_server_that_gives_up_draining_is_not_started_again(
    supervise: Callable[..., Supervised],
) -> None:
    supervised = supervise("gives-up")
    fd = memory_file("journal")
    supervised.connect().ask("store", fd, keys=["journal/1"])
    os.close(fd)
    assert supervised.end() == 1
    assert "ended with status 4" in supervised.log.read_text()


@pytest.mark.faults
def test_a_second_interrupt_forces_the_end(supervise: Callable[..., Supervised]) -> None:
    supervised = supervise("stubborn")
    pid = supervised.server()["pid"]
    supervised.process.send_signal(signal.SIGINT)
    supervised.wait_for_log("SIGINT: draining")
    assert supervised.end(signal.SIGINT) == 1
    assert not is_running(pid)


@pytest.mark.faults
def test_a_server_that_dies_while_draining_gets_a_successor_that_finishes_its_saves(
    supervise: Callable[..., Supervised], short_path: Path
) -> None:
    gate = short_path / "gate"
    os.mkfifo(gate)
    supervised = supervise(f"gate:{gate}")
    client = supervised.connect()
    fd = memory_file("journal")
    pid = client.ask("store", fd, keys=["journal/1"])["pid"]
    os.close(fd)
    supervised.connect().send("pause")  # so that SIGTERM waits
    wait_until(lambda: _state(pid) == "T", "the server to stop")
    supervised.process.send_signal(signal.SIGTERM)
    supervised.wait_for_log("SIGTERM: draining")
    os.kill(pid, signal.SIGKILL)
    supervised.wait_for_log(r"started server 2 .*, 1 descriptors")
    with gate.open("w"):
        pass
    assert supervised.process.wait(PATIENCE_S) == 0
    assert re.search(r"server 2 .*drained", supervised.log.read_text())


@pytest.mark.faults
def test_a_server_that_never_becomes_ready_ends_the_writer_with_an_error(
    supervise: Callable[..., Supervised], short_path: Path
) -> None:
    supervised = supervise("broken")
    assert supervised.process.wait(PATIENCE_S) == 1
    assert "ended with status 3" in supervised.log.read_text()
    assert "giving up" in supervised.log.read_text()
    assert not (short_path / "w.sock").exists()


def test_a_second_writer_names_the_holder_of_the_lock(
    supervise: Callable[..., Supervised],
) -> None:
    first = supervise()
    server_pid = first.server()["pid"]
    second = supervise(lock_timeout_s=0.2)
    assert second.process.wait(PATIENCE_S) == 1
    log = second.log.read_text()
    assert f"supervisor pid {first.process.pid}, server pid {server_pid}" in log
    assert first.server()["generation"] == 1


@pytest.mark.faults
def test_a_successor_starts_only_when_supervisor_and_server_are_both_gone(
    supervise: Callable[..., Supervised],
) -> None:
    first = supervise("stubborn")
    server_pid = first.server()["pid"]
    first.process.kill()
    first.process.wait()
    second = supervise()
    with pytest.raises(subprocess.TimeoutExpired):
        second.process.wait(0.5)
    assert "listening" not in second.log.read_text()
    os.kill(server_pid, signal.SIGKILL)
    assert second.server()["pid"] != server_pid


def test_a_successor_waits_for_a_draining_writer_and_then_serves(
    supervise: Callable[..., Supervised],
) -> None:
    first = supervise()
    first.server()
    second = supervise()
    assert first.end() == 0
    assert second.server()["generation"] == 1
    assert second.end() == 0


def test_stale_sockets_of_a_dead_writer_are_removed_and_strange_files_are_not(
    supervise: Callable[..., Supervised], short_path: Path
) -> None:
    folder = short_path / "w.sock.d"
    folder.mkdir(mode=0o755)
    (folder / "grpc.7.sock").touch()
    (folder / "notes").touch()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stale:
        stale.bind(str(short_path / "w.sock"))
    supervised = supervise()
    supervised.server()
    assert [path.name for path in folder.iterdir()] == ["notes"]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_file_at_the_socket_path_is_left_alone(
    supervise: Callable[..., Supervised], short_path: Path
) -> None:
    (short_path / "w.sock").write_text("precious")
    supervised = supervise()
    assert supervised.process.wait(PATIENCE_S) == 1
    assert "is no socket" in supervised.log.read_text()
    assert (short_path / "w.sock").read_text() == "precious"


@pytest.mark.root
def test_a_user_who_is_not_allowed_is_told_so_and_closed(
    supervise: Callable[..., Supervised], short_path: Path
) -> None:
    supervised = supervise(allow_uids=(12345,))
    supervised.server()
    assert stat.S_IMODE((short_path / "w.sock.d").stat().st_mode) == 0o711
    short_path.chmod(0o755)
    answer = _ask_as(54321, 54321, supervised.config.socket)
    assert (answer["push"], answer["reason"]) == ("refused", "PERMISSION")
    assert "uid 54321" in answer["message"] and "--allow-uid 54321" in answer["hint"]
    assert answer["then"] == "closed"
    assert _ask_as(12345, 54321, supervised.config.socket)["client"]["uid"] == 12345


@pytest.mark.root
def test_a_group_may_be_allowed(supervise: Callable[..., Supervised], short_path: Path) -> None:
    supervised = supervise(allow_gids=(777,))
    supervised.server()
    short_path.chmod(0o755)
    assert _ask_as(54321, 777, supervised.config.socket)["client"]["gid"] == 777
    assert _ask_as(54321, 888, supervised.config.socket, groups=[777])["client"]["gid"] == 888
    assert _ask_as(54321, 888, supervised.config.socket)["reason"] == "PERMISSION"


def _ask_as(uid: int, gid: int, path: str, groups: list[int] | None = None) -> dict[str, Any]:
    """Send a request, as clients do before they read, and return the answer."""
    script = (
        "import socket, sys, json\n"
        "s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.settimeout(20)\n"
        f"s.connect({path!r})\n"
        'try: s.send(b\'{"op": "facts", "seq": 1}\')\n'
        "except BrokenPipeError: pass\n"
        "answer = json.loads(s.recv(65536))\n"
        "if 'push' in answer: answer['then'] = 'closed' if s.recv(10) == b'' else 'open'\n"
        "print(json.dumps(answer))\n"
    )
    result = subprocess.run(
        [
            "/usr/bin/python3" if os.path.exists("/usr/bin/python3") else sys.executable,
            "-c",
            script,
        ],
        user=uid,
        group=gid,
        extra_groups=groups or [],
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer
