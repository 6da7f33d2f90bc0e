"""Popdist joins the jobs of other launchers, and takes nobody's stray variable for a job."""

from dataclasses import replace

import pytest

from popdist.errors import ContractError
from popdist.ground.contract import Contract, Endpoint
from popdist.ground.environments import Launcher, detect

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node-0",
    "MASTER_PORT": "29500",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
HYDRA = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4", "PMI_FD": "9"}

SHAPE = {"POPDIST_NUM_TOTAL_REPLICAS": "16", "POPDIST_NUM_IPUS_PER_REPLICA": "2"}

JOINED = Contract(
    num_instances=8, instance_index=5, num_local_instances=4, local_instance_index=1, host_index=1, num_replicas=8
)


def without(env: dict[str, str], *absent: str) -> dict[str, str]:
    """``env`` less some variables."""
    return {name: value for name, value in env.items() if name not in absent}


@pytest.mark.parametrize(
    ("env", "launcher", "master"),
    [
        (TORCHRUN, Launcher.TORCHRUN, Endpoint(host="node-0", port=29500)),
        (OPEN_MPI, Launcher.OPEN_MPI, None),
        (HYDRA, Launcher.HYDRA, None),
        (OPEN_MPI | {"RANK": "5", "WORLD_SIZE": "8"}, Launcher.OPEN_MPI, None),
        (HYDRA | {"RANK": "5", "WORLD_SIZE": "8"}, Launcher.HYDRA, None),
        (HYDRA | {"RANK": "5"}, Launcher.HYDRA, None),
        (OPEN_MPI | TORCHRUN, Launcher.TORCHRUN, Endpoint(host="node-0", port=29500)),
    ],
)
def test_each_rank_is_an_instance_with_one_replica(
    env: dict[str, str], launcher: Launcher, master: Endpoint | None
) -> None:
    """Each launcher's variables give the same job; torch's come first, because they tell where to meet."""
    found = detect(env)
    assert found.launcher is launcher
    assert found.contract.master == master
    assert found.contract.layout.num_local_replicas == 1
    for name in ("num_instances", "instance_index", "num_local_instances", "local_instance_index", "host_index"):
        assert getattr(found.contract, name) == getattr(JOINED, name)


@pytest.mark.parametrize("ranks", [TORCHRUN, OPEN_MPI, HYDRA])
def test_a_joined_job_may_have_more_replicas(ranks: dict[str, str]) -> None:
    """What is the same in all instances may be told beside any launcher's ranks."""
    contract, plain = detect({**ranks, **SHAPE}).contract, detect(ranks).contract
    assert contract == replace(plain, num_replicas=16, ipus_per_replica=2)


def test_torchrun_in_a_pod_tells_more() -> None:
    """In a pod of an indexed Job torchrun's ranks are those of processes, the index that of the pod."""
    assert detect(TORCHRUN | {"JOB_COMPLETION_INDEX": "0"}).launcher is Launcher.TORCHRUN
    found = detect(without(TORCHRUN, "RANK") | {"JOB_COMPLETION_INDEX": "5"})
    assert (found.launcher, found.contract) == (Launcher.KUBERNETES, detect(TORCHRUN).contract)


def test_poprun_comes_first() -> None:
    """Poprun writes the others' variables too; its own tell more."""
    contract = Contract(num_instances=2, instance_index=1, num_replicas=8, num_local_instances=2)
    found = detect(contract.to_env() | {"PMI_RANK": "1", "PMI_SIZE": "2"})
    assert found.launcher is Launcher.POPRUN
    assert found.contract == contract


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"RANK": "0"},
        {"RANK": "major"},
        {"WORLD_SIZE": "1"},
        {"LOCAL_RANK": "0"},
        {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"},
        {"PMI_FD": "9"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"},
        {"JOB_COMPLETION_INDEX": "3"},
    ],
)
def test_stray_variables_are_no_job(env: dict[str, str]) -> None:
    """Everyday names that do not make a rank and a size together leave a program alone."""
    found = detect(env)
    assert found.launcher is Launcher.NONE
    assert found.contract == Contract()


@pytest.mark.parametrize("env", [{"RANK": "0", "WORLD_SIZE": "1"}, {"PMI_RANK": "0", "PMI_SIZE": "1"}])
def test_a_job_of_one_needs_no_more(env: dict[str, str]) -> None:
    """One rank of one has nobody to meet."""
    assert detect(env).contract == Contract()


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1"])
def test_ranks_that_meet_on_loopback_share_a_host(host: str) -> None:
    """The four variables that torch needs are enough: meeting on loopback, all ranks are on this host."""
    env = without(TORCHRUN, "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK") | {"MASTER_ADDR": host}
    contract = detect(env).contract
    assert (contract.num_local_instances, contract.local_instance_index, contract.host_index) == (8, 5, 0)


@pytest.mark.parametrize(
    ("env", "words"),
    [
        (without(TORCHRUN, "MASTER_ADDR"), "no MASTER_ADDR says"),
        (without(TORCHRUN, "MASTER_ADDR", "MASTER_PORT"), "no MASTER_ADDR and MASTER_PORT says"),
        ({"RANK": "3"}, "RANK=3 is set and WORLD_SIZE is not"),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE=4 is set and RANK is not"),
        (without(OPEN_MPI, "OMPI_COMM_WORLD_SIZE"), "OMPI_COMM_WORLD_SIZE is not"),
        (without(HYDRA, "PMI_RANK"), "PMI_RANK is not"),
        (TORCHRUN | {"RANK": "8"}, "RANK=8 is not below WORLD_SIZE=8"),
        (TORCHRUN | {"RANK": "first"}, "RANK='first'"),
        (TORCHRUN | {"MASTER_PORT": "http"}, "MASTER_PORT='http'"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "-1"}, "OMPI_COMM_WORLD_RANK='-1'"),
        (TORCHRUN | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}, "Open MPI tells of rank 0 of 2"),
        (OPEN_MPI | {"PMI_RANK": "1", "PMI_SIZE": "8"}, "not with two inside each other"),
        ({"POPDIST_NUM_TOTAL_REPLICAS": "4", **OPEN_MPI}, "POPDIST_REPLICA_INDEX_OFFSET"),
        (SHAPE, "nothing tells which instance of it this is"),
        ({**SHAPE, "POPDIST_NUM_TOTAL_REPLICAS": "9", **TORCHRUN}, "does not divide over the 8 instances"),
        ({"JOB_COMPLETION_INDEX": "8", "WORLD_SIZE": "8"}, "RANK=8 is not below WORLD_SIZE=8"),
        ({"JOB_COMPLETION_INDEX": "1", "WORLD_SIZE": "2"}, "no MASTER_ADDR and MASTER_PORT says"),
    ],
)
def test_half_a_job_is_an_error(env: dict[str, str], words: str) -> None:
    """A job that is told of and not described completely, or told in two ways, is never run as several jobs."""
    with pytest.raises(ContractError) as raised:
        detect(env)
    assert words in str(raised.value)


def test_the_replicas_of_a_model_are_those_of_the_job_or_the_program_s() -> None:
    """A program may say them where neither poprun nor the one who emitted the job has."""
    alone = detect({})
    assert (alone.layout_of_model(None).num_replicas, alone.layout_of_model(4).num_replicas) == (1, 4)
    assert detect(TORCHRUN).layout_of_model(2).replicas_of(5) == range(10, 12)
    for env in (JOINED.to_env(), TORCHRUN | SHAPE):
        found = detect(env)
        said = found.contract.layout.num_local_replicas
        assert found.layout_of_model(said) == found.layout_of_model(None) == found.contract.layout
        with pytest.raises(
            ContractError, match=rf"num_local_replicas=3, .* {said}: .*--num-replicas 24, or leave"
        ):
            found.layout_of_model(3)
