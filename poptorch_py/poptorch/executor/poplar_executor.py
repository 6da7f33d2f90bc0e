"""`PoplarExecutor`: a module that runs on its device, a combined batch at a call; and what makes it."""

import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from statistics import fmean
from time import perf_counter
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from poptorch import poptorch_core
from poptorch._logging import logger
from poptorch.blocks.annotations import module_repr
from poptorch.blocks.pipeline_stages import is_pipeline
from poptorch.enums import ConnectionType, OutputMode
from poptorch.errors import Error, is_whole
from poptorch.executor.compiled_model import CompiledModel, PerfCounters, TrainingRuns
from poptorch.executor.outputs import AnchoredTensors
from poptorch.executor.saved_models import SavedModel, example_of, pickled, read, unpickled, write
from poptorch.optim.model_optimizer import accept_optimizer
from poptorch.options import Options, check_options

_DEFAULT_RATE: Final = 0.01
Hooks: TypeAlias = OrderedDict[int, Callable[[], object]]

_before_any, _after_any = Hooks(), Hooks()  # the hooks of all models


class PoplarExecutor:
    """A module that runs on its device; `trainingModel` and `inferenceModel` make it.

    On a CPU it computes with the module's own weights and buffers, and training changes them in place. With a GPU
    it computes on copies there, and the module's own have the trained values after each call. Attributes that it
    does not have are the module's. Methods for a compiled model raise an ``Error`` before it is compiled.
    """

    def __init__(
        self,
        model: nn.Module,  # the user's module
        options: Options,  # which are cloned, and the clone is frozen
        optimizer: torch.optim.Optimizer | None,  # the program's, for a model that trains; None for inference
    ) -> None:
        self._user_model = model
        self._optimizer = optimizer
        self._is_training = optimizer is not None
        self._options = options.clone()
        if optimizer is not None:
            accept_optimizer(optimizer)
        if self._options.defaultOutputMode():
            self._options.outputMode(OutputMode.Final if self._is_training else OutputMode.All)
        self._options._freeze()  # noqa: SLF001 - using options freezes them
        modes = ((part, getattr(part, "training", None)) for part in model.modules())
        self._modes = [(part, mode) for part, mode in modes if isinstance(mode, bool)]  # a frozen part has none
        self._compiled: CompiledModel | None = None
        self._attached: CompiledModel | None = None  # while it is on its device
        self._compilation_seconds: float | None = None
        self._hooks_before: Hooks = OrderedDict()  # before the model is compiled
        self._hooks_after: Hooks = OrderedDict()
        self._example: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._wrap()

    def _wrap(self) -> None:
        """Give the user's module ``destroy()``, which says that a training model wraps it."""
        if self._is_training:
            self._user_model.destroy = _Destroy(self)  # type: ignore[assignment] # as programs call it

    @property
    def model(self) -> nn.Module:
        """The user's module."""
        return self._user_model

    @property
    def options(self) -> Options:
        """A frozen copy of the options, in which the output mode is never ``Default``."""
        return self._options

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a combined batch: in training, one step of the optimizer for each device iteration.

        Returns:
            The results of its micro batches, put together as the output mode says, on the CPU.

        Raises:
            Error: If the arguments are not like the first call's, or the model cannot run so.
            AssertionError: If the first call's samples are no whole number of micro batches, or the device is
                offline.
        """
        return (self._attached or self._made_ready(args, kwargs)).call(args, kwargs)

    def _made_ready(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CompiledModel:
        self._check_device()
        if self._compiled is None:
            self._compile(args, kwargs)
        else:
            self.attachToDevice()
        return self._compiled_model()

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Make ready for calls with such arguments, as the first call does: check, and upload the weights."""
        if self._compiled is None:
            self._compile(args, kwargs)
        else:
            self._compiled.arguments.micro_batches(args, kwargs)  # which checks them

    def _compile(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for hook in [*_before_any.values(), *self._hooks_before.values()]:
            hook()
        begin = perf_counter()
        poptorch_core.log_options(self._options.toDict())
        self._wrap()
        self._compiled = CompiledModel(self._user_model, self._modes, self._options, args, kwargs, self._optimizer)
        has_device = (
            self._options.connection_type is not ConnectionType.Never and not self._options.log_cycle_count
        )
        self._attached = self._compiled if has_device else None
        self._example = example_of(args, kwargs)
        self._compilation_seconds = perf_counter() - begin
        for hook in [*_after_any.values(), *self._hooks_after.values()]:
            hook()

    def registerPreCompileHook(self, hook: Callable[[], object]) -> RemovableHandle:
        """Call ``hook()`` each time before the model is compiled, until ``remove()`` of what is returned."""
        return _registered(hook, self._hooks_before)

    def registerPostCompileHook(self, hook: Callable[[], object]) -> RemovableHandle:
        """Call ``hook()`` each time after the model was compiled, until ``remove()`` of what is returned."""
        return _registered(hook, self._hooks_after)

    def isCompiled(self) -> bool:
        """Whether a call finds the model ready."""
        return self._compiled is not None

    def destroy(self) -> None:
        """Take the model off its device; the next call compiles anew, and may have other arguments."""
        if self._is_training and self._compiled is not None:
            self._training_runs().optimizer.release()
        self._compiled = self._attached = None
        if _is_wrapped(self._user_model) and self._is_training:
            del self._user_model.destroy

    def setOptimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Train with the values that ``optimizer`` has now: of the same kind, and the same constants."""
        if not self._is_training:
            raise AssertionError(
                "setOptimizer is for models of poptorch.trainingModel, and this one does not train"
            )
        if self._compiled is None:
            accept_optimizer(optimizer)
        else:
            self._training_runs().optimizer.update(optimizer)
        self._optimizer = optimizer

    def copyWeightsToHost(self) -> None:
        """Give the user's module the device's weights and buffers, which it has after each call anyway."""
        compiled = self._compiled_model()
        logger.debug("copyWeightsToHost()")
        compiled.tensors.copy_to_host()

    def copyWeightsToHostIfNeeded(self) -> bool:
        """False: the user's module has the weights after each call."""
        return False

    def copyWeightsToDevice(self) -> None:
        """Use the weights and buffers that the user's module has now, on all instances those of instance 0."""
        self._compiled_model().copy_to_device()

    def copyNamedBuffersToDevice(self) -> None:
        """Use the values that the user's module has in the buffers of ``options.updatableNamedBuffers``."""
        self._compiled_model().copy_named_buffers_to_device()

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The state dict of the user's module, with the trained weights."""
        state: dict[str, Any] = self._user_model.state_dict(*args, **kwargs)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Load into the user's module, and upload what it has then."""
        loaded = self._user_model.load_state_dict(state_dict, strict)
        if self._attached is not None:
            self.copyWeightsToDevice()
        return loaded

    def isAttachedToDevice(self) -> bool:
        """Whether the model has its device."""
        return self._attached is not None

    def attachToDevice(self) -> None:
        """Take the device back, and upload the host's weights; an Error if the model has it."""
        compiled = self._compiled_model()
        self._check_device()
        if self._attached is not None:
            raise Error("the model is already attached to a device")
        self._attached = compiled
        self.copyWeightsToDevice()

    def detachFromDevice(self) -> None:
        """Give the device up; the host has the weights. The next call takes it again."""
        self._compiled_model()
        if self._attached is None:
            raise Error("the model is not attached to a device")
        self._attached = None

    def compileAndExport(
        self,
        filename: str | os.PathLike[str],
        *args: Any,
        export_model: bool = True,
        **kwargs: Any,
    ) -> None:
        """Compile for calls with such arguments, and write what `poptorch.load` and ``loadExecutable`` read.

        Args:
            filename: A file; or a folder, which gets ``model.poptorch``.
            *args: The arguments of a call, by position.
            export_model: Pickle the module, the options and the optimizer too, which ``load`` needs.
            **kwargs: The arguments of a call, by name.
        """
        self.compile(*args, **kwargs)
        objects = pickled(self._user_model, self._options, self._optimizer) if export_model else None
        write(SavedModel(is_training=self._is_training, example=self._example, objects=objects), filename)

    def save(
        self, filename: str | os.PathLike[str], export_model: bool = True, save_rng_state: bool = True
    ) -> None:
        """Write the compiled model: weights, the optimizer's state, buffers and random states of the replicas.

        Args:
            filename: A file; or a folder, which gets ``model.poptorch``.
            export_model: Pickle the module, the options and the optimizer too, which ``load`` needs.
            save_rng_state: Whether the random states of this process's replicas are written.
        """
        compiled = self._compiled_model()
        runs = compiled.runs
        is_offline = self._options.connection_type is ConnectionType.Never
        state = runs.optimizer.read_state() if isinstance(runs, TrainingRuns) and not is_offline else {}
        saved = SavedModel(
            is_training=self._is_training,
            weights={name: tensor.detach() for name, tensor in self._host_tensors()},
            replica_buffers=compiled.tensors.replica_buffers,
            optimizer_state=state.get("ipu_state") or {},
            random_state=torch.tensor(runs.rng_state, dtype=torch.uint8, device="cpu") if save_rng_state else None,
            example=self._example,
            objects=pickled(self._user_model, self._options, self._optimizer) if export_model else None,
        )
        write(saved, filename)

    def loadExecutable(self, filename: str | os.PathLike[str]) -> None:
        """Compile as the model in the file was, and take its weights and states; nothing of it is executed."""
        if self._compiled is not None:
            raise Error("the model is compiled: destroy() it, or load into another one")
        saved = read(filename)
        if saved.is_training != self._is_training:
            raise Error(f"{filename} is of {'a training' if saved.is_training else 'an inference'} model")
        self.restore(saved)

    def restore(self, saved: SavedModel) -> None:
        """Use the weights and states of a file, which fit the module, and compile for its example."""
        if saved.weights:
            found = dict(self._host_tensors())
            if {name: it.shape for name, it in found.items()} != {
                name: it.shape for name, it in saved.weights.items()
            }:
                differ = sorted(found.keys() ^ saved.weights.keys()) or ["all"]
                raise Error(f"the file has other weights than the module: see {', '.join(differ)}")
            with torch.no_grad():
                for name, tensor in found.items():
                    tensor.copy_(saved.weights[name])
        if saved.example is None:
            return
        args, kwargs = saved.example
        self.compile(*args, **kwargs)
        self._compiled_model().tensors.load_replica_buffers(saved.replica_buffers)
        if self._is_training and saved.optimizer_state:
            self._training_runs().optimizer.write_state({"ipu_state": saved.optimizer_state})
        if saved.random_state is not None:
            self.rng_state = saved.random_state.tolist()

    def _host_tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._user_model.named_parameters()
        yield from self._user_model.named_buffers()

    def getAnchoredTensor(self, short_name: str) -> Tensor:
        """The values that ``options.anchorTensor(short_name, ...)`` kept in the last call."""
        return self._compiled_model().runs.anchors.get(short_name)

    def getLatency(self) -> tuple[float, float, float]:
        """The shortest, longest and mean seconds of a micro batch of the last call; zeros before the first."""
        spans = [end - begin for begin, end in self._compiled_model().forward.moments] or [0.0]
        return min(spans), max(spans), fmean(spans)

    def getPerfCounters(self) -> PerfCounters:
        """Moments of the last call in seconds: when each micro batch read its inputs, and wrote its outputs."""
        return self._compiled_model().perf_counters()

    getComputeLatency = getLatency

    def getHostIpuLatency(self) -> tuple[float, float, float]:
        """Zeros: inputs are not timed by themselves."""
        self._compiled_model()
        return 0.0, 0.0, 0.0

    getIpuHostLatency = getHostIpuLatency

    def getTensorNames(self) -> list[str]:
        """The names of what ``options.anchorTensor`` can keep."""
        return AnchoredTensors.names(self._compiled_model().tensors.parameters)

    def cycleCount(self) -> int:
        """Raise an Error that says why there are no cycles to count: there is no IPU."""
        if not self._options.log_cycle_count:
            raise Error("Cycle count logging is disabled: call options.logCycleCount(True)")
        raise Error("there is no cycle count: run the model at least once, on an IPU")

    def compilationTime(self) -> timedelta:
        """How long compiling the model took, unless ``options.showCompilationProgressBar`` is off."""
        if self._compilation_seconds is None:
            raise Error("Please compile the model before you ask how long that took")
        if not self._options.show_compilation_progress_bar:
            raise Error("Please set showCompilationProgressBar: the time is taken with it")
        return timedelta(seconds=self._compilation_seconds)

    @property
    def rng_state(self) -> list[int]:
        """States of the generators of torch that this process's replicas draw from, laid end to end."""
        return self._compiled_model().runs.rng_state

    @rng_state.setter
    def rng_state(self, state: Sequence[int]) -> None:
        runs = self._compiled_model().runs
        size = len(runs.rng_state)
        given: object = state
        numbers = list(given) if isinstance(given, Iterable) else []
        if len(numbers) != size or not all(map(is_whole, numbers)):
            raise Error(f"rng_state must be {size} whole numbers, as rng_state of this model gives them")
        runs.rng_state = numbers

    def _compiled_model(self) -> CompiledModel:
        if self._compiled is None:
            raise Error("Model has not been compiled or has been destroyed: call it, or compile(), first")
        return self._compiled

    def _training_runs(self) -> TrainingRuns:
        runs = self._compiled_model().runs
        assert isinstance(runs, TrainingRuns)  # noqa: S101 - mypy cannot know that a model that trains has TrainingRuns
        return runs

    def _check_device(self) -> None:
        if self._options.connection_type is ConnectionType.Never:
            raise AssertionError(
                "Trying to run a model on an offline device: leave out useOfflineIpuTarget() and "
                "ConnectionType.Never, with which a model can be compiled only"
            )
        if self._options.log_cycle_count:
            raise Error(
                "logCycleCount(True) is only supported on actual IPU hardware, and models run on CPU or GPU"
            )

    def __getattr__(self, name: str) -> Any:
        if "_user_model" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._user_model, name)

    def __repr__(self) -> str:
        return module_repr(self._user_model)


class _Destroy:
    """The ``destroy()`` of a module that a training model wraps; copies of the module have None there."""

    def __init__(self, executor: PoplarExecutor) -> None:
        self._executor = executor

    def __call__(self) -> None:
        self._executor.destroy()

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def trainingModel(
    model: nn.Module | PoplarExecutor,
    options: Options | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> PoplarExecutor:
    """Wrap ``model`` so that a call trains it with a combined batch, over all replicas of the job.

    Args:
        model: Its ``forward`` gives results, and among them one loss. It runs in the modes, training or
            evaluation, that its parts have now.
        options: None for those of ``Options()``.
        optimizer: torch's or poptorch's, over its parameters; None for SGD with a learning rate of 0.01.

    Raises:
        RuntimeError: If another training model wraps it.
    """
    module = _module_of(model)
    if _is_wrapped(module):
        raise RuntimeError(
            "the module has already been wrapped by poptorch.trainingModel: call destroy() on it to wrap it again"
        )
    optimizer = optimizer or torch.optim.SGD(module.parameters(), lr=_DEFAULT_RATE)
    options = check_options("poptorch.trainingModel", Options() if options is None else options)
    return PoplarExecutor(module, options, optimizer)


def inferenceModel(
    model: nn.Module | PoplarExecutor,
    options: Options | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> PoplarExecutor:
    """Wrap ``model`` so that a call computes the results of a combined batch, on this process's replicas alone.

    Args:
        model: Runs in the modes, training or evaluation, that its parts have now.
        options: None for those of ``Options()``. They accumulate no gradients.
        optimizer: None.
    """
    if optimizer is not None:
        raise AssertionError("an optimizer is for poptorch.trainingModel, and inferenceModel has none")
    options = check_options("poptorch.inferenceModel", Options() if options is None else options)
    if options.Training.gradient_accumulation != 1:
        instead = "; a pipeline is filled by options.deviceIterations(n)" if is_pipeline(options) else ""
        raise Error(
            f"options.Training.gradientAccumulation({options.Training.gradient_accumulation}) is for training: "
            f"set gradientAccumulation to 1 for inferenceModel, or leave it{instead}"
        )
    return PoplarExecutor(_module_of(model), options, None)


def load(
    filename: str | os.PathLike[str], edit_opts_fn: Callable[[Options], object] | None = None
) -> PoplarExecutor:
    """The model that ``compileAndExport`` or ``save`` wrote, compiled.

    Its module is unpickled, which runs what the file says: load files that you trust.

    Args:
        filename: The file, or the folder that it was written into.
        edit_opts_fn: Called with the options, which it may change.
    """
    saved = read(filename)
    module, options, optimizer = unpickled(saved, filename)
    options = options.clone()
    if edit_opts_fn is not None:
        edit_opts_fn(options)
    model = PoplarExecutor(module, options, optimizer)
    model.restore(saved)
    return model


def registerPreCompileHook(hook: Callable[[], object]) -> RemovableHandle:
    """Call ``hook()`` each time before any model is compiled, until ``remove()`` of what is returned."""
    return _registered(hook, _before_any)


def registerPostCompileHook(hook: Callable[[], object]) -> RemovableHandle:
    """Call ``hook()`` each time after any model was compiled, until ``remove()`` of what is returned."""
    return _registered(hook, _after_any)


def _registered(hook: Callable[[], object], hooks: Hooks) -> RemovableHandle:
    if not callable(hook):
        raise RuntimeError(f"a hook is a function without arguments, and was given {hook!r}")
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def _module_of(model: nn.Module | PoplarExecutor) -> nn.Module:
    module = model.model if isinstance(model, PoplarExecutor) else model
    if not isinstance(module, nn.Module):
        raise Error(f"a torch.nn.Module can be wrapped, and this is a {type(module).__name__}")
    return module


def _is_wrapped(module: nn.Module) -> bool:
    return isinstance(vars(module).get("destroy"), _Destroy)
