"""File formats as pure functions: plan in, bytes and places out.

`get_format` is how the rest of the writer reaches one; nobody else names a format's module.
Opens no file and keeps no state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from shardwright_writer.formats.base import UnsupportedError
from shardwright_writer.formats.safetensors import Safetensors
from shardwright_writer.formats.torch_zip import TorchZip

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from shardwright_writer.formats.base import Plan, SavePlan, ShardLayout

__all__ = ["FORMATS", "Format", "UnsupportedError", "get_format"]


class Format(Protocol):
    """One container format. Methods are pure: equal arguments, equal results, in any process."""

    @property
    def name(self) -> str:
        """The name that plans carry."""

    def check(self, plan: Plan) -> None:
        """Raise UnsupportedError, naming the tensor, unless `layout` can succeed. Called first."""

    def layout(self, plan: Plan) -> ShardLayout:
        """Place every shard. Called once per plan digest; the result is cached."""

    def files(
        self, plan: Plan, layout: ShardLayout, skeleton: bytes, file_name: str, shard_tag: str
    ) -> SavePlan:
        """Return all files of one save; shards lie where `layout` put them."""

    def shard_names(self, file_name: str, count: int, tag: str) -> list[str]:
        """Return the names of a save's `count` files, root left out when that is an index."""

    def superseded(
        self,
        names: Sequence[str],
        file_name: str,
        kept: Collection[str],
        recorded: Collection[str] = (),
    ) -> list[str]:
        """Return which of a folder's names an older save of the same root left behind.

        Called once the new root is durable. kept: the new save's files. recorded: what the
        replaced index and manifest named; it is not trusted beyond names of the right shape.
        """


FORMATS: dict[str, Format] = {form.name: form for form in (TorchZip(), Safetensors())}


def get_format(name: str) -> Format:
    """Return the format. Raises UnsupportedError for one this writer does not know."""
    try:
        return FORMATS[name]
    except KeyError:
        known = ", ".join(sorted(FORMATS))
        raise UnsupportedError(
            f"unknown format {name!r}: this writer knows {known}; update the writer, or choose"
            " one of these"
        ) from None
