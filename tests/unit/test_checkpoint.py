"""What is saved is loaded, whole or not at all, and nothing else; here in a job of one.

Holds popdist.checkpoint.states and popdist.checkpoint.tensor_files.
"""

import io
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import save as save_by_torch
from torch.optim.lr_scheduler import LRScheduler, MultiStepLR, OneCycleLR, ReduceLROnPlateau, SequentialLR, StepLR

import popdist
from popdist.checkpoint import load_latest, manifest, save


@pytest.fixture(autouse=True)
def _job_of_one() -> None:
    popdist.init()


def make(width: int = 4, seed: int = 0) -> tuple[popdist.ReplicatedModel, torch.optim.Optimizer]:
    """A model with buffers in channels-last order, and an optimizer that has taken a step."""
    torch.manual_seed(seed)
    convolution = nn.Conv2d(2, width, 3)
    convolution.weight.data = convolution.weight.data.contiguous(memory_format=torch.channels_last)
    module = nn.Sequential(convolution, nn.BatchNorm2d(width))
    model = popdist.ReplicatedModel(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(2, 2, 4, 4)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def damage(file: Path) -> None:
    """Turn one bit in the middle."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def cut(file: Path) -> None:
    """Take the last byte away."""
    os.truncate(file, file.stat().st_size - 1)


def empty(file: Path) -> None:
    """Take every byte away."""
    os.truncate(file, 0)


def test_everything_comes_back(tmp_path: Path) -> None:
    """Weights, buffers, the optimizer's state with its order of memory, the place in the epoch, and values."""
    model, optimizer = make()
    sampler = popdist.ReplicaSampler(10, 2, shuffle=True)
    next(iter(sampler))
    values: dict[str, Any] = {"epoch": 3, "best": float("inf"), "history": [0.5, None, {"a": (1, 2)}]}
    directory = save(
        tmp_path, model=model, optimizer=optimizer, sampler=sampler, scaler=GradScaler("cpu"), **values
    )

    other, other_optimizer = make(seed=1)
    other_sampler = popdist.ReplicaSampler(10, 2, shuffle=True)
    loaded = load_latest(
        tmp_path, model=other, optimizer=other_optimizer, sampler=other_sampler, scaler=GradScaler("cpu"), epoch=0
    )

    assert loaded is not None
    assert (loaded.path, loaded.step, loaded.values) == (directory, 0, values)
    assert popdist.checksum(other) == popdist.checksum(model)
    assert other_sampler.state_dict() == sampler.state_dict()
    for then, now in zip(optimizer.state.values(), other_optimizer.state.values(), strict=True):
        assert {name: (it.tolist(), it.stride()) for name, it in then.items()} == {
            name: (it.tolist(), it.stride()) for name, it in now.items()
        }


def sequence(optimizer: torch.optim.Optimizer) -> LRScheduler:
    """A scheduler that holds others."""
    return SequentialLR(optimizer, [StepLR(optimizer, 2), StepLR(optimizer, 1)], [2])


@pytest.mark.parametrize(
    "make_scheduler",
    [
        lambda optimizer: MultiStepLR(optimizer, [2, 2, 5]),
        lambda optimizer: OneCycleLR(optimizer, 0.1, 10),
        lambda optimizer: ReduceLROnPlateau(optimizer, patience=1),
        sequence,
    ],
    ids=["MultiStepLR", "OneCycleLR", "ReduceLROnPlateau", "SequentialLR"],
)
def test_schedulers_go_on(tmp_path: Path, make_scheduler: Callable[[torch.optim.Optimizer], Any]) -> None:
    """Counters, infinities and nested states: the next learning rates are those that would have come."""
    ends = []
    for is_loaded in (False, True):
        _, optimizer = make()
        scheduler = make_scheduler(optimizer)
        arguments = [1.0] if isinstance(scheduler, ReduceLROnPlateau) else []
        if is_loaded:
            load_latest(tmp_path, optimizer=optimizer, scheduler=scheduler)
        else:
            optimizer.step()
            scheduler.step(*arguments)
            save(tmp_path, optimizer=optimizer, scheduler=scheduler)
        rates = []
        for _ in range(4):
            optimizer.step()
            scheduler.step(*arguments)
            rates.append(optimizer.param_groups[0]["lr"])
        ends.append(rates)
    assert ends[0] == ends[1]


def test_an_empty_folder_holds_none(tmp_path: Path) -> None:
    """A first run starts from the beginning; what a killed one left unfinished is none either."""
    model, _ = make()
    (tmp_path / ".step-000000000000.partial").mkdir()
    assert load_latest(tmp_path / "none", model=model) is None
    assert load_latest(tmp_path, model=model) is None


def test_steps_count_up_and_the_last_ones_stay(tmp_path: Path) -> None:
    """Three by default; the numbers are the caller's, or one more than the last."""
    assert [save(tmp_path, epoch=epoch).name[-2:] for epoch in range(4)] == ["00", "01", "02", "03"]
    assert save(tmp_path, step=40, epoch=4).name == "step-000000000040"
    assert [path.name[-2:] for path in sorted(tmp_path.iterdir())] == ["02", "03", "40"]
    assert save(tmp_path, keep=1, epoch=5).name == "step-000000000041"
    assert [path.name[-2:] for path in sorted(tmp_path.iterdir())] == ["41"]


def test_a_step_that_would_not_be_the_last_is_refused(tmp_path: Path) -> None:
    """A second run in the folder of the first would not find its own; a damaged one gives way."""
    last = save(tmp_path, step=10, epoch=1)
    with pytest.raises(popdist.CheckpointError, match="holds a checkpoint of step 10, so step 10 cannot be saved"):
        save(tmp_path, step=10, epoch=2)
    damage(last / "manifest.json")
    assert save(tmp_path, step=5, epoch=2).name[-2:] == "05"
    loaded = load_latest(tmp_path)
    assert loaded is not None
    assert loaded.values == {"epoch": 2}


def test_every_damage_is_found(tmp_path: Path) -> None:
    """Each file turned by one bit, cut, emptied or lost: a warning, and the checkpoint before is loaded."""
    model, _ = make()
    save(tmp_path, model=model, epoch=1)
    whole = save(tmp_path, model=model, epoch=2)
    files = [path.relative_to(whole) for path in whole.rglob("*") if path.is_file()]
    damages = (damage, Path.unlink, cut, empty)
    shutil.copytree(whole, tmp_path / "whole")
    assert {file.name for file in files} == {"manifest.json", ".metadata", "__0_0.distcp"}
    for file in files:
        for harm in damages:
            harm(whole / file)
            with pytest.warns(popdist.PopdistWarning, match=r"step-000000000001 is damaged and skipped"):
                loaded = load_latest(tmp_path, model=model)
            assert loaded is not None
            assert loaded.values == {"epoch": 1}
            shutil.rmtree(whole)
            shutil.copytree(tmp_path / "whole", whole)
    loaded = load_latest(tmp_path, model=model)
    assert loaded is not None
    assert loaded.values == {"epoch": 2}


def test_a_run_does_not_start_anew_because_all_is_damaged(tmp_path: Path) -> None:
    """Hours of work may still be there, so that is an error and not an empty folder."""
    model, _ = make()
    shutil.rmtree(save(tmp_path, model=model) / "tensors")
    with (
        pytest.warns(popdist.PopdistWarning, match="damaged"),
        pytest.raises(popdist.CheckpointError, match=r"none of the 1 checkpoints in .* can be read"),
    ):
        load_latest(tmp_path, model=model)


def test_enumerations_of_early_python_3_11_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.11.0 to 3.11.3 pickle a member as a call of getattr, which is of enumerations only."""
    kind = torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING
    monkeypatch.setattr(kind, "__reduce_ex__", lambda self, _protocol: (getattr, (kind, self.name)))
    model = nn.Linear(1, 1)
    directory = save(tmp_path, model=model)
    load_latest(tmp_path, model=model)

    monkeypatch.setattr(kind, "__reduce_ex__", lambda _self, _protocol: (getattr, (torch.Size, "count")))
    (directory / "tensors" / ".metadata").write_bytes(pickle.dumps(kind.TORCH_CONTIGUOUS_FORMAT))
    forge(directory)
    with pytest.warns(popdist.PopdistWarning, match="'count' of .*Size"), pytest.raises(popdist.CheckpointError):
        load_latest(tmp_path, model=model)


class Trap:
    """Runs something when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self._target = target

    def __reduce__(self) -> tuple[Any, tuple[Path]]:
        return Path.touch, (self._target,)


@pytest.mark.parametrize("where", ["in the index", "in place of a tensor", "as an object of DCP's own"])
def test_nothing_is_unpickled_but_tensors(tmp_path: Path, where: str) -> None:
    """A checkpoint made by somebody else, its digests right, runs nothing."""
    sprung = tmp_path / "sprung"
    directory = save(tmp_path, model=nn.Linear(1, 1, bias=False))
    tensors = directory / "tensors"
    if where == "in the index":
        (tensors / ".metadata").write_bytes(pickle.dumps(Trap(sprung)))
    elif where == "in place of a tensor":
        file = io.BytesIO()
        torch.save(Trap(sprung), file)
        (tensors / "__0_0.distcp").write_bytes(file.getvalue())
    else:
        shutil.rmtree(tensors)
        planner = DefaultSavePlanner(flatten_state_dict=False)
        with pytest.warns(UserWarning, match="torch.distributed is disabled"):
            save_by_torch({"model.weight": Trap(sprung)}, checkpoint_id=tensors, planner=planner, no_dist=True)
    forge(directory)
    with (
        pytest.warns(popdist.PopdistWarning, match="tensors cannot be read"),
        pytest.raises(popdist.CheckpointError),
    ):
        load_latest(tmp_path, model=nn.Linear(1, 1, bias=False))
    assert not sprung.exists()


@pytest.mark.parametrize("where", ["in the manifest", "in the index", "a link"])
def test_only_files_of_the_checkpoint_are_read(tmp_path: Path, where: str) -> None:
    """A checkpoint made by somebody else may name any file of this user's."""
    directory = save(tmp_path, model=nn.Linear(1, 1, bias=False))
    tensors = directory / "tensors"
    (tensors / "__0_0.distcp").rename(tmp_path / "secret")
    if where == "a link":
        (tensors / "__0_0.distcp").symlink_to(tmp_path / "secret")
    whole = json.loads((directory / "manifest.json").read_text())
    if where != "a link":
        digest = whole["manifest"]["files"].pop("__0_0.distcp")
    if where == "in the manifest":
        whole["manifest"]["files"]["../../secret"] = digest
    if where == "in the index":
        index = (tensors / ".metadata").read_bytes()
        (tensors / "other.distcp").symlink_to(tmp_path / "secret")
        (tensors / ".metadata").write_bytes(index.replace(b"__0_0.distcp", b"other.distcp"))
    (directory / "manifest.json").write_text(json.dumps(whole))
    forge(directory)
    told = "which is no (plain )?file of this checkpoint"
    with pytest.warns(popdist.PopdistWarning, match=told), pytest.raises(popdist.CheckpointError):
        load_latest(tmp_path, model=nn.Linear(1, 1, bias=False))


def forge(directory: Path) -> None:
    """Make the digests those of the files as they are now."""
    whole = json.loads((directory / "manifest.json").read_text())
    files = whole["manifest"]["files"]
    files.update({name: manifest.digest_of_file(directory / "tensors" / name) for name in files})
    whole["digest"] = manifest._digest_of(whole["manifest"])
    (directory / "manifest.json").write_text(json.dumps(whole))


def test_another_model_is_refused_before_anything_changes(tmp_path: Path) -> None:
    """Every key that is missing, unexpected or of another form is named."""
    model, optimizer = make()
    save(tmp_path, model=model, optimizer=optimizer)
    other = nn.Sequential(nn.Conv2d(2, 5, 3), nn.Identity(), nn.Linear(1, 1, bias=False))
    other_optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    before = popdist.checksum(other)
    fault = (
        r"was saved with another model: only the checkpoint has 1\.weight, 1\.bias, 1\.running_mean, .*; "
        r"it does not have 2\.weight; different are 0\.weight \(float32\[4, 2, 3, 3\] there, "
        r"float32\[5, 2, 3, 3\] here\), 0\.bias"
    )
    with pytest.raises(popdist.CheckpointError, match=fault):
        load_latest(tmp_path, optimizer=other_optimizer, model=other)
    assert popdist.checksum(other) == before
    assert other_optimizer.param_groups[0]["lr"] == 0.5
    with pytest.raises(
        popdist.CheckpointError, match=r"another optimizer: its groups have \[4\] .* and \[3\] here"
    ):
        load_latest(tmp_path, optimizer=torch.optim.AdamW(other.parameters()))
    with pytest.raises(
        popdist.CheckpointError,
        match=r"another optimizer: its settings are betas, eps, .* there, and SGD has momentum",
    ):
        load_latest(tmp_path, optimizer=torch.optim.SGD(model.parameters(), lr=0.5))


def test_what_one_object_refuses_the_others_give_back(tmp_path: Path) -> None:
    """A sampler of another dataset: the error is its own, and model and optimizer stay as they were."""
    model, optimizer = make()
    save(tmp_path, optimizer=optimizer, sampler=popdist.ReplicaSampler(10, 2), model=model)
    other, other_optimizer = make(seed=1)
    other_optimizer.param_groups[0]["lr"] = 0.5
    before = popdist.checksum(other)
    with pytest.raises(popdist.DatasetError, match=r"taken with {'length': 10}") as raised:
        load_latest(tmp_path, optimizer=other_optimizer, sampler=popdist.ReplicaSampler(11, 2), model=other)
    assert raised.value.__notes__ == ["while popdist.checkpoint loaded sampler"]
    assert popdist.checksum(other) == before
    assert other_optimizer.param_groups[0]["lr"] == 0.5


def test_a_name_that_was_not_saved_is_refused(tmp_path: Path) -> None:
    """The message says what there is; fewer names than were saved are all right."""
    model, optimizer = make()
    save(tmp_path, model=model, epoch=1)
    with pytest.raises(
        popdist.CheckpointError, match=r"holds no optimizer: .* the states of model.* values epoch"
    ):
        load_latest(tmp_path, model=model, optimizer=optimizer)
    assert load_latest(tmp_path) is not None


def test_other_conditions_are_told_once(tmp_path: Path) -> None:
    """With other threads it loads, and one warning says that the bits may differ."""
    model, _ = make()
    save(tmp_path, model=model)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(num_threads + 1)
    try:
        with pytest.warns(popdist.PopdistWarning) as told:
            load_latest(tmp_path, model=model)
    finally:
        torch.set_num_threads(num_threads)
    assert [str(it.message).partition(": ")[2] for it in told] == [
        f"threads per replica: {num_threads} then, {num_threads + 1} now"
    ]


def test_random_states_that_were_not_saved_are_told(tmp_path: Path) -> None:
    """A bare module has none; the replicas of the model that it is loaded into keep theirs."""
    save(tmp_path, model=nn.Linear(1, 1))
    with pytest.warns(popdist.PopdistWarning, match=r"bits may differ .*: it holds no model\.randomness"):
        load_latest(tmp_path, model=popdist.ReplicatedModel(nn.Linear(1, 1)))


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ({"keep": 0, "epoch": 1}, "keep=0 must be a whole number of at least 1"),
        ({"step": -1, "epoch": 1}, "step=-1 must be a whole number of at least 0"),
        ({"step": 10**12, "epoch": 1}, "must be 0 to 999999999999"),
        ({}, "nothing to save"),
        ({"a.b": 1}, r"'a\.b' is no name"),
        ({"when": object()}, "when is a object"),
    ],
)
def test_bad_arguments_are_refused(tmp_path: Path, arguments: dict[str, Any], fault: str) -> None:
    """Before anything is written."""
    with pytest.raises(popdist.CheckpointError, match=fault):
        save(tmp_path / "folder", **arguments)
    assert not (tmp_path / "folder").exists()


def test_a_later_format_is_no_damage(tmp_path: Path) -> None:
    """What a later popdist wrote is not skipped in favour of something older."""
    file = save(tmp_path, epoch=1) / "manifest.json"
    file.write_text(file.read_text().replace('"format": 2', '"format": 4'))
    with pytest.raises(
        popdist.CheckpointError, match=r"in format 4, and this is popdist .* which reads formats 2 and 3"
    ):
        load_latest(tmp_path)


def test_an_old_checkpoint_that_cannot_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new one is whole, so it is no error: a warning names what stays, and the next save tries again."""

    def refuse(_directory: object) -> None:
        raise PermissionError(13, "Permission denied")

    save(tmp_path, keep=1, epoch=0)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refuse)
        with pytest.warns(popdist.PopdistWarning, match="older .* Permission denied"):
            directory = save(tmp_path, keep=1, epoch=1)

    loaded = load_latest(tmp_path, epoch=0)
    assert loaded is not None
    assert (loaded.path, loaded.values) == (directory, {"epoch": 1})
    save(tmp_path, keep=1, epoch=2)
    assert os.listdir(tmp_path) == ["step-000000000002"]  # noqa: PTH208 - hidden ones too


def test_the_last_step_there_can_be(tmp_path: Path) -> None:
    """No checkpoint gets a name under which it would never be found."""
    save(tmp_path, step=10**12 - 1, epoch=0)

    with pytest.raises(popdist.CheckpointError, match="holds a checkpoint of step 999999999999, the last"):
        save(tmp_path, epoch=1)
