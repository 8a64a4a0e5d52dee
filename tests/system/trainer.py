"""A trainer in a process of its own, so that tests can kill it. Speaks lines on stdout.

    python -m tests.system.trainer PATH FORMAT TRANSPORT MIB SEED

Prints `prepared`, waits for a line on stdin, saves state_of(SEED), prints `captured`, then
`committed` or `failed: WHY`, and waits for stdin to close.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

import shardwright


def state_of(seed: int, mib: int) -> dict[str, torch.Tensor]:
    """Return mib MiB of tensors of uneven sizes, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    left = mib << 18
    state: dict[str, torch.Tensor] = {}
    while left:
        count = min(left, int(torch.randint(1, 3 << 20, (1,), generator=generator)))
        state[f"layer.{len(state)}.weight"] = torch.randint(
            -(1 << 31), 1 << 31, (count,), dtype=torch.int32, generator=generator
        )
        left -= count
    return state


def main() -> None:
    form: Any
    transport: Any
    path, form, transport, mib, seed = sys.argv[1:]
    state = state_of(int(seed), int(mib))
    shardwright.prepare(state, format=form)
    print("prepared", flush=True)
    sys.stdin.readline()
    handle = shardwright.async_save(state, path, format=form, transport=transport, on_error="raise")
    handle.captured(timeout_s=60)
    print("captured", flush=True)
    try:
        handle.committed(timeout_s=60)
        print("committed", flush=True)
    except shardwright.ShardwrightError as error:
        print(f"failed: {error}", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
