"""Run a program on hosts whose cables carry so much and no more, and take so long.

    python -m benchmarks.slow_network --rate 1gbit python benchmarks/overlap.py
    python -m benchmarks.slow_network --rate 1gbit --latency 1ms python benchmarks/overlap.py
    python -m benchmarks.slow_network --hosts 4 --instances 2 --rate 10gbit python benchmarks/overlap.py

The hosts are network namespaces of this machine. It takes root, iproute2 and openssh-server.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from tests.hosts.network import TMPDIR, Network, missing_reason

BUCKET = ("burst", "256kb", "latency", "50ms")
"""Of tokens: how much goes at once, and how long the rest may wait."""

INTERFACE = "eth0"
SCRIPTS = Path(sys.executable).parent


def run(network: Network, num_local: int, program: list[str]) -> int:
    """Start the program from the first host, as a user who is logged in there does; poprun's exit code."""
    settings = {
        "PATH": f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}",
        "TMPDIR": TMPDIR,
        "POPRUN_SSH_CONFIG": str(network.ssh_config),
        "GLOO_SOCKET_IFNAME": INTERFACE,
    }
    hosts = ["--host", ",".join(network.hosts), "--num-instances", str(len(network.hosts) * num_local)]
    job = ["poprun", *hosts, "--tag-output=no", *program]
    words = ["env", f"--chdir={Path.cwd()}", *(f"{name}={value}" for name, value in settings.items()), *job]
    first = next(iter(network.hosts.values()))
    return subprocess.run(first.enter(words), stdin=subprocess.DEVNULL, check=False).returncode


def milliseconds(text: str) -> float:
    """Such as ``1ms``, in seconds."""
    if not text.endswith("ms"):
        raise ValueError
    return float(text.removesuffix("ms")) / 1e3


def main() -> None:
    """Make the network, run the program on it, and take it away."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2, help="how many (2)")
    parser.add_argument("--instances", type=int, default=1, help="of each host (1)")
    parser.add_argument("--rate", default="1gbit", help="of each host's cable, as tc writes it (1gbit)")
    parser.add_argument("--latency", type=milliseconds, help="what a frame takes from host to host, such as 1ms")
    parser.add_argument("program", nargs=argparse.REMAINDER, help="what each host runs, with its words")
    options = parser.parse_args()
    if reason := missing_reason():
        raise SystemExit(reason)
    names = [f"n{number}" for number in range(1, options.hosts + 1)]
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        network = stack.enter_context(Network(names, Path(folder)))
        if options.latency:
            stack.enter_context(network.delayed(options.latency, *network.hosts))
        for host in network.hosts.values():
            host.run("tc", "qdisc", "add", "dev", INTERFACE, "root", "tbf", "rate", options.rate, *BUCKET)
        code = run(network, options.instances, options.program)
    sys.exit(code)


if __name__ == "__main__":
    main()
