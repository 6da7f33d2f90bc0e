"""Saving a checkpoint: instance 0 writes, with the random states of replicas gathered from all instances."""

import base64
import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from popdist.checkpoint import checkpoint_folder, manifest
from popdist.checkpoint.byte_exchange import is_writer, together, whole_job
from popdist.checkpoint.encoding import TensorForm, decode, encode
from popdist.checkpoint.manifest import DamagedError, Manifest, current_conditions
from popdist.checkpoint.states import Stateful, gather_sharded, replica_states_of, stateful_of
from popdist.errors import CheckpointError, PopdistWarning, whole_number
from popdist.gradients.buffers import check_buffers
from popdist.groups import Group
from popdist.weights import bytes_of, gather_bytes


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
        mine = _pack(thing.state_dict(), name)
    return {
        replica: state
        for packed in gather_bytes(group, f"checkpoint.save, {name} of all", mine)
        for replica, state in _unpack(packed).items()
    }


def _pack(state: object, name: str) -> bytes:
    """A state as bytes of JSON, its tensors included."""
    tensors: dict[str, Tensor] = {}
    encoded = encode(state, name, tensors)
    inline = {}
    for key, tensor in tensors.items():
        inline[key] = [TensorForm.of(tensor).to_json(), base64.b64encode(bytes_of(tensor)).decode()]
    return json.dumps([encoded, inline]).encode()


def _unpack(packed: bytes) -> Any:  # noqa: ANN401 - whatever the object's state is
    """Make the state from what :func:`_pack` gave."""
    encoded, inline = json.loads(packed)
    tensors = {}
    for key, (form, text) in inline.items():
        empty = TensorForm.from_json(form).empty()
        data = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
        tensors[key] = data.view(empty.dtype).view(empty.shape)
    return decode(encoded, tensors)


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
        raise CheckpointError(f"{path} is no folder to save checkpoints in: {error}") from error


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
