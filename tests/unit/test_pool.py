"""The pool as a library: where its file may be, what its file may be, and whose leases live.

Holds poprun.pool.database.
"""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from poprun.errors import IpusTakenError, PartitionError, PoolError
from poprun.plan.inventory import VirtualIpu, cpu_cluster
from poprun.pool import place
from poprun.pool.holders import lives, this_process
from poprun.pool.pool import Pool, Ticket
from poprun.pool.requests import PartitionWish, Wish

CLUSTER = cpu_cluster("box", 8)
MOUNTS = """\
22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 22 0:25 / /home rw - nfs4 server:/home rw
31 22 0:26 / /home/me/local rw - xfs /dev/vdb rw
32 22 0:27 / /mnt/a\\040b rw - fuse.sshfs host: rw
33 22 0:28 / /homes rw - tmpfs none rw
"""


@pytest.fixture
def pool(tmp_path: Path) -> Pool:
    """A new pool."""
    return Pool(str(tmp_path / "pool.sqlite"))


def wish(num_ipus: int) -> Wish:
    """So many of the 8 IPUs."""
    return Wish(num_ipus=num_ipus, choose=CLUSTER.pick(num_ipus))


def in_partition(name: str, size: int, **more: bool | None) -> Wish:
    """A partition of ``size`` IPUs."""
    wanted = PartitionWish(name=name, size=size, **more)  # type: ignore[arg-type]
    return Wish(num_ipus=size, choose=CLUSTER.pick(size), partition=wanted, cluster="box")


@contextmanager
def holding(pool: Pool, wanted: Wish) -> Iterator[Ticket]:
    """Hold what is wanted for the length of a block."""
    ticket = pool.ask("job", wanted)
    try:
        yield ticket
    finally:
        pool.release(ticket)


def test_a_pool_that_nobody_made_is_empty(pool: Pool) -> None:
    """Looking makes no file."""
    assert pool.state().taken == frozenset()
    assert not Path(pool.file).exists()


def test_leases_come_and_go(pool: Pool) -> None:
    """What is held is taken; what was given back is free, and its lock file is gone."""
    with holding(pool, wish(3)) as first, holding(pool, wish(5)) as second:
        assert first.ipus == ("cpu/0", "cpu/1", "cpu/2")
        assert len(pool.state().taken) == 8
        assert not set(first.ipus) & set(second.ipus)
        (lease, _) = pool.state().leases
        assert (lease.holder.pid, lease.holder.words, lease.num_ipus) == (os.getpid(), "job", 3)
    assert pool.state().leases == ()
    assert list(Path(f"{pool.file}.leases").iterdir()) == []


def test_nobody_slips_past(pool: Pool) -> None:
    """A lease that asks for few waits behind one that asks for many, and gets its turn after it."""
    with holding(pool, wish(4)) as first:
        large, small = pool.ask("large", wish(8)), pool.ask("small", wish(1))
        assert (large.ipus, small.ipus) == ((), ())
        assert pool.try_again(small, wish(1)).ipus == ()
        assert [lease.id for lease in pool.state().waiting("")] == [large.id, small.id]
        assert first.id < large.id
    large = pool.try_again(large, wish(8))
    assert len(large.ipus) == 8
    assert pool.try_again(small, wish(1)).ipus == ()
    pool.release(large)
    assert pool.try_again(small, wish(1)).ipus == ("cpu/0",)
    pool.release(small)


def test_the_database_itself_refuses_a_second_holder(pool: Pool) -> None:
    """Even a job that picks what is taken does not get it, and leaves the pool as it was."""
    with holding(pool, wish(1)):
        greedy = Wish(num_ipus=1, choose=lambda _: CLUSTER.pick(1)(()))
        with pytest.raises(PoolError, match=r"UNIQUE constraint failed: ipu\.name"):
            pool.ask("greedy", greedy)
        assert len(pool.state().leases) == 1


def test_who_asks_in_vain_leaves_nothing(pool: Pool) -> None:
    """Neither a row in the database, whoever would clear it away later, nor an open lock."""

    def refuse(_: object) -> tuple[VirtualIpu, ...]:
        raise PartitionError("that does not fit")

    with holding(pool, wish(1)):
        before = len(list(Path("/proc/self/fd").iterdir()))
        with pytest.raises(PartitionError, match="that does not fit"):
            pool.ask("picky", Wish(num_ipus=1, choose=refuse))
        assert len(list(Path("/proc/self/fd").iterdir())) == before
        with closing(sqlite3.connect(pool.file)) as connection:
            assert connection.execute("SELECT count(*) FROM lease").fetchone() == (1,)


def test_partitions_are_kept(pool: Pool) -> None:
    """What is in a partition is in no lease but its own, until it is removed."""
    made = pool.create_partition("p", CLUSTER, 4)
    assert (made.size, made.lease, made.is_temporary) == (4, None, False)
    with holding(pool, wish(4)) as lease:
        assert not set(lease.ipus) & set(made.ipus)
        with pytest.raises(IpusTakenError, match="no IPU-Link domain has 1 free IPUs"):
            pool.create_partition("q", CLUSTER, 1)
    with pytest.raises(PartitionError, match="there is a partition p already"):
        pool.create_partition("p", CLUSTER, 1)
    pool.remove_partition("p")
    with pytest.raises(PartitionError, match="there is no partition p: there is none"):
        pool.remove_partition("p")
    assert pool.state().taken == frozenset()


def test_a_partition_may_be_given_its_own_ipus_again(pool: Pool) -> None:
    """Where there are no others, too: what it has is as good as free for it."""
    made = pool.create_partition("p", CLUSTER, 8)

    assert pool.reset_partition("p", CLUSTER).ipus == made.ipus
    assert len(pool.state().taken) == 8


def test_a_partition_in_use(pool: Pool) -> None:
    """Who uses it is told; it is neither removed nor changed, and a second job waits."""
    pool.create_partition("p", CLUSTER, 4)
    with holding(pool, in_partition("p", 4)) as lease:
        assert lease.ipus == ("cpu/0", "cpu/1", "cpu/2", "cpu/3")
        with pytest.raises(IpusTakenError, match=f"partition p is in use: process {os.getpid()} of .* holds it"):
            pool.remove_partition("p")
        with pytest.raises(IpusTakenError, match="partition p is in use"):
            pool.reset_partition("p", CLUSTER)
        with holding(pool, in_partition("p", 4)) as second:
            assert second.ipus == ()
    partition = pool.state().partition("p")
    assert partition is not None
    assert partition.lease is None


@pytest.mark.parametrize(("is_temporary", "is_left"), [(True, False), (False, True)])
def test_a_partition_that_a_job_made(pool: Pool, is_temporary: bool, is_left: bool) -> None:  # noqa: FBT001 - a row
    """It goes with the job, unless it is to stay."""
    with holding(pool, in_partition("p", 2, is_temporary=is_temporary)) as lease:
        assert lease.ipus == ("cpu/0", "cpu/1")
    assert (pool.state().partition("p") is not None) == is_left


def test_a_partition_of_another_size(pool: Pool) -> None:
    """An error that says which sizes fit, and nothing is lost; where it may be changed it is, and it stays."""
    pool.create_partition("p", CLUSTER, 2)
    with pytest.raises(PartitionError, match="partition p has 2 IPUs, and the job fits one of 4: change the job"):
        pool.ask("job", in_partition("p", 4))
    assert pool.state().leases == ()
    with holding(pool, in_partition("p", 4, may_change=True)) as lease:
        assert len(lease.ipus) == 4
    partition = pool.state().partition("p")
    assert partition is not None
    assert partition.size == 4
    with pytest.raises(PartitionError, match="partition p has 4 IPUs, and the job fits one of 2: change the job"):
        pool.ask("job", in_partition("p", 2))


def test_a_partition_that_has_lost_an_ipu(pool: Pool) -> None:
    """Its IPUs are chosen anew, unless that is refused."""
    pool.create_partition("p", CLUSTER, 2)
    with pytest.raises(PartitionError, match="partition p has lost cpu/0"):
        pool.ask("job", replace(in_partition("p", 2, resets=False), is_known="cpu/0".__ne__))
    there = lambda taken: CLUSTER.pick(2)({*taken, "cpu/0"})  # noqa: E731 - what is left of the cluster
    wanted = replace(in_partition("p", 2), is_known="cpu/0".__ne__, choose=there)
    with holding(pool, wanted) as lease:
        assert lease.ipus == ("cpu/2", "cpu/3")


def test_a_lease_of_another_boot_has_ended(pool: Pool) -> None:
    """After a reboot nothing is held, whatever the process ids are, and the partition made for a job is gone."""
    ticket = pool.ask("job", in_partition("p", 4))
    with closing(sqlite3.connect(pool.file)) as connection:
        connection.execute("UPDATE lease SET boot_id = 'another'")
        connection.commit()
    assert pool.state().taken == frozenset()
    with holding(pool, wish(8)) as lease:
        assert len(lease.ipus) == 8
    os.close(ticket.descriptor)


def test_without_its_lock_file_the_process_decides(pool: Pool, tmp_path: Path) -> None:
    """A file that somebody removed ends no lease of a process that lives, nor of one that cannot be seen."""
    me, gone = this_process("job"), str(tmp_path / "gone")

    assert lives(me, gone)
    assert not lives(replace(me, start_ticks=me.start_ticks - 1), gone)
    assert not lives(replace(me, pid=2**22 + 1), gone)
    assert lives(replace(me, pid=2**22 + 1, pid_namespace="pid:[1]"), gone)


@pytest.mark.parametrize("content", [b"no database at all" * 100, b"SQLite format 3\0" + b"\xff" * 8176])
def test_a_damaged_file_is_left_as_it_is(pool: Pool, content: bytes) -> None:
    """The error says what to do; not a byte changes."""
    Path(pool.file).write_bytes(content)
    with pytest.raises(PoolError, match=r"damaged, or no pool .*it was left as it is.*\(mv "):
        pool.ask("job", wish(1))
    assert Path(pool.file).read_bytes() == content


def test_a_page_that_was_overwritten_is_noticed(pool: Pool) -> None:
    """Damage in the middle of a pool that was one."""
    pool.create_partition("p", CLUSTER, 4)
    with Path(pool.file).open("r+b") as file:
        file.seek(4096)
        file.write(b"\xaa" * 4096)
    with pytest.raises(PoolError, match="damaged, or no pool"):
        pool.state()


def test_the_database_of_another_program_is_left_as_it_is(pool: Pool) -> None:
    """It is told from a pool before anything is written."""
    with closing(sqlite3.connect(pool.file)) as connection:
        connection.execute("CREATE TABLE precious (thing TEXT)")
    before = Path(pool.file).read_bytes()
    with pytest.raises(PoolError, match="this is no pool but another program's file, and was left as it is"):
        pool.ask("job", wish(1))
    assert Path(pool.file).read_bytes() == before


@pytest.mark.parametrize(
    ("statement", "problem"),
    [
        ("PRAGMA user_version = 9", "made by a later poprun"),
        ("CREATE TRIGGER t AFTER INSERT ON lease BEGIN DELETE FROM ipu; END", "not as poprun makes them"),
        ("CREATE VIEW v AS SELECT 1", "not as poprun makes them"),
        ("DROP TABLE ipu", "not as poprun makes them"),
    ],
)
def test_a_pool_that_was_changed_is_refused(pool: Pool, statement: str, problem: str) -> None:
    """Nothing that somebody put into the file is executed."""
    pool.create_partition("p", CLUSTER, 4)
    with closing(sqlite3.connect(pool.file)) as connection:
        connection.execute(statement)
    with pytest.raises(PoolError, match=problem):
        pool.state()


def test_places_that_are_no_places(tmp_path: Path) -> None:
    """A folder that is missing, a folder or a link in place of the file."""
    with pytest.raises(PoolError, match="No such file or directory: make that folder first"):
        Pool(str(tmp_path / "missing" / "p")).ask("job", wish(1))
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    for name in ("folder", "link"):
        with pytest.raises(PoolError, match="this is no plain file"):
            Pool(str(tmp_path / name)).ask("job", wish(1))
    assert not (tmp_path / "target").exists()


def test_the_default_place_is_no_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who makes the folder first cannot send others elsewhere; the folder that poprun makes is open to all."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "poprun").symlink_to(tmp_path / "elsewhere")
    file = str(tmp_path / "poprun" / "pool.sqlite")
    monkeypatch.setattr(place, "DEFAULT_POOL", file)
    with pytest.raises(PoolError, match="is no folder"):
        Pool(file).ask("job", wish(1))
    (tmp_path / "poprun").unlink()
    with holding(Pool(file), wish(1)):
        modes = [Path(path).stat().st_mode & 0o7777 for path in (tmp_path / "poprun", file, f"{file}.leases")]
    assert modes == [0o777, 0o666, 0o777]


@pytest.mark.parametrize(("mode", "file_mode"), [(0o700, 0o600), (0o770, 0o660), (0o755, 0o644)])
def test_a_pool_is_open_to_whom_its_folder_is(tmp_path: Path, mode: int, file_mode: int) -> None:
    """The file and the lock files have the bits of the folder."""
    folder = tmp_path / "pool"
    folder.mkdir()
    folder.chmod(mode)
    pool = Pool(str(folder / "p"))
    with holding(pool, wish(1)) as ticket:
        modes = [Path(path).stat().st_mode & 0o777 for path in (pool.file, f"{pool.file}.leases/{ticket.id}")]
    assert modes == [file_mode, file_mode]


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/var/tmp/poprun", "ext4"),
        ("/home/me", "nfs4"),
        ("/home/me/local/p", "xfs"),
        ("/mnt/a b/p", "fuse.sshfs"),
        ("/homes/me", "tmpfs"),
        ("/home", "nfs4"),
    ],
)
def test_the_file_system_of_a_path(path: str, kind: str) -> None:
    """The innermost mount holds it; a name that only begins alike is another one."""
    assert place.file_system_of(path, MOUNTS.splitlines()) == kind


def test_a_network_file_system_is_refused(pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool of one host would be taken for that of all."""
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"22 1 0:9 / {tmp_path} rw - nfs server:/ rw\n")
    monkeypatch.setattr(place, "_MOUNTS", str(mounts))
    with pytest.raises(PoolError, match=r"is on a network file system \(nfs\)"):
        pool.ask("job", wish(1))
