"""All names of torch that popdist or poptorch uses and that are private or differ between versions.

`popdist.ground.torch_private_groups` has the names of torch.distributed. The few uses elsewhere, each with its
reason, are in a table of ``tests/architecture/test_insides.py``.

Each function says what it does if torch lacks its name: either a slower way, or a way that checks less; an error
only if there is no other way. "Without the name" means: if this torch lacks the name. Names were looked for in
torch 2.6, 2.8, 2.11, 2.13 and 2.15. All of these versions have all names, except:

=====================================  ===============================================
name                                   seen in torch
=====================================  ===============================================
``UntypedStorage._swap_data_ptr_``     2.13, 2.15
``set_code_exec_strategy``             2.8 and later
what keeps a work's Python object      2.8 and later
=====================================  ===============================================
"""

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from importlib import import_module
from inspect import currentframe
from types import CodeType, FrameType
from typing import Any, Final, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd import Variable
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.utils import data

from popdist.errors import BackendError, DescriptionError, PopdistWarning


def find(owner: object, name: str) -> Any:
    """Return the attribute ``name`` of ``owner``; None in a torch that lacks the attribute."""
    return getattr(owner, name, None)


def is_older_than(major: int, minor: int) -> bool:
    """Whether this torch is older than version ``major.minor``."""
    return tuple(map(int, torch.__version__.split(".")[:2])) < (major, minor)


def needs(major: int, minor: int, what: str) -> str:
    """Return the error message that ``what``, such as a function, needs torch ``major.minor`` or newer."""
    return f"{what} needs torch {major}.{minor}; this is {torch.__version__}"


_current_graph_task_id: Final = find(torch._C, "_current_graph_task_id")


def is_in_backward() -> bool | None:
    """Whether a backward pass of autograd runs in this thread; None if this version of torch cannot show this."""
    return None if _current_graph_task_id is None else _current_graph_task_id() >= 0


_storage_use_count: Final = find(torch._C, "_storage_Use_Count")


def is_held_once(storage: UntypedStorage) -> bool:
    """Whether only the caller has ``storage``, so that it may be reused; False if this torch cannot show this."""
    return _storage_use_count is not None and _storage_use_count(StorageWeakRef(storage).cdata) == 1


def address_of(reference: StorageWeakRef) -> int:
    """Return the address of the storage of ``reference``; 0 if it was freed, or if torch does not show it."""
    # before torch 2.10 Python's own weak references to storages become invalid when a storage ends
    make = find(UntypedStorage, "_new_with_weak_ptr")
    storage = None if make is None else make(reference.cdata)
    return 0 if storage is None else int(storage.data_ptr())


_share_fd_cpu: Final = find(UntypedStorage, "_share_fd_cpu_")


def descriptor_of(storage: UntypedStorage) -> int:
    """Return the file descriptor of a shared storage. Raises BackendError if this torch cannot show it."""
    if _share_fd_cpu is None:
        raise BackendError(_lacks("UntypedStorage._share_fd_cpu_"))
    return int(_share_fd_cpu(storage)[0])


_swap_data_ptr: Final = find(UntypedStorage, "_swap_data_ptr_")
can_swap_memory: Final = _swap_data_ptr is not None
"""Whether :func:`swap_memory` works: whether this torch has the private name."""


def swap_memory(storage: UntypedStorage, other: UntypedStorage) -> None:
    """Exchange the memory of two storages. Raises BackendError if this version of torch cannot do this."""
    if _swap_data_ptr is None:
        raise BackendError(_lacks("UntypedStorage._swap_data_ptr_"))
    _swap_data_ptr(storage, other)


def _lacks(name: str) -> str:
    return f"torch {torch.__version__} lacks {name}, so its tensors cannot be shared in place"


_eval_frame: Final = find(find(torch._C, "_dynamo"), "eval_frame")
_set_code_exec_strategy: Final = find(_eval_frame, "set_code_exec_strategy")
_strategy: Final = find(_eval_frame, "_FrameExecStrategy")

F = TypeVar("F", bound=Callable[..., object])


def skip_tracing(function: F) -> F:
    """Make torch.compile not trace ``function``; unlike ``torch.compiler.disable``, do not import the compiler."""
    if _set_code_exec_strategy is None or _strategy is None:
        return torch.compiler.disable(function)  # type: ignore[no-any-return]
    strategy = _strategy()
    strategy.cur_action = strategy.recursive_action = type(strategy.cur_action).SKIP
    _set_code_exec_strategy(function.__code__, strategy)
    return function


def is_caller_the_engine(function_frame: FrameType | None) -> bool:
    """Whether autograd's C++ engine called the function of this frame; False if this torch does not show it."""
    if function_frame is None or not is_in_backward() or _engine_starter() is None:
        return False
    # the engine is called directly by torch's function that starts the engine, or runs in its own thread
    caller = caller_of(function_frame)
    return caller is None or caller.f_code is _engine_starter()


def caller_of(function_frame: FrameType) -> FrameType | None:
    """Return the frame that called the function of ``function_frame``; skip frames of :func:`skip_tracing`."""
    caller = function_frame.f_back
    while (
        caller is not None and caller.f_globals.get("__name__") == "torch._dynamo.eval_frame"
    ):  # the wrapper of skip_tracing()
        caller = caller.f_back
    return caller


@cache
def _engine_starter() -> CodeType | None:
    """Return the code of torch's function that starts autograd's engine; None if torch has no such function."""
    callers = list[FrameType | None]()

    def hook(_gradient: torch.Tensor) -> None:
        callers.append(cast("FrameType", currentframe()).f_back)

    with torch.inference_mode(mode=False), torch.enable_grad():
        value = torch.ones(1, dtype=torch.float32, requires_grad=True, device="cpu")
        value.register_hook(hook)
        value.clone().sum().backward()
    starter = callers.pop() if callers else None
    is_torchs = starter is not None and starter.f_globals.get("__name__", "").startswith("torch.")
    return starter.f_code if starter is not None and is_torchs else None


def backward_pass() -> int | None:
    """Return the number of this thread's backward pass, -1 if none runs; None if this torch does not show it."""
    return None if _current_graph_task_id is None else _current_graph_task_id()


_execution_engine: Final = find(Variable, "_execution_engine")


def call_after_backward(function: Callable[[], None]) -> bool:
    """Call ``function`` after the running backward pass. Return True; False if this torch cannot do this."""
    if _execution_engine is None:
        return False
    _execution_engine.queue_callback(function)
    return True


def num_writes(tensor: Tensor) -> int:
    """Return how many writes to ``tensor`` torch has counted; 0 if this torch does not show the number."""
    return getattr(tensor, "_version", 0)


def num_gradient_hooks(tensor: Tensor) -> int:
    """Return the number of hooks on the gradient of the leaf ``tensor``; 0 if this torch does not show it."""
    names = ("_backward_hooks", "_post_accumulate_grad_hooks")
    return sum(len(getattr(tensor, name, None) or ()) for name in names)


_pytree: Final = find(torch.utils, "_pytree")


def open_nest(nest: Any) -> tuple[list[Any], Callable[[list[Any]], Any]] | None:
    """Return the children of a pytree node, such as a dict, and a function to rebuild the node; None otherwise."""
    # without the name no class is known: such an object is not split, and is refused when a layer returns it
    if type(nest) not in (find(_pytree, "SUPPORTED_NODES") or ()):
        return None
    children, form = _pytree.tree_flatten(nest, is_leaf=lambda it: it is not nest)
    return children, lambda changed: _pytree.tree_unflatten(changed, form)


_make_wrapper_subclass: Final = find(Tensor, "_make_wrapper_subclass")
has_wrapper_tensors: Final = _make_wrapper_subclass is not None
"""Whether :func:`wrapper_tensor` works; if torch lacks the name, every instance gets whole gradients."""

T = TypeVar("T", bound=Tensor)


def wrapper_tensor(kind: type[T], like: Tensor) -> T:
    """Make a tensor of subclass ``kind`` in the form of ``like``, without memory; ``kind`` has its operators."""
    form = {"strides": like.stride(), "dtype": like.dtype, "device": like.device}
    return cast("T", _make_wrapper_subclass(kind, like.shape, **form))


_unscale: Final = find(torch, "_amp_foreach_non_finite_check_and_unscale_")
_unscale_operator: Final = find(torch.ops.aten, "_amp_foreach_non_finite_check_and_unscale_")


def unscaler_of(operator: object) -> Callable[..., None] | None:
    """Return torch's function that unscales GradScaler's gradients if ``operator`` is this function; else None."""
    return _unscale if _unscale is not None and operator is _unscale_operator.default else None


def divides_gradients(optimizer: Optimizer) -> bool:
    """Whether ``optimizer`` itself divides gradients by GradScaler's scale; False if torch does not show it."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def step_without_hooks(kind: type[Optimizer]) -> Callable[..., object]:
    """Return ``step`` of a class of optimizers without torch's wrapper, which calls hooks and records profiles."""
    step: Any = kind.step
    return cast("Callable[..., object]", step.__wrapped__ if getattr(step, "hooked", False) else step)


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile has compiled ``module`` as a whole; False if this torch does not show this."""
    return type(module).__name__ == "OptimizedModule" or is_compiled_in_place(module)


def is_compiled_in_place(module: nn.Module) -> bool:
    """Whether the method ``compile()`` of ``module`` was called; False if this torch does not show this."""
    return getattr(module, "_compiled_call_impl", None) is not None


_set_profiling_executor: Final = find(torch._C, "_jit_set_profiling_executor")


@cache
def compile_scripts_at_once() -> None:
    """Make torch.jit optimize in the first call, without profiling calls; warn if this torch cannot do so."""
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


_worker: Final = find(find(data, "_utils"), "worker")


def hide_worker_info() -> None:
    """Make ``get_worker_info()`` return None in this DataLoader worker. Raise RuntimeError if torch cannot."""
    # if a stream divides itself among workers, and popdist divides the stream once more, items are lost
    if find(_worker, "_worker_info") is None:
        raise RuntimeError(f"torch {torch.__version__} lacks _worker_info: read streams with num_workers=0")
    _worker._worker_info = None


def set_numbers_of_dtensors(
    numbers: Callable[[Any, Any, torch.Generator | None], AbstractContextManager[None]],
) -> None:
    """Make DTensors draw random numbers in the context ``numbers(...)``; warn if this torch cannot do so."""
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
    """A context where tensors have shapes but no memory. Raises DescriptionError if torch cannot do this."""
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
    """Return a context in which torch calls ``see(operator, args, kwargs)`` in place of each operation."""

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
    """Return torch's class ``name``, after import of ``module``. Raise DescriptionError if torch lacks it."""
    mode = find(_module(module), name)
    if mode is None:
        raise DescriptionError(f"torch {torch.__version__} lacks {name}, so modules cannot be measured with it")
    return mode


class PipelineParts(NamedTuple):
    """The stages and number of micro batches of a schedule of torch.distributed.pipelining."""

    stages: list[Any]  # the stages of this process, ascending
    num_micro_batches: int


def parts_of_schedule(schedule: object) -> PipelineParts | None:
    """Return a pipeline schedule's stages and micro batches; None for others, or if torch does not show them."""
    number = find(schedule, "_n_microbatches")
    values = [] if number is None else list(vars(schedule).values())
    members = [it for value in values for it in (value if isinstance(value, list) else [value])]
    stages = {it.stage_index: it for it in members if hasattr(it, "stage_index") and hasattr(it, "submod")}
    return PipelineParts([stages[index] for index in sorted(stages)], number) if stages else None


def _module(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        return None
