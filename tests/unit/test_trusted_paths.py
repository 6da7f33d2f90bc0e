"""A folder of another user is never taken for one's own, whatever is kept there.

Holds popdist.ground.trusted_paths.
"""

import os
from pathlib import Path

import pytest
import torch

import popdist
from popdist.ground.local_tensors import TensorForm
from popdist.ground.trusted_paths import opened_own_folder, own_folder_problem
from popdist.job import context
from popdist.launching.__main__ import call_function
from popdist.phases.phase_store import PhaseStore
from popdist.startup import recording
from poprun.errors import PlanError, UsageError
from poprun.hosts.job_network import find_network
from poprun.hosts.problems import judge_slots
from poprun.observe.show.trace.collection import prepare_folder
from poprun.plan.request import TraceSettings
from tests.planning import planned

MALLORY = 54321

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user, too")


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A folder of another user."""
    folder = tmp_path / "foreign"
    folder.mkdir()
    os.chown(folder, MALLORY, -1)
    return folder


def test_a_folder_of_ones_own_is_made_and_opened(tmp_path: Path) -> None:
    """With those above it, whatever the umask is; behind a link of one's own, too."""
    (tmp_path / "link").symlink_to("real")
    before = os.umask(0)
    try:
        assert own_folder_problem(str(tmp_path / "real" / "cache")) == ""
    finally:
        os.umask(before)

    assert own_folder_problem(str(tmp_path / "link" / "cache")) == ""
    assert [it.name for it in (tmp_path / "real").iterdir()] == ["cache"]
    (tmp_path / "file").touch()
    assert own_folder_problem(str(tmp_path / "file")) == f"{tmp_path}/file: Not a directory"


def test_a_folder_for_all_is_nobodys_own(tmp_path: Path) -> None:
    """One with a sticky bit will do for what is made there under a new name."""
    for mode in (0o777, 0o1777):
        tmp_path.chmod(mode)
        assert "every user may write there" in own_folder_problem(str(tmp_path))
    with opened_own_folder(str(tmp_path), may_be_for_all=True) as folder:
        assert os.fstat(folder).st_ino == tmp_path.stat().st_ino


@needs_root
@pytest.mark.parametrize("whose", ["folder", "link"])
def test_nothing_is_kept_with_another_user(foreign: Path, whose: str) -> None:
    """No compiled programs, trace, store or call of a function: neither in his folder nor behind his link."""
    place = foreign
    if whose == "link":
        place = foreign.parent / "link"
        place.symlink_to(foreign.parent)
        os.lchown(place, MALLORY, -1)
    why = "is a symbolic link of another user" if whose == "link" else "belongs to another user"

    with pytest.raises(PlanError, match=f"--executable-cache-path: .*{why}"):
        find_network(planned(executable_cache_path=str(place)), {}, 0)
    with pytest.raises(UsageError, match=f"--trace .*{why}"):
        prepare_folder(planned(trace=TraceSettings(folder=str(place))), "job", 0)
    (foreign / "call.pickle").write_bytes(b"cos\nabort\n(tR.")
    with pytest.raises(SystemExit, match=why):
        call_function(place)
    (foreign / "call.pickle").unlink()
    popdist.init()
    with pytest.raises(popdist.StoreError, match=why):
        PhaseStore(
            place, {"w": TensorForm.of(torch.zeros(3))}, group=context.current_group(), device=torch.device("cpu")
        )
    popdist.finalize()
    assert list(foreign.iterdir()) == []


def test_another_hosts_cache_is_looked_at_there() -> None:
    """What the host says of it is a problem of that host."""
    slots = {"cores": [], "cache": "/c: it belongs to another user (number 7): name a folder of your own"}
    (problem,) = judge_slots("n1", slots, planned())
    assert (problem.host, problem.cause) == ("n1", slots["cache"])


@needs_root
def test_a_program_records_nothing_in_another_users_folder(foreign: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a host that does not share poprun's folder he may have made it."""
    monkeypatch.setenv(recording.SETTINGS, f'{{"file": "{foreign}/instance-0", "steps": [0, 1], "seconds": null}}')
    asked: list[str] = []
    recording.begin(lambda name, _: asked.append(name), bytes, lambda: None, lambda: None)  # type: ignore[arg-type,return-value]

    assert asked == []


def test_a_trace_stays_in_its_folder(tmp_path: Path) -> None:
    """Whatever the job is called."""
    with pytest.raises(PlanError, match="can have no folder"):
        prepare_folder(planned(trace=TraceSettings(folder=str(tmp_path / "trace"))), "../../x", 0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["lock", "weights"])
def test_a_store_follows_no_link(disk_folder: Path, name: str) -> None:
    """A file that it names stays as it was."""
    precious = disk_folder / "precious"
    precious.write_text("secret")
    (disk_folder / "store").mkdir()
    (disk_folder / "store" / name).symlink_to(precious)
    popdist.init()
    try:
        forms = {"w": TensorForm.of(torch.zeros(3))}
        PhaseStore(disk_folder / "store", forms, group=context.current_group(), device=torch.device("cpu")).close()
    except popdist.StoreError as error:
        assert "lock cannot be opened" in str(error)  # noqa: PT017 - files of the model are replaced
    popdist.finalize()
    assert precious.read_text() == "secret"
