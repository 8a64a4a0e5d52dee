"""Every system test has a writer of its own: none keeps the connection to the one before."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from shardwright.attach import close_all

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def no_connection_outlives_its_writer() -> Iterator[None]:
    yield
    close_all()
