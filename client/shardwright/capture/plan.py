"""A save's structure as the wire carries it: columns in, serialised SavePlan and its digest out.

The last step of both formats' captures. Checks the limits that the writer will check again, so
that a refusal comes before anything is sent. Knows no tensor.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from shardwright.errors import UnsupportedObjectError
from shardwright_proto import limits
from shardwright_proto.v1 import writer_pb2

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch


@dataclass(frozen=True, slots=True)
class Plan:
    """A serialised SavePlan and its SHA-256, with the columns that the client needs again."""

    data: bytes
    digest: bytes
    names: list[str]
    nbytes: list[int]


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name on the wire: "float32"."""
    return str(dtype).removeprefix("torch.")


def build(
    form: str,
    names: list[str],
    dtypes: Sequence[torch.dtype],
    shapes: Sequence[tuple[int, ...]],
    nbytes: list[int],
    *,
    metadata: Mapping[str, str] | None = None,
    shard_bytes_max: int = 0,
) -> Plan:
    """Return the plan of these shards: equal columns give equal bytes."""
    _check_limits(len(names), sum(nbytes))
    table = {dtype: index for index, dtype in enumerate(dict.fromkeys(dtypes))}
    message = writer_pb2.SavePlan(
        format=form,
        names=names,
        dtype_table=[dtype_name(dtype) for dtype in table],
        dtypes=bytes(map(table.__getitem__, dtypes)),
        nbytes=nbytes,
        ndims=bytes(map(len, shapes)),
        dims=chain.from_iterable(shapes),
        metadata=dict(metadata or {}),
        shard_bytes_max=shard_bytes_max,
    )
    data = message.SerializeToString(deterministic=True)
    if len(data) > limits.PLAN_BYTES_MAX:
        raise UnsupportedObjectError(
            f"the names and shapes take {len(data)} bytes, the limit is {limits.PLAN_BYTES_MAX}",
            hint="Shorten the keys",
        )
    return Plan(data, hashlib.sha256(data).digest(), names, nbytes)


def _check_limits(shards: int, total: int) -> None:
    if shards > limits.SHARDS_MAX:
        raise UnsupportedObjectError(
            f"{shards} tensors in one save, the limit is {limits.SHARDS_MAX}",
            hint="Save the object in parts",
        )
    if total > limits.SAVE_BYTES_MAX:
        raise UnsupportedObjectError(
            f"{total} bytes in one save, the limit is {limits.SAVE_BYTES_MAX}",
            hint="Save the object in parts",
        )
