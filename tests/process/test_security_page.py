"""The page on security lists all that a job opens: watched with the system's tables while one runs.

Holds poprun.devices.server.server and poprun.job.agents.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

from tests.docs.markdown import ROOT
from tests.running import DEADLINE_SECONDS, Poprun

PAGE = ROOT / "docs" / "security.md"
LISTENING = "0A"
PROGRAM = """
import sys, torch, popdist
popdist.init()
popdist.all_reduce(torch.ones(3))
print("up", flush=True)
if popdist.getInstanceIndex() == 0:
    sys.stdin.readline()
popdist.barrier()
"""


def table() -> dict[tuple[str, str], re.Pattern[str]]:
    """The rows of the page: what may be opened, by what, with the pattern of what it is called."""
    text = PAGE.read_text(encoding="utf-8").split("<!-- opened begins -->")[1].split("<!-- opened ends -->")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:3]] for line in text.strip().splitlines()[2:]]
    return {
        (name.strip("`"), who): _pattern(name.strip("`")) for name, openers in rows for who in openers.split(", ")
    }


def _pattern(name: str) -> re.Pattern[str]:
    """What a name with places in angle brackets stands for."""
    kinds = {"pid": "[0-9]+", "port": "[0-9]+", "random": "[0-9a-f]{32}", "n": "[0-9]+", "stream": "out|err"}
    kinds |= {"tmpdir": "/[^<>]+", "letters": "[0-9a-z_]{8}"}
    pieces = re.split(r"<([a-z-]+)>", name)
    fixed = ("pool", "log-dir", "report", "token")
    return re.compile(
        "".join(
            re.escape(piece if not number % 2 else f"<{piece}>")
            if not number % 2 or piece in fixed
            else f"({kinds.get(piece, '[0-9a-z]+')})"
            for number, piece in enumerate(pieces)
        )
    )


def sockets() -> dict[str, str]:
    """Names of unix sockets and addresses of listening TCP sockets of this network namespace, by inode."""
    found = {}
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split(maxsplit=7)
        if len(fields) > 7:
            found[fields[6]] = fields[7]
    for family in ("tcp", "tcp6"):
        for line in Path("/proc/net", family).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING:
                found[fields[9]] = _address(fields[1])
    return found


def _address(text: str) -> str:
    """An address of the kernel's table; one that is not loopback as it stands there."""
    host, _, port = text.partition(":")
    return f"{'127.0.0.1' if host == '0100007F' else host}:{int(port, 16)}"


def opened_by(pid: int, places: dict[str, str]) -> Iterator[str]:
    """What a process has open that others could get at: sockets with names, memory, files that it may write."""
    known = sockets()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        target = str(descriptor.readlink())
        if target.startswith("socket:["):
            if name := known.get(target[8:-1]):
                yield name
        elif target.startswith("/memfd:"):
            yield target.removeprefix("/").removesuffix(" (deleted)")
        elif target.startswith("/") and descriptor.is_file():
            flags = re.search(r"flags:\t(\d+)", Path(f"/proc/{pid}/fdinfo/{descriptor.name}").read_text())
            if flags and int(flags[1], 8) & (os.O_WRONLY | os.O_RDWR):
                yield placed(target, places)


def placed(path: str, places: dict[str, str]) -> str:
    """A path with the folders of the test as the page calls them."""
    for place, name in places.items():
        if path == place or path.startswith(f"{place}/"):
            return name + path.removeprefix(place)
    return path


def role(process: psutil.Process) -> str:
    """What the page calls a process."""
    words = process.cmdline()
    if "poprun.vipu" in words:
        return "vipu serve"
    if any(word.endswith("shim.py") for word in words):
        return "agent"
    return "program" if "-c" in words and "-m" not in words else "poprun"


def files_in(folders: Iterable[Path]) -> list[Path]:
    """All files below some folders."""
    return [file for folder in folders for file in folder.rglob("*") if file.is_file()]


def test_the_page_lists_what_a_job_opens(poprun: Poprun, tmp_path: Path) -> None:
    """Every socket, port, file and piece of memory of a job and of a server has its row, and every row is met."""
    pool, logs, report, token = (tmp_path / name for name in ("pool", "logs", "report.json", "token"))
    places = {str(pool): "<pool>", str(logs): "<log-dir>", str(report): "<report>", str(token): "<token>"}
    serve = [sys.executable, "-m", "poprun.vipu", "serve", "--port=0", f"--token-file={token}"]
    variables = os.environ | {"POPRUN_POOL": str(pool), "POPRUN_IPUS_PER_HOST": "4"}
    words = ("-n2", "--launcher=local", f"--pool={pool}", "--ipus-per-host=4", f"--log-dir={logs}")
    partition = ("--vipu-partition=p", f"--report={report}")
    nothing = subprocess.DEVNULL
    server = subprocess.Popen(
        serve, env=variables, stdin=nothing, stdout=nothing, stderr=subprocess.PIPE, text=True
    )
    seen: set[tuple[str, str]] = set()
    try:
        assert server.stderr is not None
        assert "serving" in server.stderr.readline()
        with poprun.started(*words, *partition, sys.executable, "-c", PROGRAM) as job:
            assert job.stdout is not None
            while "up" not in job.stdout.readline() or "up" not in job.stdout.readline():
                assert job.poll() is None
            watched = psutil.Process(job.pid)
            for process in (watched, *watched.children(recursive=True), psutil.Process(server.pid)):
                seen |= {(role(process), name) for name in opened_by(process.pid, places)}
            for file in files_in((pool, logs)):
                who = "vipu serve" if file.name.startswith("server-") else "poprun"
                seen.add((who, placed(str(file), places)))
            job.communicate("\n", timeout=DEADLINE_SECONDS)
        seen |= {("poprun", placed(str(report), places)), ("vipu serve", placed(str(token), places))}
        assert report.exists()
        assert token.stat().st_mode & 0o777 == 0o600
    finally:
        server.terminate()
        server.communicate(timeout=DEADLINE_SECONDS)

    rows = table()
    listed = {
        (who, name): {row for row, pattern in rows.items() if row[1] == who and pattern.fullmatch(name)}
        for who, name in seen
    }
    assert [key for key, found in listed.items() if not found] == []
    met = {row for found in listed.values() for row in found}
    assert set(rows) - met == {("<pool>/partition-<random>", "vipu serve")}  # a client's, who is not here
