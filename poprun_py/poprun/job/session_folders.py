"""Remove what killed launchers of Open MPI left in the folder for temporary files.

PRRTE keeps a folder ``ompi.<process id>`` while it runs. A launcher that is killed leaves it, and the next one
that happens to get the same process id cannot start: "The PMIx server's listener thread failed to start".
"""

import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress

_PREFIX = "ompi."
_PLACES = ("TMPDIR", "TEMP", "TMP")  # in PRRTE's order


def session_parent(environ: Mapping[str, str]) -> str:
    """The folder in which a launcher that is started with ``environ`` keeps its own."""
    return next((environ[name] for name in _PLACES if environ.get(name)), "/tmp")  # noqa: S108 - PRRTE's choice


def remove_abandoned_sessions(parent: str) -> list[str]:
    """Remove every session folder in ``parent`` that is this user's and whose launcher has ended; their paths.

    A folder is left alone when it does not bear this machine's name: containers may share ``parent`` and not their
    process ids. A ``parent`` that cannot be read has none.
    """
    removed = list(_abandoned(parent, os.uname().nodename))
    if removed:
        import shutil  # noqa: PLC0415 - there is hardly ever one

        for folder in removed:
            shutil.rmtree(folder, ignore_errors=True)
    return removed


def _abandoned(parent: str, host: str) -> Iterator[str]:
    with suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            owner = entry.name.removeprefix(_PREFIX)
            if owner != entry.name and owner.isdecimal() and not os.path.exists(f"/proc/{owner}"):
                found = entry.stat(follow_symlinks=False)
                is_ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
                if is_ours and os.path.exists(f"{entry.path}/pmix.{host}.tool"):
                    yield entry.path
