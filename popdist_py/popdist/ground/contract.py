"""The contract between launcher and library: every environment variable, written and read in one place.

The launcher writes a :class:`Contract` into the environment of each program, and the library reads the same value.
In addition to PopRun's ``POPDIST_*`` the launcher writes torch's variables (``RANK``, ``TORCHELASTIC_RUN_ID`` ...)
and Open MPI's ``OMPI_COMM_WORLD_*``, for programs that do not use popdist.
"""

import re
from collections.abc import Mapping
from dataclasses import field, replace
from typing import Final, Self

from popdist.errors import ContractError
from popdist.ground.layout import Parallelism, ReplicaLayout, ReplicaPart
from popdist.ground.values import dataclass

VERSION: Final = "0.1.0"

LAST_PORT: Final = 65535

NUM_REPLICAS: Final = "POPDIST_NUM_TOTAL_REPLICAS"
NUM_LOCAL_REPLICAS: Final = "POPDIST_NUM_LOCAL_REPLICAS"
IPUS_PER_REPLICA: Final = "POPDIST_NUM_IPUS_PER_REPLICA"
UNIFORM_REPLICAS: Final = "POPDIST_UNIFORM_REPLICAS_PER_INSTANCE"
REPLICA_OFFSET: Final = "POPDIST_REPLICA_INDEX_OFFSET"
LOCAL_INSTANCE_INDEX: Final = "POPDIST_LOCAL_INSTANCE_INDEX"

REQUIRED: Final = (
    NUM_REPLICAS,
    NUM_LOCAL_REPLICAS,
    IPUS_PER_REPLICA,
    UNIFORM_REPLICAS,
    REPLICA_OFFSET,
    LOCAL_INSTANCE_INDEX,
)
"""The variables that poprun sets; an environment must set all, none, or only the variables in ``SHAPE``."""

SHAPE: Final = (NUM_REPLICAS, IPUS_PER_REPLICA)
"""The variables with equal values in all instances; if only these are set, another launcher sets the ranks."""

INSTANCES_PER_REPLICA: Final = "POPDIST_NUM_INSTANCES_PER_REPLICA"
INDEX_IN_REPLICA: Final = "POPDIST_INSTANCE_INDEX_IN_REPLICA"
TENSOR: Final = "POPDIST_TENSOR_PARALLEL_SIZE"
PIPELINE: Final = "POPDIST_PIPELINE_PARALLEL_SIZE"
MAPPING: Final = "POPDIST_MAPPING"

EXECUTABLE_CACHE_PATH: Final = "POPDIST_EXECUTABLE_CACHE_PATH"
JOB_ID: Final = "POPDIST_JOB_ID"
DEVICES: Final = "POPDIST_DEVICES"
DEVICE_TYPE: Final = "POPDIST_DEVICE_TYPE"
SHARES_DEVICE: Final = "POPDIST_SHARES_DEVICE"
STORE: Final = "POPDIST_STORE"
STORE_DESCRIPTOR: Final = "POPDIST_STORE_DESCRIPTOR"
PROGRESS_DESCRIPTOR: Final = "POPDIST_PROGRESS_DESCRIPTOR"
NUMBERS_DESCRIPTOR: Final = "POPDIST_NUMBERS_DESCRIPTOR"
CLOCK_DESCRIPTOR: Final = "POPDIST_CLOCK_DESCRIPTOR"
TRACE: Final = "POPDIST_TRACE"
JAX_COORDINATOR: Final = "POPDIST_JAX_COORDINATOR"
RESTART_COUNT: Final = "POPDIST_RESTART_COUNT"

RANK: Final = "RANK"
WORLD_SIZE: Final = "WORLD_SIZE"
LOCAL_RANK: Final = "LOCAL_RANK"
LOCAL_WORLD_SIZE: Final = "LOCAL_WORLD_SIZE"
GROUP_RANK: Final = "GROUP_RANK"
RUN_ID: Final = "TORCHELASTIC_RUN_ID"
MASTER_ADDR: Final = "MASTER_ADDR"
MASTER_PORT: Final = "MASTER_PORT"

OMPI_RANK: Final = "OMPI_COMM_WORLD_RANK"
OMPI_SIZE: Final = "OMPI_COMM_WORLD_SIZE"
OMPI_LOCAL_RANK: Final = "OMPI_COMM_WORLD_LOCAL_RANK"
OMPI_LOCAL_SIZE: Final = "OMPI_COMM_WORLD_LOCAL_SIZE"

HYDRA_RANK: Final = "PMI_RANK"
HYDRA_SIZE: Final = "PMI_SIZE"
HYDRA_LOCAL_RANK: Final = "MPI_LOCALRANKID"
HYDRA_LOCAL_SIZE: Final = "MPI_LOCALNRANKS"
HYDRA_DESCRIPTOR: Final = "PMI_FD"

NUM_THREADS: Final = "OMP_NUM_THREADS"
DETERMINISTIC: Final = "POPDIST_DETERMINISTIC"
SHARE_TENSORS: Final = "POPDIST_SHARE_TENSORS"

_NODE_COUNT: Final = r"([0-9]{1,9})(?:\(x([0-9]{1,6})\))?"
"""The regular expression of one item of Slurm's lists of numbers."""


def read_count(env: Mapping[str, str], name: str, *, minimum: int = 1, default: int | None = None) -> int:
    """Return the integer in the variable ``name``; ``default`` if unset. Raises ContractError if invalid."""
    text = env.get(name)
    if text is None:
        if default is None:
            raise ContractError(f"{name} is not set")
        return default
    if not text.strip().isdecimal() or int(text) < minimum:
        raise ContractError(f"{name}={text!r} must be a whole number of at least {minimum}")
    return int(text)


def read_share_tensors(env: Mapping[str, str]) -> bool | None:
    """Return whether tensors may move into shared memory; None if only DistributedDataParallel's tensors may."""
    text = env.get(SHARE_TENSORS, "").strip()
    if text not in {"", "0", "1"}:
        raise ContractError(
            f"{SHARE_TENSORS}={text!r} must be 0 or 1: whether large tensors may be moved into shared memory"
        )
    return text == "1" if text else None


def read_threads(env: Mapping[str, str], name: str) -> int | None:
    """Return the first number in the variable ``name`` (4 in ``4,2``); None if there is no number above 0."""
    first = env.get(name, "").partition(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) else None


def read_ordinals(env: Mapping[str, str], name: str) -> tuple[int, ...]:
    """Return the device numbers, such as ``0,1``, in the variable ``name``; () if unset or empty."""
    text = env.get(name, "")
    words = text.split(",") if text else []
    if not all(word.isdecimal() for word in words):
        raise ContractError(f"{name}={text!r} must be device ordinals with commas between them, such as 0,1")
    return tuple(map(int, words))


def _read_device_type(env: Mapping[str, str]) -> str:
    text = env.get(DEVICE_TYPE, "")
    if text and not text.isidentifier():
        raise ContractError(f"{DEVICE_TYPE}={text!r} must be a type of device that torch knows")
    return text


def read_node_counts(env: Mapping[str, str], name: str) -> tuple[int, ...]:
    """Return one number per node from Slurm's variable ``name``, such as ``2(x3),1``; () if unset or empty."""
    counts: list[int] = []
    for item in filter(None, env.get(name, "").split(",")):
        match = re.fullmatch(_NODE_COUNT, item.strip())
        if match is None:
            raise ContractError(f"{name}={env[name]!r} is not of Slurm's form, such as 2(x3),1")
        counts += [int(match[1])] * int(match[2] or 1)
    return tuple(counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """A TCP address: ``host`` is a name or an IP address, ``port`` is 1 to 65535."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the address in ``host:port``; an IPv6 host needs brackets. Raises ContractError if malformed."""
        host, _, port = text.rpartition(":")
        if not host or not port.isdecimal() or not 1 <= int(port) <= LAST_PORT:
            raise ContractError(f"{text!r} is no address: expected HOST:PORT, for example 127.0.0.1:29500")
        return cls(host=host.removeprefix("[").removesuffix("]"), port=int(port))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """The description of a job, and of one instance's place in the job, that a launcher gives to the instance."""

    num_instances: int = 1  # processes in the job
    instance_index: int = 0  # this process, 0 to ``num_instances - 1``; torch's rank
    num_local_instances: int = 1  # processes of the job on this host
    local_instance_index: int = 0  # this process among the processes of its host; torch's local rank
    host_index: int = 0  # this host, 0 to number of hosts - 1; torch's group rank
    num_replicas: int = 1
    """Replicas in the whole job: a multiple of ``num_instances``, or a divisor if instances share replicas."""
    parallelism: Parallelism = field(default_factory=Parallelism)  # how several instances share one replica
    mapping_path: str | None = None  # the file of `poprun-size` that defines the job's mapping, or None
    ipus_per_replica: int = 1  # virtual IPUs that one replica uses. At least 1
    devices: tuple[int, ...] = ()
    """Numbers of this instance's devices among the devices that this instance can see; empty on the CPU."""
    device_type: str = ""  # torch's type of the devices, such as ``cuda`` or ``xpu``; empty if unknown
    shares_device: bool = False
    """Whether instances of the job share a device or have slices of one device, which NCCL refuses to connect."""
    job_id: str = ""  # equal on all instances and in all restarts of a job; empty if no launcher set it
    restart_count: int = 0  # how often the job has been started again after a failure
    master: Endpoint | None = None  # address at which the program's ``env://`` store of torch will listen, or None
    store: Endpoint | None = None  # address at which popdist's own store listens, or None
    store_descriptor: int | None = None  # on instance 0 the inherited listening socket of ``store``, else None
    executable_cache_path: str | None = None  # directory for compiled executables, or None
    num_threads: int | None = None  # threads for the arithmetic of each replica, or None if not set
    is_deterministic: bool = False  # whether torch must use deterministic algorithms only

    @property
    def replica_part(self) -> ReplicaPart:
        """The part of a model replica that this instance holds: replica, pipeline stage and tensor shard."""
        return self.parallelism.part_of(self.instance_index)

    @property
    def data_parallel_index(self) -> int:
        """Index of this instance among the instances that hold the same part of different replicas."""
        return self.replica_part.replica

    @property
    def layout(self) -> ReplicaLayout:
        """The assignment of replicas to instances; all instances that share one replica count as one instance."""
        number = self.num_instances // self.parallelism.instances_per_replica
        return ReplicaLayout(num_instances=number, num_replicas=self.num_replicas)

    def to_env(self) -> dict[str, str]:
        """Return this description of a job as environment variables for a program. Inverse of :meth:`from_env`."""
        local = self.layout.num_local_replicas
        env = {
            NUM_REPLICAS: str(self.num_replicas),
            NUM_LOCAL_REPLICAS: str(local),
            IPUS_PER_REPLICA: str(self.ipus_per_replica),
            UNIFORM_REPLICAS: "1",
            REPLICA_OFFSET: str(self.data_parallel_index * local),
            LOCAL_INSTANCE_INDEX: str(self.local_instance_index),
            RANK: str(self.instance_index),
            WORLD_SIZE: str(self.num_instances),
            LOCAL_RANK: str(self.local_instance_index),
            LOCAL_WORLD_SIZE: str(self.num_local_instances),
            GROUP_RANK: str(self.host_index),
            RUN_ID: self.job_id,
            OMPI_RANK: str(self.instance_index),
            OMPI_SIZE: str(self.num_instances),
            OMPI_LOCAL_RANK: str(self.local_instance_index),
            OMPI_LOCAL_SIZE: str(self.num_local_instances),
            DEVICES: ",".join(map(str, self.devices)),
            JOB_ID: self.job_id,
            RESTART_COUNT: str(self.restart_count),
        }
        env |= self._parallelism_to_env()
        if self.parallelism.is_shared:
            env[INDEX_IN_REPLICA] = str(self.replica_part.index)
        if self.master is not None:
            env |= {MASTER_ADDR: self.master.host, MASTER_PORT: str(self.master.port)}
        optional = {
            STORE: self.store,
            STORE_DESCRIPTOR: self.store_descriptor,
            EXECUTABLE_CACHE_PATH: self.executable_cache_path,
            NUM_THREADS: self.num_threads,
            DETERMINISTIC: 1 if self.is_deterministic else None,
            MAPPING: self.mapping_path,
            DEVICE_TYPE: self.device_type or None,
            SHARES_DEVICE: 1 if self.shares_device else None,
        }
        return env | {name: str(value) for name, value in optional.items() if value is not None}

    def _parallelism_to_env(self) -> dict[str, str]:
        """Return the environment variables for shared replicas; empty if each instance holds whole replicas."""
        if not self.parallelism.is_shared:
            return {}
        return {
            INSTANCES_PER_REPLICA: str(self.parallelism.instances_per_replica),
            TENSOR: str(self.parallelism.tensor),
            PIPELINE: str(self.parallelism.pipeline),
        }

    def shape_to_env(self) -> dict[str, str]:
        """Return the variables with equal values in all instances, for a job whose ranks another launcher sets."""
        env = self.to_env()
        names = (*SHAPE, *self._parallelism_to_env(), NUM_THREADS, DETERMINISTIC, MAPPING)
        return {name: env[name] for name in names if name in env}

    def shaped(self, env: Mapping[str, str]) -> Self:
        """Return this job, which another launcher started, with the number of replicas in poprun's variables."""
        if NUM_REPLICAS not in env:
            return self
        num_replicas, parallelism = read_count(env, NUM_REPLICAS), read_parallelism(env)
        if parallelism.is_shared and num_replicas * parallelism.instances_per_replica != self.num_instances:
            raise ContractError(
                f"{NUM_REPLICAS}={num_replicas} replicas of {parallelism.instances_per_replica} instances are not "
                f"the {self.num_instances} instances of the job"
            )
        if not parallelism.is_shared and num_replicas % self.num_instances:
            raise ContractError(
                f"{NUM_REPLICAS}={num_replicas} does not divide over the {self.num_instances} instances of the job"
            )
        return replace(
            self,
            num_replicas=num_replicas,
            parallelism=parallelism,
            mapping_path=env.get(MAPPING),
            ipus_per_replica=read_count(env, IPUS_PER_REPLICA),
            num_threads=read_threads(env, NUM_THREADS),
            is_deterministic=read_count(env, DETERMINISTIC, minimum=0, default=0) > 0,
        )

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> Self | None:
        """Return the job that poprun has described in ``env``; None if ``env`` has no rank from poprun."""
        missing = [name for name in REQUIRED if name not in env]
        if len(missing) == len(REQUIRED) or {*REQUIRED} - {*missing} == {*SHAPE}:
            return None
        if missing:
            raise ContractError(
                f"the environment holds part of a poprun job, but not {', '.join(missing)}: start the program "
                "with poprun, or unset every POPDIST_ variable to run it alone"
            )
        if read_count(env, UNIFORM_REPLICAS, minimum=0) != 1:
            raise ContractError(f"{UNIFORM_REPLICAS}={env[UNIFORM_REPLICAS]}: only a uniform split is supported")
        num_replicas = read_count(env, NUM_REPLICAS)
        num_local_replicas = read_count(env, NUM_LOCAL_REPLICAS)
        offset = read_count(env, REPLICA_OFFSET, minimum=0)
        if num_replicas % num_local_replicas or offset % num_local_replicas or offset >= num_replicas:
            raise ContractError(
                f"{NUM_REPLICAS}={num_replicas}, {NUM_LOCAL_REPLICAS}={num_local_replicas} and "
                f"{REPLICA_OFFSET}={offset} fit no uniform split of replicas over instances"
            )
        parallelism, index = read_parallelism(env), _read_index_in_replica(env)
        size = parallelism.instances_per_replica
        if index >= size or (size > 1 and num_local_replicas > 1):
            raise ContractError(
                f"{INSTANCES_PER_REPLICA}={size}, {INDEX_IN_REPLICA}={index} and "
                f"{NUM_LOCAL_REPLICAS}={num_local_replicas} describe no instance of a replica"
            )
        contract = cls(
            num_instances=num_replicas // num_local_replicas * size,
            instance_index=offset // num_local_replicas * size + index,
            parallelism=parallelism,
            mapping_path=env.get(MAPPING),
            num_local_instances=read_count(env, LOCAL_WORLD_SIZE, default=1),
            local_instance_index=read_count(env, LOCAL_INSTANCE_INDEX, minimum=0),
            host_index=read_count(env, GROUP_RANK, minimum=0, default=0),
            num_replicas=num_replicas,
            ipus_per_replica=read_count(env, IPUS_PER_REPLICA),
            devices=read_ordinals(env, DEVICES),
            device_type=_read_device_type(env),
            shares_device=read_count(env, SHARES_DEVICE, minimum=0, default=0) > 0,
            job_id=env.get(JOB_ID, ""),
            restart_count=read_count(env, RESTART_COUNT, minimum=0, default=0),
            master=read_master(env),
            store=Endpoint.parse(env[STORE]) if STORE in env else None,
            store_descriptor=read_count(env, STORE_DESCRIPTOR, minimum=0) if STORE_DESCRIPTOR in env else None,
            executable_cache_path=env.get(EXECUTABLE_CACHE_PATH),
            num_threads=read_threads(env, NUM_THREADS),
            is_deterministic=read_count(env, DETERMINISTIC, minimum=0, default=0) > 0,
        )
        _check_torch_agrees(contract, env)
        return contract


def read_parallelism(env: Mapping[str, str]) -> Parallelism:
    """Return how instances share a replica. Raises ContractError if numbers in ``env`` contradict each other."""
    try:
        return Parallelism(
            instances_per_replica=read_count(env, INSTANCES_PER_REPLICA, default=1),
            tensor=read_count(env, TENSOR, default=1),
            pipeline=read_count(env, PIPELINE, default=1),
        )
    except ValueError as error:
        raise ContractError(f"{INSTANCES_PER_REPLICA}, {TENSOR} and {PIPELINE}: {error}") from None


def _read_index_in_replica(env: Mapping[str, str]) -> int:
    is_shared = read_count(env, INSTANCES_PER_REPLICA, default=1) > 1
    return read_count(env, INDEX_IN_REPLICA, minimum=0, default=None if is_shared else 0)


def read_master(env: Mapping[str, str]) -> Endpoint | None:
    """Return the address in ``MASTER_ADDR`` and ``MASTER_PORT`` of torch's key-value store; None if unset."""
    if MASTER_ADDR not in env or MASTER_PORT not in env:
        return None
    return Endpoint(host=env[MASTER_ADDR], port=read_count(env, MASTER_PORT))


def _check_torch_agrees(contract: Contract, env: Mapping[str, str]) -> None:
    """Raise ContractError if torch's variables describe another job, as if a launcher runs inside a launcher."""
    found = (env.get(RANK), env.get(WORLD_SIZE))
    expected = (str(contract.instance_index), str(contract.num_instances))
    if any(text is not None and text != wanted for text, wanted in zip(found, expected, strict=True)):
        raise ContractError(
            f"{RANK}={found[0]} and {WORLD_SIZE}={found[1]} contradict the {REQUIRED[0][:8]} variables, which say "
            f"instance {expected[0]} of {expected[1]}: start the program with one launcher, not with two inside "
            "each other"
        )
