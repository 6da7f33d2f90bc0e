"""Programs of JAX and TensorFlow run unmodified, with what poprun tells them.

They run in an environment of their own, `.venv-frameworks`; TensorFlow where scripts/test-frameworks has put it.
"""

import json
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.running import Finished, MpiEnvironment, Poprun, run

EXAMPLES = Path(__file__).parents[2] / "examples"
JAX, TENSORFLOW = (str(EXAMPLES / f"{name}_training.py") for name in ("jax", "tensorflow"))

ALONE = """
import runpy, sys
import jax
jax.distributed.initialize = lambda: None
runpy.run_path(sys.argv[1], run_name="__main__")
"""
"""A program of JAX as it is by hand, in one process."""

FAILS = """
import sys
import jax
jax.distributed.initialize()
add = jax.pmap(lambda x: jax.lax.psum(x, "i"), axis_name="i")
total = add(jax.numpy.ones(jax.local_device_count()))
print("total", total[0], flush=True)
if jax.process_index() == 1:
    sys.exit(7)
while True:
    add(total).block_until_ready()
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


@pytest.fixture
def tensorflow_python(framework_python: str) -> str:
    """The Python of the environment, where it has TensorFlow."""
    if not [*Path(framework_python).parents[1].glob("lib/python3*/site-packages/tf_keras")]:
        pytest.skip("there is no TensorFlow in .venv-frameworks: scripts/test-frameworks installs it")
    return framework_python


def told(finished: Finished) -> list[str]:
    """What the programs have printed, but for gloo's messages."""
    return sorted(line for line in finished.succeeded().out.splitlines() if "[Gloo]" not in line)


def test_jax_trains_alike_in_one_process_and_in_several(
    poprun: Poprun, mpi_environments: dict[str, MpiEnvironment], framework_python: str
) -> None:
    """Under any launcher, with as many devices as replicas; and jobs at the same time do not meet."""
    words = ("--num-replicas=2", "--tag-output=no", framework_python, JAX)
    jobs = [poprun.command("--launcher=local", "-n2", *words)] + [
        Poprun(python=environment.python).command("--launcher=mpi", "-n2", *words)
        for environment in mpi_environments.values()
    ]
    with ThreadPoolExecutor(len(jobs)) as threads:
        several = [told(finished) for finished in threads.map(run, jobs)]
    one = told(poprun("--launcher=local", "-n1", *words))
    by_hand = told(run([framework_python, "-c", ALONE, JAX], env={"JAX_NUM_CPU_DEVICES": "2"}))

    assert one == by_hand == ["1 processes, 2 devices: [0. 1. 2. 3.]"]
    assert several == [["2 processes, 2 devices: [0. 1. 2. 3.]"]] * len(jobs)


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
