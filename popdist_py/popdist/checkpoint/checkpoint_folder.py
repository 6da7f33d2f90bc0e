"""A folder of checkpoints: how checkpoints are named, listed, made and removed. This module needs no torch.

A checkpoint is a directory named by its step, padded with zeros, so that any listing shows checkpoints in order.
The directory is made under a name that starts with a dot, and renamed when every byte is on the disk. So a
checkpoint with its final name is complete.
"""

import os
import re
import shutil
from pathlib import Path
from typing import Final

from popdist.errors import CheckpointError

_DIGITS: Final = 12
_NAME: Final = re.compile(rf"step-(\d{{{_DIGITS}}})")

LAST_STEP: Final = 10**_DIGITS - 1


def name_of(path: object) -> str:
    """Return ``path``, a folder's path, as a str; raise CheckpointError if it is no str and no os.PathLike."""
    if not isinstance(path, str | os.PathLike):
        raise CheckpointError(f"{path!r} is no folder: expected its path as a str or a pathlib.Path")
    return str(os.fspath(path))


def directory_of(folder: Path, step: int) -> Path:
    """Return the directory of the checkpoint of ``step``, whether the checkpoint exists or not."""
    return folder / f"step-{step:0{_DIGITS}d}"


def steps_in(folder: Path) -> list[int]:
    """Return the steps of all checkpoints in ``folder``, ascending; an empty list if there is no ``folder``."""
    try:
        names = os.listdir(folder)  # noqa: PTH208 - only names are needed, no paths
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{folder} is no folder of checkpoints: {error}") from error
    return sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))


def begin(folder: Path, step: int) -> Path:
    """Make and return a directory for the checkpoint of ``step``, and first remove all unfinished checkpoints.
    Only one job may call this at a time, because the directories of another job would be removed.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for parent in (path.parent for path in missing):
        _sync(parent)
    for unfinished in folder.glob(".step-*"):  # a killed program has left these directories
        shutil.rmtree(unfinished)
    partial = partial_of(folder, step)
    partial.mkdir()
    return partial


def partial_of(folder: Path, step: int) -> Path:
    """Return the directory in which the checkpoint of ``step`` is written until it is complete."""
    return folder / f".{directory_of(folder, step).name}.partial"


def complete(folder: Path, step: int) -> None:
    """Rename the checkpoint of ``step`` to its final name after every byte of the checkpoint is on the disk."""
    partial = partial_of(folder, step)
    _sync_tree(partial)
    partial.rename(directory_of(folder, step))
    _sync(folder)


def abandon(folder: Path, step: int) -> None:
    """Remove the unfinished checkpoint of ``step``, if there is one."""
    shutil.rmtree(partial_of(folder, step), ignore_errors=True)


def remove(folder: Path, step: int) -> None:
    """Remove the checkpoint of ``step``; rename it first, so that a half-removed checkpoint is never found."""
    directory = directory_of(folder, step)
    shutil.rmtree(directory.rename(folder / f".{directory.name}.old"))


def keep_last(folder: Path, count: int) -> None:
    """Remove all checkpoints except the last ``count``, which is at least 1."""
    for step in steps_in(folder)[:-count]:
        remove(folder, step)


def _sync_tree(directory: Path) -> None:
    """Wait until ``directory`` and every file in ``directory`` are on the disk."""
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
