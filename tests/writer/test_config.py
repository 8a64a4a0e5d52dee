from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from shardwright_writer.config import Config, ConfigError, find_socket, load_config, parse_size
from shardwright_writer.memory import cgroup_limits, derive_memory_budget

if TYPE_CHECKING:
    from collections.abc import Mapping


def load(folder: Path, environment: Mapping[str, str] | None = None, **options: Any) -> Config:
    defaults = {
        "socket": str(folder / "w.sock"),
        "memory_budget": 1 << 30,
        "roots": [str(folder)],
        "node_local": True,
    }
    return load_config(defaults | options, environment or {}).config


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4GiB", 4 << 30),
        ("256MiB", 256 << 20),
        ("1G", 1 << 30),
        ("1g", 1 << 30),
        ("512 KB", 512 << 10),
        ("1.5T", 3 << 39),
        ("1048576", 1 << 20),
        ("70B", 70),
    ],
)
def test_sizes_are_powers_of_two_in_every_spelling(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1G", "4 GiBs", "1e9", "four"])
def test_what_is_no_size_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ConfigError, match="examples: 4GiB"):
        parse_size(text)


def test_the_command_line_beats_the_environment_beats_the_default(tmp_path: Path) -> None:
    environment = {
        "SHARDWRIGHT_WRITER_IO_THREADS": "3",
        "SHARDWRIGHT_WRITER_DRAIN_TIMEOUT_S": "7.5",
        "SHARDWRIGHT_WRITER_ALLOW_UIDS": "1000, 1001",
        "SHARDWRIGHT_WRITER_ROOTS": f"{tmp_path}:/tmp",
        "SHARDWRIGHT_WRITER_MEMORY_BUDGET": "128MiB",
        "SHARDWRIGHT_WRITER_NODE_LOCAL": "yes",
    }
    config = load(
        tmp_path, environment, io_threads=5, roots=[], memory_budget=None, node_local=None
    )
    assert config.io_threads == 5
    assert config.drain_timeout_s == 7.5
    assert config.allow_uids == (1000, 1001)
    assert config.roots == (str(tmp_path), "/tmp")
    assert config.memory_budget == 128 << 20
    assert config.reattach_timeout_s == 30


def test_a_wrong_environment_variable_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="SHARDWRIGHT_WRITER_MEMORY_BUDGET: 'much'"):
        load(tmp_path, {"SHARDWRIGHT_WRITER_MEMORY_BUDGET": "much"}, memory_budget=None)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("memory_budget", 1 << 20, "memory_budget is 1048576"),
        ("io_threads", 0, "io_threads is 0"),
        ("drain_timeout_s", -1.0, "drain_timeout_s is -1"),
        ("drain_timeout_s", float("nan"), "drain_timeout_s is nan"),
        ("allow_uids", [-1], "allow_uids holds a number that is no id"),
        ("log_format", "xml", "log_format 'xml' is neither"),
        ("node_local", False, "say --node-local"),
        ("roots", ["/does/not/exist"], "--root /does/not/exist is not an existing folder"),
        ("roots", [__file__], "is not an existing folder"),
    ],
)
def test_every_option_has_bounds(tmp_path: Path, option: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, **{option: value})


def test_no_root_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no --root"):
        load(tmp_path, roots=[])


def test_roots_are_resolved_when_the_writer_starts(tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir()
    (tmp_path / "link").symlink_to(real)
    assert load(tmp_path, roots=[str(tmp_path / "link"), str(real)]).roots == (str(real),)


def test_a_socket_path_that_leaves_no_room_for_the_servers_own_is_refused(tmp_path: Path) -> None:
    longest = "/" + "s" * 87
    assert load(tmp_path, socket=longest).socket == longest
    assert len(f"{load(tmp_path, socket=longest).runtime_folder}/grpc.999999.sock") <= 107
    with pytest.raises(ConfigError, match="has 89 bytes, at most 88 are possible"):
        load(tmp_path, socket=longest + "s")


def test_a_relative_socket_path_is_made_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load(Path("/tmp"), socket="w.sock").socket == f"{os.getcwd()}/w.sock"


def test_a_config_survives_the_way_to_supervisor_and_server(tmp_path: Path) -> None:
    config = load(tmp_path, allow_uids=[1, 2], log_format="json", io_threads=3)
    assert Config.from_json(config.to_json()) == config


def test_a_config_cannot_be_changed(tmp_path: Path) -> None:
    config = load(tmp_path)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.io_threads = 4  # type: ignore[misc]


def test_a_command_looks_where_it_is_told_then_where_a_client_would() -> None:
    assert find_socket("/a", {"SHARDWRIGHT_WRITER_SOCKET": "/b"}) == "/a"
    both = {"SHARDWRIGHT_WRITER_SOCKET": "/b", "SHARDWRIGHT_ENDPOINT": "unix:///c"}
    assert find_socket(None, both) == "/b"
    assert find_socket(None, {"SHARDWRIGHT_ENDPOINT": "unix:///c"}) == "/c"
    with pytest.raises(ConfigError, match="not unix://PATH"):
        find_socket(None, {"SHARDWRIGHT_ENDPOINT": "tcp://host:1"})


# --- the default memory budget ------------------------------------------------------------------


def make_proc(folder: Path, cgroup: str, available_kib: int = 64 << 20) -> str:
    (folder / "proc/self").mkdir(parents=True)
    (folder / "proc/self/cgroup").write_text(cgroup)
    (folder / "proc/meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {available_kib} kB\n")
    return str(folder / "proc")


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_tightest_limit_between_our_cgroup_v2_and_the_root_counts(tmp_path: Path) -> None:
    proc = make_proc(tmp_path, "0::/slice/pod/container\n")
    groups = tmp_path / "cgroup"
    write(groups / "slice/pod/container/memory.max", "max\n")
    write(groups / "slice/pod/memory.max", f"{8 << 30}\n")
    write(groups / "slice/memory.max", f"{32 << 30}\n")
    budget, source = derive_memory_budget(proc, str(groups))
    assert budget == 2 << 30
    assert "memory.max (8192 MiB)" in source


def test_a_container_that_sees_only_its_own_cgroup_as_the_root_finds_its_limit(
    tmp_path: Path,
) -> None:
    proc = make_proc(tmp_path, "0::/../../kubepods/pod7\n")
    write(tmp_path / "cgroup/memory.max", f"{4 << 30}\n")
    assert derive_memory_budget(proc, str(tmp_path / "cgroup"))[0] == 1 << 30


def test_cgroup_v1_limits_count_and_its_no_limit_does_not(tmp_path: Path) -> None:
    proc = make_proc(tmp_path, "5:cpu:/job\n4:memory:/job\n")
    base = tmp_path / "cgroup/memory"
    write(base / "memory.limit_in_bytes", "9223372036854771712\n")
    assert cgroup_limits(proc, str(tmp_path / "cgroup")) == []
    write(base / "job/memory.limit_in_bytes", f"{1 << 30}\n")
    assert derive_memory_budget(proc, str(tmp_path / "cgroup"))[0] == 256 << 20


def test_without_a_limit_available_memory_counts_within_bounds(tmp_path: Path) -> None:
    nothing = str(tmp_path / "cgroup")
    for name, available_kib, budget in [
        ("usual", 8 << 20, 2 << 30),
        ("large", 1 << 30, 16 << 30),
        ("small", 100 << 10, 64 << 20),
    ]:
        proc = make_proc(tmp_path / name, "0::/\n", available_kib)
        assert derive_memory_budget(proc, nothing)[0] == budget
    assert derive_memory_budget(str(tmp_path / "none"), nothing)[0] == 64 << 20


def test_this_machine_has_a_budget() -> None:
    budget, source = derive_memory_budget()
    assert 64 << 20 <= budget <= 16 << 30
    assert source
