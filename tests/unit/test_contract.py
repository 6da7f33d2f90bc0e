"""What the launcher writes into the environment is what the library reads from it.

Holds popdist.errors.
"""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from popdist.errors import ContractError
from popdist.ground import contract as names
from popdist.ground.contract import Contract, Endpoint

ENDPOINTS = st.builds(Endpoint, host=st.sampled_from(["127.0.0.1", "::1", "node-7"]), port=st.integers(1, 65535))

FULL = Contract(num_instances=2, instance_index=1, num_local_instances=2, local_instance_index=1, num_replicas=6)


@st.composite
def contracts(draw: st.DrawFn) -> Contract:
    """Any contract that a launcher could write."""
    num_hosts, num_local_instances = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    num_instances = num_hosts * num_local_instances
    instance_index = draw(st.integers(0, num_instances - 1))
    host_index, local_instance_index = divmod(instance_index, num_local_instances)
    return Contract(
        num_instances=num_instances,
        instance_index=instance_index,
        num_local_instances=num_local_instances,
        local_instance_index=local_instance_index,
        host_index=host_index,
        num_replicas=num_instances * draw(st.integers(1, 16)),
        ipus_per_replica=draw(st.integers(1, 64)),
        devices=tuple(draw(st.lists(st.integers(0, 15), max_size=4))),
        job_id=draw(st.sampled_from(["", "a1b2"])),
        master=draw(st.none() | ENDPOINTS),
        store=draw(st.none() | ENDPOINTS),
        store_descriptor=draw(st.none() | st.integers(0, 1000)),
        executable_cache_path=draw(st.none() | st.just("/tmp/a cache")),
        num_threads=draw(st.none() | st.integers(1, 300)),
        is_deterministic=draw(st.booleans()),
    )


@given(contracts())
def test_reading_is_the_inverse_of_writing(contract: Contract) -> None:
    """A contract that was written and read is the same, and reading changes nothing."""
    env = contract.to_env()
    before = dict(env)
    assert Contract.from_env(env) == contract
    assert env == before


@given(contracts())
def test_index_and_count_follow_from_popruns_own_variables(contract: Contract) -> None:
    """The six variables of PopRun alone tell the instance and the number of instances."""
    env = {name: value for name, value in contract.to_env().items() if name in names.REQUIRED}
    read = Contract.from_env(env)
    assert read is not None
    assert (read.instance_index, read.num_instances) == (contract.instance_index, contract.num_instances)
    assert read.layout == contract.layout


def test_other_programs_find_what_they_know() -> None:
    """The variables of torch and Open MPI tell the same ranks."""
    env = FULL.to_env()
    assert [env[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")] == ["1", "2", "1", "2"]
    assert [env[f"OMPI_COMM_WORLD_{name}"] for name in ("RANK", "SIZE", "LOCAL_RANK")] == ["1", "2", "1"]
    assert env["TORCHELASTIC_RUN_ID"] == FULL.job_id


@pytest.mark.parametrize(("text", "expected"), [("4,2", 4), (" 3 ", 3), ("many", None), ("0", None), ("", None)])
def test_threads_may_be_the_users_own(text: str, expected: int | None) -> None:
    """A list of OpenMP's counts with its first number, and what OpenMP ignores is ignored."""
    contract = Contract.from_env(FULL.to_env() | {names.NUM_THREADS: text})
    assert contract is not None
    assert contract.num_threads == expected


def test_no_variable_is_no_job() -> None:
    """Without any of the required variables there is no contract, whatever else is set."""
    assert Contract.from_env({"RANK": "3", "POPDIST_JOB_ID": "x", "PATH": "/bin"}) is None


def test_the_shape_alone_is_no_contract() -> None:
    """What is the same in all instances says nothing of this one; it gives a joined job its replicas."""
    job = Contract(num_instances=2, instance_index=1)
    env = FULL.to_env() | {names.NUM_REPLICAS: "8", names.IPUS_PER_REPLICA: "2", names.NUM_THREADS: "3"}
    shape = replace(job, num_replicas=8, ipus_per_replica=2, num_threads=3).shape_to_env()

    assert Contract.from_env(shape) is None
    assert set(shape) == {*names.SHAPE, names.NUM_THREADS}
    assert job.shaped(env) == job.shaped(shape) == replace(job, num_replicas=8, ipus_per_replica=2, num_threads=3)
    assert job.shaped({}) == job
    with pytest.raises(ContractError, match="POPDIST_NUM_TOTAL_REPLICAS=3 does not divide over the 2 instances"):
        job.shaped(shape | {names.NUM_REPLICAS: "3"})


@given(
    st.sets(st.sampled_from(names.REQUIRED), min_size=1, max_size=len(names.REQUIRED) - 1).filter(
        lambda missing: missing != {*names.REQUIRED} - {*names.SHAPE}
    )
)
def test_half_a_contract_names_every_missing_variable(missing: set[str]) -> None:
    """A part of the required variables is an error that names the others and says what to do."""
    env = {name: value for name, value in FULL.to_env().items() if name not in missing}
    with pytest.raises(ContractError, match="start the program with poprun") as raised:
        Contract.from_env(env)
    assert {name for name in names.REQUIRED if name in str(raised.value)} == missing


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({names.NUM_REPLICAS: "many"}, "POPDIST_NUM_TOTAL_REPLICAS='many' must be a whole number of at least 1"),
        ({names.NUM_REPLICAS: "0"}, "at least 1"),
        ({names.NUM_REPLICAS: "-4"}, "at least 1"),
        ({names.IPUS_PER_REPLICA: "1.5"}, "whole number"),
        ({names.UNIFORM_REPLICAS: "0"}, "only a uniform split"),
        ({names.NUM_LOCAL_REPLICAS: "4"}, "fit no uniform split"),
        ({names.REPLICA_OFFSET: "2"}, "fit no uniform split"),
        ({names.REPLICA_OFFSET: "6"}, "fit no uniform split"),
        ({names.DEVICES: "0;1"}, "such as 0,1"),
        ({names.STORE: "127.0.0.1"}, "expected HOST:PORT"),
        ({names.STORE: "127.0.0.1:0"}, "expected HOST:PORT"),
        ({names.STORE: "127.0.0.1:65536"}, "expected HOST:PORT"),
        ({names.RANK: "0"}, "not with two inside each other"),
        ({names.WORLD_SIZE: "16"}, "not with two inside each other"),
    ],
)
def test_impossible_values_are_refused(changes: dict[str, str], words: str) -> None:
    """A value that cannot be right is an error that names the variable and the value."""
    with pytest.raises(ContractError) as raised:
        Contract.from_env(FULL.to_env() | changes)
    assert words in str(raised.value)
    assert all(value in str(raised.value) for value in changes.values())
