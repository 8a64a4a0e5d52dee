"""The state that every system saves: which tensors there are, and one memory that holds them.

The large state lives in one memfd that every trainer process maps, so all systems save the very
same bytes and a machine with little memory can hold a trainer per system. The layout is a pure
function of the spec and needs no torch; only the functions that trainers call import it. It
makes no statement about values: the bytes are seeded noise that no compressor can use.
"""

from __future__ import annotations

import math
import mmap
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    State = dict[str, torch.Tensor]

ALIGN_BYTES = 64
COLUMNS = 256
COPY_BYTES = 4 << 20
KINDS = (("model", "bfloat16"), ("master", "float32"), ("exp_avg", "float32"),
         ("exp_avg_sq", "float32"))  # fmt: skip
"""Weights and what Adam keeps for them: the usual mix of a training run's state."""


@dataclass(frozen=True, slots=True)
class StateSpec:
    """A state: its size, and the memfd that holds it (-1: every trainer builds its own)."""

    tensors: int
    bytes_total: int
    seed: int
    fd: int = -1


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of the large state and its place in the memfd."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def tensor_layout(spec: StateSpec) -> list[TensorSpec]:
    """Tensors of uneven sizes that add up to bytes_total: nothing happens to be page-aligned."""
    row_bytes = COLUMNS * 4
    rows = spec.bytes_total // row_bytes
    if spec.tensors < 1 or rows < spec.tensors:
        raise ValueError(f"{spec.bytes_total} bytes cannot hold {spec.tensors} tensors")
    mean, left = divmod(rows, spec.tensors)
    layout: list[TensorSpec] = []
    offset = 0
    for index in range(spec.tensors):
        # Neighbours differ by +d and -d rows, which leaves the sum alone.
        shift = (index // 2 * 37 % max(1, mean // 4)) * (1 if index % 2 else -1)
        unpaired = index == spec.tensors - 1 and spec.tensors % 2
        count = mean + (0 if unpaired else shift) + (left if index == spec.tensors - 1 else 0)
        part, dtype = KINDS[index % len(KINDS)]
        columns = COLUMNS if dtype == "float32" else 2 * COLUMNS
        name = f"{part}.layers.{index // len(KINDS)}.weight"
        layout.append(TensorSpec(name, dtype, (count, columns), offset, count * row_bytes))
        offset += math.ceil(count * row_bytes / ALIGN_BYTES) * ALIGN_BYTES
    return layout


def memory_bytes(spec: StateSpec) -> int:
    """Size of the memfd: the tensors with their alignment, in whole pages."""
    last = tensor_layout(spec)[-1]
    return math.ceil((last.offset + last.nbytes) / mmap.PAGESIZE) * mmap.PAGESIZE


def create_memory(spec: StateSpec) -> int:
    """Make the memfd and allocate its pages. The caller closes it."""
    fd = os.memfd_create("stall-state", os.MFD_CLOEXEC)
    os.posix_fallocate(fd, 0, memory_bytes(spec))
    return fd


def map_memory(spec: StateSpec) -> mmap.mmap:
    """Map the memfd, with every page present."""
    memory = mmap.mmap(spec.fd, memory_bytes(spec))
    memory.madvise(MADV_POPULATE_WRITE)
    return memory


MADV_POPULATE_WRITE = 23  # Linux 5.14; the mmap module has no name for it yet


def open_state(spec: StateSpec) -> State:
    """Make the tensors, each with a storage of its own."""
    import torch

    if spec.fd < 0:
        rows = torch.arange(2 * spec.tensors, dtype=torch.int32).view(-1, 2)
        return {
            f"experts.{index // 100}.weight.{index % 100}": rows[index].clone()
            for index in range(spec.tensors)
        }
    memory = map_memory(spec)
    return {
        tensor.name: torch.frombuffer(
            memory,
            dtype=getattr(torch, tensor.dtype),
            count=math.prod(tensor.shape),
            offset=tensor.offset,
        ).view(tensor.shape)
        for tensor in tensor_layout(spec)
    }


def fill_memory(spec: StateSpec) -> None:
    """Fill the memfd with seeded noise."""
    import torch

    generator = torch.Generator().manual_seed(spec.seed)
    words = torch.frombuffer(map_memory(spec), dtype=torch.int64)
    for start in range(0, words.numel(), COPY_BYTES):
        words[start : start + COPY_BYTES].random_(generator=generator)


def invert(state: State) -> None:
    """Flip every bit in place, as an optimizer step would change a buffer."""
    import torch

    for tensor in state.values():
        tensor.view(torch.uint8).bitwise_not_()


def difference(state: State, loaded: State) -> str:
    """Empty when the two are the same bit for bit, else what differs."""
    import torch

    if list(state) != list(loaded) and set(state) != set(loaded):
        return f"names differ: {sorted(set(state) ^ set(loaded))[:3]}"
    for name, tensor in state.items():
        other = loaded[name]
        if tensor.dtype != other.dtype or tensor.shape != other.shape:
            return f"{name} is {other.dtype}{tuple(other.shape)}, saved {tensor.dtype}"
        if not torch.equal(tensor.view(torch.uint8), other.view(torch.uint8)):
            return f"{name} has other bytes"
    return ""
