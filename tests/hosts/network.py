"""Hosts to test with: network namespaces of this machine, each with an address, a name, and an sshd.

Every host is a row of namespaces (network, names, processes, mounts) whose first process is its sshd, so the end
of that process is the end of the host: the kernel kills all that runs there. The hosts hang on a bridge in a
namespace of its own, so nothing of the machine's own network is touched, and all of it vanishes with the
processes. The hosts share the file system but for `/run`, `/dev/shm` and `/etc/hosts`.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import psutil

from tests.hosts import firewall, relay

PREFIX: Final = "10.217.0."
PREFIX_6: Final = "fd00:217::"
TMPDIR: Final = "/run/tmp"
"""A folder for temporary files of a host's own: many are named after process ids, which several hosts have."""

TOOLS: Final = ("ip", "sshd", "ssh", "ssh-keygen", "unshare", "nsenter", "mount")

_FOLDERS: Final = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))
_NAMESPACES: Final = ("--net", "--uts", "--ipc", "--pid", "--mount")
_UNSHARE: Final = ("unshare", *_NAMESPACES, "--fork", "--mount-proc", "--kill-child")
_PATIENCE_SECONDS: Final = 300.0

_SSHD: Final = """\
HostKey {folder}/{name}
AuthorizedKeysFile {folder}/user.pub
ListenAddress 0.0.0.0
ListenAddress ::
StrictModes no
UsePAM no
PidFile none
PermitRootLogin prohibit-password
PasswordAuthentication no
MaxStartups 200
LogLevel ERROR
SetEnv TMPDIR={tmpdir}
"""

_SSH: Final = """\
IdentityFile {folder}/user
IdentitiesOnly yes
UserKnownHostsFile {folder}/known_hosts
GlobalKnownHostsFile none
StrictHostKeyChecking yes
User {user}
"""

_BOOT: Final = """\
set -e
hostname "$1"
mount -t tmpfs tmpfs /run
mkdir -p /run/sshd /run/tmp
mount -t tmpfs tmpfs /dev/shm
mount --bind "$2/hosts-$1" /etc/hosts
ip link set lo up
exec "$3" -D -f "$2/sshd-$1" -E "$2/log-$1"
"""


def missing_reason() -> str:
    """Why there can be no such hosts here; empty when there can."""
    lacking = [tool for tool in TOOLS if shutil.which(tool, path=_FOLDERS) is None]
    if lacking:
        return f"no {', '.join(lacking)} here: apt-get install iproute2 openssh-server"
    try:
        tried = subprocess.run(
            [*_UNSHARE, "mount", "-t", "tmpfs", "none", "/run"],
            capture_output=True,
            text=True,
            timeout=_PATIENCE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "making a namespace takes too long here"
    return f"no namespaces can be made here: {tried.stderr.strip()}" if tried.returncode else ""


class Host:
    """One of the hosts.

    Attributes:
        name: Its host name.
        address: Its IPv4 address.
    """

    def __init__(self, name: str, number: int, folder: Path) -> None:
        self.name = name
        self.address = f"{PREFIX}{number}"
        self.address_6 = f"{PREFIX_6}{number}"
        self._holder = subprocess.Popen(
            [
                *_UNSHARE,
                *("sh", "-c", _BOOT, "sh", name, str(folder), _tool("sshd")),
            ],
            env={"PATH": _FOLDERS},
        )
        self.init = psutil.Process(_wait_for(lambda: _only_child(self._holder.pid)))

    def enter(self, command: Sequence[str]) -> list[str]:
        """The argv that runs ``command`` on this host."""
        return ["nsenter", "--target", str(self.init.pid), *_NAMESPACES, "--", *command]

    def run(self, *command: str) -> str:
        """What ``command`` prints when it runs on this host."""
        done = subprocess.run(
            self.enter(command),
            env={"PATH": _FOLDERS},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            timeout=_PATIENCE_SECONDS,
            check=True,
        )
        return done.stdout

    def processes(self) -> list[str]:
        """The command lines of all that runs here, but for the sshd that listens."""
        words = self.run("ps", "-e", "-o", "pid=,args=").splitlines()
        return [line.strip() for line in words if line.split()[0] != "1" and "ps -e -o" not in line]

    @property
    def is_alive(self) -> bool:
        """Whether it has not been switched off."""
        return self._holder.poll() is None

    def listens(self) -> bool:
        """Whether its sshd does."""
        return ":22 " in self.run("ss", "-ltn")

    def connect(self) -> None:
        """Give the cable that is there the host's addresses."""
        self.run("ip", "address", "add", f"{self.address}/24", "dev", "eth0")
        self.run("ip", "address", "add", f"{self.address_6}/64", "dev", "eth0", "nodad")
        self.run("ip", "link", "set", "eth0", "up")

    def cut(self) -> None:
        """Pull the cable: nothing comes and nothing goes, and nobody is told."""
        self.run("ip", "link", "set", "eth0", "down")

    def mend(self) -> None:
        """Plug the cable in again."""
        self.run("ip", "link", "set", "eth0", "up")

    @contextmanager
    def firewall(self) -> Iterator[str]:
        """Let in new connections of ssh only, as long as the block runs; what keeps it from that, or nothing."""
        command = self.enter([sys.executable, firewall.__file__, "eth0"])
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            yield "" if process.stdout.readline() else f"no firewall here: {process.stderr.readlines()[-1]}"
            process.kill()

    def kill(self) -> None:
        """Pull the plug, after the cable: the other hosts hear nothing of this one's end."""
        self.cut()
        self.end()

    def end(self) -> None:
        """End everything that runs here."""
        self._holder.kill()
        self._holder.wait()


class Network:
    """Some hosts that reach each other.

    Args:
        names: What they are called. The first gets address 1.
        folder: Where keys and configurations go.
    """

    def __init__(self, names: Sequence[str], folder: Path) -> None:
        self.folder = folder
        self._names = list(names)
        self.hosts: dict[str, Host] = {}
        self._switch: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        try:
            self._write_files()
            self._switch = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
            _wait_for_network(self._switch.pid)
            self.on_switch("ip", "link", "add", "bridge", "type", "bridge")
            self.on_switch("ip", "link", "set", "bridge", "up")
            for number, name in enumerate(self._names, 1):
                self._add(name, number)
            for host in self.hosts.values():
                _wait_for(host.listens)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for host in self.hosts.values():
            host.end()
        if self._switch is not None:
            self._switch.kill()
            self._switch.wait()

    @property
    def ssh_config(self) -> Path:
        """The configuration with which ssh reaches every host."""
        return self.folder / "ssh_config"

    def leftovers(self, apart_from: str = "\n") -> list[str]:
        """What still runs on the living hosts after a moment's patience, but for lines with a text in them.

        A session of sshd does not know for long that its client is lost.
        """
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            living = [host for host in self.hosts.values() if host.is_alive]
            lines = [f"{host.name}: {line}" for host in living for line in host.processes()]
            found = [line for line in lines if apart_from not in line]
            if not found or time.monotonic() >= deadline:
                return found
            time.sleep(0.05)

    def _add(self, name: str, number: int) -> None:
        host = self.hosts[name] = Host(name, number, self.folder)
        _wait_for_network(host.init.pid)
        port, pid = f"port{number}", str(host.init.pid)
        self.on_switch("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", pid)
        self.on_switch("ip", "link", "set", port, "master", "bridge", "up")
        host.connect()

    @contextmanager
    def delayed(self, seconds: float, *names: str) -> Iterator[None]:
        """Hold each frame between one of these hosts and any other for so long; afterwards they are cut off."""
        assert self._switch is not None
        hosts = [self.hosts[name] for name in names]
        for host in hosts:
            host.run("ip", "link", "delete", "eth0")
        pids = [str(it) for it in (self._switch.pid, *(host.init.pid for host in hosts))]
        command = [sys.executable, relay.__file__, "eth0", str(seconds), *pids]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline(), "the relay does not start: what it printed says why"
            self.on_switch("ip", "link", "set", "eth0", "master", "bridge", "up")
            for host in hosts:
                host.connect()
            yield

    def narrow(self, name: str, rate: str) -> None:
        """Let the cable of a host carry no more than so much in each direction, as tc(8) has it."""
        shape = ("root", "tbf", "rate", rate, "burst", "32kbit", "latency", "400ms")
        self.hosts[name].run("tc", "qdisc", "add", "dev", "eth0", *shape)
        self.on_switch("tc", "qdisc", "add", "dev", f"port{self._names.index(name) + 1}", *shape)

    def on_switch(self, *command: str) -> None:
        """Run ``command`` where the cables of all hosts end, at the ports port1, port2 and so on."""
        if self._switch is not None:
            subprocess.run(self.in_switch(*command), env={"PATH": _FOLDERS}, timeout=_PATIENCE_SECONDS, check=True)

    def in_switch(self, *command: str) -> list[str]:
        """The argv that runs ``command`` there."""
        assert self._switch is not None
        return ["nsenter", "--target", str(self._switch.pid), "--net", "--", *command]

    def _write_files(self) -> None:
        _make_key(self.folder / "user")
        known = []
        table = "127.0.0.1 localhost\n" + "".join(
            f"{PREFIX}{number} {name}\n{PREFIX_6}{number} {name}-6\n" for number, name in enumerate(self._names, 1)
        )
        for number, name in enumerate(self._names, 1):
            _make_key(self.folder / name)
            key = (self.folder / f"{name}.pub").read_text()
            known.append(f"{name},{name}-6,{PREFIX}{number},{PREFIX_6}{number} {key}")
            (self.folder / f"hosts-{name}").write_text(table)
            (self.folder / f"sshd-{name}").write_text(_SSHD.format(folder=self.folder, name=name, tmpdir=TMPDIR))
        (self.folder / "known_hosts").write_text("".join(known))
        self.ssh_config.write_text(_SSH.format(folder=self.folder, user=psutil.Process().username()))


def _tool(name: str) -> str:
    return shutil.which(name, path=_FOLDERS) or name


def _make_key(file: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(file)], check=True)


def _only_child(pid: int) -> int:
    children = psutil.Process(pid).children()
    return children[0].pid if children else 0


def _wait_for_network(pid: int) -> None:
    """Wait until a process is in a network namespace of its own."""
    ours = Path("/proc/self/ns/net").readlink()
    _wait_for(lambda: Path(f"/proc/{pid}/ns/net").readlink() != ours)


def _wait_for(find: Callable[[], int]) -> int:
    """What ``find`` finds, as soon as it finds something."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not (found := find()):
        assert time.monotonic() < deadline, "a host does not come to life"
        time.sleep(0.01)
    return found
