"""From an object to files without a writer process: capture and the pure formats alone.

A road is `write(obj, path, format)`; conftest.py has those that go through a real writer. Here no
process, wire or arena lies between the client's capture and the writer's formats, and windows are
small enough that tensors straddle them.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from shardwright.capture import capture
from shardwright.errors import SaveFailedError, UnsupportedObjectError
from shardwright_writer.crc import fold_crcs, piece_crcs
from shardwright_writer.formats import get_format
from shardwright_writer.formats.image import FileImage
from shardwright_writer.plan_codec import parse_plan
from shardwright_writer.refusal import Refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from shardwright.capture import Capture
    from shardwright_writer.formats.base import FilePlan

WINDOW_BYTES = 1 << 20
REFUSALS = (UnsupportedObjectError, SaveFailedError, Refusal)


Road: TypeAlias = "Callable[[object, Path, str], None]"
"""How a test saves: object, path, format. Raises one of REFUSALS when it is refused."""


def write_by_formats(
    obj: object,
    path: Path,
    format: str,  # noqa: A002
    *,
    metadata: Mapping[str, str] | None = None,
    max_shard_size: int | str | None = None,
) -> None:
    """Write obj by capture and pure formats alone."""
    write_capture(capture(obj, format, metadata=metadata, max_shard_size=max_shard_size), path)


def write_capture(captured: Capture, path: Path, window_bytes: int = WINDOW_BYTES) -> None:
    """Write what was captured."""
    plan = parse_plan(captured.plan)
    form = get_format(plan.format)
    save = form.files(plan, form.layout(plan), captured.skeleton, path.name, "")
    crcs = np.zeros(len(plan.nbytes), np.uint32)
    for file in save.files:
        _write_file(file, captured, crcs, path.parent / file.name, window_bytes)
    if save.index is not None:
        (path.parent / save.index[0]).write_bytes(save.index[1])


def _write_file(
    file: FilePlan, captured: Capture, crcs: Any, path: Path, window_bytes: int
) -> None:
    image = FileImage(file)
    window = np.empty(window_bytes, np.uint8)
    with path.open("wb") as out:
        for start in range(0, file.size, window_bytes):
            window[:] = 0xEE  # nothing may rely on a clean window
            pieces = image.pieces(start, start + window_bytes)
            address = window.ctypes.data
            for row in range(len(pieces)):
                _copy(
                    captured,
                    int(pieces.shard[row]),
                    address + int(pieces.begin[row]),
                    int(pieces.first_in_shard[row]),
                    int(pieces.nbytes[row]),
                )
            fold_crcs(crcs, pieces, piece_crcs(window.data, pieces))
            image.fill(window.data, start, crcs)
            out.write(window[: min(window_bytes, file.size - start)].data)


def _copy(captured: Capture, shard: int, address: int, begin: int, count: int) -> None:
    if shard in captured.sources:
        captured.sources[shard].copy_into(address, begin, count)
    else:
        ctypes.memmove(address, captured.addresses[shard] + begin, count)
