"""A model of which a few layers at a time are in memory: the rest waits in a store, and the bits are the same."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from popdist import context
from popdist.data.randomness import ReplicaRandomness
from popdist.errors import BatchError, WeightsError, seed_number, whole_number
from popdist.gradients.buffers import ReplicaBuffers, check_buffers
from popdist.gradients.flat_buffers import FlatGradient, GradientLayout
from popdist.gradients.memory import GradientMemory, OldGradients
from popdist.gradients.phased_sums import GradientBarrier
from popdist.gradients.reduction import GradientSum
from popdist.gradients.step_headers import MeanOrSum, ModelChecks, StepChecks
from popdist.layout import ReplicaLayout
from popdist.parallel.phase_layout import Form, deal
from popdist.parallel.phase_memory import Content
from popdist.parallel.phase_store import PhaseStore
from popdist.parallel.phased_layers import find_layers, install, make_absent
from popdist.parallel.phased_run import PhasedRun, StepPlan
from popdist.parallel.phased_weights import Initialize, unit_weights
from popdist.training.ddp_answers import refuse_module
from popdist.training.micro_batches import Nest, Split
from popdist.training.model_steps import CheckMaker, ModelSteps, WholeStep
from popdist.training.step import LoneStep, Step
from popdist.weights import broadcast_tensors
from popsize.phases import even_cuts


def phased(  # noqa: PLR0913 - what a model can be told
    module: nn.Module,
    *,
    phases: int | None = None,
    memory: str | int | None = None,
    store: str | os.PathLike[str],
    layers: Iterable[nn.Module | str] | None = None,
    seed: int | None = 0,
    initialize: Initialize | None = None,
    weights: str | os.PathLike[str] | None = None,
) -> "PhasedModel":
    """Train ``module`` with a few of its layers in memory at a time."""
    return PhasedModel(
        module,
        phases=phases,
        memory=memory,
        store=store,
        layers=layers,
        seed=seed,
        initialize=initialize,
        weights=weights,
    )


class PhasedModel(nn.Module):
    """What :func:`phased` makes of a module."""

    module: nn.Module

    def __init__(  # noqa: PLR0913 - as above
        self,
        module: nn.Module,
        *,
        phases: int | None,
        memory: str | int | None,
        store: str | os.PathLike[str],
        layers: Iterable[nn.Module | str] | None,
        seed: int | None,
        initialize: Initialize | None,
        weights: str | os.PathLike[str] | None,
    ) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise WeightsError(f"phased() is for an nn.Module, and was given {type(module).__name__}")
        if (phases is None) == (memory is None):
            raise WeightsError("phased() takes either phases=, how many, or memory=, how much a process may use")
        if phases is not None:
            phases = whole_number("phases", phases, WeightsError)
        contract = context.environment().contract
        of_stage = contract.parallelism.stage_of(contract.instance_index)
        refuse_module(module, context.instances_of_replica(), of_stage)
        layout = contract.layout
        if seed is None and layout.num_replicas > 1:
            raise BatchError(
                f"seed=None, and the job has {layout.num_replicas} replicas, each of which draws from states of "
                "its own: give them a seed, the same on all instances"
            )
        seed = None if seed is None else seed_number(seed, BatchError)
        context.ensure_init()
        context.data_parallel_group().agree(f"phased({phases=}, {memory=}, {seed=})")
        self.module = module
        self._run = _stored(module, store, layers, layout, initialize, weights)
        self._make_phases(phases)
        install(self._run.layers, self._run)
        self._steps = PhasedSteps(module, layout, seed=seed, run=self._run)

    def _make_phases(self, phases: int | None) -> None:
        run = self._run
        sizes = [
            float(sum(run.memory.sizes[Content("weights", it.index)] for it in unit.pieces))
            for unit in run.layers.units
        ]
        number = min(phases or len(sizes), len(sizes))
        cuts = [*even_cuts(tuple(sizes), number), len(sizes)]
        order = [unit.index for unit in run.layers.units]
        run.memory.cut([order[first:last] for first, last in pairwise(cuts)])

    @property
    def store(self) -> PhaseStore:
        """Where the weights are."""
        return self._run.store

    @property
    def randomness(self) -> ReplicaRandomness:
        """The random states of this instance's replicas; part of what a checkpoint saves."""
        return self._steps.randomness

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - whatever the module takes and gives
        """The module's own forward pass."""
        self._run.store.check_whole()
        if self._steps.layout.num_replicas > 1:
            return self._steps.forward(partial(self.module, *args, **kwargs))
        return self.module(*args, **kwargs)

    def micro_batches(
        self,
        batch: Nest,
        accumulation: int = 1,
        *,
        reduction: MeanOrSum = "mean",
        weights: Sequence[float] | None = None,
        split: Split | None = None,
    ) -> Iterator[Nest]:
        """Split this instance's combined batch into its replicas' micro batches: as ``ReplicatedModel``."""
        return self._steps.micro_batches(WholeStep(batch, accumulation, reduction, weights, split, add=False))

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override] # noqa: ANN401 - torch's own
        """The module's own state dict; weights are read from the store when they are used."""
        check_buffers(self.module)
        run = self._run
        run.memory.wait()
        kwargs.pop("keep_vars", None)
        state: dict[str, Any] = self.module.state_dict(*args, keep_vars=True, **kwargs)
        return {
            key: run.weights.mapped(run.names[id(value)])
            if id(value) in run.names
            else value.detach()
            if isinstance(value, Tensor)
            else value
            for key, value in state.items()
        }

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Parameter]]:  # noqa: ANN401 - torch's own
        """The module's parameters under its own names."""
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:  # noqa: ANN401 - torch's own
        """The module's buffers under its own names."""
        return self.module.named_buffers(*args, **kwargs)

    def close(self) -> None:
        """Release the store and its threads; the model cannot be used any more."""
        self._run.memory.close()
        self._run.store.close()

    # What an optimizer needs

    def attach_optimizer(self, optimizer: Any) -> None:  # noqa: ANN401 - a PhasedOptimizer
        """Make room for the state of ``optimizer``."""
        self._run.attach(optimizer)

    def form_of(self, parameter: Parameter) -> Form:
        """The form of a weight, or of the part of it that is here."""
        return self._run.weights.forms[self._run.names[id(parameter)]]

    def stored_state(self, parameter: Parameter) -> dict[str, Tensor]:
        """The optimizer's state for ``parameter``, as it is in the store."""
        return self._run.stored_state(parameter)

    def write_state(self, parameter: Parameter, state: Mapping[str, Tensor]) -> None:
        """Write the optimizer's state for ``parameter`` to the store."""
        self._run.write_state(parameter, state)

    def update_phases(self, update: Any) -> None:  # noqa: ANN401 - of the optimizer
        """Update all weights whose gradients are in the store."""
        self._run.update_phases(update)

    def finish_step(self) -> None:
        """End the optimizer's step on all instances."""
        self._run.finish_step()


def _stored(
    module: nn.Module,
    store: str | os.PathLike[str],
    layers: Iterable[nn.Module | str] | None,
    layout: ReplicaLayout,
    initialize: Initialize | None,
    weights: str | os.PathLike[str] | None,
) -> PhasedRun:
    """Write the weights to a store, layer by layer; what passes and updates take from there."""
    group = context.data_parallel_group()
    layers = None if layers is None else list(layers)
    found = find_layers(module, layers)
    forms = {name: Form.of(it) for piece in found.pieces for name, it in piece.named}
    device = next((it.device for it in module.parameters() if not it.is_meta), torch.device("cpu"))
    made = PhaseStore.open(store, forms, group=group, device=device)
    owners = deal(
        [{name: forms[name].num_bytes for name in piece.names} for piece in found.pieces], made.host_size
    )
    named = {unit.module for unit in found.units}

    def write(tensors: Mapping[str, Tensor]) -> None:
        if len(group.instances) > 1:
            broadcast_tensors(group, 0, tensors.values())
        if made.host_index == 0:
            for name, tensor in tensors.items():
                made.weights.write_tensor(made.regions[name], forms[name], tensor)

    for tensors in unit_weights(
        module, [unit.module for unit in found.units], initialize=initialize, weights=weights
    ):
        write(tensors)
        for name in tensors:
            make_absent(module.get_parameter(name))
    found = find_layers(module, [*named])
    for piece in found.resident:
        write({name: it.detach() for name, it in piece.named})
    if len(group.instances) > 1:
        broadcast_tensors(group, 0, list(module.buffers()))
    made.wait_for_host()
    return PhasedRun(found, made, owners, group, layout)


class PhasedSteps(ModelSteps):
    """The steps of a phased model."""

    make_checks: ClassVar[CheckMaker] = lambda *_: ModelChecks()

    def __init__(self, module: nn.Module, layout: ReplicaLayout, *, seed: int | None, run: PhasedRun) -> None:
        self._run = run
        super().__init__(module, layout, seed=seed, checks_finite=False, gradient_dtype=None, norm_size=1)

    def _make_step(self, checks: StepChecks, old: OldGradients, accumulation: int) -> "PhasedStep":
        memory = GradientMemory(context.data_parallel_group(), self.layout, GradientLayout(()))
        buffers = self.buffers if self.layout.num_replicas > 1 else None
        total = _NoGradients(memory, buffers, checks, old)
        return PhasedStep(memory, self.buffers, total, checks, accumulation, self._run)

    def _begin_loop(self, asked: WholeStep) -> tuple[Step | LoneStep, list[Nest], Sequence[float]]:
        run = self._run
        run.check_ready()
        made, contents, counts = super()._begin_loop(asked)
        step = cast("PhasedStep", made)  # of _make_step()
        try:
            filled = [number for number, content in enumerate(contents) if content is not None]
            plan = StepPlan(
                accumulation=step.accumulation,
                reduction=asked.reduction,
                weights=counts,
                last=max(filled, default=-1),
                scale=step.total.weight_scale,
                total_weight=step.memory.total_weight,
                barrier=GradientBarrier(context.data_parallel_group()),
            )
            run.begin_step(plan)
        except BaseException:
            self.abandon()
            raise
        return step, contents, counts


class _NoGradients(GradientSum):
    """What the instances say to each other in a step whose gradients are added layer by layer."""

    def _sum(self, over: float, parts: object, *, are_early_right: bool) -> FlatGradient:
        del over, parts, are_early_right
        return self._tree.values[0]

    def forget(self) -> None:
        """The others know that there will be no gradient."""
        self._is_awaited = False


class PhasedStep(Step):
    """One step of a phased model."""

    def __init__(
        self,
        memory: GradientMemory,
        buffers: ReplicaBuffers,
        total: _NoGradients,
        checks: StepChecks,
        accumulation: int,
        run: PhasedRun,
    ) -> None:
        super().__init__(memory, buffers, total, checks, accumulation=accumulation, checks_finite=False)
        self.memory = memory
        self.total = total
        self._run = run

    def begin_micro_batch(self, index: int, weight: float) -> int:
        """Begin micro batch ``index``; gives its replica in the job."""
        replica = super().begin_micro_batch(index, weight)
        self._run.begin_micro_batch(index)
        return replica

    def add(self, weight: float) -> None:
        """Add the gradients of the next micro batch that are not added yet."""
        self._run.end_micro_batch()
        super().add(weight)

    def finish(self, reduction: MeanOrSum, *, add: bool) -> None:
        """Make all gradients final, and the buffers those of the whole job's step."""
        self.total.weight_scale()
        self._run.finish()
        super().finish(reduction, add=add)

    def abandon(self) -> None:
        """Leave without gradients, and say so to the others, unless all know already. Never raises."""
        if self._run.abandon():
            self.total.forget()
        super().abandon()
