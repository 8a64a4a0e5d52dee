from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING

import pytest

from shardwright import config

if TYPE_CHECKING:
    from pathlib import Path


def test_an_empty_environment_gives_the_defaults() -> None:
    assert config.load({}) == config.Config()


def test_every_setting_can_be_set_by_its_variable() -> None:
    loaded = config.load(
        {
            "SHARDWRIGHT_TRANSPORT": "inline",
            "SHARDWRIGHT_ON_ERROR": "local",
            "SHARDWRIGHT_ARENA_BYTES": "4096",
            "SHARDWRIGHT_SIGTERM": "off",
            "SHARDWRIGHT_STALL_TIMEOUT_S": "1.5",
            "RANK": "3",
            "WORLD_SIZE": "8",
            "LOCAL_RANK": "1",
            "LOCAL_WORLD_SIZE": "4",
        }
    )
    assert (loaded.transport, loaded.on_error, loaded.arena_bytes) == ("inline", "local", 4096)
    assert (loaded.sigterm, loaded.stall_timeout_s) == (False, 1.5)
    assert (loaded.rank, loaded.world_size) == (3, 8)
    assert (loaded.local_rank, loaded.local_world_size) == (1, 4)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("SHARDWRIGHT_TRANSPORT", "carrier pigeon"),
        ("SHARDWRIGHT_ON_ERROR", "panic"),
        ("SHARDWRIGHT_ARENA_BYTES", "4GB"),
        ("SHARDWRIGHT_EXIT_WAIT_S", "-1"),
        ("SHARDWRIGHT_EXIT_WAIT_S", "inf"),
        ("SHARDWRIGHT_EXIT_WAIT_S", "nan"),
        ("SHARDWRIGHT_SIGTERM", "perhaps"),
        ("RANK", "first"),
    ],
)
def test_a_wrong_value_is_refused_by_the_name_of_its_variable(variable: str, value: str) -> None:
    with pytest.raises(ValueError, match=variable):
        config.load({variable: value})


def test_the_job_is_ours_or_slurms_or_torchruns_in_this_order() -> None:
    environment = {"SLURM_JOB_ID": "slurm", "TORCHELASTIC_RUN_ID": "elastic"}
    assert config.load(environment).job == "slurm"
    assert config.load({**environment, "SHARDWRIGHT_JOB": "ours"}).job == "ours"
    assert config.load({"TORCHELASTIC_RUN_ID": "elastic"}).job == "elastic"


def test_the_environment_is_read_once_but_for_the_endpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDWRIGHT_ARENA_BYTES", "4096")
    monkeypatch.setenv("SHARDWRIGHT_ENDPOINT", "unix:///one.sock")
    assert config.get().arena_bytes == 4096
    assert config.socket_path(None) == "/one.sock"
    monkeypatch.setenv("SHARDWRIGHT_ARENA_BYTES", "8192")
    monkeypatch.setenv("SHARDWRIGHT_ENDPOINT", "unix:///two.sock")
    assert config.get().arena_bytes == 4096
    assert config.socket_path(None) == "/two.sock"
    assert config.socket_path("unix:///three.sock") == "/three.sock"


def test_without_endpoint_the_first_default_that_exists_is_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("SHARDWRIGHT_ENDPOINT", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = tmp_path / "shardwright"
    folder.mkdir(mode=0o700)
    (folder / "writer.sock").touch()
    if not os.path.exists("/run/shardwright/writer.sock"):
        assert config.socket_path(None) == str(folder / "writer.sock")


def test_every_setting_is_documented() -> None:
    text = config.__doc__ or ""
    for field in dataclasses.fields(config.Config):
        if field.name.endswith("_s"):
            continue  # "any deadline below"
        variables = config._RENAMED.get(field.name, (f"SHARDWRIGHT_{field.name.upper()}",))
        assert variables[0] in text, field.name
