"""A real Slurm of two nodes on loopback, started for the tests and ended with them."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "salloc", "scontrol")

_CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
KillWait=2
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 State=UNKNOWN
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""

_START_SECONDS = 300.0
_STOP_SECONDS = 60.0
_ASK_AGAIN_SECONDS = 0.1


@contextmanager
def running_cluster(folder: Path) -> Iterator[dict[str, str]]:
    """The variables with which Slurm's commands find a cluster of the nodes n1 and n2, each of 4 CPUs."""
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(b"k" * 1024)
    key.chmod(0o400)
    folder.chmod(0o755)
    configuration = folder / "slurm.conf"
    ports = _free_ports(3)
    configuration.write_text(
        _CONFIGURATION.format(folder=folder, host=socket.gethostname().partition(".")[0], ports=ports)
    )
    env = {"SLURM_CONF": str(configuration)}
    started: list[subprocess.Popen[bytes]] = []
    try:
        places = ("key-file", "pid-file", "log-file", "seed-file", "socket")
        munge = [f"--{it}={folder}/munge.{it.removesuffix('-file')}" for it in places] + [
            "--force",
            "--foreground",
        ]
        started.append(_start("munged", *munge))
        _until((folder / "munge.socket").exists, "munged has no socket")
        started.append(_start("slurmctld", "-D", "-f", str(configuration)))
        started += [_start("slurmd", "-D", "-f", str(configuration), "-N", node) for node in ("n1", "n2")]
        _until(lambda: _num_idle(env) == 2, f"the nodes are not idle: see {folder}")
        yield env
    finally:
        for process in reversed(started):
            process.terminate()
        for process in reversed(started):
            _end(process)


def missing_parts() -> list[str]:
    """Programs of Slurm that are not on this machine, and root, whom its daemons need."""
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    return missing if os.geteuid() == 0 else [*missing, "root"]


def _start(*words: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _end(process: "subprocess.Popen[bytes]") -> None:
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _num_idle(env: dict[str, str]) -> int:
    asked = subprocess.run(
        ["sinfo", "-h", "-N", "-o", "%t"],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=_START_SECONDS,
    )
    return asked.stdout.split().count("idle")


def _free_ports(num_ports: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(num_ports)]
    ports = [it.getsockname()[1] for it in sockets]
    for it in sockets:
        it.close()
    return ports


def _until(is_so: Callable[[], bool], problem: str) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not is_so():
        if time.monotonic() > deadline:
            raise TimeoutError(problem)
        time.sleep(_ASK_AGAIN_SECONDS)
