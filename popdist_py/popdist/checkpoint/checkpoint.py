"""Saving and loading a checkpoint: instance 0 writes and reads, and an error on one instance is raised on all.

The random states of replicas are gathered from all instances. All instances get the states of the last whole
checkpoint, or none does.
"""

import json
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from popdist import context
from popdist.checkpoint import checkpoint_folder, manifest
from popdist.checkpoint.encoding import TensorForm, decode, encode, tensors_of
from popdist.checkpoint.manifest import DamagedError, Manifest, current_conditions, differences
from popdist.checkpoint.states import (
    Stateful,
    check_fits,
    gather_sharded,
    load_states,
    replica_states_of,
    stateful_of,
)
from popdist.collectives import gather_bytes, send_bytes
from popdist.errors import CheckpointError, CollectiveError, PopdistWarning, name_instances, whole_number
from popdist.gradients.buffers import check_buffers
from popdist.groups import Group


def save(path: str | os.PathLike[str], *, keep: int = 3, step: int | None = None, **named: object) -> Path:
    """Save everything that is named, as one checkpoint in the folder ``path``; all instances call it.

    Instance 0 writes, and what it has is what is saved: weights are equal on all instances. The random states of
    a ``ReplicatedModel``'s replicas come from the instances that hold them. A checkpoint is whole or not there,
    also when the job is killed or the power fails: it gets its name when every byte of it is on the disk. It holds
    tensors and JSON only, and loads at any number of instances.

    Not saved: the gradients, what a loader has prefetched, the random states of the processes outside of
    ``micro_batches``, and whatever you do not name.

    Args:
        path: A folder, the same on every instance; made when it is not there. One job at a time may write there.
        keep: How many checkpoints stay: the last ones. At least 1. Older ones that cannot be removed are a
            ``PopdistWarning``.
        step: The number in the checkpoint's name, which orders them: greater than that of every other one there,
            up to 12 digits. None: one more than the greatest.
        **named: Objects with ``state_dict()`` and ``load_state_dict()`` (``model=``, ``optimizer=``,
            ``scheduler=``, ``scaler=``, ``loader=``, ``sampler=``), and JSON values (``epoch=``). The states hold
            tensors and JSON values.

    Returns:
        The checkpoint's directory, on every instance.

    Raises:
        CheckpointError: If it could not be written, something holds more than tensors and JSON, or a number is
            wrong; on every instance.
        CollectiveError: If the instances do not all make the same call.
        NotInitializedError: Before ``popdist.init()``.
        BackendError: If an instance was lost or did not come in time.
    """
    call = f"checkpoint.save({checkpoint_folder.name_of(path)!r}, keep={keep}, step={step}, {', '.join(named)})"
    group = whole_job(call)
    tensors: dict[str, Tensor] = {}
    gathered = gather_sharded(named, keep=is_writer(group))
    with together(group, call):
        _check(keep, step, named)
        states, values = _encode_named(named, gathered, tensors)
    for name, thing in replica_states_of(named).items():
        states[name] = encode(_gather_replica_states(group, name, thing), name, tensors)
    with together(group, f"{call}, writing"):
        if is_writer(group):
            step = _choose_step(Path(path), step)
            forms = {name: TensorForm.of(tensor) for name, tensor in tensors.items()}
            described = Manifest(
                step=step, conditions=current_conditions(), states=states, values=values, forms=forms
            )
            _write(Path(path), keep, described, tensors)
    ((step,), *_) = group.start(f"{call}, its step", [step or 0]).wait()
    return checkpoint_folder.directory_of(Path(path), step)


def _encode_named(
    named: Mapping[str, object], gathered: Mapping[str, Any], tensors: dict[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Encode the states of objects and other values as JSON; their tensors are added to ``tensors``."""
    things = stateful_of(named)
    for thing in things.values():
        if isinstance(thing, nn.Module):
            check_buffers(thing)
    states = {
        name: encode(gathered[name] if name in gathered else thing.state_dict(), name, tensors)
        for name, thing in things.items()
    }
    values = {name: encode(value, name, tensors) for name, value in named.items() if name not in things}
    return states, values


def _check(keep: int, step: int | None, named: Mapping[str, object]) -> None:
    whole_number("keep", keep, CheckpointError)
    if step is not None and whole_number("step", step, CheckpointError, minimum=0) > checkpoint_folder.LAST_STEP:
        raise CheckpointError(f"step={step} must be 0 to {checkpoint_folder.LAST_STEP}")
    if not named:
        raise CheckpointError("nothing to save: name it, as in save(path, model=model, optimizer=optimizer)")
    if dotted := [name for name in named if not name.isidentifier()]:
        raise CheckpointError(f"{dotted[0]!r} is no name: use letters, digits and underscores")


def _gather_replica_states(group: Group, name: str, thing: Stateful) -> dict[Any, Any]:
    """Gather the random states of all replicas from the instances that own them."""
    with together(group, f"checkpoint.save, {name}"):
        mine = BytesIO()
        torch.save(thing.state_dict(), mine)
    return {
        replica: state
        for data in gather_bytes(group, f"checkpoint.save, {name} of all", mine.getvalue())
        for replica, state in torch.load(BytesIO(data), weights_only=True).items()
    }


def _choose_step(path: Path, step: int | None) -> int:
    """The number of the new checkpoint. Damaged ones that have it or a greater one are removed."""
    present = _steps(path)
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


def _steps(path: Path) -> list[int]:
    try:
        return checkpoint_folder.steps_in(path)
    except OSError as error:
        raise CheckpointError(f"{path} is no folder of checkpoints: {error}") from error


def _write(path: Path, keep: int, described: Manifest, tensors: Mapping[str, Tensor]) -> None:
    try:
        checkpoint_folder.create(
            path, described.step, lambda directory: manifest.write(directory, described, tensors)
        )
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint of step {described.step} could not be written into {path}: {error}"
        ) from error
    try:
        checkpoint_folder.keep_last(path, keep)
    except OSError as error:
        warnings.warn(
            f"the checkpoint of step {described.step} is whole, but older ones could not be removed from {path}: "
            f"{error}",
            PopdistWarning,
            stacklevel=3,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The checkpoint that was loaded.

    Attributes:
        path: Its directory.
        step: The number in its name.
        values: All JSON values that were saved in it, by name.
    """

    path: Path
    step: int
    values: dict[str, Any]


def load_latest(path: str | os.PathLike[str], **named: object) -> Loaded | None:
    """Load the last checkpoint in the folder ``path`` into everything that is named; all instances call it.

    Instance 0 reads and the others receive, so only its host needs the folder. The job may have another number of
    instances than the one that saved. With another number of replicas, other threads, another kind of CPU or build
    of torch or popdist it loads too, with one ``PopdistWarning`` that the bits may differ from there on. A damaged
    checkpoint is skipped with a ``PopdistWarning``, and the one before it is loaded. Everything is compared before
    anything is changed, and nothing of a checkpoint is ever run: it holds tensors and JSON.

    Args:
        path: The folder that was given to ``save``, the same on every instance.
        **named: Objects to load into, under the names they were saved by; not necessarily all that were saved. A
            JSON value here says only that the checkpoint must have one of that name: its value is in the result.

    Returns:
        What was loaded, with the JSON values; None, on every instance, when the folder holds no checkpoint.

    Raises:
        CheckpointError: If all checkpoints are damaged, a name was not saved, or a model or an optimizer is
            another than the one that was saved; the message names the differing keys. On every instance.
        CollectiveError: If the instances do not all make the same call.
        NotInitializedError: Before ``popdist.init()``.
        BackendError: If an instance was lost or did not come in time.
        Exception: What an object says to a state that does not fit it, such as ``DatasetError``.
    """
    call = f"checkpoint.load_latest({checkpoint_folder.name_of(path)!r}, {', '.join(named)})"
    group = whole_job(call)
    replica_states = replica_states_of(named)
    found, tensors = None, dict[str, Tensor]()
    with together(group, call):
        if is_writer(group):
            found, tensors = _read_last(Path(path), {*named, *replica_states})
    told = broadcast_bytes(
        group, f"{call}, what was found", json.dumps(found.to_json()).encode() if found else b""
    )
    if not told:
        return None
    found = Manifest.from_json(json.loads(told))
    where = checkpoint_folder.directory_of(Path(path), found.step)
    with together(group, f"{call}, names"):
        _check_names(named, found, where)
        tensors = tensors or {
            name: found.forms[name].empty() for name in _needed(found, {*named, *replica_states})
        }
    broadcast_tensors(group, f"{call}, {len(tensors)} tensors", tensors.values())
    things = {
        **stateful_of(named),
        **{name: thing for name, thing in replica_states.items() if name in found.states},
    }
    states = {name: decode(found.states[name], tensors) for name in things}
    _load_everywhere(group, call, things, states, where)
    if is_writer(group):
        _warn_of_differences(found, where, [name for name in replica_states if name not in found.states])
    values = {name: decode(value, tensors) for name, value in found.values.items()}
    return Loaded(path=where, step=found.step, values=values)


def _read_last(path: Path, names: Iterable[str]) -> tuple[Manifest | None, dict[str, Tensor]]:
    """The last checkpoint that is whole, with the tensors that ``names`` need."""
    steps = _steps(path)
    for step in reversed(steps):
        directory = checkpoint_folder.directory_of(path, step)
        try:
            found = manifest.read(directory)
            return found, manifest.read_tensors(directory, found, _needed(found, names))
        except DamagedError as error:
            warnings.warn(f"{directory} is damaged and skipped: {error}", PopdistWarning, stacklevel=4)
    if steps:
        raise CheckpointError(
            f"none of the {len(steps)} checkpoints in {path} can be read (a warning above says why for each): "
            "restore one, or use another folder to start anew"
        )
    return None, {}


def _needed(found: Manifest, names: Iterable[str]) -> list[str]:
    """The names, sorted, of the tensors that the states ``names`` and all values hold."""
    parts = [found.states[name] for name in names if name in found.states]
    return sorted(tensors_of([*parts, *found.values.values()]))


def _check_names(named: Mapping[str, object], found: Manifest, where: Path) -> None:
    things = stateful_of(named)
    lost = [name for name in named if name not in (found.states if name in things else found.values)]
    if lost:
        raise CheckpointError(
            f"{where} holds no {' and no '.join(lost)}: it was saved with the states of "
            f"{', '.join(found.states) or 'nothing'} and the values {', '.join(found.values) or 'of nothing'}"
        )


def _load_everywhere(
    group: Group, call: str, things: Mapping[str, Any], states: Mapping[str, Any], where: Path
) -> None:
    """Load the states on every instance or, but for what a module has already taken, on none."""
    with together(group, f"{call}, comparing"):
        check_fits(things, states, str(where))
    undo = None
    try:
        with together(group, f"{call}, loading"):
            undo = load_states(things, states)
    except Exception:
        if undo is not None:
            undo()
        raise


def _warn_of_differences(found: Manifest, where: Path, lost: list[str]) -> None:
    changed = differences(found.conditions, current_conditions()) + [f"it holds no {name}" for name in lost]
    if changed:
        warnings.warn(
            f"the bits may differ from those of the run that saved {where}: {'; '.join(changed)}",
            PopdistWarning,
            stacklevel=3,
        )


WRITER: Final = 0
"""The instance that reads and writes."""


def whole_job(call: str) -> Group:
    """The group of all instances of the job; an error within ``execute_on_instances``."""
    group = context.current_group()
    num_instances = context.environment().contract.num_instances
    if len(group.instances) < num_instances:
        raise CollectiveError(
            f"{call} among {name_instances(group.instances)}: all {num_instances} instances of the job take part, "
            "so call it outside of execute_on_instances"
        )
    return group


def is_writer(group: Group) -> bool:
    """Whether this instance is the one that reads and writes."""
    return group.backend.instance_index == WRITER


@contextmanager
def together(group: Group, text: str) -> Iterator[None]:
    """Run the block, which waits for nobody, on every instance: an error on one of them is raised on each."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever it is, the others are told, and it is raised below
        failure = error
    words = "" if failure is None else f"{failure}" or type(failure).__name__
    message = words.encode(errors="backslashreplace")  # the name of a file may be no text
    lengths = [length for (length,) in group.start(text, [len(message)]).wait()]
    failed = [instance for instance, length in enumerate(lengths) if length]
    if failed:
        told = send_bytes(group, message, lengths[failed[0]], failed[0])
        raise failure or CheckpointError(f"{name_instances(failed)} failed: {told.decode(errors='replace')}")


def broadcast_bytes(group: Group, text: str, data: bytes) -> bytes:
    """The writer's ``data``, on every instance."""
    (length,) = group.start(text, [len(data)]).wait()[WRITER]
    return send_bytes(group, data, length, WRITER)


def broadcast_tensors(group: Group, text: str, tensors: Iterable[Tensor]) -> None:
    """Overwrite dense CPU tensors, of the same shapes and order on all instances, with the writer's."""
    group.agree(text)
    for tensor in tensors:
        in_memory_order = tensor.as_strided((tensor.numel(),), (1,))
        group.backend.broadcast(in_memory_order, WRITER)
