"""The `shardwright` command: what a trainer on this machine would find.

For a person before a run starts, and for job scripts (`--json`). Asks the writer one question and
leaves; attaches nothing and saves nothing.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import sys
from typing import TYPE_CHECKING

from shardwright import config
from shardwright.errors import SaveFailedError, WriterUnavailableError
from shardwright.handshake import Handshake
from shardwright_proto.limits import WIRE_VERSION

if TYPE_CHECKING:
    from shardwright_proto.control import Message

EXIT_STATUS = """\
EXIT STATUS
  0  a writer answers
  1  no writer: saves would follow on_error (by default: training goes on, nothing is saved)
  2  wrong usage, or a setting that cannot be (SHARDWRIGHT_*)
"""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    parser = argparse.ArgumentParser(prog="shardwright", description="Checkpoints that leave.")
    commands = parser.add_subparsers(dest="command", required=True)
    info = commands.add_parser(
        "info",
        help="version, endpoint, and whether a writer answers there",
        description="Show the version, the endpoint, and whether a writer answers there.",
        epilog=EXIT_STATUS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    info.add_argument("--endpoint", metavar="unix://PATH", help="default: as a trainer finds it")
    info.add_argument("--json", action="store_true", help="for machines")
    options = parser.parse_args(arguments)
    try:
        path = config.socket_path(options.endpoint)
        timeout_s = config.get().connect_timeout_s
    except ValueError as error:
        print(f"shardwright: {error}", file=sys.stderr)
        return 2
    trouble = _ask(path, timeout_s)
    facts = {
        "version": importlib.metadata.version("shardwright"),
        "wire": WIRE_VERSION,
        "endpoint": f"unix://{path}",
        "writer": trouble is None,
        "error": trouble,
    }
    if options.json:
        print(json.dumps(facts))
    else:
        print(f"shardwright {facts['version']}, wire version {facts['wire']}")
        print(f"endpoint {facts['endpoint']}: {trouble or 'a writer answers'}")
    return 0 if trouble is None else 1


def _ask(path: str, timeout_s: float) -> str | None:
    """Return why no writer answers at path; None if one does."""
    refusals: list[str] = []

    def on_push(_handshake: Handshake, message: Message, fds: list[int]) -> None:
        for fd in fds:
            os.close(fd)
        if message["push"] == "refused":
            refusals.append(f"refused: {message.get('message')} ({message.get('hint')})")

    try:
        handshake = Handshake(path, timeout_s, on_push)
    except OSError as error:
        return f"no writer: {error}"
    try:
        handshake.request("status", timeout_s)
    except (SaveFailedError, WriterUnavailableError) as error:
        return refusals[0] if refusals else str(error)
    finally:
        handshake.close()
    return None


if __name__ == "__main__":
    sys.exit(main())
