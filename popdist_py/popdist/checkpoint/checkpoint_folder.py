"""A folder of checkpoints: how they are named, listed, made and removed. No torch.

A checkpoint is a directory named by its step, padded with zeros, so that any listing shows them in their order. It
is made under a name that starts with a dot and renamed when every byte is on the disk: under its own name it is
whole.
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
    except OSError as error:
        raise CheckpointError(f"{folder} is no folder of checkpoints: {error}") from error
    return sorted(int(match[1]) for name in names if (match := _NAME.fullmatch(name)))


def begin(folder: Path, step: int) -> Path:
    """Make an empty directory for the checkpoint of ``step``; only one job may do so in ``folder`` at a time."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for parent in (path.parent for path in missing):
        _sync(parent)
    for unfinished in folder.glob(".step-*"):  # left by a program that was killed
        shutil.rmtree(unfinished)
    partial = partial_of(folder, step)
    partial.mkdir()
    return partial


def partial_of(folder: Path, step: int) -> Path:
    """Where the checkpoint of ``step`` is while it is written."""
    return folder / f".{directory_of(folder, step).name}.partial"


def complete(folder: Path, step: int) -> None:
    """Give the checkpoint of ``step`` its name, when every byte of it is on the disk."""
    partial = partial_of(folder, step)
    _sync_tree(partial)
    partial.rename(directory_of(folder, step))
    _sync(folder)


def abandon(folder: Path, step: int) -> None:
    """Remove what was written of the checkpoint of ``step``, if it was begun."""
    shutil.rmtree(partial_of(folder, step), ignore_errors=True)


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
