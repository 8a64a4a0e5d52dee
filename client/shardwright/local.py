"""The stock writers, in the trainer: what on_error="local" falls back to.

Called by `api` when no writer answers, or when a save failed while its object was still at hand.
Slower, and it blocks; but as careful: a temporary name, fsync, one rename. Never for an object
that cannot be saved.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from shardwright.errors import SaveFailedError, UnsupportedObjectError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardwright.target import Target


def save_locally(
    obj: object,
    target: Target,
    save_id: str,
    format_name: str,
    metadata: Mapping[str, str] | None,
) -> int:
    """Write obj with torch.save or safetensors' save_file; return the file's size.

    Raises SaveFailedError for the storage, UnsupportedObjectError for the object.
    """
    temporary = f".{save_id}.local.swtmp"
    path = f"{target.folder}/{temporary}"
    try:
        _write(obj, path, format_name, metadata)
        fd = os.open(temporary, os.O_RDONLY | os.O_CLOEXEC, dir_fd=target.fd)
        try:
            os.fsync(fd)
            size = os.fstat(fd).st_size
        finally:
            os.close(fd)
        os.rename(temporary, target.file_name, src_dir_fd=target.fd, dst_dir_fd=target.fd)
        os.fsync(target.fd)
    except OSError as error:
        raise SaveFailedError(
            "IO_ERROR",
            f"writing in the trainer: {error.strerror or error}",
            hint="check the storage",
            lost="An older checkpoint at this path stays",
        ) from error
    finally:
        if os.path.lexists(path):
            os.unlink(path)
    return size


def _write(obj: object, path: str, format_name: str, metadata: Mapping[str, str] | None) -> None:
    if format_name == "torch":
        import torch

        torch.save(obj, path)
        return
    try:
        # By name: safetensors is no dependency of ours, only of those who fall back to it.
        stock: Any = importlib.import_module("safetensors.torch")
    except ImportError:
        raise SaveFailedError(
            "UNSUPPORTED",
            "no writer answers, and safetensors is not installed to write in the trainer",
            hint="pip install safetensors, or start `writer serve`",
        ) from None
    try:
        stock.save_file(obj, path, metadata=dict(metadata) if metadata else None)
    except (ValueError, TypeError, RuntimeError) as error:
        raise UnsupportedObjectError(f"safetensors refuses the object: {error}") from error
