"""Runs of a model on its device: the micro batches of a call, their steps, and tensors that are kept of them."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

import popdist
from poptorch.custom_types import with_tensors
from poptorch.enums import OutputMode, ReductionType
from poptorch.errors import Error
from poptorch.executor.arguments import MicroBatch
from poptorch.executor.device_tensors import DeviceTensors
from poptorch.executor.outputs import Outputs
from poptorch.executor.traced_forward import TracedForward
from poptorch.optim.device_optimizer import DeviceOptimizer
from poptorch.options import Options
from poptorch.options.combined_batch import CombinedBatch

_REDUCTIONS: Final[dict[ReductionType, Literal["mean", "sum"]]] = {
    ReductionType.Mean: "mean",
    ReductionType.Sum: "sum",
}


class Runs(ABC):
    """The calls of one model.

    Args:
        forward: Of the model.
        tensors: Its copy on the device.
        options: Its own.

    Attributes:
        moments: For each micro batch of the last call, when it began and when it ended, in seconds.
    """

    def __init__(self, forward: TracedForward, tensors: DeviceTensors, options: Options) -> None:
        self._forward = forward
        self._tensors = tensors
        self._batch = batch = CombinedBatch.of(options)
        self._outputs = Outputs(
            *(options.output_mode, options.output_return_period),
            *(batch.num_iterations, batch.num_accumulations, batch.num_replicas),
        )
        self._model: popdist.ReplicatedModel | None = None
        self.moments: list[tuple[float, float]] = []
        self.anchors = AnchoredTensors(options.anchored_tensors, tensors.parameters)

    def run(self, micro_batches: Sequence[MicroBatch]) -> Any:  # noqa: ANN401 - whatever the model gives
        """The results of a call's micro batches, put together; the device's tensors are in place."""
        outputs = self._outputs
        outputs.begin()
        self.moments = []
        self.anchors.begin()
        num_in_step = len(micro_batches) // self._batch.num_iterations
        for first in range(0, len(micro_batches), num_in_step):
            self._step(micro_batches[first : first + num_in_step], outputs)
        result = outputs.result()
        outputs.begin()  # and keep no result
        return result

    @abstractmethod
    def _step(self, micro_batches: Sequence[MicroBatch], outputs: Outputs) -> None:
        """Run those of one device iteration."""

    @property
    def rng_state(self) -> list[int]:
        """The states of the generators that the replicas draw from, laid end to end; one is the program's own."""
        states = {} if self._model is None else self._model.randomness.state_dict()
        found = [state["torch"] for state in states.values() if isinstance(state["torch"], Tensor)]
        return torch.cat(found or [torch.get_rng_state()]).tolist()

    @rng_state.setter
    def rng_state(self, state: Sequence[int]) -> None:
        """Let them go on from there."""
        states = {} if self._model is None else self._model.randomness.state_dict()
        parts = torch.tensor(state, dtype=torch.uint8).split(len(state) // (len(states) or 1))
        if self._model is None or not states:
            torch.set_rng_state(parts[0])
            return
        for number, part in zip(states, parts, strict=False):
            self._model.randomness.load_state_dict({number: {**states[number], "torch": part.clone()}})


class InferenceRuns(Runs):
    """Calls that compute results only; the replicas of this process take turns, and no other process is asked."""

    @torch.no_grad()
    def _step(self, micro_batches: Sequence[MicroBatch], outputs: Outputs) -> None:
        for position, (args, kwargs) in enumerate(micro_batches):
            self._tensors.become(position % self._batch.num_replicas)
            begin = perf_counter()
            result = self._forward.infer(args, kwargs)
            self.moments.append((begin, perf_counter()))
            outputs.add(result)
        self.anchors.note(1.0)


class TrainingRuns(Runs):
    """Calls that train: one step of the optimizer for each device iteration, over all replicas of the job.

    Where a step is one micro batch, of the one replica of the job, there is nothing to add up.

    Args:
        forward: Of the model.
        tensors: Its copy on the device.
        options: Its own.
        optimizer: The program's.

    Raises:
        Error: If the options are of another number of processes than the job has.
        PopdistError: As ``popdist.ReplicatedModel``.
    """

    def __init__(
        self, forward: TracedForward, tensors: DeviceTensors, options: Options, optimizer: torch.optim.Optimizer
    ) -> None:
        super().__init__(forward, tensors, options)
        self._reduction = reduction_of(options)
        is_alone = popdist.num_instances() * options.replication_factor == 1
        seed = None if is_alone else int(options.random_seed) if options.exists("random_seed") else 0
        self._parameters = list(tensors.parameters.values())
        if not is_alone or self._batch.num_accumulations > 1:
            self._model = popdist.ReplicatedModel(
                _DeviceParameters(tensors.parameters), seed, num_local_replicas=options.replication_factor
            )
        elif not popdist.is_initialized():
            popdist.init()
        self.optimizer = DeviceOptimizer(optimizer, tensors.device_of, tensors.names, options, self._model)
        self._must_agree = False

    def weights_were_written(self) -> None:
        """The host's weights were uploaded: all instances take those of instance 0 when they run next."""
        self._must_agree = True

    def run(self, micro_batches: Sequence[MicroBatch]) -> Any:  # noqa: ANN401 - as above
        """As told; the gradients are computed even where the program computes none."""
        if torch.is_grad_enabled():
            return super().run(micro_batches)
        with torch.enable_grad():
            return super().run(micro_batches)

    def _step(self, micro_batches: Sequence[MicroBatch], outputs: Outputs) -> None:
        scaling = self.optimizer.loss_scaling
        try:
            if self._model is None:
                outputs.add(self._train(micro_batches[0], scaling))
            else:
                self._train_replicas(self._model, micro_batches, outputs, scaling)
            self.optimizer.step()
            self.anchors.note(scaling)
        finally:
            for parameter in self._parameters:
                parameter.grad = None

    def _train_replicas(
        self,
        model: popdist.ReplicatedModel,
        micro_batches: Sequence[MicroBatch],
        outputs: Outputs,
        scaling: float,
    ) -> None:
        """Have the gradients of all replicas of the job."""
        if self._must_agree:
            self._must_agree = False
            popdist.broadcast_weights(model)
        num_replicas, num_accumulations = self._batch.num_replicas, self._batch.num_accumulations
        is_in_order = num_replicas == 1 or num_accumulations == 1
        results: dict[int, Any] = {}
        for index in range(len(micro_batches)):
            replica, step = divmod(index, num_accumulations)
            position = step * num_replicas + replica
            if num_replicas > 1:
                self._tensors.become(replica)
            with model.micro_batch(index, accumulation=num_accumulations):
                result = self._train(micro_batches[position], scaling)
            if is_in_order:
                outputs.add(result)
            else:
                results[position] = with_tensors(result, Tensor.detach)
            del result
        for position in range(len(results)):
            outputs.add(results[position])
        model.reduce_gradients(self._reduction)

    def _train(self, micro_batch: MicroBatch, scaling: float) -> Any:  # noqa: ANN401 - whatever the model gives
        """The result of a micro batch, whose gradients are there then."""
        begin = perf_counter()
        result = self._forward.train(*micro_batch, scaling)
        self.moments.append((begin, perf_counter()))
        return result


class _DeviceParameters(nn.Module):
    """The device's parameters under their names in the model, for `popdist.ReplicatedModel`."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__()
        self._parameters.update(parameters)


def reduction_of(options: Options) -> Literal["mean", "sum"]:
    """How gradients of micro batches and replicas become one.

    Raises:
        Error: If they do not, or the options are of another number of processes or replicas than the job has.
    """
    kind = options.Training.accumulation_and_replication_reduction_type
    if kind not in _REDUCTIONS:
        raise Error(
            f"accumulationAndReplicationReductionType is {kind}: choose ReductionType.Mean or ReductionType.Sum, "
            "without which replicas would have different weights"
        )
    if options.Distributed.numProcesses != popdist.num_instances():
        raise Error(
            f"the options are those of process {options.Distributed.processId} of "
            f"{options.Distributed.numProcesses}, and this job has {popdist.num_instances()} instances, which "
            "train together: make them as popdist.poptorch.Options(), and leave Distributed as it is"
        )
    if popdist.isPopdistEnvSet() and options.replication_factor != popdist.num_local_replicas():
        raise Error(
            f"options.replicationFactor({options.replication_factor}), and poprun gave this instance "
            f"{popdist.num_local_replicas()} replicas: make the options as popdist.poptorch.Options(), or start "
            f"the program with --num-replicas {popdist.num_instances() * options.replication_factor}"
        )
    return _REDUCTIONS[kind]


_GRADIENT: Final = "Gradient___"
_UPDATED: Final = "UpdatedVar___"
_LOSS_SCALE: Final = "finalLossScale"


class AnchoredTensors:
    """What the options anchor: a parameter by its name, its gradient, or the loss scaling, after each step.

    Args:
        anchored: Short name → long name, mode, period.
        parameters: Name → device parameter.

    Raises:
        Error: If there is no tensor of that name.
    """

    def __init__(self, anchored: Mapping[str, list[Any]], parameters: Mapping[str, nn.Parameter]) -> None:
        self._anchored = dict(anchored)
        self._parameters = dict(parameters)
        self._seen: dict[str, list[Tensor]] = {}
        for short, (long, *_) in anchored.items():
            if long != _LOSS_SCALE and _parameter_name(long) not in parameters:
                raise Error(
                    f"anchorTensor({short!r}, {long!r}): there is no tensor {long}. {_LOSS_SCALE} can be "
                    f"anchored, and for each parameter NAME its value NAME or {_UPDATED}NAME, and its gradient "
                    f"{_GRADIENT}NAME. The parameters are {', '.join(parameters)}"
                )

    def begin(self) -> None:
        """A run begins."""
        self._seen = {}

    def note(self, loss_scaling: float) -> None:
        """A step has ended, and the gradients are still there.

        Args:
            loss_scaling: That of the step.
        """
        for short, (long, *_) in self._anchored.items():
            if long == _LOSS_SCALE:
                value = torch.tensor(loss_scaling, dtype=torch.float32)
            else:
                parameter = self._parameters[_parameter_name(long)]
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                value = (gradient if long.startswith(_GRADIENT) else parameter).detach().clone().cpu()
            self._seen.setdefault(short, []).append(value)

    def get(self, short: str) -> Tensor:
        """What was anchored under that name in the last run: one value for each step that its mode keeps.

        Raises:
            Error: If nothing was.
        """
        if short not in self._anchored:
            raise Error(
                f"{short!r} is not the name of an anchored tensor: {', '.join(self._anchored) or 'none is'}"
            )
        if short not in self._seen:
            raise Error(f"there is no value of {short!r} yet: run the model at least once")
        values, (_, mode, period) = self._seen[short], self._anchored[short]
        if mode is OutputMode.Sum:
            return torch.stack(values).sum(0)
        if mode is OutputMode.EveryN:
            values = values[period - 1 :: period]
        elif mode is OutputMode.Final:
            values = values[-1:]
        return values[0] if len(values) == 1 else torch.stack(values)


def _parameter_name(long: str) -> str:
    """The parameter's own name, as the module has it."""
    return long.removeprefix(_GRADIENT).removeprefix(_UPDATED).removeprefix("model.")
