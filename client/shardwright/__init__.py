"""shardwright: checkpoints that leave the training process.

    pending = shardwright.async_save(state, "step-100.pt")   # returns when state may change again
    pending.committed(timeout_s=600)                         # durable, and visible under its name

The client's front: everything public is named here. It imports neither torch nor gRPC; the calls
do, when first used.
"""

from __future__ import annotations

from shardwright.api import async_save, drain, prepare, save
from shardwright.errors import (
    SaveCancelledError,
    SaveFailedError,
    SaveTimeoutError,
    ShardwrightError,
    UnsupportedObjectError,
    WriterUnavailableError,
)
from shardwright.handle import PendingSave, SaveProgress

__all__ = [
    "PendingSave",
    "SaveCancelledError",
    "SaveFailedError",
    "SaveProgress",
    "SaveTimeoutError",
    "ShardwrightError",
    "UnsupportedObjectError",
    "WriterUnavailableError",
    "async_save",
    "drain",
    "prepare",
    "save",
]
