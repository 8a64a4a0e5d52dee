"""Figures that need no rounds: what importing the client costs, what an idle writer holds.

Called by `stall`. Import times are taken inside fresh interpreters, so that start-up of Python
and torch is not in them.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from typing import Any

from harness.proc import descendants, mapped_files, resident_bytes
from harness.processes import ChildError, WriterProcess, environment

IMPORT_RUNS = 7
IMPORT_PROGRAM = (
    "import time, torch; start = time.perf_counter(); import shardwright; "
    "taken = time.perf_counter() - start; shardwright.save; print(taken)"
)
IDLE_BUDGET_BYTES = 256 << 20


def import_seconds() -> dict[str, Any]:
    """Time `import shardwright` after `import torch`; a first run fills the caches."""
    rounds: list[float] = []
    for _ in range(IMPORT_RUNS + 1):
        run = subprocess.run(
            [sys.executable, "-c", IMPORT_PROGRAM],
            capture_output=True, text=True, check=False, env=environment(),
        )  # fmt: skip
        if run.returncode:
            raise ChildError(f"import shardwright failed: {run.stderr.strip()[-300:]}")
        rounds.append(float(run.stdout))
    warm = rounds[1:]
    return {
        "seconds": statistics.median(warm), "spread": [min(warm), max(warm)], "rounds": rounds
    }  # fmt: skip


def idle_writer(root: str, run: str) -> dict[str, Any]:
    """Measure a writer that nobody is attached to: resident memory, and torch files it mapped."""
    writer = WriterProcess("idle", IDLE_BUDGET_BYTES, root, run, run)
    try:
        pids = descendants(writer.process.pid)
        files = {path for pid in pids for path in mapped_files(pid)}
        return {
            "rss_bytes": sum(resident_bytes(pid) for pid in pids),
            "rss_bytes_each": [resident_bytes(pid) for pid in pids],
            "torch_mappings": sorted(path for path in files if "/torch/" in path),
        }
    finally:
        writer.close()
