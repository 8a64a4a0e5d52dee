"""The memory meter: a process of its own that samples the trainer's and the writer's trees.

The conductor starts one `Meter`, brackets each save with `start` and `stop`, and gets the peak.
Sampling from outside sees what happens while the trainer holds the GIL or waits in the kernel.
It does not judge: what counts as extra is decided in `conductor`.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from typing import IO, TYPE_CHECKING, Any

from harness.proc import Memory, MemoryReader

if TYPE_CHECKING:
    from collections.abc import Iterable

PERIOD_S = 0.01
REFRESH_SAMPLES = 5
"""Once in so many samples the trees and their shared memory are looked up again: arenas and
processes change slowly, and a peer with hundreds of descriptors would pay for a closer look."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What the meter saw between start and stop."""

    start: Memory
    peak: Memory  # the sample with the largest total
    end: Memory
    samples: int
    gap_s_max: float  # longest time between two samples
    cpu_s: float  # the meter's own


class Meter:
    """The conductor's handle on the meter process."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "harness.meter"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(__file__))},
        )

    def start(self, roots: Iterable[int]) -> Memory:
        """Begin to sample these process trees; returns the first sample."""
        return Memory(**self._ask({"roots": list(roots)}))

    def stop(self) -> Reading:
        """End sampling."""
        reply = self._ask({})
        for name in ("start", "peak", "end"):
            reply[name] = Memory(**reply[name])
        return Reading(**reply)

    def close(self) -> None:
        """End the meter process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def _ask(self, message: dict[str, list[int]]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the memory meter ended with status {self._process.wait()}")
        reply: dict[str, Any] = json.loads(line)
        return reply


def watch(roots: list[int], commands: IO[str]) -> Reading:
    """Sample until the next command line arrives."""
    reader = MemoryReader(roots)
    start = peak = end = reader.sample()
    sys.stdout.write(json.dumps(asdict(start)) + "\n")
    sys.stdout.flush()
    samples, gap_s_max, cpu_start_s = 1, 0.0, time.process_time()
    last_s = time.monotonic()
    stopped = False
    while not stopped:
        stopped = bool(select.select([commands], [], [], PERIOD_S)[0])
        if stopped or samples % REFRESH_SAMPLES == 0:
            reader.refresh()
        end = reader.sample()
        samples += 1
        now_s = time.monotonic()
        gap_s_max, last_s = max(gap_s_max, now_s - last_s), now_s
        if end.total_bytes > peak.total_bytes:
            peak = end
    reader.close()
    return Reading(start, peak, end, samples, gap_s_max, time.process_time() - cpu_start_s)


def main() -> None:
    """Serve commands until the conductor closes the pipe."""
    for line in iter(sys.stdin.readline, ""):
        reading = watch(json.loads(line)["roots"], sys.stdin)
        if not sys.stdin.readline():
            return
        sys.stdout.write(json.dumps(asdict(reading)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
