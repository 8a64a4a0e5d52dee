"""The `shardwright` command: what a trainer on this machine would find.

For a person before a run starts, and for job scripts (`--json`). Asks the writer one question and
leaves; attaches nothing and saves nothing.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys

from shardwright import config
from shardwright_proto.control import ControlProtocolError, ask
from shardwright_proto.limits import WIRE_VERSION

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
    try:
        answer = ask(path, "status", timeout_s)
    except TimeoutError:
        return f"the writer did not answer within {timeout_s:g} s: see its log"
    except (OSError, ControlProtocolError) as error:
        return f"no writer: {error}"
    if answer is None:
        return "the writer hung up: its server has just died; ask again"
    if answer.get("ok") is not True:
        return f"the writer refused: {answer.get('message')} ({answer.get('hint')})"
    return None


if __name__ == "__main__":
    sys.exit(main())
