"""What a format is: a pure function from a save's plan to the bytes of its files.

Values only, no I/O. `torch_zip` and `safetensors` produce `FilePlan`s; `image` puts their
literals and CRCs into windows; nobody else knows a format's rules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Int64s = NDArray[np.int64]


class UnsupportedError(Exception):
    """The format cannot hold this save; the message names the tensor and says what to do."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The structure of a save, checked against the limits: parallel columns, one row a shard."""

    format: str
    names: list[str]
    dtypes: list[str]  # torch names: "float32"
    shapes: list[tuple[int, ...]]
    nbytes: Int64s
    metadata: dict[str, str]
    shard_bytes_max: int  # 0: one file


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """Where every shard goes: depends on the plan alone, so it is cached by the plan's digest.

    file_of_shard: int64[shards], index of the file. offset_of_shard: int64[shards], bytes.
    """

    file_count: int
    file_of_shard: Int64s
    offset_of_shard: Int64s
    private: Any  # what the format wants to keep between its two functions


@dataclass(frozen=True, slots=True)
class FilePlan:
    """One file's bytes: shards by reference, literals by value, and CRC holes.

    Every byte of [0, size) belongs to exactly one shard or one literal. Literals are slices of
    one blob: literal i is blob[literal_start[i]:literal_start[i+1]] at file offset
    literal_offset[i]; offsets ascend. A hole is 4 bytes inside a literal that get the CRC-32 of
    shard hole_shard[i] (little endian) at file offset hole_offset[i] (ascending) once it is
    known. Shards are listed in file order; zero-byte shards are listed too.
    """

    name: str  # final name in the target folder
    size: int
    shards: Int64s  # indices into the save's plan
    shard_offset: Int64s
    shard_nbytes: Int64s
    literal_blob: bytes
    literal_offset: Int64s
    literal_start: Int64s  # len(literals) + 1
    hole_offset: Int64s
    hole_shard: Int64s  # indices into the save's plan


@dataclass(frozen=True, slots=True)
class SavePlan:
    """All files of a save. `index` (sharded safetensors) is written whole, and published last."""

    files: list[FilePlan]
    index: tuple[str, bytes] | None
