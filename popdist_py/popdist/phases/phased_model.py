"""Models with only a few layers in memory at a time: other weights lie in a store; results are bitwise equal."""

import os
import weakref
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn

from torch import Tensor, nn

from popdist.data.randomness import checked_seed
from popdist.data.shard_randomness import give_parts_numbers
from popdist.errors import WeightsError, name_first, whole_number
from popdist.exchange.groups import Group
from popdist.gradients.buffers import check_buffers
from popdist.ground.layout import ReplicaLayout
from popdist.ground.local_tensors import TensorForm, is_distributed, local_part, part_itself, placed_as
from popdist.job import context
from popdist.job.weights import broadcast_tensors
from popdist.phases.phase_budget import limit_of
from popdist.phases.phase_store import HOST_MEMORY, PhaseStore
from popdist.phases.phased_calls import install
from popdist.phases.phased_layers import find_layers, make_absent
from popdist.phases.phased_run import PhasedRun
from popdist.phases.phased_step import PhasedSteps
from popdist.phases.phased_weights import Initialize, move_buffers, unit_weights
from popdist.phases.used_memory import give_back_memory
from popdist.step.training.ddp_answers import refuse_module
from popdist.step.training.wrapping_model import WrappingModel

_REFUSED: Final = {
    "micro_batch": "gradients are used while a loop over a whole batch runs",
    "reduce_gradients": "gradients are used while a loop over a whole batch runs",
    "run_micro_batches": "its replicas do not wait for each other in the middle of a micro batch",
    "pipeline_step": "it is no stage of a pipeline",
    "no_sync": "a backward pass outside the loop has no weights to compute with",
    "clip_grad_norm_": "clip with popdist.clip_grad_norm_(model.parameters(), ...), and make the optimizer with "
    "step_in_backward=False",
}
"""The methods of a ReplicatedModel that a phased model does not have, and the reason for each of them."""


def phased(  # noqa: PLR0913 - each argument is an option of the user
    module: nn.Module,
    *,
    memory: str | int | None = None,
    phases: int | None = None,
    store: str | os.PathLike[str],
    layers: Iterable[nn.Module | str] | None = None,
    seed: int | None = 0,
    initialize: Initialize | None = None,
    weights: str | os.PathLike[str] | None = None,
) -> "PhasedModel":
    """Return a model that trains ``module`` with only a few layers in memory; a store keeps the other weights.

    A phase is a run of layers. Two phases are in memory: while one computes, the next phase is read, and changes
    of the phase before are written. Only the inputs of a layer are kept; the backward pass computes the layer
    again, with the same random numbers and buffers. The weights are bitwise equal to the weights of
    ``ReplicatedModel(recompute(module))``, for any number of phases and instances. Only if layers are no chain,
    gradients of a tensor that several layers read may be added in another order.

    A weight that is not in memory reads as NaN: use a weight only in the ``forward`` of its layer. Weights that
    the module itself, or a module around layers, holds directly stay in memory.

    Args:
        module: A model in memory, which computes where its weights are; or a model on the meta device: its weights
            are made layer by layer, for ``popdist.device()``. All instances get the weights of instance 0.
        memory: The most memory that this process may use, torch and the model included, on the GPU if the model is
            there: ``"2 GB"``, or bytes. The first steps have one layer per phase, and are measured for the plan.
        phases: The number of phases, of about equal bytes, if ``memory`` is not given.
        store: A folder for weights, gradients and optimizer state, which the instances of a host share; or
            ``"host"``, the host's memory, for a model on a GPU. A store does not last: see `popdist.checkpoint`.
        layers: Modules, or their names, that are read as a whole, none inside another; None means the modules that
            the model repeats in lists. Another module with own weights, such as an embedding, is a layer, too.
        seed: The seed, as in ``popdist.ReplicatedModel``.
        initialize: A function that sets a module's weights on the meta device; None means ``reset_parameters()``.
        weights: A safetensors file, or a folder of safetensors files, with the weights by name.

    Returns:
        The model, which a `popdist.parallel.PhasedOptimizer` trains.

    Raises:
        WeightsError: If the module cannot be trained in phases, or ``memory`` is too small.
        StoreError: If there is no room for the store, another job uses it, or it is on a file system in memory.
        BatchError, CollectiveError, ContractError, BackendError: As in ``popdist.ReplicatedModel``.
    """
    limit_bytes, num_phases = _checked_size(memory, phases)
    layout = _checked_layout(module)
    seed = checked_seed(seed, layout.num_replicas)
    context.ensure_init()
    context.data_parallel_group().agree(f"phased({phases=}, {memory=}, {seed=})")
    run = _stored(module, store, layers, layout, initialize, weights)
    run.budget.limit_bytes = limit_bytes
    run.cut(num_phases or len(run.layers.units))
    give_back_memory(run.store.device)
    install(run)
    return PhasedModel(PhasedSteps(module, layout, seed=seed, run=run))


class PhasedModel(WrappingModel):
    """A module with only a few layers in memory at a time; :func:`phased` makes such a model.

    ``forward``, the names of parameters and buffers, the keys of ``state_dict`` and attributes that this class
    lacks are the module's.

    Attributes:
        module: The module; change neither its layers nor its parameters.
        store: The store in which the weights lie.
        phase_seconds: The seconds of each phase in the last step, computing and waiting.
        predicted_seconds: The planned seconds of a step; None until two steps have ended.
        randomness: The random states of this instance's replicas, which a checkpoint saves.
        phased_steps: The training steps of the model, which a PhasedOptimizer uses.
    """

    _title = "a phased model"
    _advice = _REFUSED
    _not_after = "after phased(): change a module before, as its store has no room"
    _model_steps: PhasedSteps

    def __init__(self, steps: PhasedSteps) -> None:
        super().__init__()
        self.module = steps.module
        self.phased_steps, self.store = steps, steps.run.store
        self._close = weakref.finalize(self, _close, steps.run)
        self._model_steps = steps

    @property
    def phase_seconds(self) -> tuple[float, ...]:
        """The seconds that each phase (group of layers) computed and waited in the last step, in both passes."""
        return tuple(self.phased_steps.run.memory.phase_seconds)

    @property
    def predicted_seconds(self) -> float | None:
        """The seconds of a step that the plan predicts; None until two steps have been measured."""
        return self.phased_steps.run.budget.predicted_seconds

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass of the wrapped module, and return its result."""
        self.phased_steps.check_forward()
        if self.phased_steps.layout.num_replicas > 1:
            return self.phased_steps.forward(partial(self.module, *args, **kwargs))
        return self.module(*args, **kwargs)

    def __reduce__(self) -> NoReturn:
        raise WeightsError(
            "a phased model cannot be copied or pickled, as its weights lie in its store: take its state_dict(), "
            "or popdist.checkpoint.save()"
        )

    def _apply(self, *_: object, **__: object) -> NoReturn:
        """Raise WeightsError: stored weights cannot be moved. Torch's ``to()`` and ``half()`` call this method."""
        raise WeightsError(
            "a phased model stays where it is, in its dtype, as its weights lie in its store: call to(), half() "
            "and the like on the module, before phased(module)"
        )

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the module's state dict; its weights are mapped from the store, and read only when used.

        The next step changes these weights: save or clone the weights before.

        Raises:
            WeightsError: As in ``popdist.ReplicatedModel``.
            StoreError: If the last step has begun and not ended.
        """
        check_buffers(self.module)
        if not kwargs.pop("keep_vars", False) and not self.phased_steps.is_unfinished:
            self.store.check_whole()
        self.phased_steps.run.check_unwritten()
        self.phased_steps.run.memory.wait()
        state: dict[str, Any] = self.module.state_dict(*args, keep_vars=True, **kwargs)
        return {key: self._in_store(value) for key, value in state.items()}

    def _in_store(self, value: Any) -> Any:
        """Return the entry of a state dict for ``value``, an entry of the module's own state dict: a weight mapped
        from the store, another tensor detached from autograd, and anything else unchanged.
        """
        name = self.phased_steps.run.names.get(id(value))
        if name is not None:
            return placed_as(value, self.store.weights.mapped(name))
        return value.detach() if isinstance(value, Tensor) else value

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:  # noqa: ARG002, FBT001, FBT002 - torch's method has this signature
        """Load ``state_dict``, the same on all instances: weights into the store, buffers into the module.

        Afterwards the model can be used again if a step has failed: load the optimizer's state, too.

        Returns:
            The missing and unexpected keys, as torch names them.

        Raises:
            WeightsError: If a weight has another shape, or if ``strict`` and keys are missing or unexpected. Then
                nothing is changed.
        """
        run, state = self.phased_steps.run, self.module.state_dict(keep_vars=True)
        self.store.check_open()
        names = {key: run.names[id(it)] for key, it in state.items() if id(it) in run.names and key in state_dict}
        missing = [key for key in state if key not in state_dict]
        unexpected = [key for key in state_dict if key not in state]
        wrong = [key for key in names if tuple(state_dict[key].shape) != tuple(state[key].shape)]
        if wrong or (strict and (missing or unexpected)):
            raise WeightsError(
                f"no state dict of {type(self.module).__name__}: missing: {name_first(missing) or 'none'}; "
                f"unexpected: {name_first(unexpected) or 'none'}; of another shape: {name_first(wrong) or 'none'}"
            )
        run.memory.wait()
        weights = self.store.weights
        for key, name in names.items() if self.store.host_index == 0 else ():
            if self.store.place_of(local_part(state_dict[key])) != (weights.file, weights.regions[name].start):
                weights.write(name, state_dict[key])
        self.store.end_step()
        run.memory.forget("weights", run.layers.pieces)
        others = {key: value for key, value in state_dict.items() if key not in names}
        keys = self.module.load_state_dict(others, strict=False)
        self.phased_steps.buffers.clear_outside_writes()
        return type(keys)(missing, unexpected)

    def close(self) -> None:
        """Close the store and end its threads; the model cannot be used any more."""
        self._close()


def _close(run: PhasedRun) -> None:
    """Close the memory and the store of ``run``, which trains a phased model."""
    run.memory.close()
    run.store.close()


def _checked_size(memory: str | int | None, phases: int | None) -> tuple[int | None, int | None]:
    """Return the memory limit in bytes and the number of phases. Raise WeightsError unless just one is given."""
    if (phases is None) == (memory is None):
        raise WeightsError("phased() takes either phases=, how many, or memory=, how much a process may use")
    if memory is not None:
        return limit_of(memory), None
    return None, whole_number("phases", phases, WeightsError)


def _checked_layout(module: nn.Module) -> ReplicaLayout:
    """Return which replicas each instance has. Raise WeightsError if ``module`` cannot train layer by layer."""
    if not isinstance(module, nn.Module):
        raise WeightsError(f"phased() is for an nn.Module, and was given {type(module).__name__}")
    contract = context.environment().contract
    if contract.parallelism.pipeline > 1:
        raise WeightsError(
            f"phased() in a job of pipelines of {contract.parallelism.pipeline} stages, each of which is whole in "
            "memory: start the job with pipeline=1, for whole models or tensor-parallel ones"
        )
    refuse_module(module)
    return contract.layout


def _stored(
    module: nn.Module,
    store: str | os.PathLike[str],
    layers: Iterable[nn.Module | str] | None,
    layout: ReplicaLayout,
    initialize: Initialize | None,
    weights: str | os.PathLike[str] | None,
) -> PhasedRun:
    """Write the weights of ``module`` to a store, layer by layer; return the PhasedRun that trains with it."""
    if any(map(is_distributed, module.parameters())):
        give_parts_numbers()
    group = context.data_parallel_group()
    if context.environment().contract.parallelism.is_shared and os.fspath(store) != HOST_MEMORY:
        store = Path(store) / f"part-{context.environment().contract.replica_part.index}"
    phased_layers = find_layers(module, layers)
    forms = {name: TensorForm.of(part_itself(it)) for name, it in phased_layers.weights.items()}
    device = next((it.device for it in module.parameters() if not it.is_meta), None)
    is_meta, device = device is None, device or context.device()
    phase_store = PhaseStore(store, forms, group=group, device=device)
    try:
        units = [unit.module for unit in phased_layers.units]
        for tensors in unit_weights(module, units, initialize=initialize, weights=weights):
            _write(phase_store, group, tensors)
            for name in tensors:
                make_absent(module.get_parameter(name), device)
            tensors.clear()
            give_back_memory(device)  # before the next layer is made
        phased_layers = find_layers(module, units)
        for piece in phased_layers.resident:
            _write(phase_store, group, {name: it.detach() for name, it in piece.weights.items()})
        if is_meta:
            move_buffers(module, device)
        if len(group.instances) > 1:
            broadcast_tensors(group, 0, list(module.buffers()))
        phase_store.wait_for_host()
    except BaseException:
        phase_store.discard()
        raise
    return PhasedRun(phased_layers, phase_store, group, layout)


def _write(store: PhaseStore, group: Group, tensors: Mapping[str, Tensor]) -> None:
    """Write the first instance's values of the weights ``tensors`` to the store of each host."""
    parts = {name: local_part(it) for name, it in tensors.items()}
    if len(group.instances) > 1:
        broadcast_tensors(group, 0, parts.values())
    if store.host_index == 0:
        for name, part in parts.items():
            store.weights.write(name, part)
