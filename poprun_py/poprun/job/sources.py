"""Lines of the programs' source, for their stacks: read where a file system that hangs cannot hold poprun up."""

import linecache
import os
import threading
from collections.abc import Collection

_MOST_SECONDS = 1.0

Place = tuple[str, int]
"""A file and the number of a line in it."""


def read_lines(places: Collection[Place]) -> dict[Place, str]:
    """The lines at ``places``; those that cannot be read, or not in a second, are left out.

    A program often hangs because of the file system that its source lies on, so a thread reads.
    """
    found: dict[Place, str] = {}
    reader = threading.Thread(target=_read, args=(sorted(places), found), name="poprun-sources", daemon=True)
    reader.start()
    reader.join(_MOST_SECONDS)
    return dict(found)


def _read(places: Collection[Place], found: dict[Place, str]) -> None:
    for file, line in places:
        if os.path.isfile(file):  # a pipe would be waited for
            text = linecache.getline(file, line).strip()
            found[file, line] = "".join(letter if letter.isprintable() else " " for letter in text)
