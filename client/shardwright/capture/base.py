"""What a capture hands to the transport.

Made by `torch_format` and `safetensors_dict`, consumed by the stager and the stream. A value: it
copies nothing and knows neither arena nor wire connection.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwright.capture.source import Source


@dataclass(frozen=True, slots=True)
class Capture:
    """One object, ready to be staged.

    By shard: addresses (of the first byte on the host, or 0 when its source must be asked),
    nbytes, names. A shard without bytes has address 0 and no source. keepalive
    holds everything that addresses point into, until all is staged: the owner of the tensors must
    neither write to them nor free their storages before that.
    """

    plan: bytes  # serialised SavePlan
    plan_digest: bytes  # its SHA-256
    skeleton: bytes  # torch: data.pkl; safetensors: empty
    addresses: list[int]
    nbytes: list[int]
    sources: dict[int, Source]
    names: list[str]
    keepalive: object
    bytes_total: int
