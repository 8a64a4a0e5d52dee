"""How much memory the writer may take when nobody said: from the cgroup and the machine.

Read once, by config, when the daemon starts. It reads /proc and /sys and reserves nothing.
"""

from __future__ import annotations

import contextlib
import os
from typing import Final

BUDGET_BYTES_MIN: Final = 64 << 20
BUDGET_BYTES_DEFAULT_MAX: Final = 16 << 30
BUDGET_SHARE: Final = 4  # a quarter

_UNLIMITED: Final = 1 << 60
"""cgroup v1 writes "no limit" as a number near 2**63."""


def derive_memory_budget(proc: str = "/proc", cgroups: str = "/sys/fs/cgroup") -> tuple[int, str]:
    """Return a quarter of the tightest bound on our memory, and in words which one that was."""
    bounds = [*cgroup_limits(proc, cgroups), *_available(proc)]
    if not bounds:
        return BUDGET_BYTES_MIN, "the least possible: neither /proc nor the cgroup names a bound"
    least, source = min(bounds)
    budget = min(least // BUDGET_SHARE, BUDGET_BYTES_DEFAULT_MAX) >> 20 << 20
    return max(budget, BUDGET_BYTES_MIN), f"a quarter of {source}, within 64 MiB..16 GiB"


def cgroup_limits(proc: str, cgroups: str) -> list[tuple[int, str]]:
    """Return every memory limit between our cgroup and the root, for cgroup v1 and v2."""
    limits = []
    for line in _read(f"{proc}/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            base, name = cgroups, "memory.max"
        elif "memory" in controllers.split(","):
            base, name = f"{cgroups}/memory", "memory.limit_in_bytes"
        else:
            continue
        for folder in _ancestors(path):
            text = _read(f"{base}{folder}/{name}").strip()
            if text.isdigit() and int(text) < _UNLIMITED:
                limits.append((int(text), f"the cgroup's {name} ({int(text) >> 20} MiB)"))
    return limits


def _ancestors(path: str) -> list[str]:
    """Return the cgroup and all above it, as suffixes. In a container only the root may exist."""
    parts = [part for part in path.split("/") if part not in {"", "..", "."}]
    return ["".join(f"/{part}" for part in parts[:depth]) for depth in range(len(parts), -1, -1)]


def _available(proc: str) -> list[tuple[int, str]]:
    for line in _read(f"{proc}/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            kilobytes = int(line.split()[1])
            return [(kilobytes << 10, f"MemAvailable ({kilobytes >> 10} MiB)")]
    return []


def _read(path: str) -> str:
    with contextlib.suppress(OSError), open(os.fspath(path), encoding="ascii") as file:
        return file.read()
    return ""
