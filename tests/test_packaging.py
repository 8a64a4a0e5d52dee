"""What users get from pip: the wheel's content, its metadata, its commands."""

from __future__ import annotations

import configparser
import re
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import tomllib

if TYPE_CHECKING:
    from email.message import Message

ROOT = Path(__file__).resolve().parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"),
            *("--wheel-dir", str(folder), str(ROOT)),
        ],
        check=True,
        capture_output=True,
    )
    (path,) = folder.glob("*.whl")
    return path


def read(wheel: Path, suffix: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(suffix)]
        return archive.read(name).decode()


def metadata_of(wheel: Path) -> Message:
    return Parser().parsestr(read(wheel, ".dist-info/METADATA"))


def test_the_wheel_holds_three_packages_with_their_types_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    packages = ("shardwright", "shardwright_proto", "shardwright_writer")
    tops = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert tops == set(packages)
    for package in packages:
        assert f"{package}/py.typed" in names
    assert "shardwright_proto/v1/writer_pb2.pyi" in names
    assert not [name for name in names if ".protoc" in name or "test" in name]


def test_a_trainer_gets_grpc_and_protobuf_and_nothing_else(wheel: Path) -> None:
    required = metadata_of(wheel).get_all("Requires-Dist") or []
    always = {re.split(r"[<>=]", text)[0] for text in required if "extra ==" not in text}
    assert always == {"grpcio", "protobuf"}


def test_no_extra_asks_for_torch_itself(wheel: Path) -> None:
    # Asking for it would replace a training image's own build.
    required = metadata_of(wheel).get_all("Requires-Dist") or []
    assert not [text for text in required if re.match(r"torch([^-_\w]|$)", text)]
    extras = metadata_of(wheel).get_all("Provides-Extra") or []
    assert {"writer", "megatron", "dev"} <= set(extras)


def test_the_wheel_names_its_commands_and_licence(wheel: Path) -> None:
    commands = configparser.ConfigParser()
    commands.read_string(read(wheel, ".dist-info/entry_points.txt"))
    assert dict(commands["console_scripts"]) == {
        "writer": "shardwright_writer.cli:main",
        "shardwright-writer": "shardwright_writer.cli:main",
        "shardwright": "shardwright.cli:main",
    }
    assert metadata_of(wheel)["License-Expression"] == "Apache-2.0"
    assert "Apache License" in read(wheel, "LICENSE")


def test_make_tries_the_oldest_versions_that_we_promise() -> None:
    floors = {"==".join(text.split(",")[0].split(">=")) for text in PROJECT["dependencies"]}
    match = re.search(r"PROTOBUF_OLDEST := (.*)", (ROOT / "Makefile").read_text())
    assert match and set(match[1].split()) == floors


def test_source_folders_hide_no_other_package() -> None:
    # From the repository's root, `import proto` and `import writer` must not find our folders
    # as packages: with an __init__.py they would hide proto-plus and PyPI's writer.
    code = (
        "from importlib.util import find_spec;"
        "print([getattr(find_spec(name), 'origin', None) for name in ('proto', 'writer')])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert str(ROOT) not in result.stdout


@pytest.mark.parametrize("name", ["writer", "shardwright-writer"])
def test_the_installed_commands_run(name: str) -> None:
    command = Path(sys.executable).with_name(name)
    if not command.exists():
        pytest.skip("the project is not installed in this environment")
    result = subprocess.run([command, "--help"], capture_output=True, text=True, check=True)
    assert "EXIT STATUS" in result.stdout
