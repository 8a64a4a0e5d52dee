"""Ours and the peers save the same state in turn: stall, time to durable, CPU, memory, bars.

The entry of the benchmark; the parts are in `harness`. Reads the command line, plays the suites,
shows the result. See README.md beside this file.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import platform
import re
import shlex
import shutil
import sys
import tempfile
from typing import Any, TextIO

from harness import bars, once, report
from harness.conductor import Suite, play
from harness.probes import PROBES
from harness.processes import ChildError
from harness.state import StateSpec, create_memory
from harness.systems import MANY_TENSORS, SYSTEMS
from rich.console import Console

MIB, GIB = 1 << 20, 1 << 30
SEED = 20_260_101
QUICK = {"size": 256 * MIB, "rounds": 2, "many": 10_000}
FULL = {"size": 2 * GIB, "rounds": 5, "many": 100_000}
TENSORS = 256
LOG_COLUMNS = 150
MEMORY_FILE_SYSTEMS = {"tmpfs", "ramfs"}
EPILOG = """\
EXIT STATUS
  0  the benchmark ran
  1  --check was given and a bar was missed or not measured
  2  wrong usage, or the machine is not fit (file system, space)
"""


def size(text: str) -> int:
    """Bytes in "256MiB", "2 GiB" or "1048576"."""
    match = re.fullmatch(r"(\d+)\s*([KMG]?)(?:iB)?", text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size (256MiB, 2GiB)")
    return int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2]]


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="stall.py",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--size", type=size, help="bytes of the large state (2GiB)")
    add("--tensors", type=int, default=TENSORS, help="tensors of the large state (256)")
    add("--many", type=int, help="tensors of 8 bytes in the second state; 0: leave it out (100000)")
    add("--rounds", type=int, help="warm rounds; one cold round is played before them (5)")
    add("--budget", type=size, default=256 * MIB, help="the small memory budget (256MiB)")
    add("--root", default=".", help="existing folder on a real disk to save into (here)")
    add("--only", default="*", help="comma-separated patterns of systems and probes to run")
    add("--quick", action="store_true", help="a small run that shows that all works")
    add("--json", action="store_true", help="print the result as JSON; tables go to stderr")
    add("--save", metavar="FILE.json", help="write the JSON result to a file, too")
    add("--plot", metavar="FILE.png", help="draw the result")
    add("--markdown", metavar="FILE.json", help="print a saved result as Markdown, run nothing")
    add("--check", action="store_true", help="exit with 1 when a bar is missed or not measured")
    parsed = parser.parse_args(arguments)
    preset = QUICK if parsed.quick else FULL
    for name, value in preset.items():
        if getattr(parsed, name) is None:
            setattr(parsed, name, value)
    if parsed.rounds < 1:
        parser.error("--rounds must be 1 or more")
    return parsed


def file_system(path: str) -> str:
    """Type of the file system that a folder lies on."""
    best, kind = "", "unknown"
    with open("/proc/self/mountinfo") as file:
        for line in file:
            left, _, right = line.partition(" - ")
            mount = left.split()[4]
            inside = path == mount or path.startswith(mount.rstrip("/") + "/")
            if inside and len(mount) >= len(best):
                best, kind = mount, right.split()[0]
    return kind


def refuse_unfit(root: str, bytes_total: int, quick: bool) -> str:
    """Return why figures taken in this folder would mean nothing; empty when they would not."""
    if not os.path.isdir(root):
        return f"{root} is no folder"
    kind = file_system(root)
    if kind in MEMORY_FILE_SYSTEMS and not quick:
        return f"{root} is on {kind}: name a folder on a real disk with --root"
    free = shutil.disk_usage(root).free
    if free < 3 * bytes_total:
        return f"{root} has {free / GIB:.1f} GiB free, {3 * bytes_total / GIB:.1f} GiB are needed"
    return ""


def chosen(names: list[str], patterns: str) -> list[str]:
    """Pick the names that match one of the patterns."""
    return [
        name
        for name in names
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns.split(","))
    ]


def suites(options: argparse.Namespace, state_fd: int) -> dict[str, Suite]:
    """Say what to play. The writer of the large arena has room for the whole file's image."""
    small = {"small": options.budget, "inline": options.budget}
    large = StateSpec(options.tensors, options.size, SEED, state_fd)
    many = StateSpec(options.many, 8 * options.many, SEED)
    return {
        "large": Suite(
            "large", large, chosen(list(SYSTEMS), options.only),
            chosen(list(PROBES), options.only), options.rounds,
            {**small, "arena": options.size + options.size // 4 + 256 * MIB},
        ),
        "many": Suite(
            "many", many, chosen(list(MANY_TENSORS), options.only) if options.many else [], [],
            options.rounds, {**small, "arena": options.budget},
        ),
    }  # fmt: skip


def console(stream: TextIO) -> Console:
    """Make a console that neither folds tables in a log nor reads ":name:" as a picture."""
    width = None if stream.isatty() else LOG_COLUMNS
    return Console(file=stream, width=width, emoji=False)


def machine(root: str) -> dict[str, Any]:
    """Where the figures come from."""
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "file_system": file_system(root),
        "load_at_start": os.getloadavg()[0],
    }


def run_once(only: str, root: str, run: str, left_out: dict[str, str]) -> dict[str, Any]:
    """Take the figures that need no rounds."""
    figures: dict[str, Any] = {}
    for name, measure in (
        ("import", once.import_seconds),
        ("idle_writer", lambda: once.idle_writer(root, run)),
    ):
        if chosen([name], only):
            try:
                figures[name] = measure()
            except ChildError as error:
                left_out[name] = str(error)
    return figures


def benchmark(options: argparse.Namespace, progress: Console) -> dict[str, Any]:
    """Run everything that was asked for."""

    def say(text: str) -> None:
        progress.print(text, markup=False, highlight=False)

    result: dict[str, Any] = {
        "settings": {
            "bytes_total": options.size, "tensors": options.tensors, "many": options.many,
            "rounds": options.rounds, "budget_bytes": options.budget, "seed": SEED,
            "quick": options.quick, "command": "python " + shlex.join(sys.argv),
        },
        "machine": machine(os.path.realpath(options.root)),
        "left_out": {}, "torch": "", "torch_threads": 0,
    }  # fmt: skip
    state_fd = create_memory(StateSpec(options.tensors, options.size, SEED))
    try:
        with (
            tempfile.TemporaryDirectory(prefix=".stall-", dir=options.root) as root,
            tempfile.TemporaryDirectory(prefix="stall-", dir="/tmp") as run,
        ):
            result["once"] = run_once(options.only, os.path.realpath(root), run, result["left_out"])
            for name, suite in suites(options, state_fd).items():
                if not suite.systems and not suite.probes:
                    continue
                figures = play(suite, os.path.realpath(root), run, say)
                result["left_out"] |= {f"{name}/{k}": v for k, v in figures["left_out"].items()}
                result["torch"] = figures["torch"] or result["torch"]
                result["torch_threads"] = figures["torch_threads"] or result["torch_threads"]
                result[name] = figures
    finally:
        os.close(state_fd)
    result["bars"] = bars.judge(result)
    return result


def main(arguments: list[str]) -> int:
    options = parse_arguments(arguments)
    errors = console(sys.stderr)
    if options.markdown:
        with open(options.markdown) as file:
            sys.stdout.write(report.markdown(json.load(file)))
        return 0
    reason = refuse_unfit(os.path.realpath(options.root), options.size, options.quick)
    if reason:
        errors.print(reason, markup=False)
        return 2
    result = benchmark(options, errors)
    report.print_tables(result, errors if options.json else console(sys.stdout))
    text = json.dumps(result, indent=1)
    if options.json:
        sys.stdout.write(text + "\n")
    if options.save:
        with open(options.save, "w") as file:
            file.write(text + "\n")
    if options.plot:
        report.plot(result, options.plot)
    held = all(bar["holds"] for bar in result["bars"].values())
    return 1 if options.check and not held else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
