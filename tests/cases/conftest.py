"""The roads that cases travel, one fixture parameter each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from tests.cases.reference import write_by_formats

import shardwright
from shardwright.capture.safetensors_dict import forget_structures as forget_dicts
from shardwright.capture.torch_format import forget_structures as forget_objects

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.cases.reference import Road
    from tests.conftest import WriterProcess


@pytest.fixture(params=["formats", "shared", "inline"])
def road(request: pytest.FixtureRequest) -> Road:
    """How objects get to files: by the pure formats, or through the daemon by either transport."""
    if request.param == "formats":
        return write_by_formats
    writer: WriterProcess = request.getfixturevalue("session_writer")

    def write_by_daemon(obj: object, path: Path, format_name: str) -> None:
        shardwright.save(
            obj,
            path,
            format=format_name,  # type: ignore[arg-type]
            transport=request.param,
            endpoint=writer.endpoint,
            on_error="raise",
        )

    return write_by_daemon


@pytest.fixture(autouse=True)
def fresh_cache() -> Iterator[None]:
    """Every case meets its first capture, and leaves no process group."""
    yield
    forget_objects()
    forget_dicts()
    if torch.distributed.is_initialized():  # the DTensor case's
        torch.distributed.destroy_process_group()
