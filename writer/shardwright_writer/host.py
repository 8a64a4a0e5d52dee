"""What a save asks of the server around it: implemented by `saves`, by stand-ins in tests.

An interface only; it keeps `save` free of the registry that holds it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from shardwright_writer.fdstore import FdStore
    from shardwright_writer.save import Save


class SaveHost(Protocol):
    """What a save needs from the server around it."""

    io_pool: Executor
    admin_pool: Executor
    fds: FdStore

    async def turn(self, save: Save) -> None:
        """Wait until every earlier save of the same path has ended."""

    def is_alone(self, save: Save) -> bool:
        """Tell whether no other save of the same path is under way."""

    def live_ids(self) -> frozenset[str]:
        """Return the ids of all live saves: their temporary files are not leftovers."""

    def ended(self, save: Save) -> None:
        """The save is COMMITTED or FAILED and holds nothing any more."""

    def log(self, save: Save, event: str, **facts: object) -> None:
        """Write the one line of a save event."""
