"""The variables that poprun adds for a program."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from popdist.contract import Contract, Endpoint
from poprun.plan.plan import LaunchPlan, StartFacts
from poprun.plan.program_environment import CACHES, passed_environment, program_environment, wished_job_id
from tests.planning import CLUSTER_NODE, planned, plans, with_gpus

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
