"""A checkpoint of a model in phases has its store's files, and loads into any model; here in a job of one."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import popdist
from popdist.checkpoint import load_latest, save
from popdist.checkpoint.stored_tensors import StoredPiece
from popdist.checkpoint.tensor_pieces import TensorPiece


@pytest.fixture(autouse=True)
def _job_of_one() -> Iterator[None]:
    popdist.init()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several would wait for each other in layers as small as these
    yield
    torch.set_num_threads(threads)
    popdist.finalize()


class Block(nn.Module):
    """A layer with a buffer and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As many numbers as it is given."""
        return x + self.layers(x)  # type: ignore[no-any-return] # a tensor


def make(store: Path | None, seed: int = 0, phases: int = 2) -> tuple[Any, Any]:
    """A model, in phases if it has a store, and its optimizer."""
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(4, 8), *(Block() for _ in range(3)), nn.Linear(8, 1))
    if store is None:
        model = popdist.ReplicatedModel(popdist.parallel.recompute(module))
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)
    phased: Any = popdist.parallel.phased(module, phases=phases, store=store)
    return phased, popdist.parallel.PhasedOptimizer(phased, torch.optim.AdamW, lr=0.1)


def step(model: Any, optimizer: Any, seed: int) -> None:
    """One step on two micro batches."""
    optimizer.zero_grad()
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))
    for micro_batch in model.micro_batches(x, 2):
        model(micro_batch).square().mean().backward()
    optimizer.step()


def bits_of(model: Any) -> list[bytes]:
    """The bits of all weights and buffers."""
    return [it.detach().clone().view(-1).view(torch.uint8).numpy().tobytes() for it in model.state_dict().values()]


@pytest.mark.parametrize("ways", ["phased to phased", "phased to ordinary", "ordinary to phased"])
def test_a_run_goes_on_with_the_same_bits(disk_folder: Path, ways: str) -> None:
    """After a step with state and random numbers, in another number of phases or none; with a torn store, too."""
    source, target = (way == "phased" for way in ways.split(" to "))
    model, optimizer = make(disk_folder / "store" if source else None)
    step(model, optimizer, 0)
    directory = save(disk_folder / "run", model=model, optimizer=optimizer)
    assert {it.name for it in (directory / "tensors").glob("phases*")} == (
        {"phases-0-0", "phases-0-1"} if source else set()
    )

    other, other_optimizer = make(disk_folder / "other" if target else None, seed=1, phases=4)
    step(other, other_optimizer, 5)
    if target:
        other.store.begin_step(7)
        with pytest.raises(popdist.CheckpointError, match=r"step 7 of model is half made: save after"):
            save(disk_folder / "none", model=other, optimizer=other_optimizer)
    load_latest(disk_folder / "run", model=other, optimizer=other_optimizer)
    assert bits_of(other) == bits_of(model)
    for number in (1, 2):
        step(model, optimizer, number)
        step(other, other_optimizer, number)
    assert bits_of(other) == bits_of(model)
    for thing in (model, other):
        if hasattr(thing, "store"):
            thing.close()


def test_what_goes_wrong(disk_folder: Path) -> None:
    """A file that has changed, a copy that fails, another model: an error each, and what was there stays."""
    model, optimizer = make(disk_folder / "store")
    named = {"model": model, "optimizer": optimizer}
    save(disk_folder / "run", **named)
    before = bits_of(model)
    step(model, optimizer, 0)
    later = save(disk_folder / "run", **named)
    with (later / "tensors" / "phases-0-1").open("r+b") as file:
        file.seek(100)
        file.write(b"x")
    with pytest.warns(popdist.PopdistWarning, match=r"phases-0-1 has changed since it was written"):
        load_latest(disk_folder / "run", **named)
    assert bits_of(model) == before

    shutil.rmtree(later)
    os.truncate(disk_folder / "store" / "weights", 4096)
    with pytest.raises(popdist.StoreError, match=r"bytes \d+ to \d+ of .*weights cannot be mapped"):
        save(disk_folder / "run", **named)
    assert [it.name for it in (disk_folder / "run").iterdir()] == ["step-000000000000"]
    model.close()
    larger = nn.Sequential(nn.Linear(4, 9))
    with pytest.raises(popdist.CheckpointError, match="saved with another model"):
        load_latest(disk_folder / "run", model=popdist.ReplicatedModel(larger))


def test_a_piece_is_read_from_pieces(tmp_path: Path) -> None:
    """Rows and columns that lie in several files, in any order of memory."""
    whole = torch.arange(48).view(6, 8)
    bounds = {"upper": (0, 4), "lower": (4, 6)}
    for name, (first, last) in bounds.items():
        data = whole[first:last].T.contiguous().numpy().tobytes()
        (tmp_path / name).write_bytes(bytes(4096) + data.ljust(4096, b"\0"))
    stored = [
        StoredPiece.from_json([name, 4096, (first, 0), (last - first, 8), (1, last - first)])
        for name, (first, last) in bounds.items()
    ]
    assert [StoredPiece.from_json(it.to_json()) for it in stored] == stored

    for offsets, sizes in (((0, 0), (6, 8)), ((3, 2), (2, 5)), ((5, 7), (1, 1)), ((1, 0), (0, 8))):
        piece, found = TensorPiece(offsets=offsets, sizes=sizes), torch.zeros(sizes, dtype=torch.int64)
        for it in stored:
            it.read(tmp_path, torch.int64, piece, found)
        rows, columns = (slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
        assert torch.equal(found, whole[rows, columns])
