"""The C extension of popdist, and the check that it was built from the C sources in this folder.

A build omits the extension if there is no C compiler; Python code then computes the same bits. The extension does
not change when its sources change, as by ``git pull``. So a build writes a digest of the sources at the end of the
file, where the system's loader does not read.
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
def find(name: str = "popdist.ground.extension._extension") -> Any:
    """Return the C extension; None if it was built for another Python, or, with a warning, from other sources."""
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        return None
    sources = sources_in(Path(spec.origin).parent)
    if sources and not _is_made_of(sources, Path(spec.origin)):
        _warn_of(Path(spec.origin))
        return None
    try:
        return import_module(name)
    except ImportError:  # the extension was built for another interpreter
        return None


def sources_in(folder: Path) -> list[Path]:
    """Return the C files in ``folder``; empty if popdist was installed from a wheel."""
    return sorted(path for path in folder.iterdir() if path.suffix in (".c", ".h"))


def digest_of_sources(sources: Iterable[Path]) -> bytes:
    """Return the digest of the C sources, which a build writes at the end of the extension's file."""
    digest = hashlib.blake2b(digest_size=_NUM_BYTES)
    for path in sources:
        digest.update(b"%s %d " % (path.name.encode(), path.stat().st_size))
        digest.update(path.read_bytes())
    return digest.digest()


def _is_made_of(sources: list[Path], extension: Path) -> bool:
    with extension.open("rb") as file:
        file.seek(-_NUM_BYTES, 2)
        return file.read() == digest_of_sources(sources)


def _warn_of(extension: Path) -> None:
    from popdist.errors import PopdistWarning  # a build runs this file alone, before popdist is installed

    warnings.warn(
        f"{extension} was built from other sources than those beside it, so popdist computes the same without it, "
        f"more slowly. Build it again: pip install --no-deps -e {extension.parents[4]}",
        PopdistWarning,
        stacklevel=3,
    )
