"""Loading of checkpoints: all instances load the last complete checkpoint, or no instance loads anything.

An instance reads its own pieces of the tensors. If all replicas need a piece, the first replica reads it for all.
"""

import os
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from popdist.checkpoint import checkpoint_folder, manifest
from popdist.checkpoint.encoding import Json, decode, tensors_of
from popdist.checkpoint.manifest import PARTS, DamagedError, Manifest, current_conditions, differences
from popdist.checkpoint.parts import parameter_names
from popdist.checkpoint.states import (
    Stateful,
    check_fits,
    cut,
    load_states,
    owned_of,
    replica_states_of,
    stateful_of,
    wanted_of,
)
from popdist.checkpoint.stored_tensors import batches, stores_of, write_into_stores
from popdist.checkpoint.tensor_pieces import TensorPiece, Wanted
from popdist.checkpoint.together import WRITER, is_writer, together, whole_job
from popdist.errors import CheckpointError, PopdistWarning
from popdist.exchange.groups import Group
from popdist.job import context
from popdist.job.collectives import broadcast_object, gather_bytes, gather_json
from popdist.phases.phase_store import PhaseStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The checkpoint that :func:`load_latest` has loaded.

    Attributes:
        path: Directory of the checkpoint.
        step: Number in the name of the directory.
        values: All JSON values that were saved in the checkpoint, by name.
    """

    path: Path
    step: int
    values: dict[str, Any]


def load_latest(path: str | os.PathLike[str], **named: object) -> Loaded | None:
    """Load the last checkpoint in the folder ``path`` into the objects that ``named`` has under the names with
    which they were saved. All instances call this together.

    Instance 0 reads and the other instances receive, so only the host of instance 0 needs the folder. If several
    instances share a replica, all instances of the first replica read. The job may have another number of
    instances than the job that saved. One ``PopdistWarning`` says that the bits may differ from now on if the job
    has other replicas or parts, threads or CPUs, or another build of torch or popdist. A damaged checkpoint is
    skipped with a ``PopdistWarning``, and the checkpoint before is loaded. Everything is compared before anything
    is changed. Nothing of a checkpoint is ever run as code, because it has only tensors and JSON.

    Args:
        path: The folder that was given to ``save``, the same on every instance.
        **named: Objects to load into, under the names with which they were saved; saved names may be left out. A
            JSON value only demands that the checkpoint has a value with this name; the result has the value.

    Returns:
        The loaded checkpoint with its JSON values; None, on every instance, if the folder has no checkpoint.

    Raises:
        CheckpointError: If all checkpoints are damaged, a name was not saved, or a model or an optimizer differs
            from the saved object; the message names the differing keys. On every instance.
        CollectiveError: If the instances do not all make the same call.
        NotInitializedError: Before ``popdist.init()``.
        BackendError: If an instance was lost or did not come in time.
        Exception: If an object refuses a state that does not fit, as with ``DatasetError``.
    """
    call = f"checkpoint.load_latest({checkpoint_folder.name_of(path)!r}, {', '.join(named)})"
    group, folder = whole_job(call), Path(path)
    replica_states = replica_states_of(named)
    for found in _whole_ones(group, call, folder):
        where = checkpoint_folder.directory_of(folder, found.step)
        things = {
            **stateful_of(named),
            **{name: thing for name, thing in replica_states.items() if name in found.states},
        }
        with together(group, f"{call}, names"):
            _check_names(named, found, where)
        parts = _parts(group, call, named, things, found, where)
        wanted = {
            name: Wanted(form=found.forms[name]) for value in found.values.values() for name in tensors_of(value)
        }
        for name, part in parts.items():
            wanted |= wanted_of(things[name], part, found.forms)
        tensors = _read_all(group, call, where, wanted, found, stores_of(named))
        if tensors is None:
            continue
        states = {name: decode(part, tensors) for name, part in parts.items()}
        _load_everywhere(group, call, things, states)
        for store in stores_of(named):
            store.end_step()
        if is_writer(group):
            _warn_of_differences(found, where, [name for name in replica_states if name not in found.states])
        values = {name: decode(value, tensors) for name, value in found.values.items()}
        return Loaded(path=where, step=found.step, values=values)
    return None


def _whole_ones(group: Group, call: str, folder: Path) -> Iterator[Manifest]:
    """Yield the undamaged checkpoints, last checkpoint first; raise CheckpointError if all are damaged."""
    steps: list[int] = []
    with together(group, call):
        if is_writer(group):
            steps = checkpoint_folder.steps_in(folder)
    steps = broadcast_object(steps, WRITER)
    for step in reversed(steps):
        directory = checkpoint_folder.directory_of(folder, step)
        content, damage = None, ""
        with together(group, f"{call}, its manifest"):
            if is_writer(group):
                try:
                    content = manifest.read(directory).to_json()
                except DamagedError as error:
                    damage = f"{error}"
        content = broadcast_object(content, WRITER)
        found = None if content is None else Manifest.from_json(content)
        if found is not None:
            damage = _damage_of_files(group, call, directory, found)
        if not _is_damaged(group, call, damage, directory) and found is not None:
            yield found
    if steps:
        raise CheckpointError(
            f"none of the {len(steps)} checkpoints in {folder} can be read (a warning of instance {WRITER} says "
            "why for each): restore one, or use another folder to start anew"
        )


def _damage_of_files(group: Group, call: str, directory: Path, found: Manifest) -> str:
    """Check this instance's part of a checkpoint's files; return a text about the damage, empty without damage."""
    contract = context.environment().contract
    damage = ""
    with together(group, f"{call}, its files"):
        if contract.data_parallel_index == 0:
            _check_sees(directory)
            part, number = contract.replica_part.index, contract.parallelism.instances_per_replica
            try:
                manifest.check_files(directory, dict(sorted(found.files.items())[part::number]))
            except DamagedError as error:
                damage = f"{error}"
    return damage


def _check_sees(directory: Path) -> None:
    if not directory.is_dir():
        raise CheckpointError(
            f"{directory} is not on the host of instance {context.instance_index()}, which reads its part of the "
            "tensors there: give all such hosts the folder"
        )


def _is_damaged(group: Group, call: str, damage: str, directory: Path) -> bool:
    """Whether any instance reports damage of a checkpoint, by a text ``damage`` that is not empty; instance 0
    warns.
    """
    damages = gather_bytes(group, f"{call}, whether it is damaged", damage.encode(errors="backslashreplace"))
    found = next(filter(None, damages), None)
    if found and is_writer(group):
        text = f"{directory} is damaged and skipped: {found.decode()}"
        warnings.warn(text, PopdistWarning, stacklevel=5)
    return found is not None


def _check_names(named: Mapping[str, object], found: Manifest, where: Path) -> None:
    things = stateful_of(named)
    lost = [name for name in named if name not in (found.states if name in things else found.values)]
    if lost:
        raise CheckpointError(
            f"{where} holds no {' and no '.join(lost)}: it was saved with the states of "
            f"{', '.join(found.states) or 'nothing'} and the values {', '.join(found.values) or 'of nothing'}"
        )


def _parts(
    group: Group,
    call: str,
    named: Mapping[str, object],
    things: Mapping[str, Stateful],
    found: Manifest,
    where: Path,
) -> dict[str, Json]:
    """Return this instance's part of each saved state; raise CheckpointError if a state does not fit an object."""
    contract, owned = context.environment().contract, owned_of(named)
    everybody = [owned]  # this instance must be first
    if contract.parallelism.is_shared:
        everybody += gather_json(group, f"{call}, keys and names", owned)
    is_same = not differences({PARTS: found.conditions[PARTS]}, current_conditions())
    with together(group, f"{call}, comparing"):
        if not is_same and (nameless := [name for name, own in owned.items() if own is None]):
            raise CheckpointError(
                f"{where} was saved by other parts of replicas, and has the parameters of {nameless[0]} by name: "
                f"name the model as well, as in load_latest(path, model=model, {nameless[0]}={nameless[0]})"
            )
        check_fits(
            things, {name: decode(found.states[name], found.forms) for name in things}, everybody, str(where)
        )
    names = parameter_names(named)
    index = contract.replica_part.index if is_same else 0
    return {name: cut(thing, found.states[name], names, index) for name, thing in things.items()}


def _read_all(
    group: Group,
    call: str,
    where: Path,
    wanted: Mapping[str, Wanted],
    found: Manifest,
    stores: list[PhaseStore],
) -> dict[str, Tensor] | None:
    """Return the ``wanted`` tensors; None if reading fails. A phased model's tensors are written to its store (a
    file or other memory), which is marked as torn, in the middle of a step, until the load ends.
    """
    in_stores = {name: it for name, it in wanted.items() if it.into is not None}
    others = {name: it for name, it in wanted.items() if it.into is None}
    tensors = _read(group, call, where, others, found)
    if tensors is None:
        return None
    for store in stores:
        store.begin_step(store.step)
    for batch in batches(in_stores):
        read = _read(group, call, where, batch, found)
        if read is None:
            return None
        with together(group, f"{call}, writing the stores"):
            write_into_stores(stores, batch, read)
        tensors |= {name: it.into for name, it in batch.items() if it.into is not None}
    return tensors


def _read(
    group: Group, call: str, where: Path, wanted: Mapping[str, Wanted], found: Manifest
) -> dict[str, Tensor] | None:
    """Return the tensors in ``wanted``; None on all instances if one instance cannot read them.

    If a piece is the same in all replicas, the first replica reads the piece and sends it to the other replicas.
    """
    replicas = context.data_parallel_group()
    is_first = replicas.backend.instance_index == WRITER
    pieces = {name: it.piece for name, it in sorted(wanted.items())}
    placed = {name: [it.offsets, it.sizes] for name, it in pieces.items() if wanted[name].like is not None}
    everybody = gather_json(replicas, f"{call}, pieces", placed)
    apart = {name for mine in everybody for name in mine if any(it.get(name) != mine[name] for it in everybody)}
    tensors = {name: it.empty(wanted[name].form) for name, it in pieces.items()}
    reads = {name: (pieces[name], tensors[name]) for name in pieces if is_first or name in apart}
    damage = ""
    with together(group, f"{call}, reading"):
        if reads:
            _check_sees(where)
            try:
                _read_files(where / manifest.TENSORS, found, reads)
            except Exception as error:  # noqa: BLE001 - torch raises errors of many types for damaged files
                damage = f"its tensors cannot be read ({error!r})"
    if _is_damaged(group, call, damage, where):
        return None
    sent = [tensors[name] for name in tensors if name not in apart]
    replicas.agree(f"{call}, {len(sent)} tensors")
    for tensor in sent:
        replicas.backend.broadcast(tensor.as_strided((tensor.numel(),), (1,)), WRITER)  # in memory order
    return {name: wanted[name].placed(tensor) for name, tensor in tensors.items()}


def _read_files(directory: Path, found: Manifest, reads: Mapping[str, tuple[TensorPiece, Tensor]]) -> None:
    """Read from the checkpoint, into each tensor in ``reads``, its piece of the saved tensor of the same name."""
    for name in reads.keys() & found.stored.keys():
        for it in found.stored[name]:
            if it.file not in found.files:
                raise ValueError(f"the manifest names {it.file!r}, which is no file of this checkpoint")
            it.read(directory, found.forms[name].dtype, *reads[name])
    if others := {name: it for name, it in reads.items() if name not in found.stored}:
        from popdist.checkpoint.tensor_files import read_pieces

        read_pieces(directory, others, found.files)


def _load_everywhere(group: Group, call: str, things: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    """Load ``states`` into the objects ``things``, modules last; if an instance fails, restore all but modules."""
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
