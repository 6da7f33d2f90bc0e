"""Machines and plans for tests, so that a test names only what it is about."""

from dataclasses import replace
from typing import Any, Final

from hypothesis import strategies as st

from poprun.plan.plan import LaunchPlan
from poprun.plan.planner import make_plan
from poprun.plan.request import (
    EndingSettings,
    LauncherChoice,
    LaunchRequest,
    OutputSettings,
    RemoteSettings,
    VipuSettings,
)
from poprun.plan.topology import Cpu, Gpu, MachineFacts, MpiKind, MpiRuntime, Occupant, ProcessPlacement

MPICH: Final = MpiRuntime(kind=MpiKind.MPICH, path="/opt/mpich/bin/mpiexec", version="5.0.2")

LAPTOP: Final = MachineFacts(
    hostname="box.example.org",
    host_aliases=frozenset({"localhost", "127.0.0.1", "box", "box.example.org"}),
    cores=(0, 1, 2, 3),
)

CLUSTER_NODE: Final = replace(LAPTOP, mpi=MPICH, cores=tuple(range(64)))


def with_gpus(free: str, machine: MachineFacts = LAPTOP) -> MachineFacts:
    """``machine`` with a GPU for each letter of ``free``: ``f`` is a free one, ``b`` a busy one."""
    busy = (Occupant(pid=999, user="bob"),)
    gpus = (Gpu(name=str(i), occupants=() if letter == "f" else busy) for i, letter in enumerate(free))
    return replace(machine, gpus=tuple(gpus))


def planned(machine: MachineFacts = LAPTOP, **asked: Any) -> LaunchPlan:
    """The plan for a request with ``asked``; its program and folder are there if they are not named."""
    words = {"program": ("/bin/train", "--epochs", "3"), "working_directory": "/home/me", **asked}
    return make_plan(LaunchRequest(**words), machine)


def output_settings(num_instances: int) -> st.SearchStrategy[OutputSettings]:
    """Any settings for the output of ``num_instances``."""
    instances = st.sets(st.integers(0, num_instances - 1), min_size=1)
    settings = st.builds(
        OutputSettings,
        shown_instances=st.none() | instances.map(lambda numbers: tuple(sorted(numbers))),
        is_tagged=st.none() | st.booleans(),
        is_folded=st.booleans(),
        log_dir=st.none() | st.just("logs"),
        has_monitor=st.booleans(),
    )
    return settings | settings.map(lambda some: replace(some, is_tagged=None, tag_format="{instance}: "))


def ending_settings() -> st.SearchStrategy[EndingSettings]:
    """Any settings for the end of a job."""
    seconds = st.floats(1e-3, 1e6)
    return st.builds(
        EndingSettings,
        stop_timeout_seconds=st.floats(0, 1e6),
        start_timeout_seconds=seconds,
        timeout_seconds=st.none() | seconds,
        max_restarts=st.integers(0, 99),
        hang_report_seconds=st.none() | seconds,
        hang_timeout_seconds=st.none() | seconds,
        report_files=st.sampled_from([(), ("report.json",)]),
    )


def vipu_settings(num_instances: int) -> st.SearchStrategy[VipuSettings]:
    """Some of what a job of ``num_instances`` can ask of the pool."""
    some = VipuSettings(
        partition="p",
        partition_attempts=3,
        allocation="POD16 test",
        updates_partition=True,
        resets_partition=False,
        num_ilds=num_instances,
        server_timeout_seconds=0.5,
    )
    other = VipuSettings(
        cluster="c",
        resets_partition=True,
        removes_partition=False,
        ipus_per_host=64,
        waits_for_devices=True,
        shares_devices=True,
        is_offline=True,
        pool="/tmp/p",
        pod="POD16",
    )
    return st.sampled_from([VipuSettings(), some, other])


def remote_settings() -> st.SearchStrategy[RemoteSettings]:
    """Any way to reach the hosts."""
    return st.builds(
        RemoteSettings,
        subnet=st.none() | st.sampled_from(["10.0.0.0/16", "fd00::/64"]),
        ssh_config=st.none() | st.just("hosts/config"),
        synchronises_venv=st.booleans(),
        slurm_job=st.none() | st.just("7"),
    )


@st.composite
def plans(draw: st.DrawFn) -> LaunchPlan:
    """Any plan that the planner can make."""
    word = st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=6)
    num_hosts = draw(st.integers(1, 6))
    num_instances = num_hosts * draw(st.integers(1, 5))
    cores = tuple(sorted(draw(st.sets(st.integers(0, 300), min_size=1, max_size=12))))
    num_nodes = draw(st.integers(1, 3))
    own_cores = [ProcessPlacement.COMPACT, ProcessPlacement.CORE]
    threads = draw(st.none() | st.integers(1, 99))
    has_own_cores = num_instances // num_hosts * (threads or 1) <= len(cores)
    machine = replace(
        LAPTOP,
        cores=cores,
        cpus=tuple(Cpu(number=core, core=core, cache=core % 5, node=core % num_nodes, socket=0) for core in cores),
        memory_nodes=tuple(range(num_nodes)),
        gpus=tuple(Gpu(name=name) for name in draw(st.sets(word, max_size=9))),
        mpi=draw(
            st.none()
            | st.builds(
                MpiRuntime, kind=st.sampled_from(MpiKind), path=word, version=word, forker=st.none() | word
            )
        ),
    )
    return planned(
        machine,
        program=tuple(draw(st.lists(word, max_size=3))),
        working_directory="/" + draw(word),
        hosts=tuple(draw(host_lists(num_hosts))),
        num_instances=num_instances,
        num_replicas=num_instances * draw(st.integers(1, 4)),  # 60 virtual IPUs of a host, of 64, at most
        ipus_per_replica=draw(st.integers(1, 3)),
        launcher=draw(st.sampled_from([LauncherChoice.AUTO, LauncherChoice.LOCAL])),
        mpi_global_args=draw(mpi_words()),
        mpi_local_args=draw(mpi_words()),
        instance_mpi_local_args=tuple(
            draw(st.lists(st.tuples(st.integers(0, num_instances - 1), mpi_words()), max_size=2))
        ),
        placement=draw(
            st.sampled_from([ProcessPlacement.SPREADNUMA, *(own_cores if has_own_cores else [])])
            | st.just(ProcessPlacement.DISABLED)
        ),
        threads_per_replica=threads,
        executable_cache_path=draw(st.none() | st.just("cache")),
        vipu=draw(vipu_settings(num_instances)),
        output=draw(output_settings(num_instances)),
        ending=draw(ending_settings()),
        remote=draw(remote_settings()),
        is_deterministic=draw(st.booleans()),
    )


def mpi_words() -> st.SearchStrategy[tuple[str, ...]]:
    """Words that a launcher may be given."""
    return st.sampled_from(
        [
            (),
            ("-x", "A=1", "-x", "B", "-x", "A= é"),
            ("--mca", "a", "b c", "-x", "B=2"),
            ("-iface", "lo", "--tag-output", "--output-filename=o"),
        ]
    )


def host_lists(num_hosts: int) -> st.SearchStrategy[list[str]]:
    """Lists of ``num_hosts`` different host names, many of which differ in a number only."""
    number = st.integers(0, 12).map(str) | st.integers(0, 12).map(lambda n: f"{n:02}") | st.just("")
    name = st.builds(
        "".join,
        st.tuples(st.sampled_from(["n", "node-", "0x", "A_"]), number, st.sampled_from(["", "-ib", ".a"]), number),
    )
    return st.lists(name, min_size=num_hosts, max_size=num_hosts, unique=True)
