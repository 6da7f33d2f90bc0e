"""A folder of checkpoints holds whole ones, in the order of their names, and no more than were asked for.

Holds popdist.checkpoint.manifest.
"""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from popdist.checkpoint import checkpoint_folder
from popdist.checkpoint.manifest import current_conditions, differences
from popdist.errors import CheckpointError


def fill(directory: Path) -> None:
    """What a checkpoint holds, here."""
    (directory / "inner").mkdir()
    (directory / "inner" / "file").write_text("content")


def fail(directory: Path) -> None:
    """Write something, and then no more."""
    fill(directory)
    raise OSError(28, "No space left on device")


def create(folder: Path, step: int, write: Callable[[Path], None]) -> Path:
    """Make a checkpoint, or nothing if ``write`` fails."""
    checkpoint_folder.begin(folder, step)
    try:
        write(checkpoint_folder.partial_of(folder, step))
    except OSError:
        checkpoint_folder.abandon(folder, step)
        raise
    checkpoint_folder.complete(folder, step)
    return checkpoint_folder.directory_of(folder, step)


@given(st.sets(st.integers(0, checkpoint_folder.LAST_STEP), min_size=1))
def test_names_are_in_the_order_of_steps(steps: set[int]) -> None:
    """Any listing shows checkpoints in their order."""
    names = [checkpoint_folder.directory_of(Path("folder"), step).name for step in sorted(steps)]
    assert names == sorted(names)


def test_a_checkpoint_is_made_and_found(tmp_path: Path) -> None:
    """With all it holds, in a folder that is made for it; other things in the folder are no checkpoints."""
    place = tmp_path / "new" / "folder"
    directory = create(place, 12, fill)
    (place / "step-7").mkdir()
    (place / "notes.txt").touch()

    assert directory.name == "step-000000000012"
    assert (directory / "inner" / "file").read_text() == "content"
    assert checkpoint_folder.steps_in(place) == [12]


def test_no_folder_is_an_empty_one(tmp_path: Path) -> None:
    """Nothing was saved yet; but a file is no folder."""
    assert checkpoint_folder.steps_in(tmp_path / "none") == []
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="is no folder of checkpoints"):
        checkpoint_folder.steps_in(tmp_path / "file")


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    """A disk that is full has its room back, and what was there is there."""
    create(tmp_path, 1, fill)
    with pytest.raises(OSError, match="No space"):
        create(tmp_path, 2, fail)
    assert os.listdir(tmp_path) == ["step-000000000001"]  # noqa: PTH208 - hidden ones too


def test_what_a_killed_program_left_goes(tmp_path: Path) -> None:
    """Half a checkpoint, and half a removal, are never found, and the next one that is made sweeps them up."""
    for name in (".step-000000000003.partial", ".step-000000000001.old"):
        (tmp_path / name).mkdir()
        fill(tmp_path / name)

    assert checkpoint_folder.steps_in(tmp_path) == []
    create(tmp_path, 3, fill)
    assert os.listdir(tmp_path) == ["step-000000000003"]  # noqa: PTH208 - hidden ones too


@pytest.mark.parametrize(("count", "left"), [(1, [9]), (2, [5, 9]), (3, [2, 5, 9]), (7, [2, 5, 9])])
def test_the_last_ones_stay(tmp_path: Path, count: int, left: list[int]) -> None:
    """The greatest steps, in whatever order they were made."""
    for step in (5, 9, 2):
        create(tmp_path, step, fill)
    checkpoint_folder.keep_last(tmp_path, count)
    assert checkpoint_folder.steps_in(tmp_path) == left


def test_everything_is_synced_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lists a new folder; files and the directories that list them; then the new name, and what lists it."""
    done: list[str] = []
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: done.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
    )
    place = tmp_path / "a" / "b"
    create(place, 1, fill)
    partial = f"{place}/.step-000000000001.partial"
    assert {*done[:2]} == {str(tmp_path), str(tmp_path / "a")}
    assert {*done[2:5]} == {f"{partial}/inner/file", f"{partial}/inner", partial}
    assert done[5:] == [str(place)]

    done.clear()
    create(place, 2, fill)  # in a folder that is there, whose parent need not be one that can be read
    assert str(place) in done
    assert str(tmp_path / "a") not in done


def test_differences_of_conditions_are_told_in_words() -> None:
    """What both know and what has changed; the same conditions are no difference."""
    now = current_conditions()
    assert {"popdist", "torch", "CPU", "CPU capability", "threads per replica", "replicas"} <= set(now)
    assert differences(now, now) == []
    assert differences({**now, "threads per replica": 96, "moon": "full"}, now) == [
        f"threads per replica: 96 then, {now['threads per replica']} now"
    ]
