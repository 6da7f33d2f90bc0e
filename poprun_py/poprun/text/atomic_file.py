"""Atomic writing of files at a path that a user typed: the file is complete, or is not there at all."""

import os
import stat
from contextlib import suppress

from popdist.ground.trusted_paths import open_below, opened_parent


def check_target(path: str) -> None:
    """Raise OSError if no file can be written at ``path``; make and remove a temporary file to find that out."""
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
    """Replace the file at ``path`` atomically: a reader finds the old text or ``text``, even after a crash."""
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
