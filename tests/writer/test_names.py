"""Which temporary files are litter, and which some live save still wants."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

from shardwright_writer.names import (
    Owner,
    belongs_to,
    leftovers,
    process_start_time,
    temporary_name,
)
from shardwright_writer.storage.posix import PosixFolder

if TYPE_CHECKING:
    from pathlib import Path

SAVE = "0123456789abcdef" * 2


def folder_of(path: Path) -> PosixFolder:
    return PosixFolder(os.open(path, os.O_RDONLY), str(path), os.getuid(), os.getgid())


def owner_of(pid: int) -> Owner:
    return Owner(pid, process_start_time(pid))


def dead_owner() -> Owner:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        owner = owner_of(process.pid)
        process.kill()
        process.wait()
    return owner


def test_names_fit_a_directory_entry_and_are_recognised() -> None:
    name = temporary_name(SAVE, Owner(4_000_000, 10**12), 99_999)
    assert len(name) < 256
    assert belongs_to(name, SAVE)
    assert not belongs_to(name, "f" * 32)
    assert not belongs_to("model.safetensors", SAVE)


def test_a_dead_trainers_unlocked_file_is_left_over(tmp_path: Path) -> None:
    name = temporary_name(SAVE, dead_owner(), 0)
    (tmp_path / name).touch()
    assert leftovers(folder_of(tmp_path), frozenset()) == [name]


def test_nothing_of_a_live_save_or_a_live_trainer_is_left_over(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    (tmp_path / temporary_name(SAVE, owner_of(os.getpid()), 0)).touch()
    assert leftovers(folder, frozenset()) == []
    other = "f" * 32
    (tmp_path / temporary_name(other, dead_owner(), 0)).touch()
    assert leftovers(folder, frozenset({other})) == []


def test_a_locked_file_is_not_left_over_though_its_trainer_died(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    file = folder.create(temporary_name(SAVE, dead_owner(), 0), 0o600)
    assert leftovers(folder, frozenset()) == []
    file.close()
    assert len(leftovers(folder, frozenset())) == 1


def test_an_earlier_boot_of_this_host_left_everything_behind(tmp_path: Path) -> None:
    parts = temporary_name(SAVE, owner_of(os.getpid()), 0).split("-")
    parts[1] = "00000000"
    (tmp_path / "-".join(parts)).touch()
    assert leftovers(folder_of(tmp_path), frozenset()) == ["-".join(parts)]


def test_another_hosts_file_is_left_over_only_after_a_day(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    tag = owner_of(os.getpid()).tag()
    name = f".{SAVE}.{'0' * 8}{tag[8:]}.0.swtmp"
    (tmp_path / name).touch()
    assert leftovers(folder, frozenset()) == []
    day_ago = os.stat(tmp_path / name).st_mtime - 25 * 3600
    os.utime(tmp_path / name, (day_ago, day_ago))
    assert leftovers(folder, frozenset()) == [name]


def test_a_users_file_of_a_similar_name_is_never_touched(tmp_path: Path) -> None:
    for name in ("x.swtmp", f".{SAVE}.swtmp", ".hidden.0.swtmp"):
        (tmp_path / name).touch()
    assert leftovers(folder_of(tmp_path), frozenset()) == []
