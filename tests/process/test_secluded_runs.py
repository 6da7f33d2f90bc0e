"""Runs of the tests that go on at the same time are kept from each other by ``scripts/secluded``."""

import socket
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from tests.docs.markdown import ROOT
from tests.running import run

SECLUDED = [str(ROOT / "scripts" / "secluded")]

TELL = """
import os, socket, subprocess, sys, tempfile
name = sys.argv[1]
print(os.path.exists(f"/dev/shm/{name}"), os.path.exists(f"/var/tmp/{name}"))
print(name in open("/proc/net/unix").read())
print([pid for pid in os.listdir("/proc") if pid.isdecimal()] == ["1", str(os.getpid())])
orphan = subprocess.Popen(["sh", "-c", "true & echo $!"], stdout=subprocess.PIPE)
orphan.wait()
pid = int(orphan.stdout.read())
while os.path.exists(f"/proc/{pid}"):
    pass
socket.create_server((socket.gethostname(), 0)).close()
print(tempfile.gettempdir())
sys.exit(7)
"""


def test_a_run_sees_only_what_is_its_own() -> None:
    """No file, socket or process of others; orphans are reaped, the host has its name, the end is passed on."""
    if subprocess.run([*SECLUDED, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no namespaces can be made here: the tests run one after the other")
    name = f"poprun-test-{uuid.uuid4().hex}"
    files = [Path(folder, name) for folder in ("/dev/shm", "/var/tmp")]
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(f"\0{name}")
        for file in files:
            file.touch()
        try:
            finished = run([*SECLUDED, sys.executable, "-c", TELL, name])
        finally:
            for file in files:
                file.unlink()

    assert finished.code == 7, finished.err
    assert finished.out.splitlines() == ["False False", "False", "True", "/var/tmp"]
