"""The roads that cases travel, one fixture parameter each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from tests.cases.reference import write_by_formats

from shardwright.capture.safetensors_dict import forget_structures as forget_dicts
from shardwright.capture.torch_format import forget_structures as forget_objects

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cases.reference import Road


@pytest.fixture(params=["formats"])
def road(request: pytest.FixtureRequest) -> Road:
    """How objects get to files: by the pure formats."""
    assert request.param == "formats"
    return write_by_formats


@pytest.fixture(autouse=True)
def fresh_cache() -> Iterator[None]:
    """Every case meets its first capture, and leaves no process group."""
    yield
    forget_objects()
    forget_dicts()
    if torch.distributed.is_initialized():  # the DTensor case's
        torch.distributed.destroy_process_group()
