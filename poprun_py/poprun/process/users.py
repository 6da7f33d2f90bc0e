"""The names of this machine's users."""

import os
import pwd


def user_name(uid: int) -> str:
    """The name of the user with that number, or the number where there is no such user."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def user_of(pid: int) -> str:
    """Whose a process is; empty when this machine's /proc does not show it."""
    try:
        return user_name(os.stat(f"/proc/{pid}").st_uid)
    except OSError:
        return ""
