from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from shardwright_proto import endpoint
from shardwright_proto.endpoint import (
    EndpointError,
    client_socket_path,
    parse_endpoint,
    server_socket_path,
    socket_candidates,
)

if TYPE_CHECKING:
    from pathlib import Path


def test_an_endpoint_names_an_absolute_path() -> None:
    assert parse_endpoint("unix:///run/x/writer.sock") == "/run/x/writer.sock"
    assert parse_endpoint("/run/x/writer.sock") == "/run/x/writer.sock"


@pytest.mark.parametrize(
    "text",
    ["", "unix://relative", "tcp://host:1", "host:1", "unix:///" + "x" * 107, "unix:///a\0b"],
)
def test_what_is_no_endpoint_is_refused(text: str) -> None:
    with pytest.raises(EndpointError):
        parse_endpoint(text)


@pytest.fixture
def no_system_socket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(endpoint, "SYSTEM_SOCKET", str(tmp_path / "no/shardwright/writer.sock"))


@pytest.mark.usefixtures("no_system_socket")
def test_trainer_and_writer_of_one_user_agree_without_being_told(tmp_path: Path) -> None:
    environment = {"XDG_RUNTIME_DIR": str(tmp_path)}
    path = server_socket_path(environment)
    assert path == f"{tmp_path}/shardwright/writer.sock"
    os.mkdir(os.path.dirname(path), 0o700)
    open(path, "w").close()
    assert client_socket_path(environment) == path


@pytest.mark.usefixtures("no_system_socket")
def test_a_socket_in_a_folder_that_others_can_write_is_not_trusted(tmp_path: Path) -> None:
    environment = {"XDG_RUNTIME_DIR": str(tmp_path)}
    folder = tmp_path / "shardwright"
    folder.mkdir()
    (folder / "writer.sock").touch()
    folder.chmod(0o777)
    assert client_socket_path(environment) != str(folder / "writer.sock")
    assert server_socket_path(environment) != str(folder / "writer.sock")


@pytest.mark.root
@pytest.mark.usefixtures("no_system_socket")
def test_a_socket_in_another_users_folder_is_not_trusted(tmp_path: Path) -> None:
    environment = {"XDG_RUNTIME_DIR": str(tmp_path)}
    folder = tmp_path / "shardwright"
    folder.mkdir(mode=0o755)
    (folder / "writer.sock").touch()
    os.chown(folder, 12345, 12345)
    assert client_socket_path(environment) != str(folder / "writer.sock")


@pytest.mark.usefixtures("no_system_socket")
def test_the_variable_beats_every_default(tmp_path: Path) -> None:
    environment = {"XDG_RUNTIME_DIR": str(tmp_path), "SHARDWRIGHT_ENDPOINT": "unix:///x/w.sock"}
    assert client_socket_path(environment) == "/x/w.sock"


def test_with_no_socket_anywhere_the_usual_place_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(endpoint, "SYSTEM_SOCKET", str(tmp_path / "a.sock"))
    environment = {"XDG_RUNTIME_DIR": str(tmp_path)}
    if not any(os.path.exists(path) for path in socket_candidates(environment)):
        assert client_socket_path(environment) == str(tmp_path / "a.sock")
