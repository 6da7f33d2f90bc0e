"""A model that its first call has made ready: what later calls must look like, and what each of them computes."""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Literal

import torch
from torch import Tensor, nn

import popdist
from poptorch.blocks.pipeline_stages import check_stages
from poptorch.custom_types import tensors_of
from poptorch.enums import ReductionType
from poptorch.errors import Error
from poptorch.executor.arguments import CallArguments, MicroBatch
from poptorch.executor.module_tensors import ModuleTensors, has_same_bits, is_grouped
from poptorch.executor.outputs import AnchoredTensors, Outputs, Result
from poptorch.executor.traced_forward import TracedForward
from poptorch.optim.model_optimizer import ModelOptimizer
from poptorch.options import Options

PerfCounters = dict[str, list[list[float]]]
"""For each input and each output: when each micro batch's began and ended to be read and to be written."""


class CompiledModel:
    """One module, ready for calls with arguments like those of the first one."""

    def __init__(
        self,
        module: nn.Module,  # the user's module
        modes: Sequence[tuple[nn.Module, bool]],  # submodules, and whether each runs in training mode
        options: Options,  # the executor's own
        arguments: tuple[Any, ...],  # of the first call, by position
        named_arguments: dict[str, Any],  # of the first call, by name
        optimizer: torch.optim.Optimizer | None,  # the program's; None for inference
    ) -> None:
        is_training = optimizer is not None
        self._module = module
        device = popdist.device()
        self.arguments = CallArguments(module.forward, arguments, named_arguments, options, device)
        # the module's parameters and buffers
        self.tensors = ModuleTensors(
            module, None if device.type == "cpu" else device, modes, is_training=is_training
        )
        self._updatable = _updatable_buffers(options, self.tensors)
        first = self.arguments.micro_batches(arguments, named_arguments)[0]
        with self.tensors:
            self.forward = forward = self._trace(first, options, is_training=is_training)
            check_stages(forward.blocks, options, is_training=is_training)
            self.runs: Runs  # what the calls compute
            if optimizer is None:
                self.runs = InferenceRuns(forward, self.tensors, options)
            else:
                self.runs = TrainingRuns(forward, self.tensors, options, optimizer)
        self._num_inputs = len(tensors_of(first))

    def _trace(self, first: MicroBatch, options: Options, *, is_training: bool) -> TracedForward:
        """Run the first forward, which leaves the buffers as they are, and give each replica those of its own."""
        before = {name: buffer.clone() for name, buffer in self.tensors.buffers.items()}
        forward = TracedForward(self._module, first, is_training=is_training)
        changed = {name for name, it in self.tensors.buffers.items() if not has_same_bits(it, before[name])}
        for name in changed:
            self.tensors.buffers[name].detach().copy_(before[name])
        if popdist.num_instances() * options.replication_factor == 1:
            return forward
        if grouped := [name for name, it in self.tensors.parameters.items() if is_grouped(it)]:
            raise Error(
                f"replicaGrouping of {grouped[0]} asks for values that differ between replicas, and all of them "
                "have the same parameters: choose CommGroupType.All, or one replica"
            )
        if options.broadcast_buffers and (others := changed - forward.statistics):
            raise Error(
                f"the model changes its buffer {min(others)}, and has several replicas, each of which makes "
                "something else of it: poptorch does not support broadcasting buffers that change. Call "
                "options.broadcastBuffers(False), with which each replica keeps its own"
            )
        separate = [name for name in self.tensors.buffers if not options.broadcast_buffers or name in changed]
        shared = changed & forward.statistics if is_training else ()
        self.tensors.separate_buffers(separate, options.replication_factor, shared)
        return forward

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The results of one call."""
        micro_batches = self.arguments.micro_batches(args, kwargs)
        with self.tensors:
            return self.runs.run(micro_batches)

    def copy_to_device(self) -> None:
        """Use the module's weights and buffers as they are now, on all instances those of instance 0."""
        self.tensors.copy_to_device()
        if isinstance(self.runs, TrainingRuns):
            self.runs.must_agree = True

    def copy_named_buffers_to_device(self) -> None:
        """Use the values that the module has in those buffers that may be uploaded alone."""
        if not self._updatable:
            raise Error("no buffers may be uploaded alone: name them, as options.updatableNamedBuffers(['mean'])")
        self.tensors.copy_to_device(self._updatable)

    def perf_counters(self) -> PerfCounters:
        """When each micro batch of the last call read its inputs and wrote its outputs."""
        moments = self.forward.moments
        inputs = [[begin for begin, _ in moments]] * self._num_inputs
        outputs = [[end for _, end in moments]] * self.forward.num_outputs
        return {"input": inputs, "input_complete": inputs, "output": outputs, "output_complete": outputs}


class Runs(ABC):
    """Runs the calls of one model, while its tensors are in place."""

    def __init__(self, forward: TracedForward, tensors: ModuleTensors, options: Options) -> None:
        self._forward = forward
        self._tensors = tensors
        self._num_accumulations: int = options.Training.gradient_accumulation
        self._num_replicas: int = options.replication_factor
        self._outputs = Outputs(
            *(options.output_mode, options.output_return_period, options.device_iterations),
            *(self._num_accumulations, self._num_replicas),
        )
        self._model: popdist.ReplicatedModel | None = None
        # the tensors that the options anchor
        self.anchors = AnchoredTensors(options.anchored_tensors, tensors.parameters)

    def run(self, micro_batches: Sequence[MicroBatch]) -> Any:
        """The results of a call's micro batches, put together."""
        self._forward.moments, self.anchors.kept = [], {}
        num_in_step = self._num_accumulations * self._num_replicas
        try:
            for first in range(0, len(micro_batches), num_in_step):
                self._step(micro_batches[first : first + num_in_step])
            return self._outputs.result()
        finally:
            self._outputs.begin()  # and keep no result

    @abstractmethod
    def _step(self, micro_batches: Sequence[MicroBatch]) -> None:
        """Run those of one device iteration."""

    @property
    def rng_state(self) -> list[int]:
        """The states of the generators that the replicas draw from, laid end to end; one is the program's own."""
        states = {} if self._model is None else self._model.randomness.state_dict()
        found = [state["torch"] for state in states.values() if isinstance(state["torch"], Tensor)]
        return torch.cat(found or [torch.get_rng_state()]).tolist()

    @rng_state.setter
    def rng_state(self, state: Sequence[int]) -> None:
        states = {} if self._model is None else self._model.randomness.state_dict()
        parts = torch.tensor(state, dtype=torch.uint8, device="cpu").split(len(state) // (len(states) or 1))
        if self._model is None or not states:
            torch.set_rng_state(parts[0])
            return
        for number, part in zip(states, parts, strict=False):
            self._model.randomness.load_state_dict({number: {**states[number], "torch": part.clone()}})


class InferenceRuns(Runs):
    """Calls that compute results only; this process's replicas take turns, and no other process takes part."""

    @torch.no_grad()
    def _step(self, micro_batches: Sequence[MicroBatch]) -> None:
        for position, (args, kwargs) in enumerate(micro_batches):
            self._tensors.select_replica(position % self._num_replicas)
            self._outputs.add(self._forward.infer(args, kwargs))
        self.anchors.add_step(1.0)


class TrainingRuns(Runs):
    """Calls that train: one step of the optimizer for each device iteration, over all replicas of the job."""

    def __init__(
        self, forward: TracedForward, tensors: ModuleTensors, options: Options, optimizer: torch.optim.Optimizer
    ) -> None:
        super().__init__(forward, tensors, options)
        self._reduction = reduction_of(options)
        is_alone = popdist.num_instances() * options.replication_factor == 1
        seed = None if is_alone else int(options.random_seed) if options.exists("random_seed") else 0
        if not is_alone or self._num_accumulations > 1:
            self._model = _replicated(tensors.parameters, seed, options.replication_factor)
            outside = ExitStack()
            outside.enter_context(self._model.no_sync())  # a backward pass of the program's own is its own matter
            weakref.finalize(self, outside.close).atexit = False
        elif not popdist.is_initialized():
            popdist.init()
        # makes the steps
        self.optimizer = ModelOptimizer(optimizer, tensors.parameters, options, self._model, tensors)
        self._parameters = list(tensors.parameters.values())
        self.must_agree = False  # whether the next call gives all instances the weights of instance 0

    @torch.enable_grad()
    def run(self, micro_batches: Sequence[MicroBatch]) -> Any:
        """The results of a call's micro batches, put together; gradients are computed also under ``no_grad``."""
        if self._model is None:
            return super().run(micro_batches)
        if self.must_agree:
            self.must_agree = False
            popdist.broadcast_weights({**self._tensors.parameters, **self._tensors.buffers})
            self._tensors.fill_replicas()
        result = super().run(micro_batches)
        self._tensors.share_buffers()
        return result

    def _step(self, micro_batches: Sequence[MicroBatch]) -> None:
        scaling = self.optimizer.loss_scaling
        try:
            if self._model is None:
                self._outputs.add(self._forward.train(*micro_batches[0], scaling))
            else:
                self._train_replicas(self._model, micro_batches, scaling)
            self.optimizer.step()
            self.anchors.add_step(scaling)
        finally:
            for parameter in self._parameters:
                parameter.grad = None

    def _train_replicas(
        self, model: popdist.ReplicatedModel, micro_batches: Sequence[MicroBatch], scaling: float
    ) -> None:
        """Compute the gradients of this process's replicas, and reduce those of the whole job."""
        num_replicas, num_accumulations = self._num_replicas, self._num_accumulations
        is_in_order = num_replicas == 1 or num_accumulations == 1
        results: dict[int, Result] = {}
        for index in range(len(micro_batches)):
            replica, step = divmod(index, num_accumulations)
            position = step * num_replicas + replica
            self._tensors.select_replica(replica)
            with model.micro_batch(index, accumulation=num_accumulations):
                structure, tensors = self._forward.train(*micro_batches[position], scaling)
            if is_in_order:
                self._outputs.add((structure, tensors))
            else:
                results[position] = structure, [*map(Tensor.detach, tensors)]
            del structure, tensors
        for position in range(len(results)):
            self._outputs.add(results[position])
        model.reduce_gradients(self._reduction)


def _replicated(
    parameters: Mapping[str, nn.Parameter], seed: int | None, num_local_replicas: int
) -> popdist.ReplicatedModel:
    """The parameters as a model of popdist; the buffers are poptorch's own matter."""
    holder = nn.Module()
    for name, parameter in parameters.items():
        holder.register_parameter(name.replace(".", "/"), parameter)  # torch allows no dot
    return popdist.ReplicatedModel(holder, seed, num_local_replicas=num_local_replicas)


def reduction_of(options: Options) -> Literal["mean", "sum"]:
    """How gradients of micro batches and replicas become one."""
    kind = options.Training.accumulation_and_replication_reduction_type
    if kind is ReductionType.NoReduction:
        raise Error(
            f"accumulationAndReplicationReductionType is {kind}: choose ReductionType.Mean or ReductionType.Sum, "
            "without which replicas would have different weights"
        )
    if popdist.num_instances() > popdist.num_replicas():
        raise Error(
            f"a model of PopTorch is whole in each instance, and {popdist.num_instances()} instances share "
            f"{popdist.num_replicas()} replicas in this job: start it without --parallelism and "
            "--instances-per-replica"
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
    return "mean" if kind is ReductionType.Mean else "sum"


def _updatable_buffers(options: Options, tensors: ModuleTensors) -> list[str]:
    names: list[str] = options._Popart.options.get("updatableNamedBuffers", [])  # noqa: SLF001 - the setter of options writes the value there
    if unknown := [name for name in names if name not in tensors.buffers]:
        raise Error(
            f"updatableNamedBuffers names {', '.join(unknown)}, and the model has no such buffer: its buffers are "
            f"{', '.join(tensors.buffers) or 'none'}"
        )
    return names
