"""A pool that users share: what one of them can do to the others, played by a process of another user.

Holds poprun.devices.pool.folder, poprun.devices.pool.place and poprun.devices.server.sole_server.
"""

import json
import os
import signal
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from poprun.devices.lease.local_lease import _inherited
from poprun.devices.pool.holders import this_process
from poprun.devices.pool.pool import Pool
from poprun.devices.pool.requests import PartitionRequest, PoolRequest
from poprun.devices.server.sole_server import is_served, sole_server
from poprun.errors import PartitionError, PoolError
from poprun.launch.process.process_tree import key_of
from poprun.plan.inventory import cpu_cluster
from tests.running import DEADLINE_SECONDS

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user, too")

MALLORY = 54321
ANN = 54322
KEY = "0" * 32
KINDS = ("lease", "lock", "new", "partition", "server")
PROBLEMS = {
    "symbolic link": "Too many levels of symbolic links",
    "hard link": "it has several names",
    "pipe": "it is no plain file",
    "folder": "it is no plain file",
    "socket": "No such device",
    "foreign file": ".*is missing",
}
CLUSTER = cpu_cluster("box", 8)
WISH = PoolRequest(num_ipus=1, choose=CLUSTER.pick(1))


@contextmanager
def acting(uid: int, act: Callable[[], object]) -> Iterator[int]:
    """``act`` by a process of another user, for the length of a block; its process id."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            act()
            code = 0
        finally:
            os._exit(code)
    try:
        yield pid
    finally:
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def done(uid: int, act: Callable[[], object]) -> bool:
    """Whether a process of another user could do that."""
    with acting(uid, act) as pid:
        return os.waitpid(pid, 0)[1] == 0


def look(*paths: Path) -> list[tuple[object, ...]]:
    """All that can be seen of files and folders: what stands in them, whose they are, when they were changed."""
    seen: list[tuple[object, ...]] = []
    for path in paths:
        found = path.lstat()
        content = sorted(path.iterdir()) if path.is_dir() else path.read_bytes()
        seen.append((content, found.st_mode, found.st_uid, found.st_gid, found.st_mtime_ns, found.st_ino))
    return seen


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that all users can look into."""
    with tempfile.TemporaryDirectory(prefix="poprun-test-", dir="/var/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture
def precious(place: Path) -> tuple[Path, Path]:
    """A folder and a file of root's that nobody may touch."""
    folder = place / "precious"
    folder.mkdir()
    (folder / "file").write_text("secret")
    (folder / "file").chmod(0o600)
    return folder, folder / "file"


@pytest.fixture(params=[0, MALLORY], ids=["of root", "of the attacker"])
def pool(request: pytest.FixtureRequest, place: Path) -> Pool:
    """A pool for all users, whose folder belongs to root or to the attacker, who may then do anything in it."""
    folder = place / "pool"
    folder.mkdir()
    folder.chmod(0o1777)
    os.chown(folder, request.param, -1)
    return Pool(str(folder), DEADLINE_SECONDS, lambda: CLUSTER)


def take_and_give_back(pool: Pool) -> bool:
    """Use the pool as poprun does; whether it could be used."""
    try:
        pool.state()
        pool.release(pool.enqueue(this_process("job"), WISH))
    except PoolError:
        return False
    return True


def plant(kind: str, file: Path, precious: Path) -> None:
    """Put something of that kind there, which belongs to the attacker where he can make it."""
    if kind == "symbolic link":
        assert done(MALLORY, lambda: file.symlink_to(precious))
    elif kind == "hard link":
        os.link(precious, file)  # as where fs.protected_hardlinks is off
    elif kind == "pipe":
        assert done(MALLORY, lambda: os.mkfifo(file))
    elif kind == "folder":
        assert done(MALLORY, file.mkdir)
    elif kind == "socket":
        assert done(MALLORY, lambda: socket.socket(socket.AF_UNIX).bind(str(file)))
    else:
        assert done(MALLORY, lambda: file.write_text("{}"))


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("kind", PROBLEMS)
def test_what_stands_in_the_pool_leads_nowhere(
    pool: Pool, precious: tuple[Path, Path], kind: str, name: str
) -> None:
    """Whatever stands there under whatever name: an error that says whose it is, or nothing; all at once."""
    planted = Path(pool.path, f"{name}-{KEY}")
    plant(kind, planted, precious[1])
    before = look(*precious)

    could = take_and_give_back(pool)
    with suppress(PoolError), sole_server(pool.path):
        pass
    is_served(pool.path)

    assert look(*precious) == before
    assert could == (name not in ("lease", "partition"))
    assert [file.name for file in Path(pool.path).iterdir()] in ([planted.name], [])
    if not could:
        owner = "root" if kind == "hard link" else str(MALLORY)
        problem = rf"as poprun writes it \({PROBLEMS[kind]}.* was left as it is. It belongs to {owner}"
        with pytest.raises(PoolError, match=f"{planted.name} is not {problem}"):
            pool.state()


def test_a_link_in_place_of_the_pool_is_not_followed(place: Path, precious: tuple[Path, Path]) -> None:
    """Nothing is made, changed or removed behind it, and the folder that it names stays closed."""
    os.chown(place, MALLORY, -1)
    assert done(MALLORY, lambda: (place / "pool").symlink_to(precious[0]))
    before = look(*precious)

    assert not take_and_give_back(Pool(str(place / "pool")))
    assert look(*precious) == before


def forever(act: Callable[[], object]) -> None:
    """Do that again and again, whether or not it works."""
    while True:
        with suppress(OSError, ValueError):
            act()


def test_a_folder_that_is_swapped_all_the_time(place: Path, precious: tuple[Path, Path]) -> None:
    """Between any two looks the folder becomes a link, another folder, and the folder again."""
    os.chown(place, MALLORY, -1)
    path, real, link = place / "pool", place / "real", place / "link"
    before = look(*precious)

    def swap() -> None:
        for step in (
            lambda: real.mkdir(0o1777),
            lambda: real.chmod(0o1777),
            lambda: real.rename(path),
            lambda: link.symlink_to(precious[0]),
            lambda: path.rename(place / f"old{time.monotonic_ns()}"),
            lambda: link.rename(path),
            path.unlink,
        ):
            with suppress(OSError):
                step()

    with acting(MALLORY, lambda: forever(swap)):
        results = {take_and_give_back(Pool(str(path), 5.0)) for _ in range(200)}
    assert False in results
    assert look(*precious) == before


def test_files_that_are_swapped_all_the_time(pool: Pool, precious: tuple[Path, Path]) -> None:
    """Every file that appears in the pool is replaced at once, in turn by each thing that can be made."""
    before = look(*precious)
    makers: list[Callable[[Path], object]] = [
        lambda file: file.symlink_to(precious[1]),
        lambda file: file.symlink_to(precious[0]),
        os.mkfifo,
        lambda file: file.write_text("{}"),
        lambda file: file.mkdir(),
    ]

    def swap() -> None:
        for number, file in enumerate(Path(pool.path).iterdir()):
            with suppress(OSError):
                file.unlink() if not file.is_dir() or file.is_symlink() else file.rmdir()
            with suppress(OSError):
                makers[(number + time.monotonic_ns()) % len(makers)](file)

    with acting(MALLORY, lambda: forever(swap)):
        for _ in range(150):
            take_and_give_back(pool)
    assert look(*precious) == before


@pytest.fixture
def held(pool: Pool) -> Iterator[Pool]:
    """The pool with a lease and a partition of ann's, whose job lives."""
    ready, told = os.pipe()
    partition = PartitionRequest(name="p", size=2, is_temporary=False)
    wish = PoolRequest(num_ipus=2, choose=CLUSTER.pick(2), partition=partition, cluster="box")

    def run() -> None:
        pool.enqueue(this_process("ann's job"), wish)
        os.write(told, b"!")
        signal.pause()

    with acting(ANN, run):
        assert os.read(ready, 1) == b"!"
        yield pool
    os.close(ready)
    os.close(told)


@pytest.mark.parametrize("pool", [0], indirect=True)
@pytest.mark.parametrize("name", ["lease", "lock", "partition"])
def test_what_others_have_put_there_is_safe(held: Pool, name: str) -> None:
    """In a folder of root's nobody renames, replaces, removes, changes or links another user's file."""
    (file,) = Path(held.path).glob(f"{name}-*")
    own = Path(held.path, f"lease-{KEY}")
    before, state = look(file), held.state()

    assert not done(MALLORY, file.unlink)
    assert not done(MALLORY, lambda: file.rename(own))
    assert done(MALLORY, own.touch)
    assert not done(MALLORY, lambda: own.rename(file))
    assert not done(MALLORY, lambda: file.write_text("{}"))
    assert not done(MALLORY, lambda: file.chmod(0o666))
    assert done(MALLORY, own.unlink)
    assert look(file) == before
    assert held.state() == state


def test_users_share_a_pool(held: Pool) -> None:
    """Root's job gets what ann's has not; only ann and root change her partition; her files outlast her job."""
    (lease,) = held.state().leases
    assert (lease.holder.user, lease.ipus) == (str(ANN), ("cpu/0", "cpu/1"))
    ticket = held.enqueue(this_process("root's job"), PoolRequest(num_ipus=7, choose=CLUSTER.pick(7)))
    assert ticket.ipus == ()
    held.release(ticket)
    refused = []

    def change() -> None:
        for act in (lambda: held.remove_partition("p"), lambda: held.reset_partition("p")):
            try:
                act()
            except PartitionError as error:
                refused.append(str(error))
        assert len(refused) == 2
        assert "partition p belongs to 54322, who can change or remove it" in refused[0]

    os.kill(lease.holder.pid, signal.SIGKILL)
    os.waitpid(lease.holder.pid, 0)
    assert done(MALLORY, change)
    assert held.state().leases == ()
    assert take_and_give_back(held)
    assert len(list(Path(held.path).glob("l*-*"))) == 2  # the lease and the lock of ann's job that was killed
    assert done(ANN, lambda: take_and_give_back(held))
    assert list(Path(held.path).glob("l*-*")) == []
    held.reset_partition("p")
    (file,) = Path(held.path).glob("partition-*")
    assert file.stat().st_uid == ANN
    held.remove_partition("p")
    assert list(Path(held.path).iterdir()) == []


def test_a_row_is_its_owners_word(pool: Pool) -> None:
    """Whoever writes that his lease is root's, of one of root's processes, hands root nothing by it."""
    parent = key_of(os.getppid())
    assert parent is not None
    me = replace(this_process("job"), pid=parent.pid, start_ticks=parent.start_ticks)
    values = {
        "version": 1,
        "id": 1,
        "holder": {name: getattr(me, name) for name in me.__dataclass_fields__},
        "since_epoch_seconds": 0,
        "num_ipus": 1,
        "queue": "",
        "ipus": ["cpu/0"],
    }
    file = Path(pool.path, f"lease-{KEY}")
    assert done(MALLORY, lambda: file.write_text(json.dumps(values)))

    (lease,) = pool.state().leases
    assert lease.holder.user == str(MALLORY)
    assert _inherited(CLUSTER, pool.state()) == []
    os.chown(file, 0, 0)
    assert _inherited(CLUSTER, pool.state()) == ["cpu/0"]


def test_the_default_pool_is_made_for_all(place: Path) -> None:
    """Whoever comes first makes it, with the mode it keeps, and others use it then."""
    place.chmod(0o1777)
    pool = Pool(str(place / "pool"))

    assert done(ANN, lambda: take_and_give_back(pool))
    assert stat.S_IMODE(Path(pool.path).stat().st_mode) == 0o1777
    assert take_and_give_back(pool)
    assert done(MALLORY, lambda: take_and_give_back(pool))
