"""Programs of several frameworks that end badly or stand still, and who is at fault in each."""

from dataclasses import dataclass, replace
from typing import Final

from poprun.observe.account.judgements import Cause
from tests.verdicts import endings

_IMPORTS: Final = """
import os, signal, sys, threading, time
rank = int(os.environ["RANK"])
"""

_LOOP: Final = """
for step in range(8):
    if step == 5 and rank == 1:
        FAULT
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.barrier()
dist.destroy_process_group()
"""

_MODEL: Final = """
import torch, torch.distributed as dist
from torch import nn
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
"""

_OPTIMIZER: Final = "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"

DDP: Final = f"{_IMPORTS}{_MODEL}model = nn.parallel.DistributedDataParallel(model)\n{_OPTIMIZER}{_LOOP}"

FSDP: Final = f"""{_IMPORTS}{_MODEL}
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
for layer in (model[0], model[2], model):
    fully_shard(layer, mesh=mesh)
{_OPTIMIZER}{_LOOP}"""

PIPELINE: Final = f"""{_IMPORTS}{_MODEL}
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
module = nn.Linear(8, 8)
stage = PipelineStage(module, rank, dist.get_world_size(), torch.device("cpu"))
schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
def fault(*_):
    if step == 5 and rank == 1:
        FAULT
module.register_forward_pre_hook(fault)
for step in range(8):
    if rank == 0:
        schedule.step(torch.ones(8, 8))
    elif rank == dist.get_world_size() - 1:
        schedule.step(target=torch.ones(8, 8))
    else:
        schedule.step()
dist.barrier()
"""

LOADER: Final = f"""{_IMPORTS}{_MODEL}
from torch.utils.data import DataLoader, Dataset
class Data(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        if index == 33 and rank == 1:
            FAULT
        return torch.ones(8)
model = nn.parallel.DistributedDataParallel(model)
for batch in DataLoader(Data(), batch_size=4, num_workers=2):
    model(batch).sum().backward()
dist.barrier()
"""

REPLICAS: Final = f"""{_IMPORTS}
import popdist, torch
from torch import nn
popdist.init()
model = popdist.ReplicatedModel(nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(8):
    if step == 5 and rank == 1:
        FAULT
    for (samples,) in model.micro_batches((torch.ones(4, 8),)):
        model(samples).sum().backward()
    optimizer.step()
popdist.barrier()
"""

BACKEND: Final = f"""{_IMPORTS}
import popdist, torch, torch.distributed as dist
popdist.init(torch_distributed=True)
for step in range(8):
    values = torch.ones(4)
    if step == 5 and rank == 1:
        FAULT
    dist.all_reduce(values)
dist.barrier()
"""

MPI: Final = f"""{_IMPORTS}
from mpi4py import MPI
for step in range(8):
    if step == 5 and rank == 1:
        FAULT
    MPI.COMM_WORLD.allreduce(1)
"""

JAX: Final = f"""{_IMPORTS}
import jax, jax.numpy as jnp
from jax.experimental import multihost_utils
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(
    os.environ["MASTER_ADDR"] + ":" + os.environ["MASTER_PORT"], int(os.environ["WORLD_SIZE"]), rank
)
for step in range(8):
    if step == 5 and rank == 1:
        FAULT
    multihost_utils.sync_global_devices(str(step))
"""

PLAIN: Final = f"""{_IMPORTS}
for step in range(8):
    if step == 5 and rank == 1:
        FAULT
    time.sleep(0.05)
time.sleep(600)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One program, and the verdict that is right."""

    framework: str
    what: str  # what goes wrong, in words
    program: str
    causes: frozenset[Cause] = frozenset()  # none: nothing is to be named
    culprits: tuple[int, ...] = (1,)
    num_instances: int = 2
    stands_still: bool = False
    options: tuple[str, ...] = ()
    memory_bytes: int = 0  # what the job's control group may use; 0 for no limit

    @property
    def is_control(self) -> bool:
        """Whether nobody is to be named."""
        return not self.causes


RAISE: Final = "raise ValueError('bad batch')"
SLEEP: Final = "time.sleep(600)"
KILL: Final = "os.kill(os.getpid(), signal.SIGKILL)"
CRASH: Final = "import ctypes; ctypes.string_at(0)"
FILL: Final = "print('x', file=open('/dev/full', 'w'), flush=True)"


def _case(  # noqa: PLR0913 - as many facts as a case has
    framework: tuple[str, str],
    what: str,
    fault: str,
    *causes: Cause,
    culprits: tuple[int, ...] = (1,),
    num: int = 2,
    still: bool = False,
    options: tuple[str, ...] = (),
) -> Case:
    name, template = framework
    return Case(
        framework=name,
        what=what,
        program=template.replace("FAULT", fault),
        causes=frozenset(causes),
        culprits=culprits,
        num_instances=num,
        stands_still=still,
        options=options,
    )


def _of_three(what: str, program: str, *causes: Cause, culprits: tuple[int, ...] = (1,)) -> Case:
    kind = "plain Python" if program == endings.LOST_CHILD else "torch, one of three"
    return Case(
        framework=kind,
        what=what,
        program=program,
        causes=frozenset(causes),
        culprits=culprits,
        num_instances=3,
        stands_still=True,
    )


_IN_C: Final = "import ctypes; [ctypes.{}(None).usleep(10**8) for _ in range(1000)]"
_DDP, _FSDP, _PIPELINE = ("DDP", DDP), ("FSDP2", FSDP), ("pipelining", PIPELINE)
_LOADER, _REPLICAS, _BACKEND = (
    ("DDP, data loader", LOADER),
    ("ReplicatedModel", REPLICAS),
    ("backend popdist", BACKEND),
)
_MPI, _JAX, _PLAIN = ("mpi4py", MPI), ("JAX", JAX), ("plain Python", PLAIN)
_PIPELINED: Final = ("--parallelism", "pipeline=2")
_NOT_KNOWN: Final[tuple[int, ...]] = ()

CASES: Final = (
    _case(_DDP, "raises an exception", RAISE, Cause.EXCEPTION),
    _case(
        _DDP,
        "raises slowly: its exit takes 3 s",
        f"import atexit; atexit.register(time.sleep, 3); dist.destroy_process_group(); {RAISE}",
        Cause.EXCEPTION,
        num=3,
    ),
    _case(_DDP, "sleeps in its own code", SLEEP, Cause.ABSENT, still=True),
    _case(_DDP, "sleeps in its own code, one of four", SLEEP, Cause.ABSENT, num=4, still=True),
    _case(_DDP, "spins in its own code", "while True: pass", Cause.ABSENT, still=True),
    _case(
        _DDP,
        "waits for a lock of its own",
        "threading.Lock().acquire() and (lock := threading.Lock()).acquire() and lock.acquire()",
        Cause.ABSENT,
        still=True,
    ),
    _case(_DDP, "os._exit(3)", "os._exit(3)", Cause.EXIT),
    _case(_DDP, "os._exit(0)", "os._exit(0)", Cause.EARLY_END),
    _case(_DDP, "sys.exit(7)", "sys.exit(7)", Cause.EXIT),
    _case(_DDP, "is killed (SIGKILL)", KILL, Cause.SIGNAL),
    _case(_DDP, "crashes (SIGSEGV)", CRASH, Cause.SIGNAL),
    _case(_DDP, "asks for too much memory", "torch.empty(1 << 50)", Cause.OUT_OF_MEMORY),
    _case(_DDP, "writes to a full disk", FILL, Cause.FULL_DISK),
    _case(_DDP, "other shapes, one of two", "dist.all_reduce(torch.ones(7))", Cause.MISMATCH, culprits=_NOT_KNOWN),
    _case(
        _DDP,
        "other collective, one of two",
        "dist.broadcast(torch.ones(9), 0)",
        Cause.MISMATCH,
        culprits=_NOT_KNOWN,
        still=True,
    ),
    _case(
        _DDP,
        "other collective, one of three",
        "dist.broadcast(torch.ones(9), 0)",
        Cause.MISMATCH,
        num=3,
        still=True,
    ),
    _case(_DDP, "skips a batch, one of two", "continue", Cause.MISMATCH, culprits=_NOT_KNOWN, still=True),
    _case(_DDP, "skips a batch, one of three", "continue", Cause.MISMATCH, num=3, still=True),
    _case(_DDP, "ends its loop early", "break", Cause.MISMATCH, num=3, still=True),
    _case(_DDP, "cannot import a module", "import no_such_module", Cause.EXCEPTION),
    _case(_FSDP, "raises an exception", RAISE, Cause.EXCEPTION),
    _case(_FSDP, "sleeps in its own code", SLEEP, Cause.ABSENT, still=True),
    _case(_FSDP, "sleeps after its forward pass", f"model(torch.randn(4, 8)); {SLEEP}", Cause.ABSENT, still=True),
    _case(_FSDP, "skips a batch, one of three", "continue", Cause.MISMATCH, num=3, still=True),
    _case(_FSDP, "is killed (SIGKILL)", KILL, Cause.SIGNAL),
    _case(_PIPELINE, "a stage raises an exception", RAISE, Cause.EXCEPTION),
    _case(_PIPELINE, "a stage sleeps", SLEEP, Cause.ABSENT, still=True),
    _case(_PIPELINE, "a stage of three sleeps", SLEEP, Cause.ABSENT, num=3, still=True),
    _case(_PIPELINE, "a stage is killed", KILL, Cause.SIGNAL),
    _case(_LOADER, "a worker sleeps", SLEEP, Cause.HELPER, still=True),
    _case(_LOADER, "a worker is killed", KILL, Cause.HELPER),
    _case(_LOADER, "a worker raises an exception", RAISE, Cause.EXCEPTION),
    _case(_REPLICAS, "raises an exception", RAISE, Cause.EXCEPTION),
    _case(_REPLICAS, "sleeps in its own code", SLEEP, Cause.ABSENT, still=True),
    _case(_REPLICAS, "os._exit(0)", "os._exit(0)", Cause.EARLY_END),
    _case(_REPLICAS, "other collective, one of three", "popdist.all_reduce(torch.ones(3))", Cause.MISMATCH, num=3),
    _case(_BACKEND, "sleeps in its own code", SLEEP, Cause.ABSENT, still=True),
    _case(_BACKEND, "other shapes, one of three", "values = torch.ones(5)", Cause.MISMATCH, num=3),
    _case(_BACKEND, "is killed (SIGKILL)", KILL, Cause.SIGNAL),
    _case(_PLAIN, "raises an exception", RAISE, Cause.EXCEPTION),
    _case(_PLAIN, "is killed (SIGKILL)", KILL, Cause.SIGNAL),
    replace(
        _case(_PLAIN, "holds more than its control group may", "held = b'x' * (1 << 30)", Cause.OUT_OF_MEMORY),
        memory_bytes=1 << 28,
    ),
    _case(_PLAIN, "sys.exit(3)", "sys.exit(3)", Cause.EXIT),
    _case(_MPI, "raises an exception", RAISE, Cause.EXCEPTION),
    _case(_MPI, "is killed (SIGKILL)", KILL, Cause.SIGNAL),
    _case(_JAX, "raises an exception", RAISE, Cause.EXCEPTION),
    _case(_JAX, "sleeps in its own code", SLEEP, Cause.ABSENT, still=True),
    _case(_JAX, "is killed (SIGKILL)", KILL, Cause.SIGNAL),
    _case(_JAX, "nothing: all goes well", "pass"),
    _case(_DDP, "is stopped by SIGSTOP", "os.kill(os.getpid(), signal.SIGSTOP)", Cause.ABSENT, num=3, still=True),
    _case(_DDP, "sys.exit(0)", "sys.exit(0)", Cause.EARLY_END, num=3),
    _case(_DDP, "raises a group", "raise ExceptionGroup('two', [ValueError('a'), OSError('b')])", Cause.EXCEPTION),
    _case(_DDP, "finds no space left", "raise OSError(28, os.strerror(28), 'model.pt')", Cause.FULL_DISK),
    _case(_DDP, "sleeps in C", _IN_C.format("CDLL"), Cause.ABSENT, num=3, still=True),
    _case(_DDP, "sleeps in C, with the GIL", _IN_C.format("PyDLL"), Cause.ABSENT, num=3, still=True),
    _case(_MPI, "sys.exit(0)", "sys.exit(0)", Cause.EARLY_END, num=3, still=True),
    _of_three("one batch less", endings.ONE_BATCH_LESS, Cause.MISMATCH),
    _of_three("one batch more", endings.ONE_BATCH_MORE, Cause.MISMATCH),
    _of_three("another dtype", endings.OTHER_DTYPE, Cause.MISMATCH),
    _of_three("a model of more parameters", endings.OTHER_MODEL, Cause.MISMATCH),
    _of_three("late for a monitored barrier", endings.LATE_FOR_BARRIER, Cause.ABSENT),
    _of_three("catches an exception and skips a call", endings.CAUGHT, Cause.MISMATCH),
    _of_three("sleeps at exit", endings.AT_EXIT, Cause.ABSENT),
    _of_three("receives what nobody sends", endings.MESSAGE, Cause.MISMATCH),
    _of_three("another port", endings.OTHER_PORT, Cause.MISMATCH),
    _of_three("the rank of another", endings.OTHER_RANK, Cause.EXCEPTION),
    _of_three("gathers weights alone", endings.WHOLE_STATE, Cause.MISMATCH),
    _of_three("does not issue an asynchronous call", endings.NOT_ISSUED, Cause.MISMATCH),
    _of_three("its prefetching thread dies", endings.PREFETCH, Cause.EXCEPTION),
    _of_three("its prefetching process dies", endings.FETCHER, Cause.ABSENT, Cause.HELPER, Cause.EXCEPTION),
    _of_three("holds a lock for which others wait", endings.LOCK, Cause.ABSENT),
    _of_three("another call than an uneven one", endings.UNEVEN, Cause.MISMATCH),
    _of_three("a stale lock: all stand still", endings.STALE_LOCK, Cause.UNKNOWN, culprits=_NOT_KNOWN),
    _of_three("its child has died", endings.LOST_CHILD, Cause.HELPER),
    _case(_DDP, "nothing: all goes well", "pass"),
    _case(_DDP, "nothing: rank 1 takes 3 s for a step", "time.sleep(3)"),
    _case(_FSDP, "nothing: all goes well", "pass"),
    _case(_REPLICAS, "nothing: all goes well", "pass"),
)
"""Every case, in the order of the table; those without a cause are controls."""
