"""A folder of checkpoints: how they are named, listed, made and removed. No torch.

A checkpoint is a directory named by its step, padded with zeros, so that any listing shows them in their order. It
is made under a name that starts with a dot and renamed when every byte is on the disk: under its own name it is
whole.
"""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

from popdist.errors import CheckpointError

_DIGITS: Final = 12
_NAME: Final = re.compile(rf"step-(\d{{{_DIGITS}}})")

LAST_STEP: Final = 10**_DIGITS - 1


def name_of(path: object) -> str:
    """The path of a folder as text; an error if the program gave no path."""
    if not isinstance(path, str | os.PathLike):
        raise CheckpointError(f"{path!r} is no folder: expected its path as a str or a pathlib.Path")
    return str(os.fspath(path))


def directory_of(folder: Path, step: int) -> Path:
    """Where the checkpoint of ``step`` is, or would be."""
    return folder / f"step-{step:0{_DIGITS}d}"


def steps_in(folder: Path) -> list[int]:
    """The steps of all checkpoints in ``folder``, ascending; none when it does not exist."""
    try:
        names = os.listdir(folder)  # noqa: PTH208 - names, not paths
    except FileNotFoundError:
        return []
    return sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))


def create(folder: Path, step: int, write: Callable[[Path], None]) -> Path:
    """Make the checkpoint of ``step``, whole or not at all; only one job may do so in ``folder`` at a time."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for unfinished in folder.glob(".step-*"):  # left by a program that was killed
        shutil.rmtree(unfinished)
    directory = directory_of(folder, step)
    partial = folder / f".{directory.name}.partial"
    partial.mkdir()
    try:
        write(partial)
        _sync_tree(partial)
        partial.rename(directory)
    except Exception:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    for parent in (folder, *(path.parent for path in missing)):
        _sync(parent)
    return directory


def remove(folder: Path, step: int) -> None:
    """Remove the checkpoint of ``step``; it loses its name first, so that no half of it is ever found."""
    directory = directory_of(folder, step)
    shutil.rmtree(directory.rename(folder / f".{directory.name}.old"))


def keep_last(folder: Path, count: int) -> None:
    """Remove all checkpoints but the last ``count``, which is at least 1."""
    for step in steps_in(folder)[:-count]:
        remove(folder, step)


def _sync_tree(directory: Path) -> None:
    """Wait until ``directory`` and every file in it is on the disk."""
    for parent, _, names in os.walk(directory):
        for name in names:
            _sync(Path(parent, name))
        _sync(Path(parent))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
