from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.conftest import WriterProcess

from shardwright_writer.status import ClientStatus, SaveStatus, WriterStatus

if TYPE_CHECKING:
    from collections.abc import Callable

WRITER = (sys.executable, "-m", "shardwright_writer.cli")


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*WRITER, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )


@pytest.mark.parametrize("command", ["serve", "status", "verify"])
def test_every_help_ends_with_its_exit_statuses(command: str) -> None:
    result = run(command, "--help")
    assert result.returncode == 0
    statuses = result.stdout.partition("EXIT STATUS")[2]
    assert all(f"\n    {status}  " in statuses for status in (0, 1, 2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--root", "/tmp"], "say --node-local"),
        (["serve", "--node-local"], "no --root"),
        (["serve", "--node-local", "--root", "/does/not/exist"], "not an existing folder"),
        (["serve", "--node-local", "--root", "/tmp", "--memory-budget", "lots"], "'lots' is not a"),
        (["serve", "--node-local", "--root", "/tmp", "--memory-budget", "1M"], "memory_budget is"),
        (["serve", "--node-local", "--root", "/tmp", "--socket", "/" + "x" * 99], "has 100 bytes"),
        (["serve", "--node-local", "--root", "/tmp", "--io-threads", "many"], "--io-threads"),
        (["serve", "--surprise"], "--surprise"),
        (["surprise"], "surprise"),
        (["verify"], "PATH"),
        (["verify", "/does/not/exist"], "No such file"),
    ],
)
def test_wrong_usage_says_what_and_exits_with_two(arguments: list[str], message: str) -> None:
    result = run(*arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_a_wrong_endpoint_is_wrong_usage() -> None:
    result = run("status", SHARDWRIGHT_ENDPOINT="tcp://host:1")
    assert result.returncode == 2 and "unix://PATH" in result.stderr


def test_no_writer_exits_with_one_and_names_the_socket(short_path: Path) -> None:
    path = str(short_path / "none.sock")
    result = run("status", "--socket", path)
    assert result.returncode == 1
    assert f"no writer at {path}" in result.stderr
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(path)
    assert run("status", SHARDWRIGHT_ENDPOINT=f"unix://{path}").returncode == 1


def test_serve_says_what_it_will_do(writer: WriterProcess, tmp_path: Path) -> None:
    lines = writer.log.splitlines()
    assert f"writer: socket {writer.socket} (SHARDWRIGHT_ENDPOINT=unix://{writer.socket})" in lines
    assert "writer: memory budget 256 MiB (as given)" in lines
    assert f"writer: saves may go below {tmp_path}" in lines


def test_status_shows_an_idle_writer_to_machines_and_people(
    writer: WriterProcess, tmp_path: Path
) -> None:
    status = writer.status()
    assert status["roots"] == [str(tmp_path)]
    assert status["server_pid"] == writer.server_pid()
    assert (status["generation"], status["crashes"], status["saves"]) == (1, 0, [])
    assert status["arena_bytes_leased"] == 0 < status["arena_bytes_max"] < 256 << 20
    text = run("status", SHARDWRIGHT_ENDPOINT=writer.endpoint)
    assert text.returncode == 0
    assert f"writer at {writer.socket}: serving" in text.stdout


@pytest.mark.faults
def test_status_counts_the_crashes_of_the_server(writer: WriterProcess) -> None:
    writer.kill_server(signal.SIGSEGV)
    writer.wait_ready()
    status = writer.status()
    assert (status["generation"], status["crashes"]) == (2, 1)
    assert "ended with SIGSEGV" in writer.log


def test_the_log_can_be_read_by_machines(
    writer_factory: Callable[..., WriterProcess],
) -> None:
    writer = writer_factory(arguments=["--log-format", "json"])
    assert writer.terminate() == 0
    lines = [json.loads(line) for line in writer.log.splitlines() if line.startswith("{")]
    assert {"supervisor", "server"} == {line["process"] for line in lines}
    assert any(line["message"].startswith("listening at") for line in lines)
    assert not [
        line for line in writer.log.splitlines() if line[0] != "{" and line[:7] != "writer:"
    ]


def test_an_idle_writer_is_small_and_has_no_torch(writer: WriterProcess) -> None:
    pids = [writer.process.pid, writer.server_pid()]
    resident = sum(_resident_bytes(pid) for pid in pids)
    assert resident <= 120 << 20, f"{resident >> 20} MiB"
    assert _resident_bytes(writer.process.pid) <= 24 << 20
    for pid in pids:
        maps = Path(f"/proc/{pid}/maps").read_text()
        assert "torch" not in maps
    assert "grpc" not in Path(f"/proc/{writer.process.pid}/maps").read_text()


def _resident_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10
    raise AssertionError(pid)


@pytest.mark.faults
def test_the_server_does_not_outlive_a_killed_supervisor(
    writer_factory: Callable[..., WriterProcess],
) -> None:
    first = writer_factory()
    first.expected_exit_status = -signal.SIGKILL
    first.process.kill()
    first.process.wait()
    second = writer_factory()  # it takes the lock, so the first server is gone
    assert second.status()["generation"] == 1


@pytest.mark.root
def test_the_writer_can_be_a_containers_first_process(short_path: Path, tmp_path: Path) -> None:
    path = str(short_path / "w.sock")
    serve = [*WRITER, "serve", "--node-local", "--socket", path, "--root", str(tmp_path)]
    namespace = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    with (short_path / "log").open("wb") as log:
        container = subprocess.Popen([*namespace, *serve], stdout=log, stderr=log)
    try:
        writer = WriterProcess(container, path, tmp_path, short_path / "log")
        writer.wait_ready()
        assert "supervisor[1] listening" in writer.log
    finally:
        container.kill()
        container.wait()


def test_a_snapshot_survives_json_and_a_newer_writers_fields() -> None:
    client = ClientStatus("c", "job", 0, 7, 1000, "shared", True, 1 << 28, 1 << 24, 16, 3)
    save = SaveStatus("s", "job", 0, 2, 40, "/x/y.pt", "RECEIVING", "receiving", 1, 0, 9, 0.5, 0.1)
    status = make_status(clients=[client], saves=[save])
    assert WriterStatus.from_json(status.to_json()) == status
    newer: dict[str, Any] = json.loads(status.to_json())
    newer["colour"] = newer["saves"][0]["mood"] = "new"
    assert WriterStatus.from_json(json.dumps(newer)) == status


def test_a_person_sees_every_client_and_save() -> None:
    from io import StringIO

    from rich.console import Console

    from shardwright_writer.status import print_status

    client = ClientStatus("c", "[b]job", 1, 7, 1000, "shared", False, 1 << 28, 1 << 24, 16, 3)
    save = SaveStatus("5a" * 16, "j", 0, 2, 40, "/x/[i].pt", "CAPTURED", "writing", 1, 0, 9, 5, 0)
    out = StringIO()
    print_status(
        make_status(clients=[client], saves=[save], crashes=2), Console(file=out, width=160)
    )
    text = out.getvalue()
    for part in (
        "[b]job",
        "shared (away)",
        "3 of 16",
        "5a5a5a5a",
        "0 of 2",
        "/x/[i].pt",
        "2 crashes",
    ):
        assert part in text


def make_status(**changes: Any) -> WriterStatus:
    values: dict[str, Any] = {
        "schema": 1,
        "socket": "/w.sock",
        "roots": ["/x"],
        "server_pid": 1,
        "generation": 3,
        "crashes": 0,
        "uptime_s": 10.0,
        "draining": False,
        "memory_budget_bytes": 1 << 30,
        "arena_bytes_max": 1 << 29,
        "arena_bytes_leased": 1 << 28,
        "saves_committed": 1,
        "saves_failed": 0,
        "bytes_committed": 1 << 31,
        "clients": [],
        "saves": [],
    }
    return WriterStatus(**values | changes)


def test_verify_tells_intact_damaged_and_nothing_apart(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    torch.save({"weight": torch.arange(1000.0)}, path)
    intact = run("verify", str(path))
    assert intact.returncode == 0 and "intact: 1 files" in intact.stdout
    data = bytearray(path.read_bytes())
    data[data.index(torch.arange(1000.0).numpy().tobytes()) + 7] ^= 1
    path.write_bytes(data)
    damaged = run("verify", str(path))
    assert damaged.returncode == 1 and "DAMAGED, 1 problems" in damaged.stdout
    report = json.loads(run("verify", "--json", str(tmp_path)).stdout)
    assert report["ok"] is False and report["problems"][0]["file"] == "state.pt"
    path.unlink()
    assert run("verify", str(tmp_path)).returncode == 2
