"""The leases of a job on several hosts: before the start, poprun acquires a lease on each host, or on none.

A process on each host (`lease_holder`) requests the lease from the host's pool. All jobs request hosts in the same
order, whatever names they use for the hosts. A waiting job therefore holds only hosts that come earlier in this
order, so two jobs never wait for each other, and one of two jobs that want the same hosts gets all of them.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import IO, Any, Final, Self, cast

from popdist.ground import contract
from poprun import errors
from poprun.devices.lease.claims import LeasedPlan
from poprun.devices.pool.records import HeldLease
from poprun.errors import HostsError, PoprunError
from poprun.hosts.probe.machine import names_of_this_machine
from poprun.launch.messages.control import RECEIVE_BYTES, LineReader
from poprun.launch.routes import JobNetwork, remote_words
from poprun.plan.plan import LaunchPlan
from poprun.plan.plan_file import plan_to_dict
from poprun.plan.request import RemoteSettings
from poprun.text import screen

HOLDER_MARK: Final = "poprun-lease:"
"""The beginning of each line that a lease holder prints, because a shell's startup files may print other lines."""

_ANSWER_SECONDS: Final = 60.0
_SLACK_SECONDS: Final = 60.0
_LEAVE_SECONDS: Final = 3.0
_COMPLAINT_SECONDS: Final = 1.0
_PING_SECONDS: Final = 10.0
_FOLDER: Final = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(contract.__file__))))
_FILE: Final = os.path.join(os.path.dirname(os.path.abspath(__file__)), "lease_holder.py")
_COMMAND: Final = (sys.executable, "-I", _FILE, _FOLDER)
_MARK: Final = HOLDER_MARK.encode()

_Message = dict[str, Any]


@contextmanager
def leased_on_hosts(job: LeasedPlan, network: JobNetwork, *, is_fixed: bool) -> Iterator[LeasedPlan]:
    """A context in which ``job`` has a lease on devices of each of its hosts; its leases end with the context."""
    if not (job.plan.takes_lease or job.plan.owns_cores):
        yield job
        return
    leases = _HostLeases(job.plan, is_fixed=is_fixed)
    try:
        leases.acquire()
        job = job.with_leases(job.given, *leases.held())
        yield replace(job, network=leases.within(network), reacquire=leases.reacquire)
    finally:
        leases.end()


class _HostLeases:
    """The leases of a job on devices of its hosts; on each host, a process holds the lease for the job."""

    def __init__(self, plan: LaunchPlan, *, is_fixed: bool) -> None:
        self._plan = plan
        self._is_fixed = is_fixed
        self._here = names_of_this_machine(plan.hosts)
        self._holders: dict[str, LeaseHolder] = {}
        self._granted: dict[str, _Message] = {}

    def acquire(self) -> None:
        """Start a process on each host that will hold a lease there, and acquire one lease after the other."""
        for host in self._plan.hosts:
            self._start_holder(host, self._plan)
        until = time.monotonic() + _ANSWER_SECONDS
        machines = {
            host: str(holder.answer("machine", until)["machine"]) for host, holder in self._holders.items()
        }
        check_machines(machines)
        for host in sorted(self._holders, key=lambda host: machines[host]):
            self._granted[host] = self._holders[host].acquire(_until(self._plan))

    def reacquire(self, network: JobNetwork) -> JobNetwork:
        """Acquire a new lease on each host that lost its lease; return ``network`` (hosts) with leased devices."""
        # A restart never waits: a job that holds some hosts and waits for an earlier host might wait for ever.
        plan = replace(self._plan, vipu=replace(self._plan.vipu, waits_for_devices=False))
        for host in [host for host, holder in self._holders.items() if not holder.is_there()]:
            self._holders[host].release()
            self._holders[host].end(time.monotonic())
            try:
                holder = self._start_holder(host, plan)
                holder.answer("machine", time.monotonic() + _ANSWER_SECONDS)
                self._granted[host] = holder.acquire(_until(plan))
            except PoprunError as error:
                raise HostsError(str(error)) from None
        return self.within(network)

    def within(self, network: JobNetwork) -> JobNetwork:
        """Return ``network``, the job's hosts, with each host's leased devices, and with the address at which
        poprun's processes on a host fetch the lease of this host.
        """
        hosts = tuple(
            replace(
                route,
                devices=tuple(self._granted[route.name]["devices"]) or route.devices,
                lease_address=self._granted[route.name]["address"],
            )
            for route in network.hosts
        )
        return replace(network, hosts=hosts, lease_holders=tuple(holder.pid for holder in self._holders.values()))

    def held(self) -> tuple[HeldLease, ...]:
        """Return the leases that the job has, in the order of its hosts."""
        return tuple(
            HeldLease(host=host, names=tuple(names), pool=pool, partition=partition)
            for host in self._plan.hosts
            for names, pool, partition in self._granted[host]["held"]
        )

    def end(self) -> None:
        """Release all leases, and wait briefly until the processes that held them have ended."""
        for holder in self._holders.values():
            holder.release()
        until = time.monotonic() + _LEAVE_SECONDS
        for holder in self._holders.values():
            holder.end(until)

    def _start_holder(self, host: str, plan: LaunchPlan) -> "LeaseHolder":
        holder = self._holders[host] = LeaseHolder(host, None if host in self._here else plan.remote)
        return holder.send({"plan": json.dumps(plan_to_dict(plan)), "is_fixed": self._is_fixed})


def check_machines(machines: Mapping[str, str]) -> None:
    """Raise HostsError if two host names mean one machine: the job would wait there for a lease of its own."""
    first: dict[str, str] = {}
    for host, machine in machines.items():
        if (twin := first.setdefault(machine, host)) != host:
            raise HostsError(
                f"{twin} and {host} have one pool of virtual IPUs, so they are one machine: name it once in "
                "--host, or give each a pool of its own with --pool, in a folder that each host has to itself"
            )


def _until(plan: LaunchPlan) -> float | None:
    """Return the monotonic time by which a host must answer a request for a lease; None for no limit."""
    vipu = plan.vipu
    if vipu.waits_for_devices:
        return None
    return time.monotonic() + 2 * vipu.server_timeout_seconds + vipu.partition_attempts + _SLACK_SECONDS


class LeaseHolder:
    """A process that holds a job's lease on one host, started by ssh or srun (``remote``), or here if None."""

    def __init__(self, host: str, remote: RemoteSettings | None) -> None:
        self.host = host
        self._lines = LineReader()
        self._heard: list[bytes] = []
        self._holds = False
        words: tuple[str, ...] = _COMMAND
        if remote is not None:
            words = remote_words(remote.ssh_config, remote.slurm_job, host, _COMMAND, is_kept=True)
        try:
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,
            )
        except OSError as error:
            raise HostsError(f"{words[0]}: {error.strerror}") from None
        streams = (self._process.stdin, self._process.stdout, self._process.stderr)
        self._orders, self._answers, self._complaints = cast("tuple[IO[bytes], IO[bytes], IO[bytes]]", streams)

    @property
    def pid(self) -> int:
        """The id of this machine's process: the lease's holder, or the ssh or srun that started the holder."""
        return self._process.pid

    def send(self, message: _Message) -> Self:
        """Send ``message`` to the process with the lease; if this fails, :meth:`answer` raises the error."""
        with suppress(OSError):
            self._orders.write(json.dumps(message).encode() + b"\n")
        return self

    def acquire(self, until: float | None) -> _Message:
        """Order the process on the host to acquire the lease; return its message, with the leased devices."""
        granted = self.send({"order": "acquire"}).answer("held", until)
        self._holds = True
        return granted

    def answer(self, wanted: str, until: float | None) -> _Message:
        """Wait for the lease holder's next message that has the field ``wanted``, such as ``held``, and return it.

        Raises PoprunError if the holder sends an error, ends, or does not answer before the time ``until``.
        """
        while True:
            message = self._receive(until)
            if wanted in message:
                return message
            if "log" in message:
                screen.log(f"host {self.host}: {message['log']}")
            elif "error" in message:
                kind = getattr(errors, message["kind"], PoprunError)
                raise kind(f"host {self.host}: {message['error']}")

    def is_there(self) -> bool:
        """Return whether the process that holds the lease answers a ping, so that the lease still exists."""
        try:
            self.send({"order": "ping"}).answer("here", time.monotonic() + _PING_SECONDS)
        except PoprunError:
            return False
        return True

    def release(self) -> None:
        """Order the process that holds the lease to release the lease, and close the pipe for its orders."""
        if self._holds:
            self.send({"order": "release"})
            self._holds = False
        with suppress(OSError):
            self._orders.close()

    def end(self, until: float) -> None:
        """Wait until the process that holds the lease has ended; kill it at the monotonic time ``until``."""
        try:
            self._process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            # The group is killed because ssh may have started other processes, such as another ssh (ProxyJump).
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._answers.close()
        self._complaints.close()

    def _receive(self, until: float | None) -> _Message:
        while not self._heard:
            lines, _ = self._lines.feed(self._read(until))
            self._heard += [line for line in lines if _MARK in line]
        message: _Message = json.loads(self._heard.pop(0).partition(_MARK)[2])
        return message

    def _read(self, until: float | None) -> bytes:
        is_readable = _is_readable(self._answers, None if until is None else max(0.0, until - time.monotonic()))
        data = os.read(self._answers.fileno(), RECEIVE_BYTES) if is_readable else b""
        if not data:
            how = f"hung up{self._complaint()}" if is_readable else "does not answer"
            raise HostsError(
                f"host {self.host}: the process that holds its virtual IPUs {how}: see that this works: "
                f"ssh {self.host} true"
            )
        return data

    def _complaint(self) -> str:
        """Return the last line that ssh or the lease holder wrote to standard error; "" if none."""
        if not _is_readable(self._complaints, _COMPLAINT_SECONDS):
            return ""
        lines = os.read(self._complaints.fileno(), RECEIVE_BYTES).decode(errors="replace").split("\n")
        words = [line.strip() for line in lines if line.strip()]
        return f" ({words[-1]})" if words else ""


def _is_readable(stream: IO[bytes], patience_seconds: float | None) -> bool:
    """Wait up to ``patience_seconds`` (None: no limit) for data; return whether ``stream`` has data to read."""
    poll = select.poll()  # select does not accept the large descriptors that many hosts need
    poll.register(stream, select.POLLIN)
    return bool(poll.poll(None if patience_seconds is None else patience_seconds * 1000))
