"""A model that its first call has made ready: its copy on the device, what calls look like, and its runs."""

from typing import Any

import torch
from torch import Tensor, nn

import popdist
from poptorch.blocks import ModelReport, check_stages, devices_of_tensors, memory_of, report_of
from poptorch.custom_types import tensors_of, with_tensors
from poptorch.errors import Error
from poptorch.executor.arguments import CallArguments, MicroBatch
from poptorch.executor.device_tensors import DeviceTensors, Modes
from poptorch.executor.host_tensors import HostWatch
from poptorch.executor.runs import InferenceRuns, Runs, TrainingRuns
from poptorch.executor.traced_forward import TracedForward
from poptorch.losses import refuse_backward_of
from poptorch.options import Options

PerfCounters = tuple[list[list[float]], list[list[float]], list[list[float]], list[list[float]]]
"""For each input and each output: when each micro batch's began and ended to be read and to be written."""


class CompiledModel:
    """One model on its device.

    Args:
        module: A shallow copy of the user's.
        modes: Those that it runs in.
        options: Its own.
        arguments: Of the first call, by position,
        named_arguments: and by name.
        watch: Of the host's tensors.
        optimizer: The program's; None for inference.

    Attributes:
        tensors: The device's copy.
        runs: Its calls.

    Raises:
        AssertionError: If the first call's samples are no whole number of micro batches.
        Error: If the model cannot run so.
    """

    def __init__(
        self,
        module: nn.Module,
        modes: Modes,
        options: Options,
        arguments: tuple[Any, ...],
        named_arguments: dict[str, Any],
        *,
        watch: HostWatch,
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        is_training = optimizer is not None
        self._module = module
        self._arguments = CallArguments.of(module.forward, arguments, named_arguments, options)
        self._is_shared = popdist.num_instances() * options.replication_factor > 1 and options.broadcast_buffers
        num_own = 1 if options.broadcast_buffers else options.replication_factor
        adopt = watch.watch if is_training else _leave_alone
        self._devices = popdist.devices()
        self._is_on_cpu = self._devices[0].type == "cpu"
        places = devices_of_tensors(module, self._devices, options)
        self.tensors = DeviceTensors(module, places, modes, num_own, adopt)
        self._updatable = _updatable_buffers(options, self.tensors)
        first = self.micro_batches(arguments, named_arguments)[0]
        forward = self._trace(module, first, is_training=is_training)
        self._seen = forward.seen
        check_stages(self._seen, options, is_training=is_training)
        self._num_inputs = len(tensors_of(first))
        self._num_outputs = len(tensors_of(forward.result))
        self.runs: Runs
        if optimizer is None:
            self.runs = InferenceRuns(forward, self.tensors, options)
        else:
            self.runs = TrainingRuns(forward, self.tensors, options, optimizer)

    def _trace(self, module: nn.Module, first: MicroBatch, *, is_training: bool) -> TracedForward:
        """The first forward, which leaves the buffers as they are.

        Raises:
            Error: If it changes a buffer that all replicas share.
        """
        before = {name: buffer.clone() for name, buffer in self.tensors.buffers.items()}
        device = self._devices[0] if len({*self._devices}) > 1 else None
        forward = self.tensors.call(TracedForward, module, first, is_training=is_training, device=device)
        for name, buffer in self.tensors.buffers.items():
            if self._is_shared and not _has_same_bits(buffer, before[name]):
                raise Error(
                    f"the model changes its buffer {name}, and has several replicas, each of which makes "
                    "something else of it: poptorch does not support broadcasting buffers that change. "
                    "Call options.broadcastBuffers(False), with which each replica keeps its own"
                )
            buffer.copy_(before[name])
        return forward

    def micro_batches(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[MicroBatch]:
        """Those of one call, where the model begins.

        Raises:
            Error: If its arguments are not like those of the first one.
        """
        if not self._is_on_cpu:
            args, kwargs = with_tensors((args, kwargs), lambda it: it.to(self._devices[0], non_blocking=True))
        return self._arguments.micro_batches(args, kwargs)

    def run(self, micro_batches: list[MicroBatch]) -> Any:  # noqa: ANN401 - whatever forward gives
        """The results of one call.

        Raises:
            Error: If a micro batch fails.
        """
        return refuse_backward_of(self.tensors.call(self.runs.run, micro_batches))

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compare arguments with those of the first call.

        Raises:
            Error: If they are not like those.
        """
        self._arguments.check(args, kwargs)

    def upload_buffers(self) -> None:
        """Take the host's values of the buffers that may be uploaded alone.

        Raises:
            Error: If there are none.
        """
        if not self._updatable:
            raise Error("no buffers may be uploaded alone: name them, as options.updatableNamedBuffers(['mean'])")
        self.tensors.upload(self._updatable)

    def report(self, memory_bytes: int | None) -> ModelReport:
        """What each virtual IPU holds; ``memory_bytes`` is what each has, None for what its device has."""
        if memory_bytes is None:
            memory_bytes = min(memory_of(device) for device in self._devices)
        states = self.runs.optimizer.state_bytes() if isinstance(self.runs, TrainingRuns) else {}
        return report_of(self._module, self._seen, optimizer_bytes=states, memory_bytes=memory_bytes)

    def perf_counters(self) -> PerfCounters:
        """Of the last call."""
        begins, ends = [begin for begin, _ in self.runs.moments], [end for _, end in self.runs.moments]
        inputs, outputs = [begins] * self._num_inputs, [ends] * self._num_outputs
        return inputs, inputs, outputs, outputs


def _leave_alone(_tensor: Tensor) -> None:
    """The host's tensors of a model that does not train are not watched."""


def _updatable_buffers(options: Options, tensors: DeviceTensors) -> list[str]:
    """The names of ``updatableNamedBuffers``.

    Raises:
        Error: If there is no buffer of that name.
    """
    names: list[str] = options._Popart.options.get("updatableNamedBuffers", [])  # noqa: SLF001 - its setter puts it there
    if unknown := [name for name in names if name not in tensors.buffers]:
        raise Error(
            f"updatableNamedBuffers names {', '.join(unknown)}, and the model has no such buffer: its buffers are "
            f"{', '.join(tensors.buffers) or 'none'}"
        )
    return names


def _has_same_bits(left: Tensor, right: Tensor) -> bool:
    one, other = (it.contiguous().reshape(-1).view(torch.uint8) for it in (left, right))
    return torch.equal(one, other)
