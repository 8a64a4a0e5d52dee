"""POSIX storage: openat below one folder fd, O_DIRECT where it works, fsync of file and folder.

Implements `storage.base` for local and network file systems; every call acts with the client's
file-system identity. Does not decide what is written when: that is pipeline's and commit's.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import stat
from typing import TYPE_CHECKING

from shardwright_proto.limits import BLOCK_BYTES
from shardwright_writer.refusal import Reason, Refusal, StorageRefusal
from shardwright_writer.storage.base import FileStat

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_libc = ctypes.CDLL(None, use_errno=True)
_libc.sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
_SYNC_FILE_RANGE_ALL = 7  # wait before, write, wait after
_NOT_SUPPORTED = (errno.EINVAL, errno.ESPIPE, errno.ENOSYS, errno.EOPNOTSUPP)

_OPEN_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


class PosixFolder:
    """A folder by its fd, acting as uid/gid. Owns the fd."""

    def __init__(self, fd: int, path: str, uid: int, gid: int) -> None:
        self.fd = fd
        self.path = path
        self._uid = uid
        self._gid = gid

    def create(self, name: str, mode: int) -> PosixFile:
        with _storage_errors("cannot create", self._label(name)), self._identity():
            fd = os.open(name, _OPEN_FLAGS | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=self.fd)
            try:
                os.fchmod(fd, mode)
                return PosixFile(fd, name, self._label(name))
            except BaseException:
                os.close(fd)
                raise

    def reopen(self, name: str) -> PosixFile:
        with _storage_errors("cannot reopen", self._label(name)), self._identity():
            fd = os.open(name, _OPEN_FLAGS, dir_fd=self.fd)
            try:
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    raise OSError(errno.EINVAL, "not a regular file")
                return PosixFile(fd, name, self._label(name))
            except BaseException:
                os.close(fd)
                raise

    def rename(self, source: str, target: str) -> None:
        with _storage_errors("cannot publish", self._label(target)), self._identity():
            os.rename(source, target, src_dir_fd=self.fd, dst_dir_fd=self.fd)

    def remove(self, name: str) -> None:
        with (
            _storage_errors("cannot remove", self._label(name)),
            self._identity(),
            contextlib.suppress(FileNotFoundError),
        ):
            os.unlink(name, dir_fd=self.fd)

    def sync(self) -> None:
        with _storage_errors("cannot sync folder", self.path):
            os.fsync(self.fd)

    def names(self) -> Sequence[str]:
        with _storage_errors("cannot list", self.path), self._identity():
            # A duplicate of the fd would share its read position with every other listing.
            fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.fd)
            try:
                return os.listdir(fd)
            finally:
                os.close(fd)

    def stat(self, name: str) -> FileStat | None:
        with _storage_errors("cannot stat", self._label(name)):
            try:
                found = os.stat(name, dir_fd=self.fd, follow_symlinks=False)
            except FileNotFoundError:
                return None
        return FileStat(found.st_ino, found.st_size, found.st_mtime, stat.S_ISREG(found.st_mode))

    def read(self, name: str, bytes_max: int) -> bytes | None:
        with _storage_errors("cannot read", self._label(name)), self._identity():
            try:
                fd = os.open(
                    name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=self.fd
                )
            except FileNotFoundError:
                return None
            except OSError as error:
                if error.errno == errno.ELOOP:  # a symlink: not followed, and not ours
                    return None
                raise
            with open(fd, "rb") as file:
                found = os.fstat(fd)
                if not stat.S_ISREG(found.st_mode) or found.st_size > bytes_max:
                    return None
                return file.read(bytes_max)

    def is_locked(self, name: str) -> bool:
        with _storage_errors("cannot test the lock of", self._label(name)), self._identity():
            try:
                fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=self.fd)
            except FileNotFoundError:
                return False
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            finally:
                os.close(fd)
            return False

    def free_bytes(self) -> int:
        with _storage_errors("cannot ask for free space in", self.path):
            found = os.fstatvfs(self.fd)
        return found.f_bavail * found.f_frsize

    def key(self) -> tuple[int, int]:
        """Return what tells this folder from every other: device and inode."""
        found = os.fstat(self.fd)
        return found.st_dev, found.st_ino

    def duplicate(self) -> PosixFolder:
        """Return the same folder with an fd of its own."""
        return PosixFolder(os.dup(self.fd), self.path, self._uid, self._gid)

    def close(self) -> None:
        os.close(self.fd)

    def _label(self, name: str) -> str:
        return f"{self.path}/{name}"

    @contextlib.contextmanager
    def _identity(self) -> Iterator[None]:
        """Act as the client: the kernel checks its rights and gives it the files.

        setfsuid is per thread, and takes root's file capabilities away while it lasts.
        """
        if os.geteuid() != 0 or self._uid == 0:
            yield
            return
        _libc.setfsgid(self._gid)
        _libc.setfsuid(self._uid)
        try:
            yield
        finally:
            _libc.setfsuid(0)
            _libc.setfsgid(os.getegid())


class PosixFile:
    """One temporary file, flocked; O_DIRECT until the file system refuses it."""

    def __init__(self, fd: int, name: str, label: str) -> None:
        self.name = name
        self.inode = os.fstat(fd).st_ino
        self._fd = fd
        self._label = label
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._direct = _set_direct(fd, True)

    def write_at(self, buffer: memoryview, offset: int) -> None:
        with _storage_errors("cannot write", self._label):
            done = 0
            while done < len(buffer):
                try:
                    written = os.pwrite(self._fd, buffer[done:], offset + done)
                except OSError as error:
                    # Some file systems take the O_DIRECT flag and refuse the write.
                    if error.errno != errno.EINVAL or not self._direct:
                        raise
                    self._direct = not _set_direct(self._fd, False)
                    continue
                if not self._direct:
                    self._write_through(offset + done, written)
                done += written
                if self._direct and written % BLOCK_BYTES:
                    done -= written % BLOCK_BYTES  # O_DIRECT goes on from an aligned place

    def read_at(self, buffer: memoryview, offset: int) -> int:
        with _storage_errors("cannot read back", self._label):
            done = 0
            while done < len(buffer):
                count = os.preadv(self._fd, [buffer[done:]], offset + done)
                done += count
                if count == 0 or count % BLOCK_BYTES:
                    break
            return done

    def sync_data(self) -> None:
        with _storage_errors("cannot sync", self._label):
            os.fdatasync(self._fd)

    def finish(self, size: int) -> None:
        with _storage_errors("cannot finish", self._label):
            if os.fstat(self._fd).st_size != size:
                os.ftruncate(self._fd, size)
            os.fsync(self._fd)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._fd)

    def _write_through(self, offset: int, count: int) -> None:
        """Keep buffered writes from piling up in the page cache."""
        if _libc.sync_file_range(self._fd, offset, count, _SYNC_FILE_RANGE_ALL) != 0:
            code = ctypes.get_errno()
            if code not in _NOT_SUPPORTED:
                raise OSError(code, os.strerror(code))
        with contextlib.suppress(OSError):
            os.posix_fadvise(self._fd, offset, count, os.POSIX_FADV_DONTNEED)


def check_inside(fd: int, roots: Sequence[str]) -> str:
    """Return the folder's path for messages if fd is one of roots or below one.

    Walks up by openat("..") and compares device and inode, so that neither symlinks nor another
    mount layout in the client's container can lead outside. Raises Refusal otherwise.
    """
    wanted = {(s.st_dev, s.st_ino) for s in map(os.stat, roots)}
    at = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=fd)
    try:
        while True:
            here = os.fstat(at)
            if (here.st_dev, here.st_ino) in wanted:
                return os.readlink(f"/proc/self/fd/{fd}")
            parent = os.open("..", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=at)
            os.close(at)
            at = parent
            above = os.fstat(at)
            if (above.st_dev, above.st_ino) == (here.st_dev, here.st_ino):
                break
    except OSError as error:
        raise StorageRefusal(
            error, "cannot walk up from", os.readlink(f"/proc/self/fd/{fd}")
        ) from None
    finally:
        os.close(at)
    raise Refusal(
        Reason.PERMISSION,
        f"{os.readlink(f'/proc/self/fd/{fd}')!r} is outside the writer's --root folders",
        f"save below one of {', '.join(roots)}, or start the writer with another --root",
    )


def _set_direct(fd: int, on: bool) -> bool:
    """Switch O_DIRECT; tell whether it is now as asked."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _storage_errors(doing: str, label: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageRefusal(error, doing, label) from error
