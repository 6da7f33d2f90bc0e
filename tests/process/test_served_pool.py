"""The pool over HTTP: who is let in, what is refused, and that a lease of another host ends with its job.

Holds poprun.devices.server.renewal, poprun.devices.server.server, poprun.devices.server.token_proofs, poprun.vipu
and poprun.devices.server.server_client.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from http.client import HTTPConnection, HTTPResponse
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
from click.testing import CliRunner

from poprun.devices.pool.holders import this_process
from poprun.devices.pool.pool import Pool, Ticket
from poprun.devices.pool.requests import IpuRequest, PartitionRequest, PoolRequest
from poprun.devices.server.server_client import RemotePool, make_token, read_token
from poprun.devices.server.server_connection import ServerAddress, call_server
from poprun.devices.server.server_messages import LeaseRequest
from poprun.devices.server.token_proofs import Challenges, authorization
from poprun.errors import IpusTakenError, PartitionError, ServerError, ServerLostError
from poprun.vipu import vipu
from tests.leftovers import TOKEN_VARIABLE, processes_of
from tests.running import DEADLINE_SECONDS, Finished, Poprun, run

T = TypeVar("T")

LEASE_SECONDS = 6
"""So long a lease lasts where a test waits for its end."""


def address(port: int, token: str, timeout_seconds: float = DEADLINE_SECONDS) -> ServerAddress:
    """Where a server is on loopback."""
    return ServerAddress(host="127.0.0.1", port=port, token=token, timeout_seconds=timeout_seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A server that runs."""

    process: "subprocess.Popen[str]"
    port: int  # where it listens on loopback
    folder: Path  # where its pool and its token are
    told: str  # what it has printed until it was ready

    @property
    def env(self) -> dict[str, str]:
        """Variables of a client."""
        return {"POPRUN_VIPU_TOKEN_FILE": str(self.folder / "token")}

    @property
    def options(self) -> tuple[str, ...]:
        """Words of a job that takes its virtual IPUs from it."""
        return ("--launcher", "local", "--vipu-server-host", "127.0.0.1", "--vipu-server-port", str(self.port))

    @property
    def pool(self) -> RemotePool:
        """A client of it."""
        token = (self.folder / "token").read_text().strip()
        return RemotePool(address(self.port, token), "a@b")

    def vipu(self, *words: str, **variables: str) -> Finished:
        """The command on it."""
        command = [sys.executable, "-m", "poprun.vipu", "--server-host=127.0.0.1", f"--server-port={self.port}"]
        return run([*command, *words], env={**self.env, **variables})

    def held(self) -> list[str]:
        """Names of the IPUs that jobs hold."""
        return [name for lease in self.pool.state().leases for name in lease.ipus]


@contextmanager
def serving(folder: Path, *words: str, start: str = "", **variables: str) -> Iterator[Server]:
    """A server of 16 IPUs with its pool and its token in ``folder``, until it is asked to end."""
    command = [
        sys.executable,
        "-c",
        f"{start}from poprun.vipu import main; main()",
        "serve",
        "--port=0",
        f"--token-file={folder / 'token'}",
        *words,
    ]
    env = {"POPRUN_POOL": str(folder / "pool"), "POPRUN_POD": "POD16", **variables}
    with subprocess.Popen(command, env={**os.environ, **env}, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            told = ""
            while (found := re.search(r"at http://\S+:(\d+)\n.*the token in", told)) is None:
                line = process.stderr.readline()
                assert line, told
                told += line
            yield Server(process=process, port=int(found[1]), folder=folder, told=told)
        finally:
            process.terminate()
            process.communicate(timeout=DEADLINE_SECONDS)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server of the tests that leave it as it was."""
    with serving(tmp_path_factory.mktemp("served")) as started:
        yield started


def request_for(wanted: IpuRequest, key: str = "0" * 32) -> LeaseRequest:
    """What a client says."""
    return LeaseRequest(key=key, pid=1, start_ticks=1, user="ann", host="n2", words="train.py", wanted=wanted)


VALID = asdict(request_for(IpuRequest(num_ipus=2)))
WANTED: dict[str, Any] = VALID["wanted"]


@pytest.mark.parametrize(
    ("status", "path", "body", "headers", "words"),
    [
        (401, "pool", b"{}", {"Authorization": "Vipu 1-2-3 " + "0" * 64}, "this is not its token"),
        (401, "pool", b"{}", {"Authorization": ""}, "this is not its token"),
        (404, "pools", b"{}", {}, "there is no command 'pools'"),
        (413, "pool", b" " * 70_000, {}, "65536 bytes at most"),
        (431, "pool", b"{}", {f"X-{index}": "1" for index in range(50)}, "more than 40 headers"),
        (400, "pool", b"{", {}, "the request is no JSON"),
        (400, "pool", b"[" * 60_000, {}, "the request is no JSON"),
        (400, "pool", b"[]", {}, "request: the file must be a mapping"),
        (400, "pool", b'{"a": 1}', {}, "a is no key of this message; it has none"),
        (400, "take-lease", {**VALID, "key": "k"}, {}, "key must be 32 hexadecimal digits"),
        (400, "take-lease", {**VALID, "user": "a\nb"}, {}, "user must be 1 to 255 characters"),
        (400, "take-lease", {**VALID, "pid": -1}, {}, "pid must be a whole number from 1"),
        (400, "take-lease", {**VALID, "pid": True}, {}, "pid must be a whole number"),
        (
            400,
            "take-lease",
            {**VALID, "wanted": {**WANTED, "num_ipus": 10**9}},
            {},
            "wanted.num_ipus must be a whole number",
        ),
        (
            400,
            "take-lease",
            {**VALID, "wanted": {**WANTED, "num_ipus": 17}},
            {},
            "needs 17 virtual IPUs, and POD16 has 16",
        ),
        (
            400,
            "take-lease",
            {**VALID, "wanted": {**WANTED, "choose": "x"}},
            {},
            "wanted.choose is no key of this message",
        ),
        (409, "take-lease", {**VALID, "wanted": {**WANTED, "allocation": "x"}}, {}, "there is no allocation x"),
        (410, "renew-lease", {"key": "1" * 32}, {}, "the lease of this job has ended"),
        (409, "remove-partition", {"name": "q"}, {}, "there is no partition q"),
    ],
)
def test_what_is_not_allowed_is_refused_in_one_line(
    server: Server, status: int, path: str, body: bytes | dict[str, object], headers: dict[str, str], words: str
) -> None:
    """Each has its status and says why, with no word of where the server failed; and the server goes on."""
    sent = body if isinstance(body, bytes) else json.dumps(body).encode()
    challenge = json.loads(posted(server.port, "challenge", b"", {})[1])
    proof = {"Authorization": authorization(server.pool.server.token, challenge, path, sent.decode())}
    answer, text = posted(server.port, path, sent, {**proof, **headers})

    assert (answer.status, answer.headers["Vipu-Version"]) == (status, "2")
    assert words in json.loads(text)["error"]
    assert "Traceback" not in text
    assert server.pool.state().leases == ()


def posted(port: int, command: str, body: bytes, headers: dict[str, str]) -> tuple[HTTPResponse, str]:
    """What the server answers."""
    connection = HTTPConnection("127.0.0.1", port, timeout=DEADLINE_SECONDS)
    connection.request("POST", f"/v1/{command}", body, headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer, text


def test_whoever_listens_in_place_of_a_server_never_sees_the_token() -> None:
    """And its words forge no line of a log."""
    heard: list[str] = []

    class Impostor(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            heard.append(f"{self.headers} {self.rfile.read(int(self.headers['Content-Length']))!r}")
            self.send_response(200 if "challenge" in self.path else 409)
            self.send_header("Vipu-Version", "2")
            self.end_headers()
            self.wfile.write(b'{"error": "x\\n1 POPRUN [I] y", "kind": "taken"}')

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Impostor) as impostor:
        threading.Thread(target=impostor.serve_forever, daemon=True).start()
        with pytest.raises(IpusTakenError, match=r"^x\\n1 POPRUN"):
            call_server(address(impostor.server_port, "5ecret" * 10), "pool", {})
        impostor.shutdown()
    assert len(heard) == 2
    assert "5ecret" not in "".join(heard)


def test_a_challenge_is_answered_once() -> None:
    """Soon, to who made it, for what was asked."""
    challenges = Challenges()
    made = challenges.make(5.0)
    header = authorization("t", made, "pool", "{}")
    assert not challenges.is_answered_by(header, "other", "pool", "{}", 6.0)
    assert not challenges.is_answered_by(header, "t", "end-lease", "{}", 6.0)
    assert not Challenges().is_answered_by(header, "t", "pool", "{}", 6.0)
    assert challenges.is_answered_by(header, "t", "pool", "{}", 6.0)
    assert not challenges.is_answered_by(header, "t", "pool", "{}", 7.0)
    late = authorization("t", challenges.make(5.0), "pool", "{}")
    assert not challenges.is_answered_by(late, "t", "pool", "{}", 26.0)


def test_a_server_out_of_descriptors_says_so_once(tmp_path: Path) -> None:
    """However many connect at once, it accepts a few, and goes on when they have left."""
    limited = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100)); "
    with serving(tmp_path, start=limited) as server:
        with ExitStack() as stack:
            for _ in range(400):
                stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE_SECONDS))
            assert "Too many open files" in next_line(server)
        assert server.pool.cluster().name == "POD16"
        server.process.terminate()
        _, rest = server.process.communicate(timeout=DEADLINE_SECONDS)
    assert len(rest.splitlines()) == 1


def test_clients_that_dawdle_keep_nobody_out(server: Server) -> None:
    """More connections than there may be, none of which sends its request as a whole: others are answered."""
    with ExitStack() as stack:
        for _ in range(300):
            dawdler = stack.enter_context(
                socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE_SECONDS)
            )
            dawdler.sendall(b"POST /v1/pool HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n")

        assert server.pool.cluster().name == "POD16"


def test_vipu_over_the_network(server: Server) -> None:
    """It shows and does the same as on the pool of its own machine, with the same errors."""
    at_server = {**server.env, "POPRUN_VIPU_SERVER_HOST": "127.0.0.1", "POPRUN_VIPU_SERVER_PORT": str(server.port)}
    here = {"POPRUN_POOL": str(server.folder / "pool"), "POPRUN_POD": "POD16"}

    made = server.vipu("create", "partition", "p", "-s8").succeeded()
    for words in (
        ["list", "clusters"],
        ["list", "ipus", "-ojson"],
        ["list", "allocations"],
        ["get", "partition", "p"],
    ):
        remote, local = (CliRunner().invoke(vipu, words, env=env) for env in (at_server, here))
        assert remote.exit_code == 0
        assert remote.output == local.output
    (row,) = json.loads(CliRunner().invoke(vipu, ["list", "partitions", "-o", "json"], env=at_server).output)
    taken = server.vipu("create", "partition", "q", "-s16")
    reset = CliRunner().invoke(vipu, ["reset", "partition", "p"], env=at_server)
    removed = CliRunner().invoke(vipu, ["remove", "partition", "p"], env=at_server)

    assert made.out == "create partition (p): success: POD16/0-7\n"
    assert row["created_by"].endswith(f"@{socket.gethostname()}")
    assert (taken.code, "no IPU-Link domain has 16 free IPUs" in taken.err) == (69, True)
    assert reset.output == "reset partition (p): success: POD16/0-7\n"
    assert removed.output == "remove partition (p): success\n"


def test_a_server_that_cannot_be_used(server: Server, tmp_path: Path) -> None:
    """Each says what was asked, what was found, and what to do."""

    class Other(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_error(404)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name there
            pass

    token = server.pool.server.token
    wrong = server.vipu("list", "partitions", **a_token(tmp_path / "wrong"))
    with HTTPServer(("127.0.0.1", 0), Other) as other:
        threading.Thread(target=other.handle_request).start()
        with pytest.raises(ServerError, match="another program"):
            RemotePool(address(other.server_port, token), "a@b").state()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(ServerLostError, match=rf"127.0.0.1:{port} does not answer within 0.2 s"):
            RemotePool(address(port, token, 0.2), "a@b").state()
    with pytest.raises(ServerLostError, match=rf"no server of virtual IPUs at 127.0.0.1:{port} \(Connection ref"):
        RemotePool(address(port, token), "a@b").state()

    assert (wrong.code, wrong.out) == (69, "")
    assert wrong.err == (
        f"vipu: error: the server of virtual IPUs at 127.0.0.1:{server.port} refuses: this is not its token: copy "
        "the file that vipu serve named when it started\n"
    )


def a_token(file: Path) -> dict[str, str]:
    """A variable that names a new token."""
    make_token(str(file))
    return {"POPRUN_VIPU_TOKEN_FILE": str(file)}


def test_a_token_is_a_secret(tmp_path: Path) -> None:
    """It is not taken from a file that others may read, or that holds something else; one that is there stays."""
    file = tmp_path / "folder" / "token"

    assert make_token(str(file))
    token = read_token(str(file))
    assert not make_token(str(file))
    assert read_token(str(file)) == token
    assert len(token) == 64
    file.chmod(0o640)
    with pytest.raises(ServerError, match=f"others may read it: chmod 600 {file}"):
        read_token(str(file))
    file.chmod(0o600)
    file.write_text("short")
    with pytest.raises(ServerError, match="it holds no token, which is 32 or more letters and digits"):
        read_token(str(file))
    with pytest.raises(ServerError, match=f"there is no token of a server of virtual IPUs at {tmp_path}/none"):
        read_token(f"{tmp_path}/none")


def test_a_queue_over_the_network(server: Server) -> None:
    """First come, first served, clients and jobs of the server's machine alike; who cannot be served goes."""
    pool, here = server.pool, Pool(str(server.folder / "pool"))
    large, small = (request_for(IpuRequest(num_ipus=num), key) for num, key in ((10, "a" * 32), (2, "b" * 32)))
    pod = pool.cluster()
    ticket = here.enqueue(this_process("local"), PoolRequest(num_ipus=8, choose=pod.pick(8)))

    assert pool.request_lease(large).ipus == ()
    assert pool.request_lease(small).ipus == ()
    here.release(ticket)
    assert pool.request_lease(small).ipus == ()
    first = pool.request_lease(large)
    assert first.ipus == tuple(f"POD16/{index}" for index in range(10))
    assert pool.request_lease(large) == first
    assert pool.request_lease(small).ipus == ("POD16/10", "POD16/11")
    (holder, _) = (lease.holder for lease in here.state().leases)
    assert str(holder) == "process 1 of ann@n2 (train.py)"
    pool.create_partition("p", 2, allocation=None, cluster=None)
    unfit = PartitionRequest(name="p", size=4, is_temporary=True, may_change=False, resets=None)
    with pytest.raises(PartitionError, match="has 2 IPUs, and the job fits one of 4"):
        pool.request_lease(request_for(IpuRequest(num_ipus=4, partition=unfit), "c" * 32))
    for key in ("a", "b", "c"):
        pool.end_lease(key * 32)
    pool.remove_partition("p")
    assert pool.state().leases == ()


def test_contenders_over_the_network_never_overlap(server: Server) -> None:
    """20 clients that take and give back 3 IPUs at a time of 16, twice each: no IPU has two holders."""
    holders: dict[str, int] = {}
    faults: list[str] = []
    turns = []

    def contend(number: int) -> None:
        for turn in range(2):
            request = request_for(IpuRequest(num_ipus=3), f"{number:016x}{turn:016x}")
            while not (answer := server.pool.request_lease(request)).ipus:
                time.sleep(answer.pause_seconds)
            faults.extend(f"{ipu}: {holders[ipu]} and {number}" for ipu in answer.ipus if ipu in holders)
            holders.update(dict.fromkeys(answer.ipus, number))
            for ipu in answer.ipus:
                holders.pop(ipu)
            turns.append(turn)
            server.pool.end_lease(request.key)

    threads = [threading.Thread(target=contend, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert faults == []
    assert len(turns) == 40
    assert server.held() == []


def await_line(process: "subprocess.Popen[str]") -> str:
    """The next line that a job prints."""
    assert process.stdout is not None
    return process.stdout.readline()


def test_a_job_holds_what_the_server_gave(poprun: Poprun, server: Server) -> None:
    """Others see who has it, and are refused; it is free when the job has ended, and its partition gone."""
    job = Poprun(options=server.options)
    with job.started(
        "--ipus-per-replica=3", "--vipu-partition=p", "sh", "-c", "echo up; read word", env=server.env
    ) as running:
        await_line(running)
        (row,) = json.loads(server.vipu("list", "partitions", "-ojson").out)
        refused = job("-n", "13", "true", env=server.env)
        running.communicate("\n", timeout=DEADLINE_SECONDS)

    assert (row["size"], row["state"]) == (4, "in use")
    assert row["used_by"].startswith(f"process {running.pid} of ")
    assert f"@{socket.gethostname()} (" in row["used_by"]
    assert refused.code == 69
    assert f"needs 13 virtual IPUs, and 12 are free of 16 in POD16 at 127.0.0.1:{server.port}" in refused.err
    assert server.pool.state().partitions == ()
    assert server.held() == []


def test_a_server_hands_out_the_gpus_of_its_machine(poprun: Poprun, tmp_path: Path) -> None:
    """Jobs there get those that nobody has, clients of the server or not, under the names that they know."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\ncase $2 in *gpu=index*) for i in 0 1 2 3; do echo $i, GPU-$i; done;; esac\n")
    smi.chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    words = ("-n2", "--no-tag-output", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES")
    with serving(tmp_path, **path, POPRUN_POD="") as server:
        job = Poprun(options=server.options)
        held = server.pool.request_lease(request_for(IpuRequest(num_ipus=1)))
        shown = job(*words, env={**server.env, **path, "CUDA_VISIBLE_DEVICES": "3,GPU-2,0"})
        elsewhere = job(*words, env=server.env)

    assert held.ipus == ("GPU-0",)
    assert set(shown.succeeded().lines) == {"3,GPU-2"}
    assert elsewhere.code == 2
    assert (
        f"the server hands out the GPUs of {socket.gethostname()}, and the job does not run there" in elsewhere.err
    )


def test_a_dry_run_asks_no_server(poprun: Poprun) -> None:
    """Whoever only looks at a plan needs neither a server nor a token."""
    words = ("--vipu-server-host=127.0.0.1", "--vipu-server-port=1", "--dry-run", "-v", "-n2", "true")
    finished = poprun(*words, env={"POPRUN_VIPU_TOKEN_FILE": "/none"}).succeeded()

    assert "the server of virtual IPUs at 127.0.0.1 is not asked" in finished.err


def test_a_killed_job_loses_its_lease(poprun: Poprun, tmp_path: Path) -> None:
    """SIGKILL of poprun: when its programs have ended. SIGKILL of what renews the lease, too: when it expires."""
    with serving(tmp_path, f"--lease-seconds={LEASE_SECONDS}") as server:
        job = Poprun(options=server.options)
        with job.started("--ipus-per-replica=2", "sh", "-c", "echo up; sleep 1000", env=server.env) as running:
            await_line(running)
            assert server.held() == ["POD16/0", "POD16/1"]
            os.kill(running.pid, signal.SIGKILL)
            running.wait()
        assert left_after_all(server.held) == []
        with job.started("--ipus-per-replica=2", "sh", "-c", "echo up; read word", env=server.env) as running:
            await_line(running)
            (renewer,) = renewers()
            renewer.kill()
            assert left_after_all(server.held) == []
            running.communicate("\n", timeout=DEADLINE_SECONDS)
        with job.started("--ipus-per-replica=2", "sh", "-c", "echo up; read word", env=server.env) as running:
            await_line(running)
            (lease,) = server.pool.state().leases
            Pool(str(tmp_path / "pool")).release(Ticket(id=lease.id, key=lease.holder.client_key or ""))
            assert running.stderr is not None
            assert "the lease of this job has ended" in running.stderr.readline()
            running.communicate("\n", timeout=DEADLINE_SECONDS)


def next_line(server: Server) -> str:
    """The next line that a server prints."""
    assert server.process.stderr is not None
    return server.process.stderr.readline()


def left_after_all(find: Callable[[], Iterable[T]]) -> list[T]:
    """What ``find`` still finds after a long time; an empty list as soon as it finds nothing."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while found := list(find()):
        if time.monotonic() > deadline:
            return found
        time.sleep(0.05)
    return []


def renewers() -> list[psutil.Process]:
    """The processes that renew leases for jobs of this test."""
    found = processes_of(os.environ[TOKEN_VARIABLE])
    return [process for process in found if any("renewal.py" in word for word in process.cmdline())]


def test_a_server_that_is_killed_and_started_again(poprun: Poprun, tmp_path: Path) -> None:
    """Jobs go on and keep what they have: nobody gets it while they renew, and who does not renew loses it."""
    words = (f"--lease-seconds={LEASE_SECONDS}",)
    dead = request_for(IpuRequest(num_ipus=2))
    with serving(tmp_path, *words) as first:
        port = first.port
        job = Poprun(options=first.options)
        with job.started("--ipus-per-replica=2", "sh", "-c", "echo up; read word", env=first.env) as running:
            await_line(running)
            assert first.pool.request_lease(dead).ipus == ("POD16/2", "POD16/3")
            first.process.kill()
            first.process.wait()
            local = Pool(str(tmp_path / "pool"))
            assert len(local.state().taken) == 4  # nobody knows, so nobody takes
            large = Poprun(options=("--launcher", "local", "--pool", str(tmp_path / "pool")))
            refused = large("--pod", "POD16", "-n1", "--ipus-per-replica=13", "true")
            assert running.stderr is not None
            assert "there is no server of virtual IPUs" in running.stderr.readline()
            with serving(tmp_path, *words, f"--port={port}") as second:
                assert "leases of an earlier server: 2; they end in 6 s" in next_line(second)
                assert "answers again, and the lease has been renewed" in running.stderr.readline()
                assert left_after_all(lambda: set(second.held()) - {"POD16/0", "POD16/1"}) == []
                assert second.held() == ["POD16/0", "POD16/1"]
                running.communicate("\n", timeout=DEADLINE_SECONDS)
                assert running.returncode == 0
                assert left_after_all(second.held) == []
            assert refused.code == 69
            assert "POD16/2-3: process 1 of ann@n2 (train.py), since 20" in refused.err
            assert "no server hands out this pool now, and without one the leases of other hosts" in refused.err


def test_the_server_says_why_it_cannot_serve(server: Server, tmp_path: Path) -> None:
    """A port in use, a pool that is served, a package that is missing, an address that others reach."""
    command = [sys.executable, "-m", "poprun.vipu", "serve", f"--token-file={server.folder / 'token'}"]
    served = {"POPRUN_POOL": str(server.folder / "pool"), "POPRUN_POD": "POD16"}
    other = {**served, "POPRUN_POOL": str(tmp_path / "pool")}
    without = "import sys; sys.modules['uvicorn'] = None; from poprun.vipu import main; main()"
    for words, env, problem in (
        (
            [*command, f"--port={server.port}"],
            other,
            f"nothing can listen at 127.0.0.1:{server.port} (Address already",
        ),
        ([*command, "--port=0"], served, f"is served already, by process {server.process.pid}"),
        ([sys.executable, "-c", without, "serve"], other, "pip install 'poprun[serve]'"),
        (
            [*command],
            {**other, "POPRUN_POD": "POD8192"},
            "POD8192 has 8,192 IPUs: a server hands out 4,096 at most",
        ),
    ):
        finished = run(words, env=env)
        assert finished.code != 0
        assert problem in finished.err
        assert "Traceback" not in finished.err


def test_a_server_that_others_reach_warns_and_ends_in_time(tmp_path: Path) -> None:
    """It says what travels in clear, makes a token that nobody else may read, and ends when asked."""
    with serving(tmp_path, "--host=0.0.0.0") as server:
        assert "warning: all but the token travels in clear" in next_line(server)
        assert "which was made now" in server.told
        assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
        assert (tmp_path / "token").read_text().strip() not in server.told
        with socket.create_connection(("127.0.0.1", server.port)):  # it sends nothing, and the end does not wait
            server.process.terminate()
            _, rest = server.process.communicate(timeout=DEADLINE_SECONDS)

    assert server.process.returncode == 0
    assert "stopped; the leases of jobs stay" in rest
