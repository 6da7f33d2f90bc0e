"""The token that lets clients in to a server of virtual IPUs: a file of the user's own, on both sides the same."""

import os
import secrets
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from poprun.errors import ServerError
from poprun.process.users import user_name

TOKEN_VARIABLE: Final = "POPRUN_VIPU_TOKEN_FILE"  # noqa: S105 - the name of a file, no secret

_TOKEN_BYTES: Final = 32
_LEAST_LETTERS: Final = 32
_MOST_LETTERS: Final = 512
_OTHERS: Final = 0o077


def token_file(environ: Mapping[str, str]) -> str:
    """Where the token is: where a variable says, else in the folder of the user's settings."""
    named = environ.get(TOKEN_VARIABLE)
    settings = environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    return os.path.abspath(named or os.path.join(settings, "poprun", "vipu-token"))


def read_token(file: str) -> str:
    """The token in ``file``.

    Raises:
        ServerError: If it is not there, others may read it, it is somebody else's, or it holds no token.
    """
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(descriptor, "rb") as opened:
            found = os.fstat(descriptor)
            text = opened.read(_MOST_LETTERS + 2).strip()
    except FileNotFoundError:
        raise ServerError(
            f"there is no token of a server of virtual IPUs at {file}: vipu serve makes one where it runs; copy "
            f"it from there, or name its file with {TOKEN_VARIABLE}"
        ) from None
    except OSError as error:
        raise ServerError(f"token {file}: {error.strerror}") from None
    if not stat.S_ISREG(found.st_mode):
        raise ServerError(f"token {file}: this is no plain file")
    if found.st_uid not in (os.geteuid(), 0):
        raise ServerError(f"token {file}: it belongs to {user_name(found.st_uid)}: make a copy of your own")
    if found.st_mode & _OTHERS:
        raise ServerError(f"token {file}: others may read it: chmod 600 {file}")
    if not (_LEAST_LETTERS <= len(text) <= _MOST_LETTERS and text.isalnum()):
        raise ServerError(f"token {file}: it holds no token, which is {_LEAST_LETTERS} or more letters and digits")
    return text.decode()


def make_token(file: str) -> bool:
    """Make a token in ``file``, which nobody else may read, unless there is one; whether one was made.

    Raises:
        ServerError: If it cannot be written.
    """
    if os.path.lexists(file):
        return False
    folder = os.path.dirname(file)
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        descriptor, unfinished = tempfile.mkstemp(prefix=".vipu-token-", dir=folder)
        try:
            with open(descriptor, "w", encoding="ascii") as opened:
                opened.write(secrets.token_hex(_TOKEN_BYTES) + "\n")
            with suppress(FileExistsError):
                os.link(unfinished, file)
        finally:
            os.unlink(unfinished)
    except OSError as error:
        raise ServerError(f"token {file} cannot be made: {error.strerror}") from None
    return True
