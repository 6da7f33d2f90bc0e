"""The job that this process is in, and, after ``init()``, its connections: the only global state of popdist.

Queries need no ``init()``: they read the environment, and never write to it. They raise ContractError if the
environment describes a job incompletely.
"""

import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from popdist.errors import BackendError, Names, NotInitializedError, as_float
from popdist.exchange.groups import HEADER_BYTES, Backend, Group, PreemptionNotice, refuse_in_turn
from popdist.exchange.host_memory import forks
from popdist.exchange.process_group.registration import register
from popdist.exchange.transport.serial_backend import SerialBackend
from popdist.ground.accelerators import BACKENDS
from popdist.ground.contract import VERSION, Contract, read_share_tensors
from popdist.ground.environments import Environment, Launcher, detect
from popdist.ground.progress import progress_page

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.distributed_c10d import Store

    from popdist.exchange.process_group.default_group import DefaultGroup

_ON_ACCELERATORS: Final = frozenset({"accelerator"})
DEVICE_KINDS: Final[dict[str | None, frozenset[str]]] = {
    None: frozenset({"cpu"}) | _ON_ACCELERATORS,
    "gloo": frozenset({"cpu"}),
    **dict.fromkeys(BACKENDS, _ON_ACCELERATORS),
}
"""The kinds of devices whose tensors may be sent; the key is the argument ``backend`` of ``init()``."""

Checks: TypeAlias = Literal["full", "off"]
"""The choices of ``init(checks=...)``: whether to make the checks that cost time; see ``popdist.step.checks``."""

Asked: TypeAlias = tuple[str | None, float, Checks, bool]
"""The type of the arguments of ``init()``, in the order in which ``init()`` has them."""


@dataclass(slots=True, kw_only=True)
class Job:
    """The job of this process after ``init()``: environment, groups of instances, and arguments of ``init()``."""

    environment: Environment  # the environment at the time of ``init()``
    asked: Asked
    group: Group  # the instances in collectives now; fewer inside ``execute_on_instances``
    data_parallel: (
        Group | None
    )  # instances with the same part of other replicas, by replica; None: all of ``group``
    is_checked: bool
    default_group: "DefaultGroup | None"  # the default group of torch.distributed, if made here
    mesh: "DeviceMesh | None" = None  # the result of ``device_mesh()``, or None


@dataclass(slots=True, kw_only=True)
class _ProcessState:
    """The job of this process, and, until the process ends, the key-value store that connects instances."""

    job: Job | None = None
    store: "Store | None" = None
    num_inits: int = 0
    mark: int | None = None  # the descriptor that shows processes started by this process that it has joined
    notice: PreemptionNotice = field(default_factory=PreemptionNotice)


_state = _ProcessState()


def environment() -> Environment:
    """Return the job that this process is in, as environment variables describe it; ``init()`` is not needed."""
    if _state.job is not None:
        return _state.job.environment
    progress_page.join()
    return detect(os.environ)


def shares_tensors() -> bool:
    """Whether tensors may be in memory that other instances map; ``POPDIST_SHARE_TENSORS=0`` forbids it."""
    return read_share_tensors(os.environ) is not False


def current_job() -> Job:
    """Return the initialized job; raises NotInitializedError before ``init()`` and after ``finalize()``."""
    if _state.job is None:
        raise NotInitializedError("this call needs the other instances: call popdist.init() first")
    return _state.job


def current_group() -> Group:
    """Return the group of instances that collectives use now. Raise CollectiveError within a micro batch if this
    instance has several replicas, because the collective would join only one replica of each instance.
    """
    group = current_job().group
    return group if group.is_limited else refuse_in_turn(group)


def data_parallel_group() -> Group:
    """Return the instances that share gradients, weights and samples now: all, or, if instances share replicas,
    the instances with the same part of the model in other replicas, in the order of the replicas.
    """
    return current_job().data_parallel or current_job().group


def notice() -> PreemptionNotice:
    """Return the notice of preemption: whether this process was asked to end, and whether all instances know."""
    return _state.notice


@contextmanager
def limited_to(members: tuple[int, ...]) -> Iterator[None]:
    """A context in which collectives include only ``members``: instances, or replicas if instances share them."""
    job = current_job()
    outer, outer_part = job.group, job.data_parallel
    size = job.environment.contract.parallelism.instances_per_replica
    job.group = outer.limited_to(tuple(it for it in outer.instances if it // size in members))
    if outer_part is not None:
        job.data_parallel = outer_part.limited_to(members)
    try:
        yield
    finally:
        job.group, job.data_parallel = outer, outer_part


def init(
    backend: str | None = None,
    *,
    timeout_seconds: float = 1800.0,
    checks: Checks = "full",
    torch_distributed: bool = False,
) -> None:
    """Connect this instance with the other instances of its job; needed before the first collective.

    The first ``ReplicatedModel`` calls ``init()`` with the defaults if the program has not called it. All
    instances must call ``init()`` with the same arguments, and it returns when all have called it. It makes its
    own process groups: the program may call ``torch.distributed.init_process_group()`` before or after. In a
    one-instance job it connects nothing, and the same calls work with the same checks. It sets the number of
    torch's threads to the launcher's ``OMP_NUM_THREADS``, and under ``poprun --deterministic`` makes torch use
    deterministic algorithms only. A second call with the same arguments does nothing. The job ends with the
    program: calling ``finalize()`` is optional.

    Args:
        backend: ``None`` sends each tensor by its device: CPU tensors through shared memory if all instances are
            on one host, otherwise over gloo; tensors of accelerators over NCCL or a similar backend. ``"gloo"``
            refuses tensors of accelerators; ``"nccl"`` and ``"xccl"`` refuse CPU tensors.
        timeout_seconds: How long ``init()`` and every collective wait for a late instance. Greater than 0.
        checks: ``"full"`` looks for silent mistakes in the first steps of a model and then in every 100th step;
            ``"off"`` omits the checks that cost time.
        torch_distributed: Also make the default group of torch.distributed, with the backend ``popdist`` and the
            instances as ranks, for libraries that ask torch for their rank and call its collectives. If the
            program has made a group whose ranks are the instances, that group is used. Only a group made here is
            destroyed at the end. A later ``init_process_group()`` of the program raises torch's error.

    Raises:
        ContractError: If the environment describes a job incompletely.
        BackendError: If an argument is invalid, the instances cannot be connected, the program's default group has
            other ranks, ``init()`` was called before with other arguments, or the process that started this
            process has called ``init()``.
        CollectiveError: If instances pass different arguments, have different numbers of threads or choices of
            algorithms, or have different versions of popdist; the message names the instances.
    """
    asked = (backend, timeout_seconds, checks, torch_distributed)
    _check_arguments(*asked)
    if _state.job is not None:
        if _state.job.asked != asked:
            raise BackendError(
                f"{_in_words(*asked)} after {_in_words(*_state.job.asked)}: call init() once, before all else, or "
                "finalize() between the two"
            )
        return
    found = environment()
    _refuse_second_process(found.contract)
    _state.job, _state.mark = _join_job(found, asked), None
    if found.contract.num_instances > 1:
        _state.mark = forks.mark_process(_name_of_instance(found.contract))
    forks.call_at_exit(_leave_at_exit)


def _refuse_second_process(contract: Contract) -> None:
    """Raise BackendError if an ancestor of this process has already joined the job as this instance."""
    if contract.num_instances == 1:
        return
    pid = forks.find_marked_ancestor(_name_of_instance(contract))
    if pid is not None:
        raise BackendError(
            f"init() in process {os.getpid()}, which process {pid} has started, and that one has joined the job "
            f"as instance {contract.instance_index}.\n"  # poprun's report has room for two lines of this length
            "A process that is spawned, such as a worker of a DataLoader, runs the main file again: put init() "
            'and what follows it into a function, and call that below `if __name__ == "__main__":`'
        )


def _name_of_instance(contract: Contract) -> str:
    """Return a text that identifies this instance of this job among all instances and jobs."""
    where = contract.store or contract.master
    return f"{contract.job_id} {where} {contract.instance_index}/{contract.num_instances}"


def _join_job(found: Environment, asked: Asked) -> Job:
    """Connect with the other instances; check that all passed equal arguments to ``init()``; return the job."""
    backend, timeout_seconds, checks, torch_distributed = asked
    computes = _prepare_arithmetic(found.contract)
    progress_page.wait("init()")
    try:
        connected = _connect(found, backend, timeout_seconds)
    finally:
        progress_page.end_wait()
    if "torch" in sys.modules or os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        register()  # else torch finds the backend by itself when it is imported
    group, parallelism = Group(connected, _state.notice), found.contract.parallelism
    data_parallel: Group | None = None
    try:
        group.agree(
            f"{_in_words(*asked)}, {found.contract.num_replicas} replicas, popdist {VERSION}, {computes}, job "
            f"{found.contract.job_id!r}, {parallelism.pipeline} stages of {parallelism.tensor} among "
            f"{parallelism.instances_per_replica} instances of a replica"
        )
        if parallelism.is_shared:
            data_parallel = _data_parallel_group(found, backend, timeout_seconds)
        default_group = None
        if torch_distributed:
            default_group = _join_torch(group, found.contract, timeout_seconds, "init(torch_distributed=True)")
    except Exception:
        if data_parallel is not None:
            data_parallel.backend.close()
        connected.close()
        raise
    return Job(
        environment=found,
        asked=asked,
        group=group,
        data_parallel=data_parallel,
        is_checked=checks == "full",
        default_group=default_group,
    )


def _check_arguments(backend: object, timeout_seconds: object, checks: object, torch_distributed: object) -> None:
    if backend not in tuple(DEVICE_KINDS):
        names = ", ".join(map(repr, filter(None, DEVICE_KINDS)))
        raise BackendError(f"unknown backend {backend!r}: choose {names}, or None for any device")
    if not 0 < as_float(timeout_seconds) < math.inf:
        raise BackendError(f"timeout_seconds={timeout_seconds!r} must be a finite number greater than 0")
    if checks not in ("full", "off"):
        raise BackendError(f"checks={checks!r} must be 'full' or 'off'")
    if not isinstance(torch_distributed, bool):
        raise BackendError(f"torch_distributed={torch_distributed!r} must be True or False")


def _in_words(backend: str | None, timeout_seconds: float, checks: Checks, torch_distributed: bool) -> str:  # noqa: FBT001 - the arguments are those of init(), in their order
    option = ", torch_distributed=True" if torch_distributed else ""
    return f"init(backend={backend!r}, timeout_seconds={timeout_seconds:g}, checks={checks!r}{option})"


def ensure_default_group(asked_by: str) -> None:
    """Make the default group of torch.distributed if it does not exist; all instances must call this function."""
    job = current_job()
    made = _join_torch(job.group, job.environment.contract, job.asked[1], asked_by)
    job.default_group = made or job.default_group


def _join_torch(group: Group, contract: Contract, timeout_seconds: float, asked_by: str) -> "DefaultGroup | None":
    """Make torch's default process group; return None if a group with the instances as ranks exists already."""
    from popdist.exchange.process_group import default_group

    place = default_group.place_in_default_group()
    places = group.start(f"{asked_by}, the default group of torch.distributed", place).wait()
    if trouble := default_group.disagreement([(number, size) for number, size in places]):
        raise BackendError(f"{asked_by}: {trouble}")
    if place != default_group.NONE:
        return None
    store = None if _state.store is None else _numbered_store(_state.store)
    made = default_group.DefaultGroup(store, contract.instance_index, contract.num_instances, timeout_seconds)
    # gloo fails on an instance that still connects when another instance destroys its group
    group.start("the default group of torch.distributed is made", [True]).wait()
    return made


def _numbered_store(store: "Store") -> "Store":
    """Return a part of the job's key-value store with the keys of this call of ``init()`` alone."""
    from torch.distributed.distributed_c10d import PrefixStore

    return PrefixStore(f"popdist/{_state.num_inits}", store)


def ensure_init() -> None:
    """Call ``init()`` with its defaults, unless ``init()`` was called before."""
    if _state.job is None:
        init()


def _prepare_arithmetic(contract: Contract) -> str:
    """Set torch's threads and algorithms as the job's ``contract`` says; return text to compare instances."""
    if contract.num_instances == 1 and contract.num_threads is None and not contract.is_deterministic:
        return "alone"
    import_module("popdist.ground.installation.needs_torch")
    from popdist.ground.accelerators import arithmetic

    return arithmetic.prepare(contract)


def _connect(found: Environment, backend: str | None, timeout_seconds: float) -> "Backend":
    """Return the backend that connects the whole job. Imports torch only if the job has several instances."""
    contract = found.contract
    if contract.num_instances == 1:
        return _alone(Names(members=(0,), noun="instance"), backend)
    from popdist.exchange.transport import rendezvous
    from popdist.exchange.transport.connections import check_available

    check_available(backend)
    if _state.store is None:
        _state.store = rendezvous.open_store(found, timeout_seconds)
        forks.never_destroy_in_children(_state.store)
    _state.num_inits += 1
    names = Names(members=tuple(range(contract.num_instances)), noun="instance")
    store = _numbered_store(_state.store)
    return _connect_members(store, contract, names, contract.instance_index, backend, timeout_seconds)


def _data_parallel_group(found: Environment, backend: str | None, timeout_seconds: float) -> Group:
    """Connect the instances with this part of the model in all replicas; return their group, in replica order."""
    from torch.distributed.distributed_c10d import PrefixStore

    contract, part = found.contract, found.contract.replica_part
    size, replicas = contract.parallelism.instances_per_replica, tuple(range(contract.num_replicas))
    place = contract.parallelism.place_of(contract.instance_index)
    words = ", ".join(f"{name} {number}" for name, number in place.items() if name != "replica")
    names = Names(members=replicas, noun="replica", place=f" ({words})")
    if contract.num_replicas == 1 or _state.store is None:
        made = _alone(names, backend)
    else:
        store = PrefixStore(f"part/{part.index}", _numbered_store(_state.store))
        made = _connect_members(store, contract, names, part.replica, backend, timeout_seconds)
    return Group(made, _state.notice, job_numbers=tuple(replica * size + part.index for replica in replicas))


def _alone(names: Names, backend: str | None) -> "Backend":
    if "cpu" not in DEVICE_KINDS[backend]:
        from popdist.exchange.transport.connections import check_available

        check_available(backend)
    return SerialBackend(0, names, device_kinds=DEVICE_KINDS[backend])


def _connect_members(
    store: "Store",
    contract: Contract,
    names: Names,
    index: int,
    backend: str | None,
    timeout_seconds: float,
) -> "Backend":
    """Connect the instances ``names``, of which number ``index`` is this instance; return the backend."""
    from popdist.exchange.transport import rendezvous, torch_backend
    from popdist.exchange.transport.connections import Connections

    num_local = contract.num_local_instances
    connected = Connections(
        store,
        names=names,
        instance_index=index,
        address=rendezvous.own_address(contract),
        host=f"host {contract.instance_index // num_local} of {num_local} each",  # equal numbers on all hosts
        timeout_seconds=timeout_seconds,
        header_bytes=HEADER_BYTES,
        warns_of_sharing=not contract.shares_device,
    )
    return torch_backend.TorchBackend(connected, names.members, DEVICE_KINDS[backend])


def finalize() -> None:
    """Leave the job and close its connections. Does nothing if there is no initialized job.

    ``finalize()`` does not wait: an instance that still waits for this instance gets a ``BackendError``.
    ``init()`` may be called again, if all instances call it.
    """
    job, _state.job = _state.job, None
    if job is not None:
        if _state.mark is not None:
            os.close(_state.mark)
        if job.default_group is not None:
            job.default_group.destroy()
        if job.data_parallel is not None:
            job.data_parallel.backend.close()
        job.group.backend.close()


def _leave_at_exit() -> None:
    """Leave the job at the end of the process. Close connections here only if MPI_Finalize waits for them."""
    if _state.job is None:
        return
    if _state.job.environment.launcher in (Launcher.OPEN_MPI, Launcher.HYDRA):
        finalize()  # because MPI_Finalize waits for every instance, and some may wait for this instance
    else:  # the kernel closes connections after the process has ended, so other instances blame no living process
        if _state.job.data_parallel is not None:
            _state.job.data_parallel.backend.stop_threads()
        _state.job.group.backend.stop_threads()


def is_initialized() -> bool:
    """Whether ``init()`` has been called and ``finalize()`` has not."""
    return _state.job is not None


def instance_index() -> int:
    """Return the index of this instance (process) in the job: 0 to ``num_instances() - 1``; 0 outside a job."""
    return environment().contract.instance_index


def num_instances() -> int:
    """Return the number of instances (processes) in the job; 1 outside a job."""
    return environment().contract.num_instances


def num_replicas() -> int:
    """Return the number of replicas of the model in the whole job, a multiple of ``num_instances()``, or, if
    instances share replicas, a divisor of it; 1 outside a job.
    """
    return environment().contract.num_replicas


def replica_index() -> int:
    """Return the index of the first replica of which this instance holds all or a part; 0 outside a job."""
    return local_replicas().start


def instances_of_replica() -> range:
    """Return the job-wide numbers of the instances that hold this instance's first replica, or parts of it."""
    contract = environment().contract
    shared = contract.parallelism.instances_per_replica
    return range(contract.replica_part.replica * shared, (contract.replica_part.replica + 1) * shared)


def num_local_replicas() -> int:
    """Return the number of replicas on each instance (1 if instances share a replica); 1 outside a job."""
    return environment().contract.layout.num_local_replicas


def local_replicas() -> range:
    """Return the job-wide numbers of this instance's replicas, ascending; ``range(0, 1)`` outside a job."""
    contract = environment().contract
    return contract.layout.replicas_of(contract.data_parallel_index)


def ipus_per_replica() -> int:
    """Return the number of virtual IPUs (CPU cores, or one accelerator each) of a replica; 1 outside a job."""
    return environment().contract.ipus_per_replica


def local_instance_index() -> int:
    """Return the index of this instance among the job's instances on its host; 0 outside a job."""
    return environment().contract.local_instance_index


def job_id() -> str:
    """Return the name of the job, equal on all its instances: for folders of runs, logs and experiment trackers.

    Under poprun the name is ``POPDIST_JOB_ID``: the value set by the caller, so that a job that is started again
    can keep its name, otherwise a new random name. Empty under other launchers and outside a job.
    """
    return environment().contract.job_id


def device() -> "torch.device":
    """Return the device that this instance computes on: the first device of ``devices()``.

    Under poprun: the first accelerator that poprun gave the instance, or the CPU if poprun gave none. Under
    another launcher and outside a job: instances take the accelerators of the host in order, as many as each
    needs, and the CPU if torch sees no accelerator for this instance. Imports torch, but initializes no
    accelerator.

    Raises:
        BackendError: If poprun gave the instance an accelerator that this torch does not see.
    """
    return devices()[0]


def devices() -> "tuple[torch.device, ...]":
    """Return all devices of this instance: ``ipus_per_replica()`` devices; fewer if instances share a replica.

    Under poprun: the accelerators that poprun gave the instance. Under another launcher and outside a job: the
    accelerators that follow on the accelerators of the host's earlier instances, if torch sees any; otherwise the
    CPU. Imports torch, but initializes no accelerator.

    Raises:
        BackendError: As :func:`device`.
    """
    import_module("popdist.ground.installation.needs_torch")
    from popdist.ground.accelerators import accelerator

    found = environment()
    return accelerator.devices_of(found.contract, are_dealt=found.launcher is Launcher.POPRUN)
