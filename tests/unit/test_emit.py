"""A plan as a job of Kubernetes: golden manifests, the API servers' schemas, and what popdist makes of them.

Holds poprun.plan.emit and poprun.plan.emit.kubernetes.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from popdist.ground.environments import Launcher, detect
from poprun.errors import UsageError
from poprun.plan.emit import emit_job, job_name
from poprun.plan.plan import LaunchPlan
from poprun.plan.request import AskedMapping, EndingSettings
from poprun.text.screen import EmitKind
from tests.planning import LAPTOP, MPICH, planned, with_gpus

FOLDER = Path(__file__).with_name("kubernetes")
SCHEMAS = yaml.safe_load((FOLDER / "schemas.yaml").read_text(encoding="utf-8"))
IMAGE = "registry.example.org/train:1"
INDEX = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}

CPU_PLAN = planned(
    LAPTOP,
    program=("python", "train.py", "--epochs", "3"),
    hosts=("a", "b"),
    num_instances=4,
    num_replicas=8,
    is_deterministic=True,
    ending=EndingSettings(timeout_seconds=3600.0, max_restarts=2, stop_timeout_seconds=30.0),
)
GPU_PLAN = planned(
    with_gpus("ffff"),
    program=("python", "train.py"),
    hosts=("a", "b"),
    num_instances=4,
    num_replicas=16,
    ipus_per_replica=2,
)
GOLDEN = {
    "cpu.mpijob": CPU_PLAN,
    "cpu.jobset": CPU_PLAN,
    "gpus.mpijob": GPU_PLAN,
    "gpus.jobset": GPU_PLAN,
}
SLURM_GOLDEN = """\
#!/bin/bash
# 4 instances · 8 replicas · 8 virtual IPUs · 2 hosts
#SBATCH --job-name=train
#SBATCH --output=train-%j.out
#SBATCH --chdir="/data/my runs"
#SBATCH --nodes=2
#SBATCH --nodelist=a,b
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=1
#SBATCH --time=01:01:00

exec /opt/python -m poprun --num-replicas=8 '--mpi-global-args=-x A' python train.py --epochs 3
"""


@pytest.mark.parametrize("name", GOLDEN)
def test_the_manifest(name: str) -> None:
    """Every line, as it was when somebody read it and found it right; the API server would take it."""
    text = _written(name)

    assert text == (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    _check(text, EmitKind(name.partition(".")[2]))


def test_the_batch_script() -> None:
    """It asks Slurm for what the plan needs, and calls poprun, which finds it there."""
    plan = replace(CPU_PLAN, working_directory="/data/my runs")
    command = ("/opt/python", "-m", "poprun", "--num-replicas=8", "--mpi-global-args=-x A")
    text = emit_job(plan, EmitKind.SBATCH, command=command)

    assert text == SLURM_GOLDEN


def test_the_batch_script_asks_for_gpus() -> None:
    """As many as its instances use, whose replicas take turns on them: fewer than there are virtual IPUs."""
    shared = planned(with_gpus("f" * 8), num_instances=4, instances_per_replica=2, ipus_per_replica=4)
    text = emit_job(GPU_PLAN, EmitKind.SBATCH)

    assert "#SBATCH --gpus-per-node=4\n" in text
    assert "#SBATCH --gpus-per-node=8\n" in emit_job(shared, EmitKind.SBATCH)
    assert "nvidia.com/gpu: 2\n" in emit_job(shared, EmitKind.JOBSET, image=IMAGE)


def test_a_line_break_fits_no_line_of_sbatch() -> None:
    """It would end the line, and the rest would be a command."""
    with pytest.raises(UsageError, match="has a line break in it"):
        emit_job(replace(CPU_PLAN, working_directory="/a\nrm"), EmitKind.SBATCH)


@st.composite
def some_plans(draw: st.DrawFn) -> LaunchPlan:
    """Plans of many shapes, with words that YAML, a shell and Kubernetes read in ways of their own."""
    word = st.text(
        st.characters(exclude_characters="\0", exclude_categories=["Cs"], max_codepoint=0x2FF), max_size=8
    )
    num_hosts, num_local = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    size = draw(st.sampled_from([1, num_local, num_hosts * num_local]))
    tensor = draw(st.sampled_from([1, size]))
    num_replicas = num_hosts * num_local // size * draw(st.integers(1, 4 if size == 1 else 1))
    return planned(
        draw(st.sampled_from([LAPTOP, with_gpus("f" * 8)])),
        program=(draw(word.filter(bool)), *draw(st.lists(word | st.just("$(RANK) $$ yes"), max_size=3))),
        hosts=tuple(f"n{index}" for index in range(num_hosts)),
        num_instances=num_hosts * num_local,
        num_replicas=num_replicas,
        mapping=AskedMapping(text="", tensor=tensor, pipeline=size // tensor),
        ipus_per_replica=draw(st.integers(1, 2)) * size,
        ending=EndingSettings(
            timeout_seconds=draw(st.none() | st.floats(0.001, 1e6)), max_restarts=draw(st.integers(0, 9))
        ),
    )


@settings(deadline=None, max_examples=50)
@given(plan=some_plans(), kind=st.sampled_from([EmitKind.MPIJOB, EmitKind.JOBSET]))
def test_an_api_server_takes_it(plan: LaunchPlan, kind: EmitKind) -> None:
    """Whatever the plan, the manifest is as its schema asks, and the program's words arrive as they were."""
    spec = _check(emit_job(plan, kind, image=IMAGE), kind)["spec"]
    if kind is EmitKind.JOBSET:
        pod = spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    else:
        pod = spec["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]
    command = [_expanded(word) for word in pod["containers"][0]["command"]]

    assert tuple(command[-len(plan.program) :]) == plan.program


@settings(deadline=None, max_examples=30)
@given(plan=some_plans(), data=st.data())
def test_popdist_finds_its_place_in_a_pod(plan: LaunchPlan, data: st.DataObject) -> None:
    """With what a pod of the JobSet is told, popdist knows its instance and its replicas; also under mpirun."""
    index = data.draw(st.integers(0, plan.num_instances - 1))
    found = detect(_pod_environment(plan, index))
    ranks = {"OMPI_COMM_WORLD_RANK": str(index), "OMPI_COMM_WORLD_SIZE": str(plan.num_instances)}
    under_mpi = detect(ranks | plan.contract(0).shape_to_env())

    assert found.launcher is Launcher.KUBERNETES
    for contract in (found.contract, under_mpi.contract):
        assert contract.layout == plan.layout
        assert contract.replica_part == plan.instance(index).part
        assert contract.parallelism == plan.parallelism
        assert (contract.instance_index, contract.ipus_per_replica) == (index, plan.ipus_per_replica)
        assert contract.num_threads == plan.threads_per_replica
    assert found.contract.num_local_instances == 1
    assert found.contract.master is not None


@pytest.mark.parametrize("kind", [EmitKind.MPIJOB, EmitKind.JOBSET])
def test_the_threads_that_the_user_has_set_go_into_pods(kind: EmitKind) -> None:
    """A pod does not inherit what poprun does not set; what is no number says nothing of a pod."""
    plan = replace(CPU_PLAN, threads_per_replica=None)
    with_threads, without = (emit_job(plan, kind, image=IMAGE, user_num_threads=text) for text in ("3", "many"))

    assert "OMP_NUM_THREADS" not in without
    assert re.search(r"OMP_NUM_THREADS(=3|\s+(- |value: )'3')", with_threads)


def test_an_mpi_of_another_kind() -> None:
    """The manifest is for the MPI that the plan would start with; without one it is Open MPI's."""
    for mpi, name, first in ((None, "OpenMPI", "mpirun"), (MPICH, "MPICH", "mpiexec")):
        plan = replace(CPU_PLAN, mpi=mpi, mpi_global_args=("-g",), mpi_local_args=("-l",))
        spec = _check(emit_job(plan, EmitKind.MPIJOB, image=IMAGE), EmitKind.MPIJOB)["spec"]
        command = spec["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]["command"]

        assert (spec["mpiImplementation"], command[4]) == (name, first)
        assert command.index("-g") < command.index("4") < command.index("-l") < command.index("python")


@pytest.mark.parametrize(
    ("program", "name"),
    [
        (("python", "/data/Train_2.py"), "train-2"),
        (("/opt/run.sh",), "run-sh"),
        (("python", "2nd.py"), "job-2nd"),
        (("python", "ä.py"), "job"),
        (("x" * 80,), "x" * 40),
    ],
)
def test_names(program: tuple[str, ...], name: str) -> None:
    """A job is called as its program, in letters that a host's name may have."""
    assert job_name(planned(program=program)) == name


@pytest.mark.parametrize("kind", [EmitKind.MPIJOB, EmitKind.JOBSET])
def test_what_is_missing(kind: EmitKind) -> None:
    """A pod needs an image, a job a program, and no instance can have variables of its own."""
    with pytest.raises(UsageError, match="add --image NAME"):
        emit_job(planned(), kind)
    with pytest.raises(UsageError, match="--instance-mpi-local-args: the pods of a job are all alike"):
        emit_job(replace(CPU_PLAN, instance_variables=((0, (("A", "1"),)),)), kind, image=IMAGE)
    with pytest.raises(UsageError, match=f"--emit {kind} needs the PROGRAM"):
        emit_job(planned(program=()), kind, image=IMAGE)


def _check(text: str, kind: EmitKind) -> dict[str, Any]:
    """The one manifest in ``text``, which is of ``kind``."""
    assert "&id" not in text
    manifest: dict[str, Any] = yaml.safe_load(text)
    jsonschema.validate(manifest, {**SCHEMAS, "$ref": f"#/{kind}"})
    return manifest


def _pod_environment(plan: LaunchPlan, index: int) -> dict[str, str]:
    """The variables of pod ``index`` of the JobSet; Kubernetes adds the index to each pod of an indexed Job."""
    manifest = _check(emit_job(plan, EmitKind.JOBSET, image=IMAGE), EmitKind.JOBSET)
    pod = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    variables = pod["containers"][0]["env"]
    assert all(it.get("valueFrom", INDEX) == INDEX for it in variables)
    return {"JOB_COMPLETION_INDEX": str(index)} | {it["name"]: it.get("value", str(index)) for it in variables}


def _expanded(word: str) -> str:
    """``word`` as the program gets it: of two dollars one is left, and only one alone begins a reference."""
    assert "$(" not in word.replace("$$", "")
    return word.replace("$$", "$")


def _written(name: str) -> str:
    return emit_job(GOLDEN[name], EmitKind(name.partition(".")[2]), image=IMAGE)


if __name__ == "__main__":  # renews the golden manifests; read them before you keep them
    for name in GOLDEN:
        (FOLDER / f"{name}.yaml").write_text(_written(name), encoding="utf-8")
