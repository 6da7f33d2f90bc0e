"""Loading a checkpoint: instance 0 reads the last whole one, and all instances get its states or none does."""

import json
import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from popdist.checkpoint import checkpoint_folder, manifest
from popdist.checkpoint.byte_exchange import broadcast_bytes, broadcast_tensors, is_writer, together, whole_job
from popdist.checkpoint.encoding import decode, tensors_of
from popdist.checkpoint.manifest import DamagedError, Manifest, current_conditions, differences
from popdist.checkpoint.states import check_fits, load_states, replica_states_of, stateful_of
from popdist.errors import CheckpointError, PopdistWarning
from popdist.groups import Group


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
    try:
        steps = checkpoint_folder.steps_in(path)
    except OSError as error:
        raise CheckpointError(f"{path} is no folder of checkpoints: {error}") from error
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
    """Names of the tensors in the states ``names`` and in all values, in one order."""
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
