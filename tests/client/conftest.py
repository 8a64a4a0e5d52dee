"""Fixtures of the client's tests: a fake writer, settings, and a clean process afterwards."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
from tests.client.fake_writer import FakeWriter

from shardwright import attach, config, lifecycle

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def clean_client() -> Iterator[None]:
    """Leave no connection, no pending save and no setting to the next test."""
    yield
    left = lifecycle.wait_for_pending(10, 10)
    attach.close_all()
    config.forget()
    assert not left, f"the test left saves under way: {left}"


@pytest.fixture
def configure() -> Callable[..., config.Config]:
    """Change settings for this test: `configure(stall_timeout_s=1)`."""

    def change(**values: Any) -> config.Config:
        changed = dataclasses.replace(config.get(), **values)
        config._loaded = changed
        return changed

    return change


@pytest.fixture
def fake_factory(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., FakeWriter]]:
    """Start fake writers; SHARDWRIGHT_ENDPOINT names the latest."""
    writers: list[FakeWriter] = []

    def start(**options: Any) -> FakeWriter:
        folder = short_path / f"fake{len(writers)}"
        folder.mkdir()
        writers.append(FakeWriter(str(folder), **options).start())
        monkeypatch.setenv("SHARDWRIGHT_ENDPOINT", f"unix://{writers[-1].socket_path}")
        return writers[-1]

    yield start
    for writer in writers:
        writer.stop()


@pytest.fixture
def fake(fake_factory: Callable[..., FakeWriter]) -> FakeWriter:
    """One fake writer: 16 slots of 64 KiB."""
    return fake_factory()
