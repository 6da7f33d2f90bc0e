"""The opening of files and folders that a user names, safe from links and folders of other users.

Symbolic links of root and of this user are followed. A link of another user is refused, because that user may have
put the link into a folder for all users, such as ``/tmp``. Each folder on the path is held open, so that nobody
can replace the folder by a link. A file is run, unpickled or overwritten by its name only if its folder belongs to
this user.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

_MODE: Final = 0o666
_FOLDER_MODE: Final = 0o775
_MOST_LINKS: Final = 40

FOLDER: Final = os.O_PATH | os.O_DIRECTORY
"""Flags for opening a folder in which a file or folder will be opened."""


@contextmanager
def opened_own_folder(path: str, *, makes: bool = False, may_be_for_all: bool = False) -> Iterator[int]:
    """A context that yields the opened folder ``path``, of this user or of root, where no other user can write.

    With ``may_be_for_all``, a folder such as ``/tmp`` is allowed too: all users can write there, but no user can
    replace files of another user.
    """
    with opened_parent(f"{path}/.", makes=makes) as (folder, _):
        status = os.fstat(folder)
        if status.st_uid not in (0, os.geteuid()):
            why = f"it belongs to another user (number {status.st_uid}): name a folder of your own"
            raise PermissionError(errno.EPERM, why, path)
        if status.st_mode & stat.S_IWOTH and not (may_be_for_all and status.st_mode & stat.S_ISVTX):
            raise PermissionError(
                errno.EPERM, "every user may write there: chmod o-w, or name another folder", path
            )
        yield folder


def own_folder_problem(path: str) -> str:
    """Return why ``path`` cannot be this user's folder; an empty text if it can be. Make the folder if missing."""
    try:
        with opened_own_folder(path, makes=True):
            return ""
    except OSError as error:
        return f"{error.filename}: {error.strerror}"


@contextmanager
def opened_parent(path: str, *, makes: bool = False) -> Iterator[tuple[int, str]]:
    """A context with the open folder of the file ``path``: yields the folder's descriptor and the file's name."""
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
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))  # noqa: TRY301 - handled like an error of os.open
    except OSError as error:
        os.close(folder)
        raise OSError(error.errno, error.strerror, os.path.normpath(path)) from None


def _names(path: str) -> list[str]:
    """Return the names in ``path``, last name first; before them ``.`` if the path is empty or ends with ``/``."""
    names = list(filter(None, path.split("/")))
    return [*reversed(names)] if names and not path.endswith("/") else [".", *reversed(names)]


def _target(folder: int, name: str, rest: list[str]) -> str | None:
    """Return the target of the symbolic link ``name`` in ``folder``; None if ``name`` is no link. Raise
    PermissionError if another user owns the link; the message has ``rest``, the path's following names.
    """
    try:
        link = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    except FileNotFoundError:
        return None
    try:
        status = os.fstat(link)
        if not stat.S_ISLNK(status.st_mode):
            return None
        target = os.readlink("", dir_fd=link)
    finally:
        os.close(link)
    if status.st_uid not in (0, os.geteuid()):
        place = _place(folder, name)
        leads_to = os.path.normpath(os.path.join(os.path.dirname(place), target, *reversed(rest)))
        raise PermissionError(
            errno.EPERM, f"{place} is a symbolic link of another user: if you mean what it names, give {leads_to}"
        )
    return target


def open_below(folder: int, name: str, flags: int, *, makes_folder: bool = False) -> int:
    """Open the file or folder ``name`` in ``folder``, but no link; with ``makes_folder``, make it if missing."""
    try:
        if makes_folder:
            with suppress(FileExistsError):
                os.mkdir(name, _FOLDER_MODE, dir_fd=folder)
        return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, _MODE, dir_fd=folder)
    except OSError as error:
        place = _place(folder, name)
        why = "it is a symbolic link" if os.path.islink(place) else error.strerror
        raise OSError(error.errno, why, place) from None


def _place(folder: int, name: str) -> str:
    return os.path.join(os.readlink(f"/proc/self/fd/{folder}"), name)
