"""All names of torch that popdist or poptorch uses and that are private or differ between versions.

Each function says what it does if torch lacks its name: either a slower way, or a way that checks less; an error
only if there is no other way. "Without the name" means: if this torch lacks the name. Names were looked for in
torch 2.6, 2.8, 2.11, 2.13 and 2.15. All of these versions have all names, except:

=====================================  ===============================================
name                                   seen in torch
=====================================  ===============================================
``UntypedStorage._swap_data_ptr_``     2.13, 2.15
``set_code_exec_strategy``             2.8 and later
what keeps a work's Python object      2.8 and later
``c10d._shutdown_backend``             2.6; later torchs call ``ProcessGroup.shutdown``
``op`` of an operator's operation      2.11 and later
``asyncOp`` of all options             2.8 and later
methods in ``RENAMED_METHODS``         by their newer names 2.13, 2.15
=====================================  ===============================================
"""

import logging
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from functools import cache
from importlib import import_module
from inspect import currentframe
from types import CodeType, FrameType
from typing import Any, Final, NamedTuple, NoReturn, TypeVar, cast

import torch
from torch import Tensor, UntypedStorage, nn
from torch import distributed as dist
from torch.autograd import Variable
from torch.distributed import ReduceOp, TCPStore, distributed_c10d  # type: ignore[attr-defined] # torch exports it all the same
from torch.distributed.distributed_c10d import Store
from torch.futures import Future
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import data

from popdist.errors import BackendError, DescriptionError, PopdistWarning


def _find(owner: object, name: str) -> Any:
    """Return the attribute ``name`` of ``owner``; None in a torch that lacks the attribute."""
    return getattr(owner, name, None)


def is_older_than(major: int, minor: int) -> bool:
    """Whether this torch is older than version ``major.minor``."""
    return tuple(map(int, torch.__version__.split(".")[:2])) < (major, minor)


def needs(major: int, minor: int, what: str) -> str:
    """Return the error message that ``what`` needs a newer torch."""
    return f"{what} needs torch {major}.{minor}; this is {torch.__version__}"


_current_graph_task_id: Final = _find(torch._C, "_current_graph_task_id")


def is_in_backward() -> bool | None:
    """Whether autograd runs in this thread; None, for unknown, if torch lacks the private name."""
    return None if _current_graph_task_id is None else _current_graph_task_id() >= 0


_storage_use_count: Final = _find(torch._C, "_storage_Use_Count")


def is_held_once(storage: UntypedStorage) -> bool:
    """Whether no other object refers to the storage; False if torch lacks the name: no memory is reused."""
    return _storage_use_count is not None and _storage_use_count(StorageWeakRef(storage).cdata) == 1


def address_of(reference: StorageWeakRef) -> int:
    """Return the address of a weak reference's storage; 0 if the storage is gone or torch lacks the name."""
    # before torch 2.10 Python's own weak references to storages become invalid when a storage ends
    make = _find(UntypedStorage, "_new_with_weak_ptr")
    storage = None if make is None else make(reference.cdata)
    return 0 if storage is None else int(storage.data_ptr())


_share_fd_cpu: Final = _find(UntypedStorage, "_share_fd_cpu_")


def descriptor_of(storage: UntypedStorage) -> int:
    """Return the descriptor of a shared storage's file. Raises BackendError if torch lacks the private name."""
    if _share_fd_cpu is None:
        raise BackendError(_lacks("UntypedStorage._share_fd_cpu_"))
    return int(_share_fd_cpu(storage)[0])


_swap_data_ptr: Final = _find(UntypedStorage, "_swap_data_ptr_")
can_swap_memory: Final = _swap_data_ptr is not None
"""Whether :func:`swap_memory` works."""


def swap_memory(storage: UntypedStorage, other: UntypedStorage) -> None:
    """Exchange the memory of two storages. Raises BackendError if torch lacks the name; all-reduces then copy."""
    if _swap_data_ptr is None:
        raise BackendError(_lacks("UntypedStorage._swap_data_ptr_"))
    _swap_data_ptr(storage, other)


def _lacks(name: str) -> str:
    return f"torch {torch.__version__} lacks {name}, so its tensors cannot be shared in place"


_create_work_from_future: Final = _find(_find(torch._C, "_distributed_c10d"), "_create_work_from_future")


def done_work(results: list[Any]) -> Any:
    """Return a finished work of torch's own class with ``results``. RuntimeError if torch lacks the name."""
    if _create_work_from_future is None:
        raise RuntimeError(f"torch {torch.__version__} lacks _create_work_from_future: use the backend gloo")
    future: Future[list[Any]] = Future()
    future.set_result(results)  # never an error, which the wait() of torch's work would not raise
    return _create_work_from_future(future)


def arguments_of(operator: str) -> list[str]:
    """Return the argument names of a collective's ``operator``. Raises RuntimeError if torch lacks it."""
    schema = _find(_find(_find(torch.ops.c10d, operator), "default"), "_schema")
    if schema is None:
        raise RuntimeError(f"torch {torch.__version__} lacks c10d::{operator}: use the backend gloo")
    return [argument.name for argument in schema.arguments]


def tcp_store(*where: Any, **named: Any) -> TCPStore:
    """Make a TCPStore; without libuv before torch 2.8, where libuv cannot use a socket that already listens."""
    named["use_libuv"] = not is_older_than(2, 8)
    return TCPStore(*where, **named)


RENAMED_METHODS: Final = {
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
}
"""Newer names of methods of process groups, with the names that torch used before 2.12."""


def with_async_op(options: Any) -> Any:
    """Return the class of a collective's options with a field ``asyncOp``, which some of torch 2.6 lack."""
    return options if hasattr(options, "asyncOp") else type(options.__name__, (options,), {"asyncOp": True})


def reduce_op(boxed: Any, arguments: Sequence[object] | None) -> ReduceOp:
    """Return the reduction of an operator; before torch 2.11 it is found among the method's ``arguments``."""
    if hasattr(boxed, "op"):
        return ReduceOp(ReduceOp.RedOpType(boxed.op()))
    if arguments is None:
        raise RuntimeError(f"{needs(2, 11, 'a c10d operator itself')}; call torch.distributed's function")
    found = [getattr(argument, "reduceOp", argument) for argument in arguments]
    op = next((it for it in found if isinstance(it, ReduceOp | ReduceOp.RedOpType)), ReduceOp.SUM)
    return op if isinstance(op, ReduceOp) else ReduceOp(op)


def call_torchs_kernel(operator: str, group: Any, arguments: Sequence[Any]) -> object:
    """Call torch's kernel of an operator for a ``group`` that is not popdist's; used before torch 2.11."""
    device = torch.device("privateuseone")  # the device of torch's own kernel, which calls the registered backend
    gloo = dist.ProcessGroup.BackendType.GLOO
    group._register_backend(device, gloo, group._get_backend(torch.device("cpu")))
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)
    return getattr(torch.ops.c10d, operator).default.redispatch(keys, *arguments)


def reduce_scatter_of(backend: Any) -> Callable[..., Any]:
    """Return a function that reduces and scatters a tensor; before torch 2.11 gloo's own method always adds."""
    is_wrong = is_older_than(2, 11) and isinstance(backend, dist.ProcessGroupGloo)

    def call(output: Tensor, tensor: Tensor, opts: Any) -> Any:
        if not is_wrong or opts.reduceOp == ReduceOp.SUM:
            return backend._reduce_scatter_base(output, tensor, opts)
        whole, options = tensor.clone(), dist.AllreduceOptions()
        options.reduceOp, options.timeout = opts.reduceOp, opts.timeout
        backend.allreduce([whole], options).wait()
        output.copy_(whole.view(backend.size(), *output.shape)[backend.rank()])
        return done_work([output])

    return call


_shutdown_backend: Final = _find(distributed_c10d, "_shutdown_backend")


def have_shut_down(kind: type[Any]) -> None:
    """Make ``destroy_process_group`` call ``shutdown()`` of groups of ``kind``; torch 2.6 does not call it."""
    if _shutdown_backend is not None:
        distributed_c10d._shutdown_backend = lambda group: (  # type: ignore[attr-defined]
            group.shutdown() if isinstance(group, kind) else _shutdown_backend(group)
        )


_set_unwrap_func: Final = _find(Future, "_set_unwrap_func")


def set_failure(future: Any, value: object, reveal: Callable[[Any], NoReturn]) -> None:
    """Finish ``future``: ``wait()`` raises by ``reveal(value)``, or gives ``value`` if torch lacks the name."""
    if _set_unwrap_func is not None:
        _set_unwrap_func(future, reveal)
    future.set_result(value)


_eval_frame: Final = _find(_find(torch._C, "_dynamo"), "eval_frame")
_set_code_exec_strategy: Final = _find(_eval_frame, "set_code_exec_strategy")
_strategy: Final = _find(_eval_frame, "_FrameExecStrategy")

F = TypeVar("F", bound=Callable[..., object])


def skip_tracing(function: F) -> F:
    """Disable tracing of ``function`` like ``torch.compiler.disable``, but without importing the compiler."""
    if _set_code_exec_strategy is None or _strategy is None:
        return torch.compiler.disable(function)  # type: ignore[no-any-return]
    strategy = _strategy()
    strategy.cur_action = strategy.recursive_action = type(strategy.cur_action).SKIP
    _set_code_exec_strategy(function.__code__, strategy)
    return function


def is_caller_the_engine(function_frame: FrameType | None) -> bool:
    """Whether autograd's C++ engine has called the function of this frame; False if torch lacks the name."""
    if function_frame is None or not is_in_backward() or _engine_starter() is None:
        return False
    # the engine is called directly by torch's function that starts the engine, or runs in its own thread
    caller = _caller(function_frame)
    return caller is None or caller.f_code is _engine_starter()


def keeps_works(function_frame: FrameType | None) -> bool:
    """Whether the caller of this frame's function keeps the Python object of the work that the function returns.

    Before torch 2.8, C++ callers do not keep the object, and then wait for ever. There, only torch.distributed
    counts as a caller in Python.
    """
    if not is_older_than(2, 8):
        return True
    caller = None if function_frame is None else _caller(function_frame)
    return caller is not None and caller.f_globals is vars(distributed_c10d)


def _caller(function_frame: FrameType) -> FrameType | None:
    caller = function_frame.f_back
    while (
        caller is not None and caller.f_globals.get("__name__") == "torch._dynamo.eval_frame"
    ):  # the wrapper of skip_tracing()
        caller = caller.f_back
    return caller


@cache
def _engine_starter() -> CodeType | None:
    """Return the code of torch's function that starts the engine; None if no function of torch called the hook."""
    found = list[FrameType | None]()

    def hook(_gradient: torch.Tensor) -> None:
        found.append(cast("FrameType", currentframe()).f_back)

    with torch.inference_mode(mode=False), torch.enable_grad():
        value = torch.ones(1, dtype=torch.float32, requires_grad=True, device="cpu")
        value.register_hook(hook)
        value.clone().sum().backward()
    starter = found.pop() if found else None
    is_torchs = starter is not None and starter.f_globals.get("__name__", "").startswith("torch.")
    return starter.f_code if starter is not None and is_torchs else None


def backward_pass() -> int | None:
    """Return the number of the backward pass that runs in this thread; None if torch lacks the name."""
    return None if _current_graph_task_id is None else _current_graph_task_id()


_execution_engine: Final = _find(Variable, "_execution_engine")


def call_after_backward(function: Callable[[], None]) -> bool:
    """Call ``function`` after the running backward pass, and return True; return False if torch lacks the name."""
    if _execution_engine is None:
        return False
    _execution_engine.queue_callback(function)
    return True


def num_writes(tensor: Tensor) -> int:
    """Return how many writes to ``tensor`` torch has counted; 0 if torch lacks the private name."""
    return getattr(tensor, "_version", 0)


def num_gradient_hooks(tensor: Tensor) -> int:
    """Return the number of hooks on the gradient of the leaf ``tensor``; 0 if torch lacks the private names."""
    names = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return sum(len(getattr(tensor, name, None) or ()) for name in names)


_pytree: Final = _find(torch.utils, "_pytree")


def open_nest(nest: Any) -> tuple[list[Any], Callable[[list[Any]], Any]] | None:
    """Return the children of an object of torch's pytree and a function to rebuild it; None for others."""
    # without the name no class is known: such an object is not split, and is refused when a layer returns it
    if type(nest) not in (_find(_pytree, "SUPPORTED_NODES") or ()):
        return None
    children, form = _pytree.tree_flatten(nest, is_leaf=lambda it: it is not nest)
    return children, lambda changed: _pytree.tree_unflatten(changed, form)


_make_wrapper_subclass: Final = _find(Tensor, "_make_wrapper_subclass")
has_wrapper_tensors: Final = _make_wrapper_subclass is not None
"""Whether :func:`wrapper_tensor` works; if torch lacks the name, every instance gets whole gradients."""

T = TypeVar("T", bound=Tensor)


def wrapper_tensor(kind: type[T], like: Tensor) -> T:
    """Make a tensor like ``like``, but without memory, of the class ``kind``, which dispatches its operations."""
    form = {"strides": like.stride(), "dtype": like.dtype, "device": like.device}
    return cast("T", _make_wrapper_subclass(kind, like.shape, **form))


_unscale: Final = _find(torch, "_amp_foreach_non_finite_check_and_unscale_")
_unscale_operator: Final = _find(torch.ops.aten, "_amp_foreach_non_finite_check_and_unscale_")


def unscaler_of(operator: object) -> Callable[..., None] | None:
    """Return GradScaler's function for unscaling if ``operator`` is that function; None otherwise."""
    return _unscale if _unscale is not None and operator is _unscale_operator.default else None


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile has compiled ``module`` as a whole; False if torch lacks the names."""
    return type(module).__name__ == "OptimizedModule" or is_compiled_in_place(module)


def is_compiled_in_place(module: nn.Module) -> bool:
    """Whether the method ``compile()`` of ``module`` was called; False if torch lacks the name."""
    return getattr(module, "_compiled_call_impl", None) is not None


_set_profiling_executor: Final = _find(torch._C, "_jit_set_profiling_executor")


@cache
def compile_scripts_at_once() -> None:
    """Make torch.jit compile in the first call, without observing calls; warn if torch lacks the private name."""
    # observed calls give other bits, and the replicas that run in such calls depend on the number of instances
    if _set_profiling_executor is not None:
        _set_profiling_executor(False)  # noqa: FBT003 - torch's signature
        return
    warnings.warn(
        f"torch {torch.__version__} lacks _jit_set_profiling_executor: what torch.jit has scripted or traced may "
        "have other bits when the replicas are dealt to other instances. Train modules that it has not compiled",
        PopdistWarning,
        stacklevel=3,
    )


def connect_gloo(store: Store, rank: int, size: int, timeout: timedelta, address: str | None) -> Any:
    """Make a gloo group at ``address`` of this host; gloo chooses one for None, or if torch lacks the options."""
    gloo: Any = dist.ProcessGroupGloo
    make_options = _find(gloo, "_Options")
    options: Any = None if make_options is None else make_options()
    if address is None or not (hasattr(options, "_devices") and hasattr(options, "_timeout")):
        return gloo(store, rank, size, timeout)
    options._devices, options._timeout = [gloo.create_device(hostname=address)], timeout
    return gloo(store, rank, size, options)


def connect_direct(kind: Any, store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Make a group of the class ``kind``, such as NCCL's, with ``timeout``, if torch has this option."""
    options = kind.Options()
    if hasattr(options, "_timeout"):
        options._timeout = timeout
    return kind(store, rank, size, options)


_world: Final = _find(distributed_c10d, "_world")


def num_collectives(apart_from: Collection[int] = ()) -> int:
    """Return the number of collectives so far, except among ``apart_from``; 0 if torch lacks the private name."""
    number, groups = 0, _find(_world, "pg_map") or ()
    for group in groups:
        with suppress(RuntimeError):  # a backend that does not count collectives raises this error
            if not apart_from or set(dist.get_process_group_ranks(group)) - set(apart_from):
                number += int(group._get_sequence_number_for_group())
    return number


_worker: Final = _find(_find(data, "_utils"), "worker")


def hide_worker_info() -> None:
    """Make ``get_worker_info()`` return None in this worker. Raises RuntimeError if torch lacks the name."""
    # if a stream divides itself among workers, and popdist divides the stream once more, items are lost
    if _find(_worker, "_worker_info") is None:
        raise RuntimeError(f"torch {torch.__version__} lacks _worker_info: read streams with num_workers=0")
    _worker._worker_info = None


def set_numbers_of_dtensors(
    numbers: Callable[[Any, Any, torch.Generator | None], AbstractContextManager[None]],
) -> None:
    """Make DTensors draw inside ``numbers(mesh, placements, generator)``; warn if torch lacks the private name."""
    random = _module("torch.distributed.tensor._random")
    if not hasattr(random, "_rng_tracker"):
        warnings.warn(
            f"torch {torch.__version__} lacks _rng_tracker: the parts of a DTensor draw the same random numbers "
            "on all instances. Draw on plain tensors, within popdist.parallel.sharded_randomness()",
            PopdistWarning,
            stacklevel=3,
        )
        return
    if random._rng_tracker is None:
        random._rng_tracker = _Numbers(numbers)


class _Numbers:
    """The object that DTensor asks for a context in which an operation draws random numbers."""

    distribute_region_enabled = True

    def __init__(
        self, numbers: Callable[[Any, Any, torch.Generator | None], AbstractContextManager[None]]
    ) -> None:
        self.numbers = numbers

    def _distribute_region(
        self,
        spec: Any,
        generator: torch.Generator | None = None,
    ) -> AbstractContextManager[None]:
        if generator is None and is_older_than(2, 9):  # DTensor does not pass the generator there
            info = cast("FrameType", cast("FrameType", currentframe()).f_back).f_locals.get("op_info")
            generator = None if info is None else info.local_kwargs.pop("generator", None)
        return self.numbers(spec.mesh, spec.placements, generator)


@contextmanager
def fake_tensors() -> Iterator[None]:
    """A context where tensors have shapes but no memory. Raises DescriptionError if torch lacks the name."""
    mode = _mode("torch.fx.passes.fake_tensor_prop", "FakeTensorMode")(allow_non_fake_inputs=True)
    log = logging.getLogger("torch._subclasses.fake_tensor")  # which logs the traceback of an error that is raised
    disabled, log.disabled = log.disabled, True
    try:
        with mode:
            yield
    finally:
        log.disabled = disabled


def seen_operations(
    see: Callable[[Any, tuple[Any, ...], dict[str, Any]], object],
) -> AbstractContextManager[object]:
    """Return a context that calls ``see(operator, args, kwargs)`` in place of each operation of torch."""

    def dispatch(
        self: object,
        operator: object,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        del self, types
        return see(operator, args, kwargs or {})

    base = _mode("torch.utils.flop_counter", "TorchDispatchMode")
    mode: AbstractContextManager[object] = type("SeenOperations", (base,), {"__torch_dispatch__": dispatch})()
    return mode


def _mode(module: str, name: str) -> Any:
    """Return the class ``name`` of ``module``, imported only for measuring. Raises DescriptionError if absent."""
    mode = _find(_module(module), name)
    if mode is None:
        raise DescriptionError(f"torch {torch.__version__} lacks {name}, so modules cannot be measured with it")
    return mode


class PipelineParts(NamedTuple):
    """The parts of a schedule of torch.distributed.pipelining."""

    stages: list[Any]  # the stages of this process, ascending
    num_micro_batches: int


def parts_of_schedule(schedule: object) -> PipelineParts | None:
    """Return the parts of a pipeline's schedule; None if ``schedule`` is no schedule, or torch lacks the name."""
    number = _find(schedule, "_n_microbatches")
    values = [] if number is None else list(vars(schedule).values())
    found = [it for value in values for it in (value if isinstance(value, list) else [value])]
    stages = {it.stage_index: it for it in found if hasattr(it, "stage_index") and hasattr(it, "submod")}
    return PipelineParts([stages[index] for index in sorted(stages)], number) if stages else None


def _module(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        return None
