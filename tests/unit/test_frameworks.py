"""What JAX, TensorFlow and onnxruntime are told of a job, as poprun writes it and as they read it.

Holds popdist.startup.jax_cluster.
"""

import json
import os
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from popdist.ground import contract
from popdist.ground.contract import Endpoint
from popdist.startup import jax_cluster, sitecustomize
from poprun.errors import PlanError
from poprun.plan.frameworks import (
    MOST_WORKERS,
    by_framework,
    contradictions,
    example_start,
    framework_variables,
    workers_of,
)
from poprun.plan.plan import StartFacts
from poprun.plan.program_environment import program_environment
from tests.planning import CLUSTER_NODE, planned, with_gpus

WORKERS = [Endpoint(host="10.0.0.1", port=1), Endpoint(host="::1", port=2)]
START = StartFacts(coordinator=Endpoint(host="10.0.0.1", port=7), workers=WORKERS)
DEVICES, CONFIG, COORDINATOR = "JAX_NUM_CPU_DEVICES", "TF_CONFIG", "POPDIST_JAX_COORDINATOR"
THREADS = "ORT_INTRA_OP_NUM_THREADS"


def test_each_instance_is_told_what_it_is() -> None:
    """Its replicas are JAX's CPU devices; TensorFlow has a worker for each instance, and none in a job of one."""
    plan = planned(CLUSTER_NODE, num_instances=2, num_replicas=4)
    first, second = (framework_variables(plan, index, {}, START) for index in (0, 1))

    assert (first[DEVICES], first[COORDINATOR]) == ("2", "10.0.0.1:7")
    assert json.loads(second[CONFIG]) == {
        "cluster": {"worker": ["10.0.0.1:1", "[::1]:2"]},
        "task": {"type": "worker", "index": 1},
    }
    assert not workers_of(planned())
    assert set(framework_variables(planned(), 0, {}, StartFacts())) == {DEVICES, THREADS}


def test_gpus_are_named_by_their_numbers_on_the_host() -> None:
    """As every instance sees all those of the job; there are no CPU devices then."""
    plan = planned(with_gpus("ffff"), num_instances=2, ipus_per_replica=2)

    assert framework_variables(plan, 1, {THREADS: "1"}, StartFacts()) == {"JAX_LOCAL_DEVICE_IDS": "2,3"}


@pytest.mark.parametrize(
    ("user", "told"),
    [({}, 2), ({"OMP_NUM_THREADS": "3"}, 6), ({"OMP_NUM_THREADS": "many"}, None), ({THREADS: "9"}, None)],
)
def test_onnxruntime_has_the_threads_of_an_instance(user: dict[str, str], told: int | None) -> None:
    """Those of all its replicas: OMP_NUM_THREADS, which it does not read, says those of one."""
    plan = replace(planned(num_instances=2, num_replicas=4), threads_per_replica=None if user else 1)

    assert framework_variables(plan, 1, user, START).get(THREADS) == (told and str(told))


@pytest.mark.parametrize(
    ("user", "kept", "told"),
    [
        ({}, {}, ()),
        ({DEVICES: "1"}, {}, ()),
        ({DEVICES: "3"}, {DEVICES}, ("JAX_NUM_CPU_DEVICES=3 is set and stays: ",)),
        ({CONFIG: "{}"}, {CONFIG}, ("TF_CONFIG is set and stays",)),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}, {DEVICES}, ()),
        ({"JAX_COORDINATOR_ADDRESS": "a:1"}, set(), ("JAX_COORDINATOR_ADDRESS is set and stays",)),
        ({CONFIG: "{}", DEVICES: "3", contract.NUM_REPLICAS: "9"}, set(), ()),  # of a job that starts this one
    ],
)
def test_the_users_own_variables_win(user: dict[str, str], kept: set[str], told: tuple[str, ...]) -> None:
    """And what comes of that is said once."""
    plan = planned(CLUSTER_NODE, num_instances=2)
    written = framework_variables(plan, 0, user, START)

    assert not written.keys() & kept
    said = [*contradictions(plan, user)]
    assert len(said) == len(told)
    assert all(text.startswith(beginning) for text, beginning in zip(said, told, strict=True))


def test_a_config_for_each_instance_is_no_mistake() -> None:
    """Who gives each instance its own knows what he does."""
    plan = planned(CLUSTER_NODE, num_instances=2, mpi_local_args=("-x", f"{CONFIG}={{}}"))

    assert len([*contradictions(plan, {})]) == 1
    assert CONFIG not in framework_variables(plan, 0, plan.variables_of(0), START)


def test_a_mask_of_gpus_is_poprun_s() -> None:
    """One that was given to the program as well is not used, and that is said; where there is no GPU, it stays."""
    words = ("-x", "CUDA_VISIBLE_DEVICES=7")
    masked = planned(with_gpus("ffff"), num_instances=2, mpi_local_args=words)

    assert program_environment(masked, 0, {})["CUDA_VISIBLE_DEVICES"] == "0,1"
    (said,) = contradictions(masked, {})
    assert said.startswith("CUDA_VISIBLE_DEVICES of -x is not used: all instances see the job's GPUs, 0,1, and")
    assert not [*contradictions(planned(CLUSTER_NODE, num_instances=2, mpi_local_args=words), {})]
    amd = replace(with_gpus("ffff"), maker="AMD")
    stacked = planned(amd, num_instances=2, mpi_local_args=("-x", "ROCR_VISIBLE_DEVICES=1"))
    with pytest.raises(PlanError, match="-x ROCR_VISIBLE_DEVICES would number the devices anew after poprun has"):
        [*contradictions(stacked, {})]


def test_a_dry_run_shows_what_is_for_whom() -> None:
    """With a port 0 in place of those that the start chooses; TensorFlow is left out of very large jobs."""
    plan = planned(CLUSTER_NODE, num_instances=4, hosts=("a", "b"))
    shown = by_framework(program_environment(plan, 0, {}, example_start(plan)))

    assert shown["JAX"] == {DEVICES: "1", COORDINATOR: "a:0"}
    assert shown["torch"]["MASTER_ADDR"] == "a"
    assert json.loads(shown["TensorFlow"][CONFIG])["cluster"]["worker"] == ["a:0", "a:0", "b:0", "b:0"]
    hosts = tuple(f"n{number}" for number in range(MOST_WORKERS + 1))
    assert example_start(planned(CLUSTER_NODE, num_instances=len(hosts), hosts=hosts)).workers == []


class Base:
    """JAX's class of clusters, which keeps those that derive from it."""

    kinds: list[Any] = []  # noqa: RUF012 - as JAX has it

    def __init_subclass__(cls) -> None:
        Base.kinds.append(cls)


def test_jax_is_told_of_the_job_when_it_asks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its coordinator listens where the processes connect and nowhere else, and at the user's own port."""
    asked: list[int] = []
    jax_cluster.register(SimpleNamespace(ClusterEnv=Base), lambda: asked.append(1))  # type: ignore[arg-type] # a module
    (kind,) = Base.kinds
    Base.kinds.clear()
    monkeypatch.delenv(COORDINATOR, raising=False)
    assert not kind.is_env_present()
    asked.clear()
    for name, value in ((COORDINATOR, "[::1]:7"), ("RANK", "1"), ("WORLD_SIZE", "3")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(jax_cluster.BIND_ADDRESS, "")
    monkeypatch.delenv(jax_cluster.BIND_ADDRESS)
    monkeypatch.setitem(sys.modules, "jax", SimpleNamespace(__version_info__=(0, 4, 30)))
    monkeypatch.setenv(DEVICES, "2")

    assert kind.is_env_present()
    assert asked == [1]
    assert not capsys.readouterr().err  # instance 0 says what is too old
    monkeypatch.setenv("RANK", "0")
    assert kind.is_env_present()
    assert capsys.readouterr().err.startswith(
        "JAX 0.4.30 does not read JAX_NUM_CPU_DEVICES: each instance has one"
    )
    monkeypatch.setenv("RANK", "1")
    assert not jax_cluster.describe_age((0, 5, 0))
    assert (kind.get_process_count(), kind.get_process_id(), kind.get_local_process_id()) == (3, 1, None)
    assert kind.get_coordinator_address(timeout_secs=3, override_coordinator_port=None) == "[::1]:7"
    assert os.environ[jax_cluster.BIND_ADDRESS] == "[::1]:7"
    assert kind.get_coordinator_address(timeout_secs=3, override_coordinator_port="9") == "[::1]:9"
    assert jax_cluster.COORDINATOR == sitecustomize.JAX_COORDINATOR == contract.JAX_COORDINATOR == COORDINATOR


def test_a_process_that_jax_has_connected_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a one is not left to wait for the others when it has failed."""
    assert not sitecustomize.is_in_jax_job()
    state = SimpleNamespace(client=None)
    monkeypatch.setitem(sys.modules, "jax._src.distributed", SimpleNamespace(global_state=state))
    assert not sitecustomize.is_in_jax_job()
    state.client = object()

    assert sitecustomize.is_in_jax_job()


@pytest.mark.parametrize(
    ("is_initialized", "is_own", "num_waits"), [(True, True, 1), (False, True, 0), (True, False, 0)]
)
def test_the_end_of_a_program_waits_for_gloo(
    monkeypatch: pytest.MonkeyPatch, *, is_initialized: bool, is_own: bool, num_waits: int
) -> None:
    """Only where a process group is left, and in no forked child; a torch without collectives has no function."""
    waits: list[float] = []
    monkeypatch.setattr("time.sleep", waits.append)
    monkeypatch.setitem(sys.modules, "torch.distributed", SimpleNamespace(is_initialized=lambda: is_initialized))
    sitecustomize.leave_gloo_time(os.getpid() if is_own else 0)
    monkeypatch.setitem(sys.modules, "torch.distributed", SimpleNamespace())
    sitecustomize.leave_gloo_time(os.getpid())

    assert waits == [0.01] * num_waits
