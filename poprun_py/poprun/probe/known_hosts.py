"""Names of other hosts that this user's files know; they may be there or not."""

import os
import re
from collections.abc import Iterable, Iterator
from typing import Final

_FILES: Final = ("~/.ssh/config", "~/.ssh/known_hosts", "/etc/ssh/ssh_known_hosts", "/etc/hosts")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_MAX_BYTES: Final = 2**20


def known_hosts(files: Iterable[str] = _FILES) -> list[str]:
    """Names of hosts, in order of the alphabet; files that cannot be read are left out."""
    names: set[str] = set()
    for file in files:
        try:
            with open(os.path.expanduser(file), encoding="utf-8", errors="replace") as stream:
                names.update(names_in(os.path.basename(file), stream.read(_MAX_BYTES)))
        except OSError:
            continue
    return sorted(names)


def names_in(kind: str, text: str) -> Iterator[str]:
    """The names of hosts in the text of a file.

    Args:
        kind: ``config`` (ssh_config(5)), ``known_hosts`` (sshd(8)), or ``hosts`` (hosts(5)).
        text: What the file holds. Hashed names, patterns and addresses are left out.
    """
    for line in text.splitlines():
        words = line.partition("#")[0].split()
        if kind == "config":
            found = words[1:] if words and words[0].lower() == "host" else []
        elif kind == "hosts":
            found = words[1:]
        else:
            found = words[0].split(",") if words and words[0][0] not in "|@" else []
        yield from (name for name in found if _NAME.fullmatch(name) and not name.replace(".", "").isdigit())
