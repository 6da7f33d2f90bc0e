"""The laws of checkpoints between instances; every instance runs all of them, in a folder that all of them see."""

import os
import resource
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from torch import nn

import popdist
from popdist.checkpoint import load_latest, save
from tests.contract.collective_laws import refused
from tests.contract.training_laws import is_last


def make(seed: int, width: int = 3) -> tuple[popdist.ReplicatedModel, torch.optim.Optimizer]:
    """A model and an optimizer with a state."""
    torch.manual_seed(seed)
    model = popdist.ReplicatedModel(nn.Linear(2, width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=seed + 1.0)
    model.weight.grad, model.bias.grad = torch.ones(width, 2), torch.ones(width)
    optimizer.step()
    return model, optimizer


def files_in(folder: Path) -> list[str]:
    """What is in ``folder``, hidden files too; the same moment on every instance."""
    popdist.barrier()
    names = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    popdist.barrier()
    return names


def law_all_instances_get_what_was_saved(folder: Path) -> None:
    """Weights, optimizer and values, and the same directory, whatever each instance has by then."""
    model, optimizer = make(seed=0)
    directory = save(folder, model=model, optimizer=optimizer, epoch=7, step=12)
    other, other_optimizer = make(seed=1)
    with torch.no_grad():
        other.weight.add_(popdist.instance_index())
    loaded = load_latest(folder, model=other, optimizer=other_optimizer)

    assert loaded is not None
    assert (loaded.path, loaded.step, loaded.values) == (directory, 12, {"epoch": 7})
    assert popdist.checksum(other) == popdist.checksum(model)
    assert other_optimizer.param_groups[0]["lr"] == 1.0
    assert files_in(folder) == ["step-000000000012"]


def law_damaged_ones_are_skipped_everywhere(folder: Path) -> None:
    """Whether the manifest is cut or a file of tensors; instance 0 warns of each."""
    model, _ = make(seed=0)
    whole = save(folder, model=model, epoch=0)
    cuts = [
        save(folder, model=model, epoch=1) / "tensors" / "__0_0.distcp",
        save(folder, epoch=2) / "manifest.json",
    ]
    popdist.barrier()
    if popdist.is_main():
        for file in cuts:
            os.truncate(file, 7)
    popdist.barrier()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        loaded = load_latest(folder, model=model)

    assert loaded is not None
    assert (loaded.path, loaded.values) == (whole, {"epoch": 0})
    found = [f"{it.message}" for it in told if it.category is popdist.PopdistWarning]
    assert [("manifest.json" in text, "has changed" in text) for text in found] == (
        [(True, False), (False, True)] if popdist.is_main() else []
    )


def law_no_checkpoint_is_none_everywhere(folder: Path) -> None:
    """A first run starts at the beginning on every instance."""
    assert load_latest(folder, epoch=0) is None


def law_what_one_cannot_save_nobody_saves(folder: Path) -> None:
    """Every instance raises, and the next call works."""
    fault = (
        "value is a object" if is_last() else f"instance {popdist.num_instances() - 1} failed: value is a object"
    )
    with refused(popdist.CheckpointError, fault):
        save(folder, value=object() if is_last() else 1)
    assert files_in(folder) == []
    assert save(folder, value=1).name == "step-000000000000"


def law_a_full_disk_is_an_error_everywhere(folder: Path) -> None:
    """What was written of it goes, what was there stays, and the next call works."""
    model, _ = make(seed=0, width=10_000)
    save(folder, epoch=0)
    with small_files(), refused(popdist.CheckpointError, "step 1 could not be written into .*: .*File too large"):
        save(folder, model=model)
    assert files_in(folder) == ["step-000000000000"]
    assert save(folder, model=model).name == "step-000000000001"


@contextmanager
def small_files(num_bytes: int = 50_000) -> Iterator[None]:
    """No file of this process can become larger than this."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def law_a_file_in_place_of_the_folder_is_an_error_everywhere(folder: Path) -> None:
    """To save and to load."""
    if popdist.is_main():
        folder.touch()
    popdist.barrier()
    with refused(popdist.CheckpointError, "is no folder of checkpoints"):
        save(folder, epoch=0)
    with refused(popdist.CheckpointError, "is no folder of checkpoints"):
        load_latest(folder, epoch=0)


def law_all_make_the_same_call(folder: Path) -> None:
    """Another folder on each instance, such as one named by a clock, is told and not filled."""
    if popdist.num_instances() == 1:
        return
    with refused(popdist.CollectiveError, r"instance 0: checkpoint\.save\(.*instance-0.*instance-1"):
        save(folder / f"instance-{popdist.instance_index()}", epoch=0)
    assert files_in(folder) == []
    with refused(popdist.CollectiveError, r"checkpoint\.load_latest\("):
        load_latest(folder, **{"epoch" if is_last() else "step": 0})


def law_all_instances_take_part(folder: Path) -> None:
    """The usual ``if is_main(): save()`` is told apart from the call that all make."""
    if popdist.num_instances() > 1:
        told = refused(popdist.CollectiveError, "call it outside of execute_on_instances")
        with told if popdist.is_main() else nullcontext():
            popdist.execute_on_instances({0}, save, folder, epoch=0)


def law_another_model_on_one_instance_changes_nothing_anywhere(folder: Path) -> None:
    """The message has the differing keys on every instance."""
    model, optimizer = make(seed=0)
    save(folder, model=model.module, optimizer=optimizer)
    torch.manual_seed(1)
    other = nn.Linear(2, 4 if is_last() else 3)
    _, other_optimizer = make(seed=1)
    before = popdist.checksum(other)
    with refused(popdist.CheckpointError, r"different are weight \(float32\[3, 2\] there, float32\[4, 2\] here\)"):
        load_latest(folder, optimizer=other_optimizer, model=other)
    assert popdist.checksum(other) == before
    assert other_optimizer.param_groups[0]["lr"] == 2.0


class Stubborn:
    """An object of a user: on the last instance it refuses its state."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, int]:
        """Its value."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take the value, or not."""
        if is_last() and state["value"]:
            raise ValueError("no, thank you")
        self.value = state["value"]


def law_what_one_refuses_all_give_back(folder: Path) -> None:
    """Also the instances on which everything was loaded; the cause is told there."""
    model, optimizer = make(seed=0)
    stubborn = Stubborn()
    stubborn.value = 5
    save(folder, model=model, optimizer=optimizer, stubborn=stubborn)
    other, other_optimizer, fresh = *make(seed=1), Stubborn()
    expected = (ValueError, "no, thank you") if is_last() else (popdist.CheckpointError, "failed: no, thank you")
    with refused(*expected):
        load_latest(folder, optimizer=other_optimizer, stubborn=fresh)
    assert other_optimizer.param_groups[0]["lr"] == 2.0
    assert fresh.value == 0
    assert popdist.checksum(other) != popdist.checksum(model)


def law_tensors_without_elements_reach_every_instance(folder: Path) -> None:
    """A buffer may be empty for now."""
    save(folder, none=torch.empty(0, 3), one=torch.tensor(2.5))
    loaded = load_latest(folder, none=0)

    assert loaded is not None
    assert loaded.values["none"].shape == (0, 3)
    assert loaded.values["one"] == 2.5


def law_a_name_that_is_no_text_is_told_to_all(folder: Path) -> None:
    """The error of the one that writes reaches the others, whatever bytes the folder's name has."""
    file = folder / "file-\udcff"
    if popdist.instance_index() == 0:
        folder.mkdir()
        file.touch()
    popdist.barrier()
    with refused(popdist.CheckpointError, "is no folder of checkpoints"):
        save(file, value=1)


def law_weights_that_differ_are_not_saved(folder: Path) -> None:
    """One instance has moved a weight by itself, and no later step has told so."""
    model, optimizer = make(seed=0)
    if popdist.num_instances() == 1:
        return
    if is_last():
        torch.nn.init.zeros_(model.weight)
    with refused(popdist.WeightsError, "the weights of the instances are no longer equal: "):
        save(folder, model=model, optimizer=optimizer)
    assert files_in(folder) == []
