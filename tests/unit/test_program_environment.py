"""The variables that poprun adds for a program."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from popdist.ground.contract import Contract, Endpoint
from popdist.ground.environments import detect
from poprun.errors import PlanError
from poprun.plan.plan import LaunchPlan, StartFacts
from poprun.plan.plan_file import plan_from_dict, plan_to_dict
from poprun.plan.program_environment import CACHES, passed_environment, program_environment, wished_job_id
from poprun.plan.render.words import stands_for
from poprun.plan.request import VipuSettings
from poprun.plan.topology import Gpu
from tests.planning import CLUSTER_NODE, LAPTOP, planned, plans, with_gpus

START = StartFacts(
    job_id="j",
    restart_count=2,
    master=Endpoint(host="127.0.0.1", port=29500),
    store=Endpoint(host="::1", port=1),
)


@given(plans(), st.data())
def test_the_program_reads_what_poprun_wrote(plan: LaunchPlan, data: st.DataObject) -> None:
    """The library gets back the very contract that the plan holds for its instance."""
    index = data.draw(st.integers(0, plan.num_instances - 1))
    env = program_environment(plan, index, {}, START)

    assert Contract.from_env(env) == plan.contract(index, START)


def test_the_user_has_the_last_word() -> None:
    """What is set already is left alone."""
    plan = planned(CLUSTER_NODE, num_instances=2)

    assert program_environment(plan, 0, {})["PYTHONUNBUFFERED"] == "1"
    assert "PYTHONUNBUFFERED" not in program_environment(plan, 0, {"PYTHONUNBUFFERED": ""})


def test_sets_of_strings_have_one_order() -> None:
    """In a job of one instance, too, so that it computes what several do; the user's own seed stays."""
    for plan in (planned(), planned(CLUSTER_NODE, num_instances=2)):
        assert program_environment(plan, 0, {}, START)["PYTHONHASHSEED"] == "0"
        assert "PYTHONHASHSEED" not in program_environment(plan, 0, {"PYTHONHASHSEED": "random"})
    asked = planned(mpi_local_args=("-x", "PYTHONHASHSEED=3"))
    assert program_environment(asked, 0, {})["PYTHONHASHSEED"] == "3"


def test_the_users_own_modules_are_found_after_the_hook() -> None:
    """An empty place would be the working directory, so none is made."""
    plan = planned()
    alone, behind = (
        program_environment(plan, 0, user)["PYTHONPATH"] for user in ({"PYTHONPATH": ""}, {"PYTHONPATH": "/a:/b"})
    )

    assert alone == program_environment(plan, 0, {})["PYTHONPATH"]
    assert Path(alone, "sitecustomize.py").is_file()
    assert behind == f"{alone}:/a:/b"


def test_deterministic_is_for_all_that_is_asked() -> None:
    """Not for cuBLAS where the user has told it already."""
    plan = planned(CLUSTER_NODE, is_deterministic=True)
    told = program_environment(plan, 0, {})

    assert (told["POPDIST_DETERMINISTIC"], told["CUBLAS_WORKSPACE_CONFIG"]) == ("1", ":4096:8")
    assert "CUBLAS_WORKSPACE_CONFIG" not in program_environment(plan, 0, {"CUBLAS_WORKSPACE_CONFIG": ":16:8"})
    assert not {"POPDIST_DETERMINISTIC", "CUBLAS_WORKSPACE_CONFIG"} & set(
        program_environment(planned(CLUSTER_NODE), 0, {})
    )


def test_every_instance_sees_all_devices_of_the_job() -> None:
    """So ``cuda:LOCAL_RANK`` is right in any program, and popdist knows an instance's own."""
    plan = planned(with_gpus("ffff"), num_instances=2, ipus_per_replica=2)
    first, second = (program_environment(plan, index, {}) for index in (0, 1))

    assert first["CUDA_VISIBLE_DEVICES"] == second["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    assert (first["POPDIST_DEVICES"], second["POPDIST_DEVICES"]) == ("0,1", "2,3")


def test_cuda_counts_devices_as_poprun_did() -> None:
    """By PCI bus, unless the user's own ``CUDA_VISIBLE_DEVICES`` was counted in CUDA's order."""
    plan = planned(with_gpus("ff"), num_instances=2)

    assert program_environment(plan, 0, {})["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert "CUDA_DEVICE_ORDER" not in program_environment(plan, 0, {"CUDA_VISIBLE_DEVICES": "1,0"})


def test_each_maker_has_its_own_mask() -> None:
    """The outer mask of the user stays, because what it leaves was counted; torch's type of devices is told."""
    amd = planned(replace(with_gpus("ff"), maker="AMD"), num_instances=2)
    intel = planned(replace(with_gpus("ff"), maker="Intel"), num_instances=2)
    of_amd = program_environment(amd, 1, {"ROCR_VISIBLE_DEVICES": "4,5"})
    of_intel = program_environment(intel, 1, {})

    assert (of_amd["HIP_VISIBLE_DEVICES"], of_amd["POPDIST_DEVICES"]) == ("0,1", "1")
    assert not {"ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"} & of_amd.keys()
    assert (of_intel["ZE_AFFINITY_MASK"], of_intel["ZE_ENABLE_PCI_ID_DEVICE_ORDER"]) == ("0,1", "1")
    assert [detect(env).contract.device_type for env in (of_amd, of_intel)] == ["cuda", "xpu"]


def test_an_instance_sees_its_own_slice_only() -> None:
    """A process sees the first slice of its mask and no other, also where a lease gives others than planned."""
    facts = replace(LAPTOP, gpus=tuple(Gpu(name=f"MIG-{name}") for name in "abc"))
    plan = planned(facts, num_instances=3)
    leased = StartFacts(devices=("MIG-x", "MIG-y", "MIG-z"))
    told = [program_environment(plan, index, {}, start) for index, start in ((0, None), (2, None), (1, leased))]

    assert [env["CUDA_VISIBLE_DEVICES"] for env in told] == ["MIG-a", "MIG-c", "MIG-y"]
    assert [env["POPDIST_DEVICES"] for env in told] == ["0"] * 3
    assert [env["POPDIST_SHARES_DEVICE"] for env in told] == ["1"] * 3  # NCCL connects no slices of one GPU
    assert [env["JAX_LOCAL_DEVICE_IDS"] for env in told] == ["0"] * 3
    with pytest.raises(
        PlanError, match="an instance needs 2 devices, and MIG-a is a slice of one, of which a process"
    ):
        planned(facts, ipus_per_replica=2)


def test_instances_share_devices_in_turn() -> None:
    """Only where the user lets them, and there are too few."""
    shares = VipuSettings(shares_devices=True)
    plan = planned(with_gpus("ff"), num_instances=3, vipu=shares)
    told = [program_environment(plan, index, {}) for index in range(3)]

    assert [env["POPDIST_DEVICES"] for env in told] == ["0", "1", "0"]
    assert [env["POPDIST_SHARES_DEVICE"] for env in told] == ["1"] * 3
    assert [env["CUDA_VISIBLE_DEVICES"] for env in told] == ["0,1"] * 3
    assert [stands_for(plan.instance(index)) for index in range(3)] == ["GPU 0, shared", "GPU 1", "GPU 0, shared"]
    assert (plan.num_gpus_per_host, plan_from_dict(plan_to_dict(plan), "x")) == (2, plan)
    own = planned(with_gpus("fff"), num_instances=3, vipu=shares)
    assert "POPDIST_SHARES_DEVICE" not in program_environment(own, 0, {})
    pairs = planned(with_gpus("fff"), num_instances=2, ipus_per_replica=2, vipu=shares)
    assert [pairs.contract(index).devices for index in range(2)] == [(0, 1), (2, 0)]
    assert planned(with_gpus("f"), ipus_per_replica=2, vipu=shares).devices == ()  # a replica needs two of them


def test_a_plan_that_shares_says_so() -> None:
    """In a file that names too few devices it is a mistake otherwise, and so is a maker that nobody knows."""
    values = plan_to_dict(planned(with_gpus("ff"), num_instances=3, vipu=VipuSettings(shares_devices=True)))
    alone = plan_to_dict(planned(with_gpus("fff"), num_instances=3))
    with pytest.raises(PlanError, match="devices names 2, and the 3 instances of a host use 3, 1 each"):
        plan_from_dict({**alone, "devices": ["0", "1"]}, "x")
    with pytest.raises(PlanError, match="maker is 'Acme': give one of NVIDIA, AMD, Intel"):
        plan_from_dict({**values, "maker": "Acme"}, "x")


def test_accelerate_is_told_to_connect_cpus() -> None:
    """It does not by itself; where there are GPUs, it connects those."""
    on_cpu = planned(CLUSTER_NODE, num_instances=2)
    on_gpu = planned(with_gpus("ff"), num_instances=2)

    assert program_environment(on_cpu, 0, {})["ACCELERATE_USE_CPU"] == "true"
    assert "ACCELERATE_USE_CPU" not in program_environment(on_cpu, 0, {"ACCELERATE_USE_CPU": "false"})
    assert "ACCELERATE_USE_CPU" not in program_environment(on_gpu, 0, {})


def test_a_job_is_called_as_the_user_wishes() -> None:
    """So a job that is started again finds its folder; a job within a job has a name of its own."""
    assert wished_job_id({}) == ""
    assert wished_job_id({"POPDIST_JOB_ID": "tuesday"}) == "tuesday"
    assert wished_job_id(Contract(job_id="outer").to_env()) == ""


def test_compiled_programs_have_one_place() -> None:
    """A folder for each cache in the one that was asked for, with an absolute path; one's own cache stays."""
    plan = planned(executable_cache_path="cache")
    env = program_environment(plan, 0, {"TRITON_CACHE_DIR": "/mine"})

    assert plan.contract(0).executable_cache_path == "/home/me/cache"
    assert env["TORCHINDUCTOR_CACHE_DIR"] == "/home/me/cache/inductor"
    assert env["POPDIST_EXECUTABLE_CACHE_PATH"] == env["POPTORCH_CACHE_DIR"] == "/home/me/cache"
    assert "TRITON_CACHE_DIR" not in env
    assert not set(CACHES) & set(program_environment(planned(), 0, {}))


def test_what_is_named_goes_to_other_hosts() -> None:
    """Besides the settings that go anyway: by name, by beginning, for one instance; even a secret."""
    plan = planned(
        num_instances=2,
        mpi_local_args=("-x", "DATA", "-x", "MY_*", "-x", "HF_TOKEN", "-x", "SEED=1"),
        instance_mpi_local_args=((1, ("-x", "OWN")),),
    )
    user = {"DATA": "d", "MY_A": "a", "HF_TOKEN": "t", "API_KEY": "k", "OWN": "o", "TORCH_A": "1", "HOME": "/h"}

    assert set(passed_environment(user)) == {"TORCH_A"}
    assert set(passed_environment(user, plan.passed_names(0))) == {"TORCH_A", "DATA", "MY_A", "HF_TOKEN"}
    assert set(passed_environment(user, plan.passed_names(1))) == {"TORCH_A", "DATA", "MY_A", "HF_TOKEN", "OWN"}
