"""Why a host did not answer, from what ssh or the interpreter there said. Pure."""

import re
from typing import Final

from poprun.hosts.problems import Problem

SSH_FAILED: Final = 255
_NO_COMMAND: Final = (126, 127)

_SSH_CAUSES: Final = (
    (
        r"REMOTE HOST IDENTIFICATION HAS CHANGED|host key .*has changed",
        "its host key is not the one that ssh knows",
        "set up anew? then ssh-keygen -R {host}; if not, ask who answers there",
    ),
    (
        r"Host key verification failed|No .* host key is known",
        "ssh does not know its host key",
        "compare and accept the key once: ssh {host} true",
    ),
    (r"Permission denied", "ssh refuses the login", "let this user in without a password: ssh-copy-id {host}"),
    (
        r"Could not resolve hostname|Name or service not known",
        "nobody knows this name",
        "check the spelling, or give the host in ~/.ssh/config or /etc/hosts",
    ),
    (r"Connection refused", "no sshd listens there", "start sshd on the host, or name its port in ~/.ssh/config"),
    (
        r"timed out|No route to host|Network is unreachable|Host is down",
        "it does not answer",
        "see that the host is up and lets ssh in: ssh {host} true",
    ),
    (
        r"Can't open user config file (.*)",
        r"ssh cannot read its configuration file: \1",
        "name one that is there: --ssh-config FILE, or POPRUN_SSH_CONFIG",
    ),
)


def no_answer(host: str, code: int | None, words: str, python_file: str, *, in_slurm: bool = False) -> Problem:
    """Why a host did not answer.

    Args:
        host: The host.
        code: Exit code of ssh: that of the command there, unless ssh itself failed; None when time was over.
        words: What it said.
        python_file: The interpreter that was to answer.
        in_slurm: Whether it was to be started by srun instead of ssh.
    """
    said = words.splitlines()[-1] if words else ""
    if in_slurm:
        ended = "no answer in time" if code is None else f"exit code {code}"
        return Problem(
            host=host,
            cause=f"srun could not ask it: {said or ended}",
            remedy=f"see that this works: srun --overlap --nodelist={{host}} {python_file} --version",
        )
    if code is None:
        return Problem(
            host=host, cause="it does not answer in time", remedy="see that this is quick: ssh {host} true"
        )
    if code in _NO_COMMAND and words.startswith("ssh:"):
        return Problem(host=host, cause="there is no ssh here", remedy="install an ssh client on this machine")
    if code in _NO_COMMAND:
        return _no_python(host, python_file)
    if code != SSH_FAILED:
        return Problem(
            host=host,
            cause=f"{python_file} ended there with exit code {code}{said and f': {said}'}",
            remedy=f"see that this works: ssh {{host}} {python_file} --version",
        )
    for pattern, cause, remedy in _SSH_CAUSES:
        if match := re.search(pattern, words, re.IGNORECASE):
            return Problem(host=host, cause=match.expand(cause), remedy=remedy)
    return Problem(
        host=host,
        cause=f"ssh failed: {said or f'exit code {code}'}",
        remedy="see that this works: ssh {host} true",
    )


def _no_python(host: str, python_file: str) -> Problem:
    return Problem(
        host=host,
        cause=f"there is no Python at {python_file}",
        remedy="make the same environment there, or have poprun do so: --synchronise-python-venv yes",
        lacks_environment=True,
    )
