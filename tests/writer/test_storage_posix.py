"""POSIX storage: what commit relies on, on the disk under pytest's folder and on a tmpfs."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from shardwright_writer.arena import anonymous_buffer
from shardwright_writer.refusal import Reason, Refusal, StorageRefusal
from shardwright_writer.storage.posix import PosixFolder, check_inside

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root: mounts, other users")


def open_folder(path: Path, uid: int = os.getuid(), gid: int = os.getgid()) -> PosixFolder:
    return PosixFolder(os.open(path, os.O_RDONLY | os.O_DIRECTORY), str(path), uid, gid)


@pytest.fixture(params=["disk", "tmpfs"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    if request.param == "disk":
        yield tmp_path
        return
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a tmpfs")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", tmp_path], check=True)
    yield tmp_path
    subprocess.run(["umount", "-l", tmp_path], check=True)


def test_what_is_written_and_finished_has_its_bytes_size_and_mode(place: Path) -> None:
    folder = open_folder(place)
    file = folder.create("a", 0o640)
    buffer = anonymous_buffer(8192)
    buffer[:] = bytes(range(256)) * 32
    file.write_at(buffer[:4096], 4096)
    file.write_at(buffer[4096:], 0)
    file.sync_data()
    file.finish(5000)
    file.close()
    assert (place / "a").read_bytes() == (bytes(range(256)) * 32)[:5000]
    assert (place / "a").stat().st_mode & 0o777 == 0o640


def test_a_file_is_locked_while_its_writer_lives(place: Path) -> None:
    folder = open_folder(place)
    file = folder.create("a", 0o600)
    assert folder.is_locked("a")
    file.close()
    assert not folder.is_locked("a")
    assert not folder.is_locked("missing")


def test_an_existing_name_or_a_symlink_is_never_opened_for_writing(place: Path) -> None:
    folder = open_folder(place)
    (place / "old").write_text("old")
    (place / "link").symlink_to(place / "old")
    for name in ("old", "link"):
        with pytest.raises(StorageRefusal, match="cannot create"):
            folder.create(name, 0o600)
    with pytest.raises(StorageRefusal, match="cannot reopen"):
        folder.reopen("link")
    assert folder.read("link", 100) is None
    assert folder.read("old", 100) == b"old"


def test_a_full_file_system_is_named_with_the_file(place: Path) -> None:
    if place.stat().st_dev == place.parent.stat().st_dev:
        pytest.skip("only on the small tmpfs")
    folder = open_folder(place)
    file = folder.create("big", 0o600)
    buffer = anonymous_buffer(1 << 20)
    with pytest.raises(StorageRefusal, match=r"big.*ENOSPC") as refused:
        for index in range(9):
            file.write_at(buffer, index << 20)
    assert refused.value.reason is Reason.NO_SPACE


def test_removing_a_missing_name_is_no_error_and_stat_says_none(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)
    folder.remove("missing")
    assert folder.stat("missing") is None
    assert folder.read("missing", 10) is None


def test_a_fifo_is_neither_read_nor_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    assert open_folder(tmp_path).read("fifo", 10) is None


def test_folders_below_a_root_are_inside_and_others_are_not(tmp_path: Path) -> None:
    (tmp_path / "root" / "deep").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "root" / "way-out").symlink_to(tmp_path / "other")
    inside = os.open(tmp_path / "root" / "deep", os.O_RDONLY)
    assert check_inside(inside, [str(tmp_path / "root")]).endswith("deep")
    for outside in (tmp_path / "other", tmp_path / "root" / "way-out", tmp_path):
        with pytest.raises(Refusal, match="outside the writer's --root"):
            check_inside(os.open(outside, os.O_RDONLY), [str(tmp_path / "root")])


@needs_root
def test_files_belong_to_the_client_and_its_rights_are_the_kernel_s_to_check(
    tmp_path: Path,
) -> None:
    tmp_path.chmod(0o755)
    own = tmp_path / "own"
    own.mkdir()
    os.chown(own, 1234, 1234)
    folder = open_folder(own, uid=1234, gid=1234)
    folder.create("a", 0o644).close()
    assert (own / "a").stat().st_uid == 1234
    foreign = tmp_path / "foreign"
    foreign.mkdir(mode=0o755)
    with pytest.raises(StorageRefusal) as refused:
        open_folder(foreign, uid=1234, gid=1234).create("a", 0o644)
    assert refused.value.reason is Reason.PERMISSION
    assert os.access(foreign, os.W_OK), "root's own rights must be back"


def test_a_lock_dies_with_its_process(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    script = (
        "import fcntl, os, sys; fd = os.open(sys.argv[1], os.O_RDWR);"
        "fcntl.flock(fd, fcntl.LOCK_EX); print('locked', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "a")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        folder = open_folder(tmp_path)
        assert folder.is_locked("a")
        holder.kill()
        holder.wait()
        assert not folder.is_locked("a")
