"""From an object to what the wire needs: plan, skeleton, and where the bytes are.

    capture()
     ├ torch_format      any picklable object -> data.pkl and records
     │   ├ torch_pickle  one run of the C pickler, placeholders for data
     │   ├ storages      which bytes become a record
     │   └ opcodes       what takes the placeholders' places
     ├ safetensors_dict  a flat dict of tensors
     └ both: structure + cache (seen before?), columns, names, source, plan

The API calls `capture` on the trainer's thread; the stager takes the Capture from there. Copies no
tensor bytes, and never unpickles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwright.capture.base import Capture
from shardwright.capture.safetensors_dict import capture_safetensors
from shardwright.capture.source import Source
from shardwright.capture.torch_format import capture_torch
from shardwright.errors import UnsupportedObjectError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Capture", "Source", "capture"]


def capture(
    obj: object,
    format: str,  # noqa: A002  the word that users know from the API
    *,
    metadata: Mapping[str, str] | None = None,
    max_shard_size: int | str | None = None,
) -> Capture:
    """Capture obj as "torch" or "safetensors". Raises UnsupportedObjectError, naming the key.

    metadata and max_shard_size ("5GB", "500MiB", or bytes) are for safetensors.
    """
    if format == "safetensors":
        return capture_safetensors(obj, metadata, max_shard_size)
    if format != "torch":
        raise UnsupportedObjectError(
            f"unknown format {format!r}", hint='Formats are "torch" and "safetensors"'
        )
    for name, value in (("metadata", metadata), ("max_shard_size", max_shard_size)):
        if value is not None:
            raise UnsupportedObjectError(
                f"the torch format has no place for {name}",
                hint="Put it into the object, or use safetensors",
            )
    return capture_torch(obj)
