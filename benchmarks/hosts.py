"""How long a job of several hosts takes to begin and to end, on hosts that are network namespaces of this machine.

    python -m benchmarks.hosts --rounds 5

Three things are measured: the time until the first training step of a plain torch program, beside mpiexec on the
same hosts, in turn; the look at 64 hosts of which 8 do not answer; and how long a job lives on after the cable of
a host was pulled. It takes root, iproute2 and openssh-server.
"""

import argparse
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.hosts.network import TMPDIR, Network, missing_reason

NUM_HOSTS, NUM_DEAD = 64, 8
NUM_PROCESSES = 2
STOP_TIMEOUT_SECONDS = 2
SCRIPTS = Path(sys.executable).parent

FIRST_STEP = """
import os, time
rank = os.environ.get("RANK") or os.environ["PMI_RANK"]
os.environ.update(RANK=rank, WORLD_SIZE="2")
os.environ.setdefault("MASTER_ADDR", "10.217.0.1")
os.environ.setdefault("MASTER_PORT", "29517")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "eth0")
import torch
torch.distributed.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.randn(16, 64)).sum().backward()
optimizer.step()
print("first step at", time.time(), flush=True)
torch.distributed.destroy_process_group()
os._exit(0)  # a thread of gloo may abort a Python that ends
"""

HANG = "trap '' TERM; echo ready; while :; do sleep 1; done"


def on_first_host(network: Network, *command: str) -> "subprocess.Popen[str]":
    """Start a command on the first host, as a user who is logged in there does."""
    settings = {
        "PATH": f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}",
        "TMPDIR": TMPDIR,
        "POPRUN_SSH_CONFIG": str(network.ssh_config),
        "HYDRA_LAUNCHER_EXTRA_ARGS": f"-F {network.ssh_config}",
    }
    words = network.hosts["n1"].enter(["env", *(f"{name}={value}" for name, value in settings.items()), *command])
    return subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def until_first_step(network: Network, *launcher: str) -> float:
    """Seconds from the start of a launcher to the first step that both programs have done."""
    start = time.time()
    process = on_first_host(network, *launcher, sys.executable, "-c", FIRST_STEP)
    out, err = process.communicate(timeout=300)
    steps = [float(text) for text in re.findall(r"first step at ([0-9.]+)", out)]
    if process.returncode or len(steps) != NUM_PROCESSES:
        raise SystemExit(f"{shlex.join(launcher)} failed: {err}")
    return max(steps) - start


def compare_starts(network: Network, rounds: int) -> None:
    """Print how long each launcher takes to the first step, and their ratio."""
    launchers = {
        "poprun --host n1,n2": ("poprun", "--host", "n1,n2", "-n", "2"),
        "mpiexec -hosts n1,n2": ("mpiexec", "-launcher", "ssh", "-hosts", "n1,n2", "-n", "2"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in launchers}
    for _ in range(rounds):
        for name, words in launchers.items():
            seconds[name].append(until_first_step(network, *words))
    ours, theirs = (statistics.median(values) for values in seconds.values())
    for name, values in seconds.items():
        print(f"first step, {name:22} median {statistics.median(values):6.2f} s, least {min(values):6.2f} s")
    print(f"first step, ratio {ours / theirs:.2f}")


def look_at_many(network: Network) -> None:
    """Print how long the look at many hosts takes when some are dead."""
    own_key = (network.folder / "n1.pub").read_text()
    with (network.folder / "known_hosts").open("a") as known:
        known.write(f"127.0.0.* {own_key}")
    alive = f"127.0.0.[2-{NUM_HOSTS - NUM_DEAD + 1}]"
    dead = f"10.217.0.[200-{200 + NUM_DEAD - 1}]"
    words = ("poprun", "--host", f"{alive},{dead}", "-n", str(NUM_HOSTS), "true")
    start = time.perf_counter()
    _, err = on_first_host(network, *words).communicate(timeout=300)
    seconds = time.perf_counter() - start
    if f"{dead}  it does not answer" not in err:
        raise SystemExit(f"the look at {NUM_HOSTS} hosts failed: {err}")
    print(f"look at {NUM_HOSTS} hosts, {NUM_DEAD} of them dead: {seconds:.1f} s, all {NUM_DEAD} in one table")


def lose_a_host(network: Network, launcher: str) -> None:
    """Print how long a job lives on when the cable of a host is pulled."""
    options = ("--host", "n[1-3]", "-n", "3", f"--stop-timeout={STOP_TIMEOUT_SECONDS}")
    process = on_first_host(network, launcher, *options, "sh", "-c", HANG)
    if process.stdout is not None:
        for _ in range(3):
            process.stdout.readline()
    start = time.perf_counter()
    network.hosts["n2"].cut()
    process.communicate(timeout=300)
    told = time.perf_counter() - start
    left = network.leftovers(apart_from="sshd:")
    everywhere = time.perf_counter() - start
    network.hosts["n2"].mend()
    print(
        f"cable pulled, --stop-timeout {STOP_TIMEOUT_SECONDS}: poprun has ended after {told:.1f} s, "
        f"the job on every host after {everywhere:.1f} s, left {left}"
    )


def main() -> None:
    """Measure, then print the figures and the command that made them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="how often each launcher runs (5)")
    rounds = parser.parse_args().rounds
    if reason := missing_reason():
        raise SystemExit(reason)
    with tempfile.TemporaryDirectory() as folder, Network(("n1", "n2", "n3"), Path(folder)) as network:
        compare_starts(network, rounds)
        look_at_many(network)
        lose_a_host(network, "poprun")
    print(f"\n{rounds} rounds; again: python -m benchmarks.hosts --rounds {rounds}")


if __name__ == "__main__":
    main()
