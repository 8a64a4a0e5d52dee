"""Which windows of a save the client fills, and where each one's records are in the journal.

Values computed once per save from the files' images; used by `save` and `recovery`. Numbers only:
no memory, no files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shardwright_writer.refusal import Reason, Refusal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardwright_writer.formats.base import FilePlan, Int64s
    from shardwright_writer.formats.image import FileImage


class WindowTable:
    """A row per window that holds shard bytes: files in order, windows in order."""

    def __init__(self, files: Sequence[tuple[FilePlan, FileImage]], window_bytes: int) -> None:
        self._orders = [image.shard_windows(window_bytes) for _, image in files]
        self._bases = np.cumsum([0, *(len(order) for order in self._orders)])
        counts = [
            _pieces_per_window(plan, order, window_bytes)
            for (plan, _), order in zip(files, self._orders, strict=True)
        ]
        self._piece_starts = np.concatenate([[0], np.cumsum(np.concatenate([[], *counts]))]).astype(
            np.int64
        )

        self._shard_bytes = np.concatenate(
            [np.zeros(0, np.int64)]
            + [
                _bytes_before(plan, (order + 1) * window_bytes)
                - _bytes_before(plan, order * window_bytes)
                for (plan, _), order in zip(files, self._orders, strict=True)
            ]
        )

    def __len__(self) -> int:
        return int(self._bases[-1])

    @property
    def piece_count(self) -> int:
        """How many piece CRCs the journal holds."""
        return int(self._piece_starts[-1])

    def row(self, file: int, window: int) -> int:
        """Return the window's row. Raises Refusal for a window the client has no business with."""
        if file < len(self._orders):
            order = self._orders[file]
            at = int(np.searchsorted(order, window))
            if at < len(order) and int(order[at]) == window:
                return int(self._bases[file]) + at
        raise Refusal(
            Reason.BAD_REQUEST, f"window {window} of file {file} holds no shard of this save"
        )

    def shard_bytes(self, row: int) -> int:
        """Return how many bytes of shards the window holds."""
        return int(self._shard_bytes[row])

    def place(self, row: int) -> tuple[int, int]:
        """Return (file, window) of a row."""
        file = int(np.searchsorted(self._bases, row, side="right")) - 1
        return file, int(self._orders[file][row - int(self._bases[file])])

    def pieces(self, row: int) -> slice:
        """Return where the row's piece CRCs are in the journal's array."""
        return slice(int(self._piece_starts[row]), int(self._piece_starts[row + 1]))


def _pieces_per_window(plan: FilePlan, order: Int64s, window_bytes: int) -> Int64s:
    real = plan.shard_nbytes > 0
    starts = plan.shard_offset[real]
    ends = starts + plan.shard_nbytes[real]
    begun = np.searchsorted(starts, (order + 1) * window_bytes, side="left")
    ended = np.searchsorted(ends, order * window_bytes, side="right")
    return (begun - ended).astype(np.int64)


def _bytes_before(plan: FilePlan, offsets: Int64s) -> Int64s:
    """Return the shard bytes that lie before each file offset."""
    totals = np.concatenate([[0], np.cumsum(plan.shard_nbytes)])
    begun = np.searchsorted(plan.shard_offset, offsets, side="left")
    ends = np.concatenate([[0], plan.shard_offset + plan.shard_nbytes])
    return totals[begun] - np.maximum(ends[begun] - offsets, 0)
