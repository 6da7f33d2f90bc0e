"""Safe access to the files in the folder of a pool: any user can write files there, so no file is trusted.

Another user may have made any file in the folder. Therefore a file is opened relative to the open folder, symbolic
links are not followed, and a pipe does not block. Only a regular file with one name is accepted. A file is written
under a new name that nobody can guess, and then renamed. Another user's file is never opened for writing.
"""

import fcntl
import os
import re
import secrets
import stat
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from poprun.devices.pool.place import opened_place
from poprun.errors import PoolError
from poprun.launch.process.process_tree import user_name

BUSY_SECONDS: Final = 120.0  # how long to wait for other processes, which each lock the folder for milliseconds
MAX_FILE_BYTES: Final = 4 * 2**20
_MAX_FILES: Final = 50_000
_KEY: Final = re.compile("([a-z]+)-([0-9a-f]{32})")
_NEW: Final = "new"
_SHORTEST_PAUSE_SECONDS: Final = 0.001
_LONGEST_PAUSE_SECONDS: Final = 0.02
_READ: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
_CREATE: Final = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_MODE: Final = 0o644  # everybody who may look into the folder reads its files


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolFile:
    """The contents and the owner of a file in the pool's folder, when the file was read."""

    uid: int
    data: bytes

    @property
    def is_own(self) -> bool:
        """Whether this process may change or remove the file, because its user owns the file or is root."""
        return os.geteuid() in (0, self.uid)


class PoolFolder:
    """The open folder of a machine's pool (record of leases). Methods raise PoolError if a system call fails."""

    def __init__(self, path: str, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    @contextmanager
    def alone(self, busy_seconds: float) -> Iterator[None]:
        """A context in which this process has locked the pool's folder, so no other process changes it."""
        deadline, pause_seconds = time.monotonic() + busy_seconds, _SHORTEST_PAUSE_SECONDS
        while True:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise PoolError(
                        f"pool {self.path}: others have kept it locked for {busy_seconds:g} s: try again"
                    ) from None
                time.sleep(pause_seconds)
                pause_seconds = min(2 * pause_seconds, _LONGEST_PAUSE_SECONDS)
        try:
            yield
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def keys(self, *kinds: str) -> list[tuple[str, str]]:
        """Return the sorted (kind, key) of all files of the folder named ``kind-key`` with a kind in ``kinds``."""
        names = []
        with self._errors(), os.scandir(self._descriptor) as entries:
            for number, entry in enumerate(entries):
                if number > _MAX_FILES:
                    raise PoolError(
                        f"pool {self.path}: more than {_MAX_FILES:,} files: remove those of ended jobs"
                    )
                match = _KEY.fullmatch(entry.name)
                if match and match[1] in kinds:
                    names.append((match[1], match[2]))
        return sorted(names)

    def read(self, kind: str, key: str) -> PoolFile | None:
        """Return the contents of the file ``kind-key`` in the pool's folder; None if there is no such file."""
        with self._opened(kind, key) as (descriptor, uid):
            if descriptor is None:
                return None
            with self._errors(), open(descriptor, "rb", closefd=False) as file:
                data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise self.damage(kind, key, uid, "it is too long")
        return PoolFile(uid=uid, data=data)

    def write(self, kind: str, key: str, data: bytes, *, uid: int | None = None, is_lasting: bool = False) -> None:
        """Write the file ``kind-key`` in one step for the owner ``uid``; if ``is_lasting``, sync it to disk."""
        if len(data) > MAX_FILE_BYTES:
            raise PoolError(f"pool {self.path}: a lease of so many virtual IPUs is too large for it")
        new = f"{_NEW}-{secrets.token_hex(16)}"
        with self._errors():
            descriptor = self._create(new)
            try:
                if uid is not None and uid != os.geteuid():
                    os.fchown(descriptor, uid, -1)
                with open(descriptor, "wb", closefd=False) as file:
                    file.write(data)
                if is_lasting:
                    os.fdatasync(descriptor)
                os.rename(new, f"{kind}-{key}", src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)
            except BaseException:
                self._unlink(new)
                raise
            finally:
                os.close(descriptor)

    def remove(self, kind: str, key: str) -> None:
        """Remove the file ``kind-key`` from the pool's folder, if there is such a file."""
        with self._errors():
            self._unlink(f"{kind}-{key}")

    def make_lock(self, kind: str, key: str, data: bytes = b"") -> int:
        """Make and lock the file ``kind-key``; return its descriptor. The file is locked while a copy is open."""
        with self._errors():
            descriptor = self._create(f"{kind}-{key}")
            try:
                os.write(descriptor, data)
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BaseException:
                os.close(descriptor)
                self._unlink(f"{kind}-{key}")
                raise
        return descriptor

    def is_locked(self, kind: str, key: str, uid: int | None = None) -> bool | None:
        """Return whether a process locks the file ``kind-key``; None if the user ``uid`` has no such file."""
        # A process that can only read the file can also try to lock the file.
        try:
            with self._opened(kind, key) as (descriptor, owner):
                if descriptor is None or (uid is not None and owner != uid):
                    return None
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except (OSError, PoolError):
            return None
        return False

    def remove_own(self, keeps: Mapping[str, Collection[str]]) -> None:
        """Remove this user's files named ``KIND-KEY`` from the pool folder, for each kind in ``keeps`` (such as
        ``lease``), if the key is not in ``keeps[KIND]``. Remove also this user's incomplete new files.
        """
        for kind, key in self.keys(_NEW, *keeps):
            if key not in keeps.get(kind, ()):
                with suppress(OSError):
                    status = os.stat(f"{kind}-{key}", dir_fd=self._descriptor, follow_symlinks=False)
                    if status.st_uid == os.geteuid():
                        self._unlink(f"{kind}-{key}")

    def damage(self, kind: str, key: str, uid: int, how: str) -> PoolError:
        """Return the PoolError for a damaged file of the user ``uid``; ``how`` says what is wrong with it."""
        file = f"{self.path}/{kind}-{key}"
        return PoolError(
            f"pool {self.path}: {kind}-{key} is not as poprun writes it ({how}), and was left as it is. It "
            f"belongs to {user_name(uid)}, who can remove it, as root can: rm {file}"
        )

    @contextmanager
    def _opened(self, kind: str, key: str) -> Iterator[tuple[int | None, int]]:
        """A context with the descriptor (None if there is no such file) and owner of a file, open to read."""
        name = f"{kind}-{key}"
        with self._errors():
            try:
                descriptor = os.open(name, _READ, dir_fd=self._descriptor)
            except FileNotFoundError:
                yield None, 0
                return
            except OSError as error:
                status = os.stat(name, dir_fd=self._descriptor, follow_symlinks=False)
                raise self.damage(kind, key, status.st_uid, error.strerror or "it cannot be opened") from None
            try:
                status = os.fstat(descriptor)
                if not stat.S_ISREG(status.st_mode):
                    raise self.damage(kind, key, status.st_uid, "it is no plain file")
                if status.st_nlink > 1:
                    raise self.damage(kind, key, status.st_uid, "it has several names")
                yield descriptor, status.st_uid
            finally:
                os.close(descriptor)

    def _create(self, name: str) -> int:
        descriptor = os.open(name, _CREATE, _MODE, dir_fd=self._descriptor)
        os.fchmod(descriptor, _MODE)
        return descriptor

    def _unlink(self, name: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._descriptor)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except BlockingIOError:
            raise
        except OSError as error:
            raise PoolError(f"pool {self.path}: {error.filename or 'the folder'}: {error.strerror}") from None


@contextmanager
def opened_folder(path: str, *, makes: bool) -> Iterator[PoolFolder]:
    """A context with the open folder ``path`` of a pool. Raises PoolError if the folder is not safe to use."""
    with opened_place(path, makes=makes) as descriptor:
        yield PoolFolder(path, descriptor)
