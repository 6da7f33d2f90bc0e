"""Bring poprun's virtual environment to hosts that lack it, to the same place, with rsync over ssh."""

import asyncio
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Sequence
from typing import Final

from poprun.errors import HostsError
from poprun.hosts.problems import Problem
from poprun.hosts.routes import ssh_options

_SILENCE_SECONDS: Final = 60
_MOST_AT_ONCE: Final = 8


def environment_folder() -> str:
    """The folder of the virtual environment that poprun runs in.

    Raises:
        HostsError: If it runs in none.
    """
    if sys.prefix == sys.base_prefix:
        raise HostsError(
            f"--synchronise-python-venv: poprun runs under {sys.executable}, which is in no virtual environment "
            "that could be copied: install it in one (python -m venv), or install it on each host"
        )
    return os.path.abspath(sys.prefix)


async def copy_environment(folder: str, hosts: Sequence[str], ssh_config: str | None) -> list[Problem]:
    """Make ``folder`` on each of ``hosts`` what it is here; the hosts on which that failed.

    A host that says nothing for a minute is given up.
    """
    turns = asyncio.Semaphore(_MOST_AT_ONCE)
    found = await asyncio.gather(*(_copy(folder, host, ssh_config, turns) for host in hosts))
    return [problem for problem in found if problem is not None]


async def _copy(folder: str, host: str, ssh_config: str | None, turns: asyncio.Semaphore) -> Problem | None:
    ssh = " ".join(("ssh", *ssh_options(ssh_config)))
    target = f"[{host}]" if ":" in host else host
    words = ("--archive", "--delete", "--mkpath", f"--timeout={_SILENCE_SECONDS}", f"--rsh={ssh}")
    async with turns:
        try:
            process = await asyncio.create_subprocess_exec(
                "rsync",
                *words,
                "--",
                f"{folder}/",
                f"{target}:{folder}/",
                stdin=DEVNULL,
                stdout=DEVNULL,
                stderr=PIPE,
            )
        except FileNotFoundError:
            raise HostsError(
                f"--synchronise-python-venv: there is no rsync here to copy {folder} to {host}: install it"
            ) from None
        _, said = await process.communicate()
    if process.returncode == 0:
        return None
    words_of_it = said.decode(errors="replace").strip().splitlines() or [f"exit code {process.returncode}"]
    return Problem(
        host=host,
        cause=f"rsync could not copy {folder} to it: {words_of_it[0]}",
        remedy="see that rsync is installed there and the folder may be written",
    )
