"""A store keeps bytes in a folder or in host memory, and refuses a place that would not do; here in a job of one.

Holds popdist.phases.store_file.
"""

import os
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

import popdist
from popdist.ground.local_tensors import TensorForm
from popdist.job import context
from popdist.phases.phase_store import PhaseStore
from popdist.phases.store_file import BLOCK_BYTES, PIECE_BYTES, Region, digest_of_pieces, make_buffer

WEIGHT = TensorForm.of(torch.zeros(3, 700))
FORMS = {"weight": WEIGHT, "bias": TensorForm.of(torch.zeros(3))}


@pytest.fixture
def tmp_path(disk_folder: Path) -> Path:
    """Not in memory, where a store of a model on the CPU is refused."""
    return disk_folder


@pytest.fixture(autouse=True)
def _job_of_one() -> Iterator[None]:
    popdist.init()
    before = threading.active_count()
    yield
    popdist.finalize()
    assert threading.active_count() == before


def open_store(place: Path | str, forms: dict[str, TensorForm] | None = None) -> PhaseStore:
    """Open a store of two weights."""
    return PhaseStore(place, forms or FORMS, group=context.current_group(), device=torch.device("cpu"))


def bytes_of(num_bytes: int, seed: int = 0) -> torch.Tensor:
    """A buffer of random bytes."""
    buffer = make_buffer(num_bytes)
    return buffer.random_(256, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("place", ["host", None])
def test_what_is_written_is_read(tmp_path: Path, place: str | None) -> None:
    """In pieces and mapped; what is written into a mapped tensor stays there."""
    store = open_store(place or tmp_path / "run" / "store")
    big = TensorForm.of(torch.zeros(PIECE_BYTES + BLOCK_BYTES, dtype=torch.uint8))
    state = store.add("state", {"first": WEIGHT, "big": big})
    file, regions = state.file, state.regions
    data, back = bytes_of(regions["big"].length), make_buffer(regions["big"].length)
    file.write(regions["big"].start, data)
    file.read(regions["big"].start, back)
    assert torch.equal(back, data)

    mapped = file.mapped(regions["big"], big)
    assert torch.equal(mapped, data)
    assert store.place_of(mapped) == (file, regions["big"].start)
    assert store.place_of(data) is None
    mapped[0] += 1
    file.read(regions["big"].start, back)
    assert torch.equal(back, data)
    del mapped
    values = torch.arange(2100).view(700, 3).T
    for name, content in {"first": values.to(torch.float32), "big": data + 1}.items():
        state.write(name, content)
        assert torch.equal(state.mapped(name), content)
    store.close()
    store.close()


def test_a_file_is_copied(tmp_path: Path) -> None:
    """Whole, with the digest of what stands in the copy."""
    form = TensorForm(dtype=torch.uint8, shape=(2 * PIECE_BYTES + 5,), stride=(1,))
    store = open_store(tmp_path / "store", {"w": form})
    store.weights.file.write(0, bytes_of(store.weights.file.num_bytes))
    digest = store.weights.file.copy_to(tmp_path / "copy")
    store.close()

    content = (tmp_path / "copy").read_bytes()
    assert content == (tmp_path / "store" / "weights").read_bytes()
    assert digest == digest_of_pieces(tmp_path / "copy")
    (tmp_path / "copy").write_bytes(content[:-1] + b"x")
    assert digest != digest_of_pieces(tmp_path / "copy")


def test_a_file_that_is_made_anew_frees_its_room(tmp_path: Path) -> None:
    """What was mapped from it stays as it was."""
    store = open_store(tmp_path)
    first = store.add("state", FORMS)
    first.write("bias", torch.ones(3))
    mapped = first.mapped("bias")
    second = store.add("state", FORMS)
    assert first.file.descriptor == -1
    assert torch.equal(mapped, torch.ones(3))
    assert torch.equal(second.mapped("bias"), torch.zeros(3))
    store.close()


def test_a_torn_store_says_so(tmp_path: Path) -> None:
    """Between the begin and the end of a step; a failed write leaves it so."""
    store = open_store(tmp_path)
    store.check_whole()
    store.begin_step(17)
    with pytest.raises(popdist.StoreError, match=r"step 17 is half made.*load_latest"):
        store.check_whole()
    os.truncate(tmp_path / "weights", BLOCK_BYTES)
    failing = partial(store.weights.file.read, 0, make_buffer(store.weights.file.num_bytes))
    with pytest.raises(popdist.StoreError, match=rf"weights ends at byte {BLOCK_BYTES}"):
        store.end_step(failing)
    assert store.is_torn
    store.end_step()
    store.check_whole()
    for start, data in ((0, make_buffer(100)), (8, make_buffer(BLOCK_BYTES)), (1 << 20, make_buffer(BLOCK_BYTES))):
        with pytest.raises(popdist.StoreError, match=r"are not (whole blocks|in )"):
            store.weights.file.write(start, data)
    store.close()
    with pytest.raises(popdist.StoreError, match="closed"):
        store.weights.file.read(0, make_buffer(BLOCK_BYTES))


def test_a_store_in_use_is_refused(tmp_path: Path) -> None:
    """By another process, and by another model of the same one; after its end any model takes it over."""
    store = open_store(tmp_path)
    with pytest.raises(popdist.StoreError, match=r"another phased model of this program: call its close\(\)"):
        open_store(tmp_path)
    (tmp_path / "lock").write_text("process 1 on here")
    with pytest.raises(popdist.StoreError, match=r"in use by process 1 on here: wait for its end"):
        open_store(tmp_path)
    child = forked(lambda: store.weights.file.read(0, make_buffer(BLOCK_BYTES)))
    assert "forked" in child
    store.close()

    other = open_store(tmp_path, {"weight": TensorForm.of(torch.zeros(4, 700))})
    assert [it.name for it in sorted(tmp_path.iterdir())] == ["lock", "weights"]
    assert (tmp_path / "weights").stat().st_size == other.weights.file.num_bytes
    other.close()


def forked(call: Callable[[], object]) -> str:
    """The error of ``call`` in a forked child, which ends without a word."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
        pid = os.fork()
    if not pid:
        try:
            call()
        except popdist.StoreError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(pid, 0)
    with os.fdopen(read, "rb") as told:
        return told.read().decode()


def test_a_place_that_will_not_do(tmp_path: Path) -> None:
    """Each is an error that says why, and nothing stays behind."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    too_large = {"weight": TensorForm(dtype=torch.float32, shape=(1 << 50,), stride=(1,))}
    faults: list[tuple[Path | str, dict[str, TensorForm], str]] = [
        (tmp_path / "full", FORMS, r"is no store, and not empty: it has thesis\.txt"),
        (tmp_path / "full" / "thesis.txt" / "store", FORMS, "cannot be a store: Not a directory"),
        (tmp_path / "new", too_large, rf"weights needs {4 << 50} bytes, and \d+ are free"),
        ("host", too_large, rf"needs {4 << 50} bytes of host memory, and \d+ are available"),
        (Path("/dev/shm") / f"popdist-{os.getpid()}", FORMS, "is on a tmpfs, which is the memory"),
    ]
    for place, forms, words in faults:
        with pytest.raises(popdist.StoreError, match=words):
            open_store(place, forms)

    assert [it.name for it in tmp_path.rglob("*")] == ["full", "thesis.txt"]
    assert not (Path("/dev/shm") / f"popdist-{os.getpid()}").exists()
    store = open_store(tmp_path / "new")
    with pytest.raises(popdist.StoreError, match=re.escape(str(tmp_path / "new" / "gradients"))):
        store.add("gradients", too_large)
    nothing = TensorForm.of(torch.zeros(0, 2))
    assert store.weights.file.mapped(Region(start=0, num_bytes=0), nothing).shape == (0, 2)
    store.close()
