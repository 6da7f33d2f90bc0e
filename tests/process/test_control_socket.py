"""Strangers at the control socket of a running job, and agents that come over the network.

Holds poprun.job.agents, poprun.job.key_proofs, poprun.job.output.streams and poprun.hosts.remote_side.
"""

import json
import os
import resource
import selectors
import socket
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from poprun.job.agents import AgentLinks
from poprun.launch.messages.control import MAX_MESSAGE_BYTES, abstract_address
from poprun.launch.messages.proofs import NONCE_BYTES, PROOF_BYTES
from tests.process.endings import has_met, write_program
from tests.process.test_endings import wait_until
from tests.running import DEADLINE_SECONDS, Finished, Poprun, run

HELLO = {"event": "hello", "instance": 0, "pid": 1, "shim": 1, "runtime": 1, "address": "127.0.0.1", "ports": []}
HOSTILE = [
    b"nonsense\n",
    b"\0" * 1000 + b"\n",
    b"[]\n",
    json.dumps({"event": "ended"}).encode() + b"\n",
    json.dumps(HELLO).encode() + b"\n",
    json.dumps(HELLO | {"instance": 99}).encode() + b"\n",
    json.dumps(HELLO | {"instance": "0"}).encode() + b"\n",
    json.dumps({"event": "stream", "instance": 0, "stream": 1}).encode() + b"\n",
]


def control_socket(pid: int) -> str:
    """The name of the control socket of a running poprun."""
    text = Path("/proc/net/unix").read_text(encoding="utf-8")
    names = {line.split("@", 1)[1] for line in text.splitlines() if f"@poprun-{pid}-" in line}
    assert len(names) == 1
    return names.pop()


def say(address: str, data: bytes) -> None:
    """Connect, say something, and wait until poprun has hung up or a moment has passed in silence."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        stranger.settimeout(0.2)
        stranger.connect(abstract_address(address))
        try:
            stranger.sendall(data)
            while stranger.recv(4096):
                pass
        except (TimeoutError, ConnectionError, BrokenPipeError):
            return


def test_strangers_are_refused_and_the_job_goes_on(poprun: Poprun, tmp_path: Path) -> None:
    """Whatever a process of the same user says to the control socket."""
    words = write_program(tmp_path, "ready()\nsys.stdin.read()")
    with poprun.started("--launcher", "local", "-n", "2", *words) as process:
        wait_until(lambda: has_met(tmp_path, 2))
        address = control_socket(process.pid)

        @settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
        @given(st.lists(st.sampled_from(HOSTILE) | st.binary(max_size=50), max_size=3))
        def fuzz(pieces: list[bytes]) -> None:
            say(address, b"".join(pieces))
            assert process.poll() is None

        for piece in HOSTILE:
            say(address, piece)
        say(address, b"x" * (MAX_MESSAGE_BYTES + 10) + b"\n")
        fuzz()
        say(address, b"".join(b"nonsense %d\n" % number for number in range(10)))
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as silent:
            silent.connect(abstract_address(address))
            _, err = process.communicate("", timeout=DEADLINE_SECONDS)

    assert process.returncode == 0
    assert "refused: a control message is no JSON" in err
    assert "refused: the event hello of 0 at a time that is not its" in err
    assert err.count("refused") == 10


def test_a_monitor_for_which_there_is_no_descriptor_does_not_end_a_job(capsys: pytest.CaptureFixture[str]) -> None:
    """All agents are connected, here none, and the programs run."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with selectors.DefaultSelector() as selector, socket.socket(socket.AF_UNIX) as monitor:
        links = AgentLinks(0, selector, None)
        monitor.connect(abstract_address(links.address))
        ((key, _),) = selector.select(DEADLINE_SECONDS)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
        try:
            assert list(key.data()) == []
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert not selector.get_map()
        links.close()

    assert "no monitor can connect to this job any more: too many open files" in capsys.readouterr().err


CONNECT = """
import os, socket, sys
os.setuid(30_000)
for _ in range(5):
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect("\\0" + sys.argv[1])
        assert stranger.recv(1) == b""
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_connections_of_another_user_are_one_line(poprun: Poprun) -> None:
    """However often: nobody fills the terminal of another user."""
    with poprun.started(
        "--launcher=local", "-n1", sys.executable, "-c", "input(print('here', flush=True))"
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        run([sys.executable, "-c", CONNECT, control_socket(process.pid)]).succeeded()
        _, err = process.communicate("x\n", timeout=DEADLINE_SECONDS)

    assert err.count("refused: a process of another user connected to the control socket") == 1


OVER_TCP = """
import os, sys
from poprun.launch.messages.proofs import new_key
from poprun.plan.plan_file import read_plan
from poprun.hosts.remote_side import hold
from poprun.launch.routes import HostRoute, JobKey, JobNetwork
from poprun.start import run_job
plan, host = read_plan(open(sys.argv[1]).read(), "plan"), sys.argv[2]
key = JobKey(text=new_key(), file=sys.argv[1] + "-key")
assert hold({"file": key.file, "key": key.text}) == {"problem": ""}
here = HostRoute(name="localhost", address=host, interface="lo")
network = JobNetwork(control_host=host, hosts=(here,), key=key)
sys.exit(run_job(plan, network, verbosity=2))
"""


def over_tcp(poprun: Poprun, folder: Path, host: str, *words: str, also: str = "", stdin: str = "") -> Finished:
    """Run a job whose agents come over the network, as those of other hosts do; ``also`` is done before."""
    plan = poprun(*words[:-3], "--dry-run", "--topology-format", "json", *words[-3:]).succeeded().out
    (folder / "plan.json").write_text(plan)
    text = OVER_TCP.replace("network =", f"{also}\nnetwork =")
    return run([str(poprun.python), "-c", text, str(folder / "plan.json"), host], stdin=stdin)


def has_ipv6() -> bool:
    """Whether there is an IPv6 loopback address."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_agents_come_over_the_network(poprun: Poprun, tmp_path: Path, host: str) -> None:
    """Their programs' output arrives, and the key of the job is left nowhere."""
    text = "import os, sys; print('out', os.environ['RANK']); print('err', file=sys.stderr); print(*os.environ)"
    if host == "::1" and not has_ipv6():
        pytest.skip("this machine has no IPv6 loopback address")
    finished = over_tcp(poprun, tmp_path, host, "--launcher", "local", "-n", "3", sys.executable, "-c", text)

    out = [line for line in finished.succeeded().lines if "] out" in line]
    assert out == [f"[{n}] out {n}" for n in range(3)]
    assert finished.err.count("] err") == 3
    assert "POPRUN_CONTROL" not in finished.out
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"]


def test_programs_of_torch_are_watched_from_elsewhere(poprun: Poprun, tmp_path: Path) -> None:
    """Where poprun runs on none of the job's hosts, or one is given by another of its addresses."""
    words = ("--launcher", "local", "-n", "2", sys.executable, "-c", "import time, torch; time.sleep(2.5)")
    also = "here = HostRoute(name='localhost', address='127.0.0.2', interface='lo')"

    over_tcp(poprun, tmp_path, "127.0.0.1", *words, also=also).succeeded()


def test_input_that_nobody_reads_for_long_is_kept(poprun: Poprun, tmp_path: Path) -> None:
    """The time after which a silent host counts as lost is no limit for a program that reads later."""
    text = "import sys, time; time.sleep(1.5); print(len(sys.stdin.read()))"
    also = "from poprun.launch.messages import control; control._DEAD_MILLISECONDS = 300"
    words = ("--launcher", "local", "-n", "1", sys.executable, "-c", text)
    finished = over_tcp(poprun, tmp_path, "127.0.0.1", *words, also=also, stdin="x" * 10_000_000)

    assert finished.succeeded().out == "10000000\n"


def test_a_host_without_the_key_says_so(poprun: Poprun, tmp_path: Path) -> None:
    """Or with one that others may read; nothing is started."""
    words = ("-n", "1", sys.executable, "-c", "print(1)")
    missing = over_tcp(poprun, tmp_path, "127.0.0.1", "--launcher=mpi", *words, also="os.unlink(key.file)")
    shared = over_tcp(poprun, tmp_path, "127.0.0.1", "--launcher=mpi", *words, also="os.chmod(key.file, 0o644)")

    assert "no key of the job on" in missing.err
    assert "No such file or directory" in missing.err
    assert "is not this user's alone" in shared.err
    assert (missing.code, missing.out, shared.code, shared.out) == (70, "", 70, "")


def test_a_failure_over_the_network_is_one(poprun: Poprun, tmp_path: Path) -> None:
    """The same end, and the same report, as on one machine."""
    text = "import os, sys, time; os.environ['RANK'] == '1' and sys.exit('bad'); time.sleep(600)"
    finished = over_tcp(
        poprun, tmp_path, "127.0.0.1", "--launcher", "local", "-n", "2", sys.executable, "-c", text
    )

    assert finished.code == 1
    assert "bad" in finished.err


def test_a_failure_on_another_host_is_explained_from_there(poprun: Poprun, tmp_path: Path) -> None:
    """Its agent tells what the kernel grants a process there, and what it has killed."""
    also = "import resource; resource.setrlimit(resource.RLIMIT_AS, (4 << 30,) * 2)"
    words = ("--launcher", "local", "-n", "1", sys.executable, "-c", "bytearray(1 << 40)")
    finished = over_tcp(poprun, tmp_path, "127.0.0.1", *words, also=also)

    assert finished.code == 1
    assert "out of memory: ulimit -v lets a process have 4.0 GiB" in finished.err


def test_who_does_not_know_the_key_is_refused_at_the_network(poprun: Poprun, tmp_path: Path) -> None:
    """A stranger learns nothing and disturbs nothing, whether it lies, is silent, or goes away."""
    words = write_program(tmp_path, "ready()\nsys.stdin.read()\nopen(sys.argv[1] + '/go').read()")
    (tmp_path / "meeting" / "go").touch()
    plan = poprun("--launcher=local", "-n", "2", "--dry-run", "--topology-format", "json", *words).succeeded().out
    (tmp_path / "plan.json").write_text(plan)
    text = OVER_TCP.replace("import os, sys\n", STRANGERS)

    finished = run([str(poprun.python), "-c", text, str(tmp_path / "plan.json"), "127.0.0.1"])

    assert finished.code == 0
    assert "refused: the other side does not know the key of this job" in finished.err
    assert f"a stranger got {NONCE_BYTES} bytes" in finished.out


STRANGERS = f"""
import os, socket, sys, threading
from poprun.job import agents
created = socket.create_server
def create_server(*args, **kwargs):
    listener = created(*args, **kwargs)
    def knock():
        liar, silent, gone = (socket.create_connection(listener.getsockname()[:2]) for _ in range(3))
        gone.close()
        liar.sendall(b"x" * {NONCE_BYTES + PROOF_BYTES})
        got = b""
        while data := liar.recv(100): got += data
        print("a stranger got", len(got), "bytes", flush=True)
    threading.Thread(target=knock, daemon=True).start()
    return listener
socket.create_server = create_server
"""
