"""Bounds and units that both sides rely on. Checked by the writer on every field a client sends."""

from __future__ import annotations

from typing import Final

WIRE_VERSION: Final = 1
"""Named in the handshake; a writer refuses a client of another version with both numbers."""

BLOCK_BYTES: Final = 4096
"""Alignment of O_DIRECT memory, offsets and lengths; window sizes are multiples of it."""

WINDOW_BYTES_MIN: Final = 1 << 20
WINDOW_BYTES_MAX: Final = 16 << 20
"""A window is lease / 8 between these two; 16 MiB reached the disk's rate where it was measured."""

SEGMENT_BYTES_MAX: Final = 256 << 20
"""An arena grows by sealed segments of at most this size, so that a client can start early."""

MESSAGE_BYTES_MAX: Final = 4 << 20
"""gRPC's default receive limit, kept: everything longer is chunked below it."""

CHUNK_BYTES: Final = 2 << 20
"""Payload of one chunk message; 1-4 MiB is where Python gRPC is fastest (DESIGN: 0.9-1.5 GB/s)."""

CONTROL_BYTES_MAX: Final = 64 << 10
CONTROL_FDS_MAX: Final = 64
"""One handshake message: JSON bytes and passed file descriptors."""

SHARDS_MAX: Final = 4_000_000
PLAN_BYTES_MAX: Final = 1 << 30
SKELETON_BYTES_MAX: Final = 1 << 30
NAME_BYTES_MAX: Final = 1 << 16
DIMS_MAX: Final = 64
SAVE_BYTES_MAX: Final = 1 << 50
FILE_NAME_BYTES_MAX: Final = 200
"""Leaves room for the temporary name's suffix within NAME_MAX (255)."""

PROGRESS_PERIOD_S: Final = 1.0
"""The writer speaks at least this often on a live save; a long silence means it is stuck."""

REATTACH_DEADLINE_S: Final = 30.0
"""How long a save whose stream broke before capture waits for its client."""

TOKEN_METADATA_KEY: Final = "shardwright-token"  # noqa: S105 -- the name of a header
MANIFEST_SUFFIX: Final = ".shardwright.json"
