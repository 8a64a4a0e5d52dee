"""The `writer` command: serve, status, verify.

`serve` reads the options, says what it will do, and becomes the supervisor by exec, so that
nothing imported here stays resident. The other verbs ask and leave. It holds no defaults: they
are `config`'s.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from shardwright_proto.control import ControlProtocolError, ask
from shardwright_proto.endpoint import SYSTEM_SOCKET
from shardwright_proto.limits import TOKEN_METADATA_KEY
from shardwright_writer.config import ConfigError, find_socket, load_config, parse_size
from shardwright_writer.status import WriterStatus, print_status

if TYPE_CHECKING:
    from shardwright_writer.verify import Report

app = typer.Typer(
    name="writer",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="The checkpoint writer of this node, outside every training process.",
    epilog="EXIT STATUS: 0 done; 1 failed; 2 wrong usage. Each command's --help says more.",
)

SERVE_EXIT_STATUS = """\b
EXIT STATUS
  0  ended by SIGTERM or SIGINT, and every save it had was finished
  1  a save was still unfinished at --drain-timeout, a second SIGINT forced the
     end, or the writer could not start (its log says why)
  2  wrong usage

\b
ENVIRONMENT
  SHARDWRIGHT_WRITER_ and SOCKET, MEMORY_BUDGET, ROOTS (separated by ":"),
  ALLOW_UIDS, ALLOW_GIDS, DRAIN_TIMEOUT_S, REATTACH_TIMEOUT_S, IO_TIMEOUT_S,
  LOCK_TIMEOUT_S, LOG_FORMAT, IO_THREADS
"""
STATUS_EXIT_STATUS = """\b
EXIT STATUS
  0  a writer answered
  1  no writer, or none that answered in time
  2  wrong usage
"""
VERIFY_EXIT_STATUS = """\b
EXIT STATUS
  0  nothing is wrong; a note says what could not be checked, and why
  1  damaged: the output names each file and tensor or record
  2  PATH is not there, holds no checkpoint, or wrong usage
"""
STATUS_TIMEOUT_S = 10.0
PROBLEMS_SHOWN_MAX = 50


class NoWriterError(Exception):
    """Nobody answers at the handshake socket; the message says where and how it failed."""


# The options of `serve`: None means "not said", and config decides.
NodeLocal = Annotated[
    bool | None,
    typer.Option("--node-local", help="Serve the ranks of this node (needed: the only way)."),
]
ServeSocket = Annotated[
    str | None,
    typer.Option(
        "--socket",
        metavar="PATH",
        help=f"Handshake socket. Default: {SYSTEM_SOCKET}, or the user's own.",
    ),
]
MemoryBudget = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Memory for saves, as 4GiB. Default: a quarter of what cgroup or machine has.",
    ),
]
Roots = Annotated[
    list[str] | None,
    typer.Option(metavar="DIR", help="Folder that saves may go to, or below. Repeatable."),
]
AllowUids = Annotated[
    list[int] | None,
    typer.Option(metavar="UID", help="User who may save, beside ours and root. Repeatable."),
]
AllowGids = Annotated[
    list[int] | None, typer.Option(metavar="GID", help="Group whose members may save. Repeatable.")
]
DrainTimeout = Annotated[
    float | None,
    typer.Option(metavar="SECONDS", help="At SIGTERM, wait this long for saves. Default: 300."),
]
ReattachTimeout = Annotated[
    float | None,
    typer.Option(metavar="SECONDS", help="A save waits so long for a lost rank. Default: 30."),
]
IoTimeout = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS", help="Give up on storage that is silent so long. Default: 300."
    ),
]
LockTimeout = Annotated[
    float | None,
    typer.Option(metavar="SECONDS", help="Wait for an earlier writer to end. Default: 30."),
]
LogFormat = Annotated[
    str | None,
    typer.Option(metavar="text|json", help="Of the log on standard error. Default: text."),
]
IoThreads = Annotated[
    int | None, typer.Option(metavar="N", help="Default: twice the cores, within 2..8.")
]


@app.command(epilog=SERVE_EXIT_STATUS)
def serve(
    *,
    node_local: NodeLocal = None,
    socket_path: ServeSocket = None,
    memory_budget: MemoryBudget = None,
    root: Roots = None,
    allow_uid: AllowUids = None,
    allow_gid: AllowGids = None,
    drain_timeout: DrainTimeout = None,
    reattach_timeout: ReattachTimeout = None,
    io_timeout: IoTimeout = None,
    lock_timeout: LockTimeout = None,
    log_format: LogFormat = None,
    io_threads: IoThreads = None,
) -> None:
    """Write the saves of this node's ranks, until SIGTERM."""
    try:
        loaded = load_config(
            {
                "node_local": node_local,
                "socket": socket_path,
                "memory_budget": None if memory_budget is None else parse_size(memory_budget),
                "roots": root,
                "allow_uids": allow_uid,
                "allow_gids": allow_gid,
                "drain_timeout_s": drain_timeout,
                "reattach_timeout_s": reattach_timeout,
                "io_timeout_s": io_timeout,
                "lock_timeout_s": lock_timeout,
                "log_format": log_format,
                "io_threads": io_threads,
            },
            os.environ,
        )
    except ConfigError as error:
        _fail(2, str(error))
    config = loaded.config
    print(f"writer: socket {config.socket} (SHARDWRIGHT_ENDPOINT=unix://{config.socket})")
    print(f"writer: memory budget {config.memory_budget >> 20} MiB ({loaded.budget_source})")
    for folder in config.roots:
        print(f"writer: saves may go below {folder}", flush=True)
    # A trainer's folder must never shadow one of our modules.
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", "shardwright_writer.supervisor", config.to_json()]
    os.execve(command[0], command, environment)  # noqa: S606 - no shell is wanted


SocketOption = Annotated[
    str | None,
    typer.Option("--socket", metavar="PATH", help="Handshake socket. Default: as a trainer's."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="For machines: JSON on standard output.")]


@app.command(epilog=STATUS_EXIT_STATUS)
def status(socket_path: SocketOption = None, *, as_json: JsonOption = False) -> None:
    """Show what the writer of this node is doing."""
    try:
        path = find_socket(socket_path, os.environ)
    except ConfigError as error:
        _fail(2, str(error))
    try:
        snapshot = ask_status(path, STATUS_TIMEOUT_S)
    except NoWriterError as error:
        _fail(1, str(error))
    if as_json:
        print(snapshot.to_json())
    else:
        from rich.console import Console

        print_status(snapshot, Console(highlight=False))


def ask_status(path: str, timeout_s: float) -> WriterStatus:
    """Return the snapshot of the writer at path. Raises NoWriterError."""
    import grpc

    from shardwright_proto.v1.writer_pb2 import StatusRequest
    from shardwright_proto.v1.writer_pb2_grpc import WriterStub

    facts = _shake_hands(path, timeout_s)
    options = [("grpc.enable_http_proxy", 0)]  # a proxy must not capture a local socket
    try:
        with grpc.insecure_channel(facts["grpc"], options=options) as channel:
            reply = WriterStub(channel).Status(
                StatusRequest(),
                metadata=((TOKEN_METADATA_KEY, facts["token"]),),
                timeout=timeout_s,
                wait_for_ready=True,
            )
    except grpc.RpcError as error:
        raise NoWriterError(f"the writer at {path} gave no status: {error.details()}") from None
    return WriterStatus.from_json(reply.json)


def _shake_hands(path: str, timeout_s: float) -> dict[str, Any]:
    try:
        answer = ask(path, "status", timeout_s)
    except TimeoutError:
        raise NoWriterError(
            f"the writer at {path} did not answer within {timeout_s:g} s: its server is"
            " starting again or stuck, its log says which"
        ) from None
    except (OSError, ControlProtocolError) as error:
        raise NoWriterError(f"no writer at {path}: {error}") from None
    if answer is None:
        raise NoWriterError(f"the writer at {path} hung up: its server died; ask again")
    if not answer.get("ok"):
        raise NoWriterError(
            f"the writer at {path} refused: {answer.get('message')} ({answer.get('hint')})"
        )
    return answer


@app.command(epilog=VERIFY_EXIT_STATUS)
def verify(
    path: Annotated[str, typer.Argument(metavar="PATH", help="A checkpoint, or a folder of them.")],
    *,
    as_json: JsonOption = False,
) -> None:
    """Compare every byte of a checkpoint with what was written."""
    from shardwright_writer.verify import verify_path

    try:
        report = verify_path(Path(path))
    except OSError as error:
        _fail(2, f"cannot verify {path}: {error.strerror}")
    if as_json:
        print(json.dumps({"path": path, "ok": report.ok, **dataclasses.asdict(report)}))
    else:
        _print_report(path, report)
    if not report.ok:
        nothing_found = not report.files and all(p.name == "folder" for p in report.problems)
        raise typer.Exit(2 if nothing_found else 1)


def _print_report(path: str, report: Report) -> None:
    for problem in report.problems[:PROBLEMS_SHOWN_MAX]:
        where = f" (bytes {problem.start} to {problem.stop})" if problem.stop else ""
        print(f"{problem.file}: {problem.name}: {problem.what}{where}")
    if len(report.problems) > PROBLEMS_SHOWN_MAX:
        print(f"... and {len(report.problems) - PROBLEMS_SHOWN_MAX} more (--json lists them all)")
    for note in report.notes:
        print(f"note: {note}")
    verdict = "intact" if report.ok else f"DAMAGED, {len(report.problems)} problems"
    print(
        f"{path}: {verdict}: {len(report.files)} files, {report.tensors} tensors,"
        f" {report.bytes_checked} bytes checked"
    )


def _fail(exit_status: int, message: str) -> NoReturn:
    print(f"writer: {message}", file=sys.stderr)
    raise typer.Exit(exit_status)


def main() -> NoReturn:
    """Run the command line and exit."""
    app()
    raise AssertionError("typer exits")


if __name__ == "__main__":
    main()
