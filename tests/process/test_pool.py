"""Jobs that share a machine: they never hold the same virtual IPU, and what they hold comes back at every end.

Holds poprun.devices.lease.claims, poprun.devices.lease.pool_client, poprun.devices.pool.listing, poprun.outcome,
poprun.start and poprun.vipu.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import poprun.vipu
from poprun.devices.pool.pool import Pool
from tests.leftovers import wait_until_none
from tests.running import DEADLINE_SECONDS, Finished, Poprun, run, run_here

LOCAL = ("--launcher", "local")


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    """The file of a pool of the test's own."""
    return tmp_path / "pool"


@pytest.fixture
def vipu(pool: Path) -> Callable[..., Finished]:
    """The command ``vipu`` on the test's pool, with 8 virtual IPUs."""

    def call(*words: str, **variables: str) -> Finished:
        env = {"POPRUN_POOL": str(pool), "POPRUN_IPUS_PER_HOST": "8", **variables}
        return run_here(poprun.vipu.vipu, "vipu", *words, env=env)

    return call


@pytest.fixture
def job(poprun: Poprun, pool: Path) -> Poprun:
    """Poprun on the test's pool, with 8 virtual IPUs."""
    return Poprun(options=(*LOCAL, "--pool", str(pool), "--ipus-per-host", "8"))


def rows(finished: Finished) -> list[dict[str, Any]]:
    """What ``vipu list … --output json`` printed."""
    found: list[dict[str, Any]] = json.loads(finished.succeeded().out)
    return found


def held(vipu: Callable[..., Finished]) -> list[str]:
    """Names of the virtual IPUs that jobs hold."""
    return [row["name"] for row in rows(vipu("list", "ipus", "--output", "json")) if row["used_by"]]


def await_line(process: "subprocess.Popen[str]") -> str:
    """The next line that a job prints."""
    assert process.stdout is not None
    return process.stdout.readline()


def test_two_jobs_hold_different_ipus(job: Poprun, vipu: Callable[..., Finished]) -> None:
    """A job holds what its instances use while it runs; what it needs beyond that is refused, with who has it."""
    with job.started("--ipus-per-replica", "6", "sh", "-c", "echo up; read word") as running:
        await_line(running)
        assert held(vipu) == [f"cpu/{index}" for index in range(6)]
        small = job("-n", "2", "true")
        large = job("-n", "3", "true")
        running.communicate("\n", timeout=DEADLINE_SECONDS)

    assert small.code == 0
    assert large.code == 69
    assert "the job needs 3 virtual IPUs, and 2 are free of 8 on this machine" in large.err
    assert f"cpu/0-5: process {running.pid} of " in large.err
    assert ", since 20" in large.err
    assert held(vipu) == []


def test_every_replica_has_its_own_ipus(job: Poprun, vipu: Callable[..., Finished]) -> None:
    """A lease of counted virtual IPUs counts replicas, and a partition fits at exactly its power of two."""
    words = ("-n", "2", "--num-replicas", "4", "--vipu-partition", "p")
    program = ("sh", "-c", "echo up; [ $RANK = 1 ] || read word")
    with job.started(*words, "--ipus-per-replica", "2", *program) as running:
        await_line(running)
        assert held(vipu) == [f"cpu/{index}" for index in range(8)]
        running.communicate("\n", timeout=DEADLINE_SECONDS)
    vipu("create", "partition", "p", "--size", "8").succeeded()
    large = job(*words, "true")
    many = job("--num-replicas", "9", "true")

    assert "partition p has 8 IPUs, and the job fits one of 4" in large.err
    assert "--ipus-per-host 8 is too few: 9 replicas of 1 IPU use 9 virtual IPUs; give" in many.err


def test_a_lease_on_gpus_counts_gpus(poprun: Poprun, pool: Path, gpus: dict[str, str], tmp_path: Path) -> None:
    """Replicas of an instance take turns on its own; the report says which virtual IPUs they are."""
    report = tmp_path / "report.json"
    words = (
        *LOCAL,
        "--pool",
        str(pool),
        "-n2",
        "--num-replicas=8",
        "--ipus-per-replica=2",
        "--report",
        str(report),
    )
    poprun(*words, "true", env=gpus).succeeded()
    told = json.loads(report.read_text())

    assert [lease["held"] for lease in told["leases"]] == [["GPU 0", "GPU 1", "GPU 2", "GPU 3"]]
    instances = told["attempts"][0]["instances"]
    assert [(one["ipus"], one["devices"]) for one in instances] == [("0-7", ["0", "1"]), ("8-15", ["2", "3"])]


def test_a_lease_outlives_a_killed_poprun_until_its_programs_have_ended(
    job: Poprun, vipu: Callable[..., Finished], tmp_path: Path
) -> None:
    """SIGKILL of poprun frees the IPUs when the agents have ended the programs, and not before."""
    fifo = tmp_path / "go"
    os.mkfifo(fifo)
    script = f"trap 'read word < {fifo}; exit' TERM; echo up; while :; do sleep 0.05; done"
    with job.started(
        "-n", "1", "--ipus-per-replica", "4", "--stop-timeout", "30", "bash", "-c", script
    ) as running:
        await_line(running)
        os.kill(running.pid, signal.SIGKILL)
        running.wait()
        with fifo.open("w"):  # opens when the program, which was asked to end, waits
            assert held(vipu) == ["cpu/0", "cpu/1", "cpu/2", "cpu/3"]
        running.communicate(timeout=DEADLINE_SECONDS)

    assert wait_until_none(lambda: held(vipu)) == []


def test_many_jobs_at_once_never_overlap(poprun: Poprun, pool: Path, tmp_path: Path, gpus: dict[str, str]) -> None:
    """All jobs that wait get their turn, and no GPU is given to two: a job would find the other one's mark."""
    script = """
        for gpu in $(echo $CUDA_VISIBLE_DEVICES | tr , ' '); do mkdir mark-$gpu || exit 9; done
        sleep 0.1
        for gpu in $(echo $CUDA_VISIBLE_DEVICES | tr , ' '); do rmdir mark-$gpu; done
        """
    sizes = (5, 3, 8, 1, 4, 2)
    words = (*LOCAL, "--pool", str(pool), "--wait-for-devices", "--ipus-per-replica")
    jobs = [
        subprocess.Popen(
            poprun.command(*words, str(size), "sh", "-c", script),
            cwd=tmp_path,
            env=os.environ | gpus,
            stderr=subprocess.PIPE,
        )
        for size in sizes
    ]
    ends = [(job.communicate(timeout=DEADLINE_SECONDS)[1], job.returncode) for job in jobs]

    assert [code for _, code in ends] == [0] * len(sizes), ends
    assert list(tmp_path.glob("mark-*")) == []


def test_first_come_first_served(job: Poprun, tmp_path: Path) -> None:
    """Jobs get their turn in the order in which they came; nobody slips past, nobody waits for a killed one."""
    log = tmp_path / "log"
    with job.started("--ipus-per-replica", "6", "sh", "-c", "echo up; read word") as running:
        await_line(running)
        late = [waiting(job, "--ipus-per-replica", str(n), "sh", "-c", f"echo {n} >> {log}") for n in (8, 5, 7, 2)]
        late[1].kill()
        hasty = job("-n", "1", "true")
        running.communicate("\n", timeout=DEADLINE_SECONDS)
        ends = [(process.communicate(timeout=DEADLINE_SECONDS), process.returncode) for process in late]

    assert [code for _, code in ends] == [0, -signal.SIGKILL, 0, 0]
    assert hasty.code == 69
    assert "waiting before it for 8: process" in hasty.err
    assert log.read_text().split() == ["8", "7", "2"]


def waiting(job: Poprun, *words: str) -> "subprocess.Popen[bytes]":
    """A job that has taken its place in the queue."""
    process = subprocess.Popen(job.command("--wait-for-devices", *words), stderr=subprocess.PIPE)
    assert process.stderr is not None
    assert b"waiting: the job needs" in process.stderr.readline()
    return process


CONTENDER = """
import fcntl, sys
from poprun.plan.inventory import cpu_cluster
from poprun.devices.pool.holders import this_process
from poprun.devices.pool.pool import Pool, wait_for_turn
from poprun.devices.pool.requests import PoolRequest
pool, wish = Pool(sys.argv[1]), PoolRequest(num_ipus=1, choose=cpu_cluster("box", 3).pick(1))
for _ in range(int(sys.argv[2])):
    ticket = pool.enqueue(this_process("contender"), wish)
    while not ticket.ipus:
        wait_for_turn(pool, ticket, wish, 60.0)
        ticket = pool.retry(ticket, wish)
    (ipu,) = ticket.ipus
    # opened after the lease's file: of a killed process the kernel frees the file that was opened last first
    with open(ipu.replace("/", "-"), "w") as mark:
        fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
        print("held", flush=True)
    pool.release(ticket)
"""


def test_killed_contenders_lose_nothing(pool: Path, tmp_path: Path) -> None:
    """Processes are killed in the middle of leases and transactions: the others get on, and no IPU stays held."""
    command = [sys.executable, "-c", CONTENDER, str(pool)]
    survivors, victims = (
        [subprocess.Popen([*command, turns], cwd=tmp_path, stdout=subprocess.PIPE, text=True) for _ in range(3)]
        for turns in ("15", "1000000")
    )
    for victim in victims:
        await_line(victim)
        victim.kill()
    ends = [
        (contender.communicate(timeout=DEADLINE_SECONDS), contender.returncode)
        for contender in (*survivors, *victims)
    ]

    assert [code for _, code in ends] == [0, 0, 0, *[-signal.SIGKILL] * 3], ends
    assert Pool(str(pool)).state().taken == frozenset()
    assert run([*command, "1"], cwd=tmp_path).succeeded().out == "held\n"


def test_a_gpu_on_which_others_compute_is_taken(
    poprun: Poprun, pool: Path, gpus: dict[str, str], tmp_path: Path
) -> None:
    """The error names the user and the process; it can be overruled, and free GPUs are taken first."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as other:  # one above poprun would not count
        busy = gpus | {"FAKE_PROCESSES": f"GPU-0, {other.pid}"}
        words = (*LOCAL, "--pool", str(pool), "sh", "-c", "echo $CUDA_VISIBLE_DEVICES")
        alone = poprun("-n", "8", *words, env=busy)
        shared = poprun("-n", "8", "--share-devices", "--no-tag-output", *words, env=busy)
        seven = poprun("-n", "7", "--no-tag-output", *words, env=busy)
        user = Path(f"/proc/{other.pid}").owner()

    assert alone.code == 69
    assert f"GPU 0: memory is held outside the pool by process {other.pid} of {user}" in alone.err
    assert "--share-devices" in alone.err
    assert set(shared.succeeded().lines) == {"0,1,2,3,4,5,6,7"}
    assert set(seven.succeeded().lines) == {"1,2,3,4,5,6,7"}


def test_devices_are_in_slot_order(poprun: Poprun, pool: Path, gpus: dict[str, str]) -> None:
    """Every instance sees all devices of the job, in the order in which the user named them."""
    program = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], os.environ['POPDIST_DEVICES'])"
    words = (*LOCAL, "--pool", str(pool), "-n", "2", "--ipus-per-replica", "2", "--no-tag-output")
    finished = poprun(*words, sys.executable, "-c", program, env=gpus | {"CUDA_VISIBLE_DEVICES": "6,GPU-1,4,0"})

    assert finished.succeeded().lines == ["6,GPU-1,4,0 0,1", "6,GPU-1,4,0 2,3"]


def test_a_job_inside_a_job_runs_on_its_gpus(poprun: Poprun, pool: Path, gpus: dict[str, str]) -> None:
    """What a program starts shares the lease of the job that it belongs to; nobody waits for itself."""
    words = (*LOCAL, "--pool", str(pool), "--ipus-per-replica")
    inner = poprun.command(*words, "3", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES")
    finished = poprun(*words, "8", *inner, env=gpus)

    assert finished.succeeded().lines == ["0,1,2"]


def test_the_partition_of_a_job(job: Poprun, vipu: Callable[..., Finished], tmp_path: Path) -> None:
    """Poprun removes the partition that it made, keeps the one that it found, and never touches one in use."""
    partition = ("--vipu-partition", "p", "--ipus-per-replica")
    job(*partition, "3", "true").succeeded()
    gone = rows(vipu("list", "partitions", "--output", "json"))
    vipu("create", "partition", "p", "--size", "4").succeeded()
    small = job(*partition, "5", "true")
    with job.started(*partition, "3", "sh", "-c", "echo up; read word") as running:
        await_line(running)
        (used,) = rows(vipu("list", "partitions", "--output", "json"))
        second = job(*partition, "3", "--vipu-partition-attempts", "2", "true")
        removed = vipu("remove", "partition", "p")
        running.communicate("\n", timeout=DEADLINE_SECONDS)
    (found,) = rows(vipu("list", "partition", "-o", "json"))

    assert gone == []
    assert small.code == 2
    assert "partition p has 4 IPUs, and the job fits one of 8" in small.err
    assert (used["size"], used["state"], used["used_by"].split()[:2]) == (
        4,
        "in use",
        ["process", str(running.pid)],
    )
    assert second.code == 69
    assert f"p: process {running.pid} of " in second.err
    assert removed.code == 69
    assert "vipu: error: partition p is in use: process" in removed.err
    assert (found["state"], found["ipus"]) == ("free", "cpu/0-3")


def test_a_partition_grows_where_it_may(job: Poprun, vipu: Callable[..., Finished]) -> None:
    """With --update-partition=yes one that is too small is changed; what poprun made stays where that is asked."""
    partition = ("--vipu-partition", "p", "--remove-partition=no", "--ipus-per-replica")
    job(*partition, "2", "true").succeeded()
    job(*partition, "5", "--update-partition=yes", "true").succeeded()
    (found,) = rows(vipu("list", "partitions", "-o", "json"))

    assert (found["size"], found["state"]) == (8, "free")


def test_a_dry_run_says_what_would_be_held(job: Poprun, vipu: Callable[..., Finished], pool: Path) -> None:
    """And changes nothing: what is free, which partition, or why it would not start; -v tells of a real job."""
    before = job("--dry-run", "-n", "2", "true").err
    made_no_pool = not pool.exists()
    new = job("--dry-run", "-n", "2", "--vipu-partition", "p", "true").err
    vipu("create", "partition", "p", "--size", "4").succeeded()
    told = [
        job("--dry-run", *words, "true").succeeded().err
        for words in (("-n2",), ("-n4", "--vipu-partition=p"), ("-n2", "--vipu-partition=p"), ("-n5",))
    ]
    held = job("-v", "-n", "2", "true").succeeded().err

    assert made_no_pool
    assert f"would lease cpu/0-1, from the pool {pool}" in before
    assert f"would lease partition p, made for it: cpu/0-1, from the pool {pool}" in new
    assert "would lease cpu/4-5," in told[0]
    assert "would lease partition p: cpu/0-3," in told[1]
    assert "would not start now: partition p has 4 IPUs, and the job fits one of 2" in told[2]
    assert "would not start now: the job needs 5 virtual IPUs, and 4 are free of 8" in told[3]
    assert f"holds cpu/4-5 on localhost, from the pool {pool}" in held


def test_a_job_of_a_pod_leases_gpus_beside_its_ipus(
    poprun: Poprun, vipu: Callable[..., Finished], pool: Path, gpus: dict[str, str], tmp_path: Path
) -> None:
    """Its virtual IPUs are names of the plan; its GPUs are those of the machine, for jobs without a pod, too."""
    file = tmp_path / "pod.yaml"
    file.write_text("name: box\nnum_machines: 4\nallocations: {ann: 0, bob: 1-3}\n")
    words = (*LOCAL, "--pool", str(pool))
    pod = (*words, "-v", "--pod", str(file), "--vipu-allocation", "bob", "--vipu-partition", "p")
    turns = ("-n2", "--num-replicas", "8", "--no-tag-output")
    program = ("sh", "-c", "echo $CUDA_VISIBLE_DEVICES; [ $RANK = 1 ] || read word")
    with poprun.started(*pod, *turns, *program, env=gpus) as running:
        shown = await_line(running)
        (partition,) = rows(vipu("list", "partitions", "--output", "json"))
        other = poprun(*words, "-n", "7", "true", env=gpus)
        _, told = running.communicate("\n", timeout=DEADLINE_SECONDS)
    dry = poprun(*pod, *turns, "--dry-run", "true", env=gpus).succeeded().err
    too_many = poprun(*pod, "--num-replicas", "13", "--dry-run", "true", env=gpus)

    assert (shown, partition["ipus"]) == ("0,1\n", "box/8-15")
    assert "the job needs 7 GPUs, and 6 are free of 8 on this machine" in other.err
    assert f"GPU 0-1: process {running.pid} of" in other.err
    assert "holds box/8-15 (partition p) on localhost" in told
    assert "holds GPU 0-1 on localhost" in told
    assert f"would lease partition p, made for it: box/8-15 and GPU 0-1, from the pool {pool}" in dry
    assert "allocation bob of box has 12 IPUs, and 13 replicas of 1 IPU use 13: give at most" in too_many.err


def test_vipu(vipu: Callable[..., Finished]) -> None:
    """What the command prints, as tables and with errors that say what to do."""
    pod = {"POPRUN_POD": "POD16"}
    assert vipu("create", "partition", "p", "--size=8", **pod).out == "create partition (p): success: POD16/0-7\n"
    assert "POD16     pod    16     8      1      16" in vipu("list", "clusters", **pod).out
    assert "all          POD16     0-15   8      1" in vipu("list", "allocations", **pod).out
    assert "0     POD16/0    0         0     p           -" in vipu("list", "ipus", **pod).out
    assert "partition    p\nsize         8\n" in vipu("get", "partition", "p").out
    assert vipu("reset", "partition", "p", **pod).out == "reset partition (p): success: POD16/0-7\n"
    for words, problem in (
        (
            ("create", "partition", "q", "--size", "3"),
            "--size 3: the size of a partition is a power of two; nearest: 2 or 4",
        ),
        (("create", "partition", "q", "--size", "16"), "no IPU-Link domain has 16 free IPUs"),
        (("create", "partition", "q", "-s", "1", "-a", "x"), "there is no allocation x: there is none"),
        (("get", "partition", "q"), "there is no partition q"),
        (("list", "things"), "No such command 'things'"),
    ):
        finished = vipu(*words, **pod)
        assert finished.code != 0
        assert problem in finished.err
        assert "Traceback" not in finished.err
    assert vipu("remove", "partition", "p").out == "remove partition (p): success\n"


def test_a_job_whose_gpu_has_gone_is_not_started_again(poprun: Poprun, pool: Path, tmp_path: Path) -> None:
    """A GPU that fell off the bus comes back with a reset only; what is left is said."""
    smi = tmp_path / "nvidia-smi"
    second = f"[ -e {tmp_path}/gone ] || echo 1, GPU-1"
    smi.write_text(f"#!/bin/sh\ncase $2 in *gpu=index*) echo 0, GPU-0; {second};; esac\n")
    smi.chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    words = (*LOCAL, "--pool", str(pool), "-n2", "--max-restarts", "3")
    loses = poprun(*words, "sh", "-c", f"touch {tmp_path}/gone; exit 3", env=env)

    assert loses.code == 3
    assert "not started again: GPU 1 of the job cannot be found any more: GPU 0 is left; reset" in loses.err
    (tmp_path / "gone").unlink()
    keeps = poprun(*words[:-1], "1", "sh", "-c", "exit 3", env=env)
    assert "cannot be found any more" not in keeps.err


def test_instances_share_gpus_where_the_user_lets_them(
    poprun: Poprun, pool: Path, gpus: dict[str, str], tmp_path: Path
) -> None:
    """The job holds the two that it may use; the start says once that they are shared, and without it how to."""
    report = tmp_path / "report.json"
    masked = {**gpus, "CUDA_VISIBLE_DEVICES": "3,5"}
    words = (*LOCAL, "--pool", str(pool), "-n3", "--report", str(report))
    show = ("sh", "-c", "echo sees $CUDA_VISIBLE_DEVICES, has $POPDIST_DEVICES, $POPDIST_SHARES_DEVICE")
    shared = poprun(*words, "--share-devices", *show, env=masked).succeeded()
    told = json.loads(report.read_text())

    assert sorted(line.partition("] ")[2] for line in shared.out.splitlines()) == [
        "sees 3,5, has 0, 1",
        "sees 3,5, has 0, 1",
        "sees 3,5, has 1, 1",
    ]
    assert shared.err.count("3 instances share GPUs 3, 5: their tensors are exchanged over the memory") == 1
    assert [lease["held"] for lease in told["leases"]] == [["GPU 3", "GPU 5"]]
    refused = poprun(*words, *show, env=masked)
    assert (refused.code, refused.out) == (2, "")
    assert "and --share-devices lets instances share them; --offline-mode computes on the CPU" in refused.err
    assert "sees , has" in poprun(*words, "--offline-mode", *show, env=masked).succeeded().out


@pytest.fixture
def gpus(tmp_path: Path) -> dict[str, str]:
    """Variables of a machine with 8 GPUs, as an ``nvidia-smi`` of the test's tells of them."""
    folder = tmp_path / "bin"
    folder.mkdir()
    smi = folder / "nvidia-smi"
    smi.write_text(
        "#!/bin/sh\ncase $2 in *gpu=index*) for i in 0 1 2 3 4 5 6 7; do echo $i, GPU-$i; done;;\n"
        '*) [ -z "$FAKE_PROCESSES" ] || echo "$FAKE_PROCESSES";; esac\n'
    )
    smi.chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}
