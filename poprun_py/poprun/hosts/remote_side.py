"""The program that answers poprun's questions on each host before a job starts.

poprun sends the text of the program over ssh, and any Python 3 of the host runs it. Each input line is a question
as JSON. Each answer has a mark, because a shell's startup files may print lines too. The program imports only the
standard library until the host has shown that its poprun is the same as here.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import glob
import hashlib
import json
import os
import re
import resource
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

MARK = "poprun-preflight:"

_SIOCGIFCONF = 0x8912
_IFREQ_BYTES = 40
_MAX_ADDRESSES = 1024
_MPI_SECONDS = 5.0
_CONNECT_SECONDS = 2.0
_RESOLVE_SECONDS = 3
_LONGEST_SECONDS = 300.0
_WEEK_SECONDS = 7 * 86_400
_ROOM_BYTES = 1024 * 1024
_PACKAGE_VERSION = re.compile(r"""^(?:__version__|version)\b[^=\n]*= *["'](.+?)["']""", re.MULTILINE)
_VERSION = re.compile(r'^VERSION: Final = "(.*)"', re.MULTILINE)


def main() -> None:
    """Answer each question on standard input until the input ends or ``_LONGEST_SECONDS`` have passed."""
    timer = threading.Timer(_LONGEST_SECONDS, os._exit, (1,))
    timer.daemon = True
    timer.start()
    for line in sys.stdin:
        question = json.loads(line)
        answer = _ANSWERS[question["ask"]](question)
        sys.stdout.write(MARK + json.dumps(answer) + "\n")
        sys.stdout.flush()


def facts(question: dict[str, Any]) -> dict[str, Any]:
    """Return what decides whether this host can run the job, such as its versions, files and addresses."""
    return {
        "python": ".".join(map(str, sys.version_info[:3])),
        "python_file": sys.executable,
        "sources": {folder: digest(folder) for folder in question["folders"]},
        "version": version(question["version_file"]),
        "packages": package_versions(question["packages"]),
        "mpi": mpi_version(question["mpi"]),
        "has_directory": os.path.isdir(question["working_directory"]),
        "files": {file: file_problem(file) for file in question["files"]},
        "temporary": write_problem(temporary_folder()),
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "addresses": addresses(),
        "ssh": os.environ.get("SSH_CONNECTION", "").split(),
        "names": resolve(question["names"]),
    }


def digest(folder: str) -> str:
    """Return a SHA-256 digest of all Python files in ``folder``; an empty text if there are no files."""
    hasher = hashlib.sha256()
    files = [
        os.path.join(path, name) for path, _, names in os.walk(folder) for name in names if name.endswith(".py")
    ]
    for file in sorted(files):
        with open(file, "rb") as source:
            hasher.update(os.path.relpath(file, folder).encode() + b"\0" + hashlib.sha256(source.read()).digest())
    return hasher.hexdigest() if files else ""


def version(file: str) -> str:
    """Return poprun's version, as written in its source file ``file``; an empty text if the file is missing."""
    try:
        with open(file, encoding="utf-8") as source:
            match = _VERSION.search(source.read())
    except OSError:
        return ""
    return match[1] if match else ""


def package_versions(patterns: list[str]) -> dict[str, str]:
    """Return packages' versions by folder, for patterns such as ``/env/lib/python3*/site-packages/torch``."""
    versions: dict[str, str] = {}
    for folder in {path for pattern in patterns for path in glob.glob(pattern)}:
        for file in ("version.py", "__init__.py"):
            with contextlib.suppress(OSError), open(os.path.join(folder, file), encoding="utf-8") as source:
                if match := _PACKAGE_VERSION.search(source.read()):
                    versions.setdefault(folder, match[1])
    return versions


def mpi_version(launcher: str) -> str:
    """Return what the MPI launcher ``launcher`` prints about its version; an empty text if it cannot run."""
    if not os.access(launcher, os.X_OK):
        return ""
    try:
        done = subprocess.run(
            [launcher, "--version"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_MPI_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace")


def file_problem(file: str) -> str:
    """Return why the program's file ``file`` cannot be used on this host; an empty text if it can be used."""
    if not os.path.exists(file):
        return "missing"
    return "" if os.access(file, os.R_OK) or os.access(file, os.X_OK) else "not readable"


def temporary_folder() -> str:
    """Return the folder in which Open MPI's daemons keep the files of a job."""
    return next(filter(None, map(os.environ.get, ("TMPDIR", "TEMP", "TMP"))), "/tmp")


def write_problem(folder: str) -> str:
    """Return the name of ``folder`` and why nothing can be written there; an empty text if there is room."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(_ROOM_BYTES))
    except OSError as error:
        return f"{folder}: {error.strerror}"
    return ""


def addresses() -> list[tuple[str, str]]:
    """Return this host's addresses as (interface, address), first IPv4, then IPv6 without link-local addresses."""
    pairs = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        buffer = array.array("B", bytes(_IFREQ_BYTES * _MAX_ADDRESSES))
        request = struct.pack("iL", len(buffer), buffer.buffer_info()[0])
        (filled,) = struct.unpack_from("i", fcntl.ioctl(probe.fileno(), _SIOCGIFCONF, request))
    for at in range(0, filled, _IFREQ_BYTES):
        name = buffer[at : at + 16].tobytes().partition(b"\0")[0].decode()
        pairs.append((name, socket.inet_ntoa(buffer[at + 20 : at + 24].tobytes())))
    try:
        with open("/proc/net/if_inet6", encoding="ascii") as table:
            rows = [line.split() for line in table]
    except OSError:
        rows = []
    for digits, _, _, scope, _, name in rows:
        if scope != "20":
            pairs.append((name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))))
    return pairs


def resolve(names: list[str]) -> dict[str, list[str]]:
    """Return the IP addresses of each name that this host can resolve; give up after 3 s for all names."""
    results: dict[str, list[str]] = {}

    def stop(*_: object) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(_RESOLVE_SECONDS)
    try:
        for name in names:
            try:
                results[name] = sorted(
                    {str(entry[4][0]) for entry in socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)}
                )
            except (socket.gaierror, UnicodeError):
                results[name] = []
    except TimeoutError:
        return results
    finally:
        signal.alarm(0)
    return results


def slots(question: dict[str, Any]) -> dict[str, Any]:
    """Return the CPU cores that a job may use on this host, and why its cache folder cannot be used, or ""."""
    sys.path[:0] = [os.path.dirname(folder) for folder in question["folders"]]
    from popdist.ground.trusted_paths import own_folder_problem
    from poprun.hosts.probe.machine import usable_cores

    return {"cores": list(usable_cores()), "cache": question["cache"] and own_folder_problem(question["cache"])}


def listen(question: dict[str, Any]) -> dict[str, Any]:
    """Listen on a free TCP port of this host, so that other hosts can try to connect; return the port."""
    family = socket.AF_INET6 if ":" in question["host"] else socket.AF_INET
    _listeners.append(socket.create_server((question["host"], 0), family=family, backlog=socket.SOMAXCONN))
    return {"port": _listeners[-1].getsockname()[1]}


def route(question: dict[str, Any]) -> dict[str, Any]:
    """Try to connect from this host to each of ``targets``; return for each the error, or an empty text."""
    problems = [""] * len(question["targets"])

    def reach(number: int, target: list[Any]) -> None:
        try:
            socket.create_connection(tuple(target), _CONNECT_SECONDS, (question["from"], 0)).close()
        except OSError as error:
            problems[number] = error.strerror or str(error)

    threads = [threading.Thread(target=reach, args=pair) for pair in enumerate(question["targets"])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"problems": problems}


def hold(question: dict[str, Any]) -> dict[str, Any]:
    """Write the job's key to a file that only this user can read, delete old keys; return {"problem": error}."""
    folder, name = os.path.split(question["file"])
    writing = f"{question['file']}.{os.getpid()}"
    try:
        for other in os.listdir(folder):
            if other.startswith(name.rpartition("-")[0]):
                remove_old(os.path.join(folder, other))
        descriptor = os.open(writing, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(question["key"])
        os.replace(writing, question["file"])
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(writing)
        return {"problem": error.strerror or str(error)}
    return {"problem": ""}


def forget(question: dict[str, Any]) -> dict[str, Any]:
    """Remove the file with the key of a job that will not start, if the file exists."""
    with contextlib.suppress(OSError):
        os.unlink(question["file"])
    return {}


def remove_old(file: str) -> None:
    """Remove a key file of this user if it is older than a week, because its job has started long ago."""
    try:
        status = os.lstat(file)
        if status.st_uid == os.getuid() and time.time() - status.st_mtime > _WEEK_SECONDS:
            os.unlink(file)
    except OSError:
        return  # another process has removed the file


_ANSWERS = {"facts": facts, "slots": slots, "hold": hold, "forget": forget, "listen": listen, "route": route}
_listeners: list[socket.socket] = []


if __name__ == "__main__":
    main()
