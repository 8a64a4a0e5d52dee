"""From the wire's plan bytes to a checked `Plan`: every bound on what a client sends is here.

Used by `service` and `recovery`. Allocates nothing in proportion to a number that has not been
checked against the message's own length.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from google.protobuf.message import DecodeError

from shardwright_proto import limits
from shardwright_proto.v1 import writer_pb2 as wire
from shardwright_writer import formats
from shardwright_writer.formats.base import Plan, UnsupportedError
from shardwright_writer.refusal import Reason, Refusal
from shardwright_writer.spec import SaveSpec

if TYPE_CHECKING:
    from shardwright_writer.names import Owner

_SAVE_ID = re.compile(r"[0-9a-f]{32}")


def parse_plan(data: bytes | memoryview) -> Plan:
    """Decode and check a serialised SavePlan. Raises Refusal."""
    try:
        message = wire.SavePlan.FromString(bytes(data))
    except DecodeError as error:
        raise Refusal(Reason.BAD_REQUEST, f"plan does not decode: {error}") from None
    count = len(message.names)
    if not count == len(message.dtypes) == len(message.nbytes) == len(message.ndims):
        raise Refusal(Reason.BAD_REQUEST, "plan columns differ in length")
    if count > limits.SHARDS_MAX:
        raise Refusal(Reason.BAD_REQUEST, f"{count} shards; the limit is {limits.SHARDS_MAX}")
    if message.shard_bytes_max > limits.SAVE_BYTES_MAX:
        raise Refusal(Reason.BAD_REQUEST, "shard_bytes_max is out of range")
    names = list(message.names)
    for name in names:
        if len(name) > limits.NAME_BYTES_MAX:
            raise Refusal(
                Reason.UNSUPPORTED, f"tensor name of {len(name)} characters: {name[:60]!r}..."
            )
    plan = Plan(
        format=message.format,
        names=names,
        dtypes=_dtypes(message),
        shapes=_shapes(message),
        nbytes=_nbytes(message),
        metadata=dict(message.metadata),
        shard_bytes_max=int(message.shard_bytes_max),
    )
    if plan.format not in formats.FORMATS:
        raise Refusal(
            Reason.UNSUPPORTED,
            f"format {plan.format!r}; this writer knows {', '.join(formats.FORMATS)}",
        )
    try:
        formats.get_format(plan.format).check(plan)
    except UnsupportedError as error:
        raise Refusal(Reason.UNSUPPORTED, str(error), "nothing was written") from None
    return plan


def parse_spec(message: wire.Open, owner: Owner) -> SaveSpec:
    """Check the fields of Open that become names and modes. Raises Refusal."""
    name = message.file_name
    if not _SAVE_ID.fullmatch(message.save_id):
        raise Refusal(Reason.BAD_REQUEST, "save_id must be 32 lower-case hex digits")
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise Refusal(Reason.BAD_REQUEST, f"file name {name!r} is not one path component")
    if len(name.encode("utf-8", "surrogatepass")) > limits.FILE_NAME_BYTES_MAX:
        raise Refusal(
            Reason.BAD_REQUEST,
            f"file name of more than {limits.FILE_NAME_BYTES_MAX} bytes: {name[:60]!r}...",
        )
    if not 0 <= message.rank < max(1, message.world_size):
        raise Refusal(Reason.BAD_REQUEST, f"rank {message.rank} of {message.world_size}")
    if message.skeleton_bytes > limits.SKELETON_BYTES_MAX:
        raise Refusal(
            Reason.UNSUPPORTED,
            f"{message.skeleton_bytes} bytes of pickled Python objects; the limit is"
            f" {limits.SKELETON_BYTES_MAX}",
            "keep large data in tensors",
        )
    return SaveSpec(
        save_id=message.save_id,
        file_name=name,
        mode=0o666 & ~(message.umask & 0o777),
        rank=message.rank,
        world_size=max(1, message.world_size),
        step=message.step,
        job_id=message.job_id[:256],
        owner=owner,
    )


def _dtypes(message: wire.SavePlan) -> list[str]:
    table = list(message.dtype_table)
    indices = message.dtypes
    if indices and max(indices) >= len(table):
        raise Refusal(Reason.BAD_REQUEST, "dtype index out of range")
    return [table[index] for index in indices]


def _shapes(message: wire.SavePlan) -> list[tuple[int, ...]]:
    ends = np.cumsum(np.frombuffer(message.ndims, np.uint8), dtype=np.int64)
    dims = list(message.dims)
    if (int(ends[-1]) if len(ends) else 0) != len(dims):
        raise Refusal(Reason.BAD_REQUEST, "plan shapes do not add up")
    if dims and max(dims) > limits.SAVE_BYTES_MAX:
        raise Refusal(Reason.BAD_REQUEST, "dimension out of range")
    starts = [0, *ends.tolist()]
    return [tuple(dims[a:b]) for a, b in pairwise(starts)]


def _nbytes(message: wire.SavePlan) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    if message.nbytes and max(message.nbytes) > limits.SAVE_BYTES_MAX:
        raise Refusal(Reason.BAD_REQUEST, "shard size out of range")
    nbytes = np.array(message.nbytes, np.int64)
    if sum(message.nbytes) > limits.SAVE_BYTES_MAX:
        raise Refusal(Reason.BAD_REQUEST, "save size out of range")
    return nbytes
