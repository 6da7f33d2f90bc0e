"""Files that poprun writes: where the path that a user typed leads, and text that is written wholly or not at all.

Symbolic links of root and of this user are followed. One of another user is refused: he may have put it into a
folder for all users, such as ``/tmp``. Folders are held open on the way, so that nobody can replace one by a link.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_MODE = 0o666
_MOST_LINKS = 40

FOLDER = os.O_PATH | os.O_DIRECTORY  # flags of a folder in which something is to be opened


@contextmanager
def opened_parent(path: str, *, makes: bool = False) -> Iterator[tuple[int, str]]:
    """Open the folder of the file at ``path`` for the length of a block: its descriptor, and the file's name."""
    folder, name = _reach(path, makes=makes)
    try:
        yield folder, name
    finally:
        os.close(folder)


def _reach(path: str, *, makes: bool) -> tuple[int, str]:
    folder = os.open("/" if path.startswith("/") else ".", FOLDER | os.O_CLOEXEC)
    names, num_links = _names(path), 0
    try:
        while num_links <= _MOST_LINKS:
            name = names.pop()
            target = _target(folder, name, names)
            if target is not None:
                num_links += 1
                names += _names(target)
                if not target.startswith("/"):
                    continue
                name = "/"
            elif not names:
                return folder, name
            above, folder = folder, open_below(folder, name, FOLDER, makes_folder=makes)
            os.close(above)
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))  # noqa: TRY301 - as an error on the way is
    except OSError as error:
        os.close(folder)
        raise OSError(error.errno, error.strerror, os.path.normpath(path)) from None


def _names(path: str) -> list[str]:
    """The names of a path, last one first; a path that is empty or ends with a slash leads to ``.``."""
    names = list(filter(None, path.split("/")))
    return [*reversed(names)] if names and not path.endswith("/") else [".", *reversed(names)]


def _target(folder: int, name: str, rest: list[str]) -> str | None:
    """The target of the link ``name``, or None if it is none; ``rest`` are the names behind it, last one first."""
    try:
        link = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    except FileNotFoundError:
        return None
    try:
        found = os.fstat(link)
        if not stat.S_ISLNK(found.st_mode):
            return None
        target = os.readlink("", dir_fd=link)
    finally:
        os.close(link)
    if found.st_uid not in (0, os.geteuid()):
        place = _place(folder, name)
        leads_to = os.path.normpath(os.path.join(os.path.dirname(place), target, *reversed(rest)))
        raise PermissionError(
            errno.EPERM, f"{place} is a symbolic link of another user: if you mean what it names, give {leads_to}"
        )
    return target


def open_below(folder: int, name: str, flags: int, *, makes_folder: bool = False) -> int:
    """Open ``name``, which must be no link, in a folder; ``makes_folder`` makes a folder of that name first."""
    try:
        if makes_folder:
            with suppress(FileExistsError):
                os.mkdir(name, dir_fd=folder)
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, _MODE, dir_fd=folder)
    except OSError as error:
        place = _place(folder, name)
        why = "it is a symbolic link" if os.path.islink(place) else error.strerror
        raise OSError(error.errno, why, place) from None


def _place(folder: int, name: str) -> str:
    return os.path.join(os.readlink(f"/proc/self/fd/{folder}"), name)


def check_target(path: str) -> None:
    """Check that an ordinary file can be written at ``path``, by making one beside it for a moment."""
    with opened_parent(path) as (folder, name):
        with suppress(FileNotFoundError):
            mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
            if stat.S_ISDIR(mode):
                raise IsADirectoryError(None, "it is a directory", path)
            if not stat.S_ISREG(mode):
                raise OSError(None, "it is no ordinary file", path)
        temporary = _temporary_name()
        os.close(open_below(folder, temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        os.unlink(temporary, dir_fd=folder)


def write_whole(path: str, text: str) -> None:
    """Replace the file at ``path``; a reader sees the old one or the new one, even after the machine crashed."""
    with opened_parent(path) as (folder, name):
        temporary = _temporary_name()
        descriptor = open_below(folder, temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary, dir_fd=folder)
            raise
        _sync(folder)


def _temporary_name() -> str:
    return f".poprun-{os.getpid()}-{os.urandom(6).hex()}"


def _sync(folder: int) -> None:
    descriptor = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
