"""The values of a save: what was asked for, and what it says on its way.

Shared by `save`, `service`, `recovery` and `publication`. Values only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from shardwright_writer.names import temporary_name
from shardwright_writer.refusal import Refusal

if TYPE_CHECKING:
    from shardwright_writer.names import Owner


@dataclass(frozen=True, slots=True)
class SaveSpec:
    """What Open says, checked. mode: of the files."""

    save_id: str
    file_name: str
    mode: int
    rank: int
    world_size: int
    step: int
    job_id: str
    owner: Owner

    def temporary_name(self, part: int | str) -> str:
        """Return the name of file `part` ("m": the manifest) until it is published."""
        return temporary_name(self.save_id, self.owner, part)

    def meta(self) -> dict[str, Any]:
        """What the journal keeps of it."""
        return {
            "save_id": self.save_id,
            "file_name": self.file_name,
            "mode": self.mode,
            "rank": self.rank,
            "world_size": self.world_size,
            "step": self.step,
            "job_id": self.job_id,
            "owner_pid": self.owner.pid,
            "owner_start_time": self.owner.start_time,
        }


@dataclass(frozen=True, slots=True)
class Acked:
    """(file, window, CRC): durable, the slots are the client's again."""

    windows: list[tuple[int, int, int]]


@dataclass(frozen=True, slots=True)
class Captured:
    """The writer alone can finish."""


@dataclass(frozen=True, slots=True)
class Committed:
    """Durable and visible. files: names in the folder, root last."""

    size: int
    files: list[str]
    seconds: float


Emission: TypeAlias = Acked | Captured | Committed | Refusal
