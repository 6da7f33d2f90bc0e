"""Write a file wholly or not at all: under another name first, renamed when it is on the disk."""

import errno
import os
import stat
from contextlib import suppress

_MODE = 0o666
_MOST_LINKS = 40


def check_target(path: str) -> None:
    """Check that a file can be written at ``path``, by making one beside it for a moment.

    Raises:
        OSError: If it cannot: the directory is missing or cannot be written, ``path`` is a directory, a device or
            a pipe, the name is too long.
    """
    target = own_target(path)
    with suppress(FileNotFoundError):
        os.lstat(target)
        if os.path.isdir(target):
            raise IsADirectoryError(None, "it is a directory", path)
        if not os.path.isfile(target):
            raise OSError(None, "it is no ordinary file", path)
    name = _name_beside(target)
    os.close(_create(name))
    os.unlink(name)


def write_whole(path: str, text: str) -> None:
    """Replace the file at ``path``; a reader sees the old one or the new one, also after a crash of the machine.

    A symbolic link stays one: the file that it names is replaced. One of another user, who may have put it into a
    folder for all users such as ``/tmp``, is not followed.

    Raises:
        OSError: If it cannot be written; the old file is there as before.
    """
    target = own_target(path)
    name = _name_beside(target)
    descriptor = _create(name)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise
    _sync_folder(os.path.dirname(target))


def own_target(path: str) -> str:
    """The path that ``path`` leads to, through symbolic links of this user and of root only.

    Raises:
        OSError: If a link is another user's, or links lead in a circle.
    """
    for _ in range(_MOST_LINKS):
        path = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
        try:
            descriptor = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return path
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISLNK(found.st_mode):
                return path
            if found.st_uid not in (0, os.geteuid()):
                raise PermissionError(errno.EPERM, "it is a symbolic link of another user", path)
            path = os.path.join(os.path.dirname(path), os.readlink("", dir_fd=descriptor))
        finally:
            os.close(descriptor)
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)


def _name_beside(target: str) -> str:
    return os.path.join(os.path.dirname(target), f".poprun-{os.getpid()}-{os.urandom(6).hex()}")


def _create(name: str) -> int:
    return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _MODE)


def _sync_folder(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
