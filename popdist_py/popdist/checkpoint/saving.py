"""Saving of checkpoints: the first instance that has a piece of a tensor writes it; instance 0 writes the rest."""

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from popdist.checkpoint import checkpoint_folder, manifest
from popdist.checkpoint.encoding import Json, encode
from popdist.checkpoint.manifest import DamagedError, Manifest, current_conditions
from popdist.checkpoint.parts import place
from popdist.checkpoint.states import Stateful, gather_sharded, join_states, replica_states_of, states_of
from popdist.checkpoint.stored_tensors import StoreCopies, check_whole, join_copies
from popdist.checkpoint.tensor_pieces import Held, WritePlan, held_of, plan_writes
from popdist.checkpoint.together import WRITER, is_writer, together, whole_job
from popdist.errors import CheckpointError, PopdistWarning, StoreError, whole_number
from popdist.exchange.groups import Group
from popdist.ground.local_tensors import is_distributed
from popdist.job import context
from popdist.job.collectives import gather_bytes, gather_json
from popdist.job.weights import sums_of
from popdist.step.checks.tensor_changes import check_equal
from popdist.step.training.replicated_model import ReplicatedModel


def save(path: str | os.PathLike[str], *, keep: int = 3, step: int | None = None, **named: object) -> Path:
    """Save the objects ``named`` as one checkpoint in the folder ``path``, on all instances together.

    Instance 0 writes its own objects, because weights are equal on all instances. If several instances share a
    replica, the instances of the first replica write. Each of these instances writes its part of modules and
    optimizers, whose parameters are identified by their names. The random states of a ``ReplicatedModel``'s
    replicas come from the instances of the replicas. A checkpoint is complete or absent, even if the job is killed
    or the power fails, because it gets its name after every byte is on the disk. It has tensors and JSON only, and
    loads with any number of instances.

    Not saved: the gradients, the samples that a loader has prefetched, the random states of the processes outside
    of ``micro_batches``, and every object that you do not name.

    Args:
        path: A folder, the same on every instance; made if it does not exist. Only one job at a time may write.
        keep: Number of checkpoints to keep: the last ones. At least 1. If an older checkpoint cannot be removed,
            there is a ``PopdistWarning``.
        step: Number in the checkpoint's name, up to 12 digits: greater than the step of every checkpoint in the
            folder. None: one more than the greatest step.
        **named: Objects with ``state_dict()`` and ``load_state_dict()`` (``model=``, ``optimizer=``,
            ``scheduler=``, ``scaler=``, ``loader=``, ``sampler=``), and JSON values (``epoch=``). The states may
            have only tensors and JSON values.

    Returns:
        The checkpoint's directory, on every instance.

    Raises:
        CheckpointError: If the checkpoint cannot be written, a state has more than tensors and JSON, a number is
            wrong, or the parts of a model do not fit together; on every instance.
        CollectiveError: If the instances do not all make the same call.
        NotInitializedError: Before ``popdist.init()``.
        WeightsError: If the weights of a ``ReplicatedModel`` differ between instances; on every instance.
        BackendError: If an instance was lost or did not come in time.
    """
    call = f"checkpoint.save({checkpoint_folder.name_of(path)!r}, keep={keep}, step={step}, {', '.join(named)})"
    group, folder = whole_job(call), Path(path)
    for model in named.values():
        if isinstance(model, ReplicatedModel):
            check_equal(model.module)
    gathered = gather_sharded(named, keep=context.environment().contract.data_parallel_index == 0)
    with together(group, call):
        _check(keep, step, named)
        check_whole(named)
        states, values, tensors = _encode(named, gathered)
    for name, thing in replica_states_of(named).items():
        random_states = _gather_replica_states(group, name, thing)
        if is_writer(group):
            states[name] = encode(random_states, name, tensors)
    plan, states = _join(group, call, named, states, tensors)
    step = _begin(group, call, folder, step)
    described = Manifest(
        step=step, conditions=current_conditions(), states=states, values=values, forms=plan.forms, files={}
    )
    own = {name: tensors[name] for name in plan.writes[group.backend.instance_index]}
    _write(group, call, folder, described, named, own)
    if is_writer(group):
        _remove_older(folder, keep, step)
    return checkpoint_folder.directory_of(folder, step)


def _encode(
    named: Mapping[str, object], gathered: Mapping[str, Any]
) -> tuple[dict[str, Json], dict[str, Json], dict[str, Tensor]]:
    """Return the states and the values of the objects in ``named`` as JSON, and the tensors of both."""
    tensors: dict[str, Tensor] = {}
    must_have_names = context.environment().contract.parallelism.is_shared
    found = states_of(named, gathered, must_have_names=must_have_names)
    states = {name: encode(state, name, tensors) for name, state in found.items()}
    values = {name: encode(value, name, tensors) for name, value in named.items() if name not in found}
    return states, values, tensors


def _join(
    group: Group, call: str, named: Mapping[str, object], states: dict[str, Json], tensors: Mapping[str, Tensor]
) -> tuple[WritePlan, dict[str, Json]]:
    """Return the plan, equal on all instances, of which instance writes which tensor, and the objects' states: on
    instance 0 the states of the whole model, on any other instance its own ``states``.

    Modules and optimizers are joined from the instances of the first replica; other states are of instance 0.
    """
    with together(group, f"{call}, parts"):
        described = _describe_parts(group, named, states, tensors)
    everybody = gather_json(group, f"{call}, parts of all", described)
    with together(group, f"{call}, joining"):
        plan = plan_writes({name: Held.from_json(it) for name, it in held.items()} for _, held in everybody)
        if is_writer(group):
            others = {instance: theirs for instance, (theirs, _) in enumerate(everybody) if theirs}
            states |= join_states(named, {WRITER: states} | others)
    return plan, states


def _describe_parts(
    group: Group, named: Mapping[str, object], states: Mapping[str, Json], tensors: Mapping[str, Tensor]
) -> Json:
    """Return this instance's states that instance 0 lacks, and the tensor pieces that this instance can write."""
    contract = context.environment().contract
    shared = {name for name, thing in named.items() if isinstance(thing, nn.Module | Optimizer)}
    adds = contract.data_parallel_index == 0 and not is_writer(group)
    mine = {
        name: tensor
        for name, tensor in tensors.items()
        if is_distributed(tensor) or is_writer(group) or (adds and name.partition(".")[0] in shared)
    }
    copies = [name for name in mine if contract.parallelism.is_shared and not is_distributed(mine[name])]
    totals = dict(zip(copies, sums_of(mine[name] for name in copies), strict=True))
    held = {name: it.to_json() for name, it in held_of(mine, totals).items()}
    return [{name: states[name] for name in shared} if adds else {}, held]


def _begin(group: Group, call: str, folder: Path, step: int | None) -> int:
    """Make the new checkpoint's directory, on instance 0 only; return the checkpoint's step on all instances."""
    with together(group, f"{call}, writing"):
        if is_writer(group):
            step = _choose_step(folder, step)
            with _explained(folder, step):
                (checkpoint_folder.begin(folder, step) / manifest.TENSORS).mkdir()
    ((step,), *_) = group.start(f"{call}, its step", [step or 0]).wait()
    return step


def _write(
    group: Group,
    call: str,
    folder: Path,
    described: Manifest,
    named: Mapping[str, object],
    own: Mapping[str, Tensor],
) -> None:
    """Write the tensors ``own`` of this instance; then instance 0 writes the manifest (the JSON file), and renames
    the directory to its final name. If an instance fails, instance 0 removes the directory.
    """
    directory, written = checkpoint_folder.partial_of(folder, described.step), b""
    copies = StoreCopies(named, own, group.backend.instance_index)
    pieces = {name: (described.forms[name], it) for name, it in own.items() if name not in copies.places}
    try:
        with together(group, f"{call}, tensors"), _explained(folder, described.step):
            if pieces:
                from popdist.checkpoint.tensor_files import write_pieces

                written = write_pieces(directory / manifest.TENSORS, group.backend.instance_index, pieces)
            copied = copies.write(directory / manifest.TENSORS)
        all_copied = gather_json(group, f"{call}, what was copied", copied)
        everybody = [data for data in gather_bytes(group, f"{call}, what was written", written) if data]
        with together(group, f"{call}, completing"), _explained(folder, described.step):
            if is_writer(group):
                files, stored = join_copies(all_copied)
                if everybody:
                    from popdist.checkpoint.tensor_files import write_index

                    files |= write_index(directory / manifest.TENSORS, everybody)
                manifest.write(directory, replace(described, files=files, stored=stored))
                checkpoint_folder.complete(folder, described.step)
    except Exception:
        if is_writer(group):
            checkpoint_folder.abandon(folder, described.step)
        raise


@contextmanager
def _explained(folder: Path, step: int) -> Iterator[None]:
    """A context in which a system error becomes a CheckpointError that names ``folder`` and ``step``."""
    try:
        yield
    except OSError as error:
        is_absent = isinstance(error, FileNotFoundError)
        advice = ": it cannot be made here, or other hosts do not have it" if is_absent else ""
        raise CheckpointError(
            f"the checkpoint of step {step} could not be written into {folder}: {error}{advice}"
        ) from None
    except StoreError as error:
        raise CheckpointError(f"the checkpoint of step {step} could not be written: {error}") from None


def _remove_older(folder: Path, keep: int, step: int) -> None:
    try:
        checkpoint_folder.keep_last(folder, keep)
    except (OSError, CheckpointError) as error:
        warnings.warn(
            f"the checkpoint of step {step} is whole, but older ones could not be removed from {folder}: {error}",
            PopdistWarning,
            stacklevel=3,
        )


def _check(keep: int, step: int | None, named: Mapping[str, object]) -> None:
    whole_number("keep", keep, CheckpointError)
    if step is not None and whole_number("step", step, CheckpointError, minimum=0) > checkpoint_folder.LAST_STEP:
        raise CheckpointError(f"step={step} must be 0 to {checkpoint_folder.LAST_STEP}")
    if not named:
        raise CheckpointError("nothing to save: name it, as in save(path, model=model, optimizer=optimizer)")
    if dotted := [name for name in named if not name.isidentifier()]:
        raise CheckpointError(f"{dotted[0]!r} is no name: use letters, digits and underscores")


def _gather_replica_states(group: Group, name: str, thing: Stateful) -> dict[str, Any]:
    """Gather the random states of all replicas from the instances that own the replicas."""
    index = context.environment().contract.replica_part.index
    with together(group, f"checkpoint.save, {name}"):
        mine = BytesIO()
        torch.save({place(replica, index): state for replica, state in thing.state_dict().items()}, mine)
    return {
        replica: state
        for data in gather_bytes(group, f"checkpoint.save, {name} of all", mine.getvalue())
        for replica, state in torch.load(BytesIO(data), weights_only=True).items()
    }


def _choose_step(path: Path, step: int | None) -> int:
    """Return the new checkpoint's step: ``step``, or one more than the last step if None. Remove damaged
    checkpoints of ``step`` or a later step; raise CheckpointError if a whole checkpoint has such a step.
    """
    present = checkpoint_folder.steps_in(path)
    if step is None and present and present[-1] == checkpoint_folder.LAST_STEP:
        raise CheckpointError(
            f"{path} holds a checkpoint of step {present[-1]}, the last there can be: use another folder"
        )
    if step is None:
        return present[-1] + 1 if present else 0
    for other in [other for other in present if other >= step]:
        try:
            manifest.read(checkpoint_folder.directory_of(path, other))
        except DamagedError:
            checkpoint_folder.remove(path, other)
        else:
            raise CheckpointError(
                f"{path} holds a checkpoint of step {other}, so step {step} cannot be saved after it: go on from "
                "there with load_latest(), save later steps, or use another folder"
            )
    return step
