"""Jobs over several hosts that take their virtual IPUs from a server on another one."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.jobs import ROOT, HostPoprun
from tests.hosts.network import TMPDIR, Network
from tests.hosts.test_jobs import poprun_itself
from tests.process.endings import has_met, write_program
from tests.process.test_endings import wait_until

POD = "name: lab\nnum_machines: 2\nmachines_per_domain: 1\nhosts: n[1-2]\n"
GPUS = "#!/bin/sh\ncase \"$*\" in *query-compute*) ;; *) printf '0, GPU-a\\n1, GPU-b\\n' ;; esac\n"
PROGRAM = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], os.environ['POPDIST_DEVICES'])"


@pytest.fixture
def served(own_network: Network, tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """A server on the last of three hosts with two GPUs each: it hands out four IPUs of each of the others."""
    (tmp_path / "pod.yaml").write_text(POD)
    (tmp_path / "nvidia-smi").write_text(GPUS)
    (tmp_path / "nvidia-smi").chmod(0o755)
    for host in own_network.hosts.values():
        host.run("mount", "-t", "tmpfs", "none", "/usr/local/sbin")
        host.run("cp", str(tmp_path / "nvidia-smi"), "/usr/local/sbin/nvidia-smi")
    settings = {
        "PYTHONPATH": os.pathsep.join(str(ROOT / folder) for folder in ("poprun_py", "popdist_py")),
        "POPRUN_POD": str(tmp_path / "pod.yaml"),
        "POPRUN_POOL": f"{TMPDIR}/pool",
    }
    told = [f"{name}={value}" for name, value in settings.items()]
    words = [
        "-m",
        "poprun.vipu",
        "serve",
        "--host=0.0.0.0",
        "--lease-seconds=10",
        f"--token-file={tmp_path / 'token'}",
    ]
    command = own_network.hosts["n3"].enter(["env", *told, sys.executable, *words])
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        while "in clear text" not in (line := server.stderr.readline()):
            assert line
        yield server
        for line in own_network.hosts["n3"].processes():
            if "poprun.vipu serve" in line and "nsenter" not in line:
                own_network.hosts["n3"].run("kill", line.split()[0])
        server.communicate()


def test_jobs_of_several_hosts_share_one_pool(
    own_network: Network, served: "subprocess.Popen[str]", tmp_path: Path
) -> None:
    """IPUs come from the server, and beside them GPUs from each host's own pool; the error says who has what."""
    poprun = HostPoprun(python=Path(sys.executable), name="mpich")
    folders = ("/usr/local/sbin", str(Path(sys.executable).parent), os.environ["PATH"])
    env = {"PATH": os.pathsep.join(folders), "POPRUN_VIPU_TOKEN_FILE": str(tmp_path / "token")}
    words = write_program(tmp_path, "ready()\nhang()")
    options = ("-v", "--vipu-server-host=n3", "--pool=/run/pool", "--host")
    command = poprun.words(own_network, (*options, "n2", "-n1", sys.executable, *words), ROOT, env)
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as first:
        wait_until(lambda: has_met(tmp_path, 1))
        second = poprun(own_network, *options, "n[1-2]", "-n2", sys.executable, "-c", PROGRAM, env=env)
        large = poprun(own_network, *options, "n[1-2]", "-n2", "--ipus-per-replica=4", "true", env=env)
        poprun_itself(first).send_signal(signal.SIGTERM)
        _, told = first.communicate()

    assert "holds lab/4 on n2, from the pool n3:8090" in told
    assert "holds GPU 0 on n2, from the pool /run/pool" in told
    assert second.succeeded().lines == ["[0] 0 0", "[1] 1 0"]
    assert "holds lab/0,5 on n[1-2], from the pool n3:8090" in second.err
    assert large.code == 69
    assert "the job needs 8 virtual IPUs, and 7 are free of 8 in lab at n3:8090" in large.err
    assert "lab/4: process" in large.err


def test_a_lost_link_frees_what_the_job_held(
    own_network: Network, served: "subprocess.Popen[str]", tmp_path: Path
) -> None:
    """The server cannot know of the job, and the job goes on: it is told at once, and when others may have it."""
    poprun = HostPoprun(python=Path(sys.executable), name="mpich")
    folders = ("/usr/local/sbin", str(Path(sys.executable).parent), os.environ["PATH"])
    env = {"PATH": os.pathsep.join(folders), "POPRUN_VIPU_TOKEN_FILE": str(tmp_path / "token")}
    words = write_program(tmp_path, "ready()\nhang()")
    server = own_network.hosts["n3"]
    command = poprun.words(own_network, ("--vipu-server-host=n3", "-Hn1", sys.executable, *words), ROOT, env)
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as job:
        wait_until(lambda: has_met(tmp_path, 1))
        server.cut()
        told = lines_until(job, "The job goes on. If only the link is cut")
        ended = lines_until(served, "ended: nothing was heard of its job for 10 s")
        server.mend()
        lost = lines_until(job, "The job goes on without its lease")
        poprun_itself(job).send_signal(signal.SIGTERM)
        job.communicate()

    assert "n3:8090" in told
    assert "lab/0 for process" in ended
    assert "the lease of this job has ended" in lost


def lines_until(process: "subprocess.Popen[str]", words: str) -> str:
    """What a process says up to the line that has ``words``."""
    assert process.stderr is not None
    told = ""
    while words not in told:
        line = process.stderr.readline()
        assert line, told
        told += line
    return told
