"""What the doctor's facts mean, as a table and as JSON.

Holds poprun.hosts.doctor.facts.
"""

import json
import re
from dataclasses import asdict, replace
from typing import Any

import pytest

from popdist.ground.installation.torch_found import OLDEST_TORCH, trouble_of_torch
from poprun.hosts.doctor.diagnosis import NEWEST_TORCH, State, can_run, diagnose, judge_hosts, render_findings
from poprun.hosts.doctor.facts import InstallationFacts, Libraries, read_libraries
from poprun.launch.process.limits import find_tmpdir_problem
from poprun.launch.process.machine_evidence import MemoryLimits
from poprun.plan.topology import Gpu, MachineFacts
from poprun.text.screen import ReportFormat
from tests.docs.markdown import ROOT
from tests.planning import LAPTOP, MPICH, with_gpus

GIB = 2**30
VERSIONS = {"torch": "2.13.0+cpu", "mpi4py": "4.1.2", "popdist": "0.1.0"}
HEALTHY = InstallationFacts(
    python="3.12.3",
    interpreter="/env/bin/python",
    libraries=Libraries(versions=VERSIONS, has_gloo=True, has_extension=True),
    machine=replace(LAPTOP, mpi=MPICH),
    cpu_quota=None,
    memory=MemoryLimits(machine_bytes=16 * GIB, shared_bytes=8 * GIB, shared_free_bytes=8 * GIB),
    can_share_memory=True,
    ssh="OpenSSH_9.2p1",
    slurm="slurm 24.11",
    slurm_job="77",
    hash_seed="7",
)
BROKEN = {"torch": "ImportError: libtorch.so: cannot open shared object file"}
BARE = replace(
    HEALTHY,
    libraries=Libraries(problems=BROKEN, versions={"popdist": "0.0.9"}),
    machine=replace(
        with_gpus("fb"), gpu_source="nvidia-smi", unknown_mpi=("/usr/bin/mpirun",), memory_nodes=(0, 1)
    ),
    cpu_quota=2.5,
    memory=MemoryLimits(
        machine_bytes=16 * GIB, group_bytes=4 * GIB, address_space_bytes=2 * GIB, shared_free_bytes=64 * 2**20
    ),
    ssh="",
    slurm="",
    hash_seed="",
    loopback_problem="the loopback address 127.0.0.1 cannot be reached: ip link set lo up",
)

HEALTHY_TABLE = """\
Python     ok      3.12.3, /env/bin/python
torch      ok      2.13.0+cpu, for the CPU
popdist    ok      0.1.0
extension  ok      popdist's, in C
MPI        ok      MPICH 5.0.2, /opt/mpich/bin/mpiexec
GPUs       absent  none: virtual IPUs are shares of the cores
cores      ok      4 (0-3)
memory     ok      16.0 GiB
/dev/shm   ok      8.0 GiB free
hash seed  ok      PYTHONHASHSEED=7, as you have set it
ssh        ok      OpenSSH_9.2p1
Slurm      ok      slurm 24.11, inside job 77

jobs can run on this machine
"""

BARE_TABLE = """\
Python     ok       3.12.3, /env/bin/python
torch      fails    ImportError: libtorch.so: cannot open shared object file
                    → /env/bin/python -m pip install --force-reinstall torch
popdist    fails    0.0.9, but poprun is 0.1.0
                    → /env/bin/python -m pip install poprun==0.1.0
MPI        absent   none, so jobs start without it, on this machine only; of neither family: /usr/bin/mpirun
                    → /env/bin/python -m pip install 'poprun[mpich]'
GPUs       warning  2 (NVIDIA), found by nvidia-smi; GPU 0 is free; torch sees 0
                    → install a torch that is built for devices of NVIDIA, and for this machine's driver
cores      ok       4 (0-3), 2 NUMA nodes; the control group grants the time of 2.5
memory     ok       16.0 GiB; the control group grants 4.0 GiB; ulimit -v 2.0 GiB for each process
/dev/shm   warning  64.0 MiB free, where data loaders leave their batches
                    → start the container with --shm-size 8g, or mount -o remount,size=8g /dev/shm
loopback   fails    the loopback address 127.0.0.1 cannot be reached
                    → ip link set lo up
hash seed  ok       poprun sets PYTHONHASHSEED=0; with torchrun, mpiexec and srun, export PYTHONHASHSEED=0 yourself
ssh        absent   none: no jobs on other hosts
                    → install an ssh client (Debian: apt install openssh-client)
Slurm      absent   none

no job can run before that is mended
"""


@pytest.mark.parametrize(("facts", "table"), [(HEALTHY, HEALTHY_TABLE), (BARE, BARE_TABLE)])
def test_the_table(facts: InstallationFacts, table: str) -> None:
    """What was found and what to do, and in the last line whether a job can run."""
    assert render_findings(diagnose(facts), ReportFormat.TABLE, width=120) == table


@pytest.mark.parametrize(
    ("facts", "failing"),
    [
        (HEALTHY, set()),
        (BARE, {"torch", "popdist", "loopback"}),
        (replace(HEALTHY, can_share_memory=False), {"/dev/shm"}),
        (replace(HEALTHY, memory=MemoryLimits()), {"/dev/shm"}),
        (replace(HEALTHY, libraries=replace(HEALTHY.libraries, has_gloo=False)), {"torch"}),
        (replace(HEALTHY, libraries=replace(HEALTHY.libraries, has_extension=False)), set()),
        (replace(HEALTHY, machine=LAPTOP, ssh="", slurm=""), set()),
        (replace(HEALTHY, libraries=replace(HEALTHY.libraries, problems={"mpi4py": "ImportError: no"})), set()),
    ],
)
def test_what_no_job_can_do_without(facts: InstallationFacts, failing: set[str]) -> None:
    """Only what every job needs fails; each such finding says what to do."""
    findings = diagnose(facts)
    fails = [finding for finding in findings if finding.state is State.FAILS]

    assert {finding.subject for finding in fails} == failing
    assert all(finding.remedy for finding in fails)
    assert can_run(findings) == (not failing)


WITHOUT = {"popdist": "0.1.0"}
OLD = trouble_of_torch("2.3.1", has_distributed=True)
TWO = ("/env/torch", "/home/me/torch")


@pytest.mark.parametrize(
    ("libraries", "subject", "state", "found", "remedy"),
    [
        ({"versions": WITHOUT}, "torch", State.ABSENT, "none: programs of torch", "'poprun[torch]'"),
        ({"versions": WITHOUT}, "mpi4py", State.ABSENT, "none: only programs", "install mpi4py"),
        ({"versions": WITHOUT}, "GPUs", State.OK, "2 (NVIDIA)", ""),
        ({"torch_trouble": OLD}, "torch", State.FAILS, "torch 2.3.1 is too old", "pip install 'torch>=2.6'"),
        (
            {"torch_folders": TWO},
            "torch",
            State.WARNING,
            f"programs import {TWO[0]}, and not {TWO[1]}",
            "all but one",
        ),
    ],
)
def test_what_is_found_of_torch_and_mpi4py(
    libraries: dict[str, Any], subject: str, state: State, found: str, remedy: str
) -> None:
    """Where they are not there, jobs of other programs run; a wrong one, or a second one, is named."""
    facts = replace(HEALTHY, machine=replace(with_gpus("ff"), mpi=MPICH))
    findings = diagnose(replace(facts, libraries=replace(HEALTHY.libraries, num_devices=0, **libraries)))
    first = next(it for it in findings if it.subject == subject)

    assert (first.state, can_run(findings)) == (state, state is not State.FAILS)
    assert found in first.found
    assert remedy in first.remedy


@pytest.mark.parametrize(
    ("version", "found"),
    [
        ("2.15.1", "2.15.1, for the CPU"),
        ("2.16.0.dev1", "2.16.0.dev1, for the CPU; poprun was tested with versions up to 2.15"),
        ("3.0", "3.0, for the CPU; poprun was tested with versions up to 2.15"),
        ("nightly", "nightly, for the CPU"),
    ],
)
def test_a_torch_that_is_newer_than_the_tested_ones(version: str, found: str) -> None:
    """One line says so, and nothing is to be done about it."""
    libraries = replace(HEALTHY.libraries, versions={**VERSIONS, "torch": version})
    (finding,) = (it for it in diagnose(replace(HEALTHY, libraries=libraries)) if it.subject == "torch")

    assert (finding.found, finding.remedy) == (found, "")
    assert (finding.state is State.WARNING) == ("tested" in found)


ONE = Gpu(name="0", model="NVIDIA H200")
ODD = "nvidia-smi finds no GPU, and says: Driver/library version mismatch: check the driver"


@pytest.mark.parametrize(
    ("machine", "seen", "state", "found"),
    [
        (
            replace(LAPTOP, gpus=(ONE,), gpu_source="nvidia-smi"),
            1,
            "ok",
            "1 (NVIDIA H200), found by nvidia-smi; GPU 0 is free",
        ),
        (replace(with_gpus("bb"), maker="AMD"), 2, "ok", "2 (AMD); none is free"),
        (replace(with_gpus("ff"), maker="Intel"), 2, "ok", "2 (Intel); GPUs 0, 1 are free"),
        (
            replace(LAPTOP, gpus=(Gpu(name="MIG-a"), Gpu(name="MIG-b"))),
            1,
            "ok",
            "2 (NVIDIA); GPUs MIG-a, MIG-b are free",
        ),
        (replace(LAPTOP, gpu_problems=(ODD,)), 0, "warning", ODD.removesuffix(": check the driver")),
        (LAPTOP, 0, "absent", "none: virtual IPUs are shares of the cores"),
    ],
)
def test_what_is_found_of_gpus(machine: MachineFacts, seen: int, state: str, found: str) -> None:
    """How many, of which kind, by which tool, and which are free."""
    facts = replace(HEALTHY, machine=machine, libraries=replace(HEALTHY.libraries, num_devices=seen))
    (finding,) = (it for it in diagnose(facts) if it.subject == "GPUs")

    assert (finding.state, finding.found) == (state, found)
    assert finding.remedy == ("check the driver" if state == "warning" else "")


def test_a_torch_says_for_what_it_was_built() -> None:
    """For the runtime of the maker of the devices."""
    libraries = replace(HEALTHY.libraries, builds={"cuda": "", "hip": "7.0.2", "xpu": ""})
    (finding,) = (it for it in diagnose(replace(HEALTHY, libraries=libraries)) if it.subject == "torch")

    assert finding.found == "2.13.0+cpu, for ROCm 7.0.2"


def test_the_tested_versions_of_torch_stand_in_a_table() -> None:
    """None is older than what the project allows, and the last is the newest that is taken for tested."""
    table = (ROOT / "docs" / "torch.md").read_text(encoding="utf-8").partition("| torch |")[2]
    tested = [tuple(map(int, found)) for found in re.findall(r"^\| (\d+)\.(\d+)\.\d+\b", table, re.MULTILINE)]

    assert tested[-1] == NEWEST_TORCH
    assert min(tested) == OLDEST_TORCH


def test_json() -> None:
    """A program reads the same findings."""
    report = json.loads(render_findings(diagnose(BARE), ReportFormat.JSON))

    assert (report["version"], report["can_run"]) == (1, False)
    assert report["findings"][1] == {
        "subject": "torch",
        "state": "fails",
        "found": BROKEN["torch"],
        "remedy": "/env/bin/python -m pip install --force-reinstall torch",
    }


def test_a_terminal_obeys_nothing_that_another_host_says() -> None:
    """Its words are shown, line by line."""
    finding = judge_hosts(("n1",), "1 of 1 hosts cannot take part:\n  n1  it says \x1b[2J")

    assert render_findings((finding,), ReportFormat.TABLE).splitlines()[1].endswith("it says \\x1b[2J")


def test_what_the_other_python_says() -> None:
    """Its last line counts, whatever libraries print when they are imported; silence is a problem of torch's."""
    found = Libraries(
        versions={"torch": "2"},
        problems={"mpi4py": "ImportError: x"},
        torch_folders=["/env/torch"],
        num_devices=3,
        has_gloo=True,
        has_extension=True,
    )

    assert read_libraries(f"a warning\n\n{json.dumps(asdict(found))}\n") == found
    assert "did not answer within" in read_libraries(None).problems["torch"]
    assert "did not answer within" in read_libraries("").problems["torch"]


@pytest.mark.parametrize(
    ("folder", "is_too_long"), [("", False), ("/tmp", False), ("/scratch/" + "j" * 100, True)]
)
def test_a_tmpdir_in_which_no_socket_fits_is_a_warning(folder: str, is_too_long: bool) -> None:  # noqa: FBT001 - a parameter
    """A batch system may set one; a loader's workers would hang there without a word."""
    facts = replace(HEALTHY, tmpdir_problem=find_tmpdir_problem(folder))
    found = [finding for finding in diagnose(facts) if finding.subject == "TMPDIR"]

    assert [(it.state, it.remedy) for it in found] == (
        [(State.WARNING, "export TMPDIR=/tmp, or another short one")] if is_too_long else []
    )
    assert all("TMPDIR has 109 bytes" in it.found for it in found)
