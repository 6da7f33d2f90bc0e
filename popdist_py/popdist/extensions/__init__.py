"""The parts of popdist that are written in C: where each one is, and whether it is as old as its sources.

A build leaves them out where there is no C compiler; what they do is also written in Python, with the same bits.
In an editable checkout an extension lies beside its sources, and stays when these change, as by ``git pull``: so a
build writes a digest of the sources at the end of the file, where the loader of the system does not look.
"""

import hashlib
import warnings
from collections.abc import Iterable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_NUM_BYTES = 32


@cache
def find(name: str) -> Any:  # noqa: ANN401 - mypy knows no extension
    """The extension ``name``, as ``"popdist.optim._arithmetic"``.

    None where it was not built or is for another interpreter. None with a warning where it was built from other
    sources than those beside it.
    """
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        return None
    sources = sources_in(Path(spec.origin).parent)
    if sources and not _is_made_of(sources, Path(spec.origin)):
        _warn_of(Path(spec.origin))
        return None
    try:
        return import_module(name)
    except ImportError:
        return None


def sources_in(folder: Path) -> list[Path]:
    """The files in C there, and the headers that all extensions share; none where popdist comes from a wheel."""
    own = sorted(path for path in folder.iterdir() if path.suffix in (".c", ".h"))
    return own and own + sorted(Path(__file__).parent.glob("*.h"))


def digest_of(sources: Iterable[Path]) -> bytes:
    """What a build writes at the end of an extension."""
    digest = hashlib.blake2b(digest_size=_NUM_BYTES)
    for path in sources:
        digest.update(b"%s %d " % (path.name.encode(), path.stat().st_size))
        digest.update(path.read_bytes())
    return digest.digest()


def _is_made_of(sources: list[Path], extension: Path) -> bool:
    with extension.open("rb") as file:
        file.seek(-_NUM_BYTES, 2)
        return file.read() == digest_of(sources)


def _warn_of(extension: Path) -> None:
    from popdist.errors import PopdistWarning  # noqa: PLC0415 - a build reads this file where popdist is not installed

    warnings.warn(
        f"{extension} was built from other sources than those beside it, so popdist computes the same without it, "
        f"more slowly. Build it again: pip install --no-deps -e {extension.parents[3]}",
        PopdistWarning,
        stacklevel=3,
    )
