"""Environment variables for JAX, TensorFlow and onnxruntime, so that their programs run unchanged. Pure.

poprun does not replace a variable that the user has set; `contradictions` tells the user what follows.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Final

from popdist.ground import contract
from popdist.ground.contract import Endpoint
from poprun.errors import PlanError
from poprun.makers.maker import MAKERS
from poprun.plan.plan import LaunchPlan, StartFacts
from poprun.text.ranges import counted

ACCELERATE_ON_CPU: Final = "ACCELERATE_USE_CPU"
JAX_CPU_DEVICES: Final = "JAX_NUM_CPU_DEVICES"
JAX_LOCAL_DEVICES: Final = "JAX_LOCAL_DEVICE_IDS"
JAX_ADDRESS: Final = "JAX_COORDINATOR_ADDRESS"
XLA_FLAGS: Final = "XLA_FLAGS"
XLA_DEVICES: Final = "xla_force_host_platform_device_count"
TENSORFLOW: Final = "TF_CONFIG"
ONNXRUNTIME: Final = "ORT_INTRA_OP_NUM_THREADS"

_READ_BY: Final = {
    "torch": (
        *(contract.RANK, contract.WORLD_SIZE, contract.LOCAL_RANK, contract.LOCAL_WORLD_SIZE),
        *(contract.MASTER_ADDR, contract.MASTER_PORT),
    ),
    "accelerate": (ACCELERATE_ON_CPU,),
    "JAX": (JAX_CPU_DEVICES, JAX_LOCAL_DEVICES, contract.JAX_COORDINATOR),
    "TensorFlow": (TENSORFLOW,),
    "onnxruntime": (ONNXRUNTIME,),
}

MOST_WORKERS: Final = 512
"""The largest number of instances for which TensorFlow's variable is set: a longer list would be too long for each
program's environment."""


def framework_variables(
    plan: LaunchPlan, index: int, user: Mapping[str, str], start: StartFacts
) -> dict[str, str]:
    """Return instance ``index``'s variables for JAX, TensorFlow and onnxruntime, except what the user has set."""
    set_already = _of_user(user)
    variables = {
        **_for_jax(plan, index, set_already, start),
        **_for_tensorflow(index, start),
        **_for_onnxruntime(plan, set_already),
    }
    return {name: value for name, value in variables.items() if name not in set_already}


def by_framework(environment: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return {framework, such as JAX: {name: value} of each variable in ``environment`` that it reads}."""
    return {
        framework: {name: environment[name] for name in names if name in environment}
        for framework, names in _READ_BY.items()
    }


def example_start(plan: LaunchPlan) -> StartFacts:
    """Return example addresses of a job's stores and workers for a dry run; ports are 0, as none is chosen."""
    hosts = ("127.0.0.1",) if len(plan.hosts) == 1 else plan.hosts
    count = plan.num_instances_per_host
    workers = [Endpoint(host=hosts[index // count], port=0) for index in workers_of(plan)]
    first = Endpoint(host=hosts[0], port=0)
    return StartFacts(master=first, store=first, coordinator=first, workers=workers)


def workers_of(plan: LaunchPlan) -> range:
    """Return which instances TF_CONFIG lists as TensorFlow workers: all if there are 2 to 512, otherwise none."""
    return range(plan.num_instances if 1 < plan.num_instances <= MOST_WORKERS else 0)


def contradictions(plan: LaunchPlan, user: Mapping[str, str]) -> Iterator[str]:
    """Yield a warning for each variable of JAX or TensorFlow that the user set, if poprun's value would differ."""
    set_already = _of_user({**user, **plan.variables_of(0)})
    local = plan.layout.num_local_replicas
    devices = set_already.get(JAX_CPU_DEVICES, str(local))
    if devices != str(local) and not plan.devices:
        yield (
            f"{JAX_CPU_DEVICES}={devices} is set and stays: so many CPU devices has JAX in each instance, and "
            f"poprun {counted(local, 'replica')}; unset it to leave that to poprun"
        )
    own_names = {name for _, variables in plan.instance_variables for name, _ in variables}
    for name, meaning in (
        (TENSORFLOW, "TensorFlow takes its workers from there, and each instance takes itself for the same one"),
        (JAX_LOCAL_DEVICES, "JAX uses these devices in every instance, whichever poprun gives it"),
        (JAX_ADDRESS, "JAX connects there, where poprun holds no port"),
    ):
        if name in set_already and name not in own_names and plan.num_instances > 1:
            yield f"{name} is set and stays: {meaning}; unset it to leave that to poprun"
    yield from _contradicting_masks(plan, {*plan.variables_of(0), *own_names})


def _contradicting_masks(plan: LaunchPlan, asked: Collection[str]) -> Iterator[str]:
    """Yield a warning for each variable of option -x (``asked``) that would select other GPUs than poprun selects.

    Raises PlanError for a variable that would number the GPUs anew.
    """
    maker = MAKERS[plan.maker]
    for name in (it for it in maker.masks if plan.devices and it in asked):
        if name in maker.outer_masks:
            raise PlanError(
                f"-x {name} would number the devices anew after poprun has counted them: set it where poprun is "
                "called"
            )
        yield (
            f"{name} of -x is not used: all instances see the job's GPUs, {','.join(plan.devices)}, "
            "and each takes its own of them; to say which GPUs a job may have, set it where poprun is called"
        )


def _of_user(user: Mapping[str, str]) -> Mapping[str, str]:
    """Return the variables that the user has set, without variables that an outer poprun job has set."""
    if contract.NUM_REPLICAS not in user:
        return user
    return {name: value for name, value in user.items() if name not in (JAX_CPU_DEVICES, TENSORFLOW, ONNXRUNTIME)}


def _for_jax(plan: LaunchPlan, index: int, user: Mapping[str, str], start: StartFacts) -> dict[str, str]:
    """Return the environment variables for JAX: devices of instance ``index``, and the coordinator's address."""
    variables = {}
    if plan.devices:
        variables[JAX_LOCAL_DEVICES] = ",".join(map(str, plan.instance(index).ordinals))
    elif XLA_DEVICES not in user.get(XLA_FLAGS, ""):
        variables[JAX_CPU_DEVICES] = str(plan.layout.num_local_replicas)
    if start.coordinator is not None:
        variables[contract.JAX_COORDINATOR] = str(start.coordinator)
    return variables


def _for_tensorflow(index: int, start: StartFacts) -> dict[str, str]:
    """Return TF_CONFIG, the variable with the addresses of all TensorFlow workers; {} if ``start`` has none."""
    if not start.workers:
        return {}
    import json

    cluster = {"worker": [str(worker) for worker in start.workers]}
    return {TENSORFLOW: json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})}


def _for_onnxruntime(plan: LaunchPlan, user: Mapping[str, str]) -> dict[str, str]:
    """Return the variable with onnxruntime's number of threads; {} if the number of threads is unknown."""
    threads = str(plan.threads_per_replica or user.get(contract.NUM_THREADS))
    return {ONNXRUNTIME: str(int(threads) * plan.layout.num_local_replicas)} if threads.isdecimal() else {}
