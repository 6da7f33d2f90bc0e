"""Programs of JAX, TensorFlow and others run unmodified, with what poprun tells them.

Most run in an environment of their own, `.venv-frameworks`; TensorFlow where scripts/test-frameworks has put it.
"""

import json
import os
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests import jax_programs
from tests.docs.markdown import ROOT, blocks
from tests.running import Finished, MpiEnvironment, Poprun, run

EXAMPLES = Path(__file__).parents[2] / "examples"
TENSORFLOW = str(EXAMPLES / "tensorflow_training.py")

FAILS = """
import signal
import sys
import jax
jax.distributed.initialize()
add = jax.pmap(lambda x: jax.lax.psum(x, "i"), axis_name="i")
total = add(jax.numpy.ones(jax.local_device_count()))
print("total", total[0], flush=True)
if jax.process_index() == 1:
    sys.exit(7)
try:
    while True:
        add(total).block_until_ready()
except ValueError:  # the connection to instance 1 is lost, perhaps before poprun hears of its end
    while True:
        signal.pause()
"""


COLLECTIVES = """
import popdist.tensorflow
strategy = popdist.tensorflow.PopDistStrategy()
rank = strategy.cluster_resolver.task_id
with strategy.scope():
    total, mean = popdist.tensorflow.allreduce([1.0 + rank]), popdist.tensorflow.allreduce(rank * 2.0, "MEAN")
    rows, first = popdist.tensorflow.allgather(rank), popdist.tensorflow.broadcast([rank, 7], root_rank=1)
    print(total.numpy(), mean.numpy(), rows.numpy(), first.numpy())
"""
"""Of PopDist's own functions, in an environment without torch."""


TASK = """
import os, sys
import datasets, joblib, webdataset
from datasets.distributed import split_dataset_by_node
from mpi4py.futures import MPIPoolExecutor

def find_place(_):
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    rows = split_dataset_by_node(datasets.Dataset.from_dict({"row": range(4)}), rank, size)["row"]
    return rank, size, list(rows), list(webdataset.split_by_node("abcd")), joblib.cpu_count()

if __name__ == "__main__":
    with MPIPoolExecutor() as pool:
        print(*pool.map(find_place, range(1)))
"""
"""What libraries find in a worker of mpi4py's pool."""


@pytest.fixture
def tensorflow_python(framework_python: str) -> str:
    """The Python of the environment, where it has TensorFlow."""
    if not [*Path(framework_python).parents[1].glob("lib/python3*/site-packages/tf_keras")]:
        pytest.skip("there is no TensorFlow in .venv-frameworks: scripts/test-frameworks installs it")
    return framework_python


def told(finished: Finished) -> list[str]:
    """What the programs have printed, but for gloo's messages."""
    of_gloo = ("[Gloo]", "peer ranks")  # two lines where the messages of two threads mix
    return sorted(
        line for line in finished.succeeded().out.splitlines() if not any(word in line for word in of_gloo)
    )


def free_address() -> str:
    """One at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def test_jax_computes_alike_in_any_number_of_processes(
    poprun: Poprun, mpi_environments: dict[str, MpiEnvironment], framework_python: str
) -> None:
    """Under any launcher, with as many devices as replicas, and as by hand; jobs at a time stay apart."""
    program = (framework_python, jax_programs.PROGRAM)
    words = ("--num-replicas=4", "--tag-output=no", *program)
    jobs = [
        Poprun(python=environment.python).command("--launcher=mpi", "-n2", *words)
        for environment in mpi_environments.values()
    ]
    jobs += [[*program, address, rank] for address in [free_address()] for rank in "01"]
    with ThreadPoolExecutor(len(jobs)) as threads:
        variables = {"JAX_NUM_CPU_DEVICES": "2"}  # which poprun sets, too
        *under_mpi, first, second = (told(it) for it in threads.map(lambda job: run(job, env=variables), jobs))
    local = [told(poprun("--launcher=local", f"-n{number}", *words)) for number in (1, 4)]

    assert local == [jax_programs.expected(1), jax_programs.expected(4)]
    assert [*under_mpi, first + second] == [jax_programs.expected(2)] * (len(mpi_environments) + 1)


def test_an_instance_of_jax_that_fails_ends_all(poprun: Poprun, framework_python: str) -> None:
    """It waits for nobody at its end, and the others, whom JAX keeps from SIGTERM, get no time in vain."""
    words = ("--launcher=local", "-n2", "--stop-timeout=10000", framework_python, "-c", FAILS)
    finished = poprun(*words)

    assert finished.code == 7
    assert finished.out.count("total 2.0") == 2
    assert "instance 1 failed first: exit code 7" in finished.err


def test_tensorflow_trains_as_with_variables_by_hand(poprun: Poprun, tensorflow_python: str) -> None:
    """A loop of its own and `fit`; the ports that are held are the workers'."""
    words = (tensorflow_python, TENSORFLOW)
    finished = poprun("--launcher=local", "-n2", "--tag-output=no", *words)
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    workers = [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]
    for one in sockets:
        one.close()
    tasks = [{"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}} for index in range(2)]
    with ThreadPoolExecutor(len(tasks)) as threads:
        by_hand = threads.map(lambda task: told(run([*words], env={"TF_CONFIG": json.dumps(task)})), tasks)

    sources = os.pathsep.join([str(EXAMPLES.parent / "popdist_py"), os.environ.get("PYTHONPATH", "")])
    collectives = ("--launcher=local", "-n2", "--tag-output=no", tensorflow_python, "-c", COLLECTIVES)

    assert told(poprun(*collectives, env={"PYTHONPATH": sources})) == ["[3.] 1.0 [0 1] [1 7]"] * 2
    assert told(finished) == sorted(line for lines in by_hand for line in lines)
    assert told(finished) == ["2 replicas: [0. 1. 2. 3.] [0. 1. 2. 3.]"]
    assert "trained alone" not in finished.err


@pytest.mark.skipif(find_spec("webdataset") is None, reason="the extra `neighbours` is not installed")
def test_other_libraries_find_their_place(mpi_environments: dict[str, MpiEnvironment], tmp_path: Path) -> None:
    """The rank and size of the job, and the cores of the instance, in a worker of mpi4py's."""
    (program := tmp_path / "task.py").write_text(TASK)
    words = ("-n2", "--launcher=mpi", "--process-placement=core", "--tag-output=no")
    python = mpi_environments["mpich"].python
    finished = Poprun(python=python)(*words, str(python), "-m", "mpi4py.futures", str(program)).succeeded()

    assert finished.lines == ["(1, 2, [2, 3], ['b', 'd'], 1)"]


def test_xgboost_trains_alike_in_any_number_of_instances(
    poprun: Poprun, framework_python: str, tmp_path: Path
) -> None:
    """The program of docs/frameworks.md, beside popdist: its processes find the tracker that instance 0 runs."""
    (packages,) = Path(framework_python).parents[1].glob("lib/python3*/site-packages")
    if not (packages / "xgboost").exists():
        pytest.skip("there is no XGBoost in .venv-frameworks: scripts/test-frameworks installs it")
    (program,) = (it.text for it in blocks(ROOT / "docs" / "frameworks.md") if "xgboost" in it.text)
    (script := tmp_path / "train.py").write_text(program)
    search = os.pathsep.join([str(packages), os.environ.get("PYTHONPATH", "")])
    words = ("--launcher=local", "--tag-output=no", sys.executable, str(script))
    one, two = (poprun(f"-n{number}", *words, env={"PYTHONPATH": search}).succeeded() for number in (1, 2))

    assert [line for line in two.lines if "Task" not in line] == ["mean error 1.69"]
    assert [line for line in one.lines if "Task" not in line] == ["mean error 1.69"]
