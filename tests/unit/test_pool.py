"""The pool as a library: where it may be, what may stand in it, and whose leases live.

Holds poprun.devices.pool.contents, poprun.devices.pool.folder, poprun.devices.pool.holders and
poprun.devices.pool.requests.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from poprun.devices.pool import place
from poprun.devices.pool.holders import is_alive, this_process
from poprun.devices.pool.pool import Pool, Ticket, wait_for_turn
from poprun.devices.pool.requests import PartitionRequest, PoolRequest
from poprun.errors import IpusTakenError, PartitionError, PlanError, PoolError
from poprun.plan.inventory import VirtualIpu, cpu_cluster

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
    return Pool(str(tmp_path / "pool"), cluster=lambda: CLUSTER)


def wish(num_ipus: int) -> PoolRequest:
    """So many of the 8 IPUs."""
    return PoolRequest(num_ipus=num_ipus, choose=CLUSTER.pick(num_ipus))


def in_partition(name: str, size: int, **more: bool | None) -> PoolRequest:
    """A partition of ``size`` IPUs."""
    wanted = PartitionRequest(name=name, size=size, **more)  # type: ignore[arg-type]
    return PoolRequest(num_ipus=size, choose=CLUSTER.pick(size), partition=wanted, cluster="box")


def names(pool: Pool, kind: str) -> list[Path]:
    """The files of one kind in a pool."""
    return sorted(Path(pool.path).glob(f"{kind}-*"))


def edit(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what stands in a file of a pool."""
    values = json.loads(file.read_text())
    change(values)
    file.write_text(json.dumps(values))


@contextmanager
def holding(pool: Pool, wanted: PoolRequest) -> Iterator[Ticket]:
    """Hold what is wanted for the length of a block."""
    ticket = pool.enqueue(this_process("job"), wanted)
    try:
        yield ticket
    finally:
        pool.release(ticket)


def test_a_pool_that_nobody_made_is_empty(pool: Pool) -> None:
    """Looking makes no file."""
    assert pool.state().taken == frozenset()
    assert not Path(pool.path).exists()


def test_leases_come_and_go(pool: Pool) -> None:
    """What is held is taken; what was given back is free, and no file is left of it."""
    with holding(pool, wish(3)) as first, holding(pool, wish(5)) as second:
        assert first.ipus == ("cpu/0", "cpu/1", "cpu/2")
        assert len(pool.state().taken) == 8
        assert not set(first.ipus) & set(second.ipus)
        (lease, _) = pool.state().leases
        assert (lease.holder.pid, lease.holder.words, lease.num_ipus) == (os.getpid(), "job", 3)
    assert pool.state().leases == ()
    assert list(Path(pool.path).iterdir()) == []


def test_what_a_job_runs_is_made_visible(pool: Pool) -> None:
    """In the words that other users read of it; what it is called there must be a name that can be shown."""
    ticket = pool.enqueue(this_process("sh -c '\x1b[2J\n'"), wish(1))
    assert [lease.holder.words for lease in pool.state().leases] == ["sh -c '\\x1b[2J\\n'"]
    pool.release(ticket)
    for name in ("\x1b[2J", "x" * 256):
        with pytest.raises(PlanError, match=r"this cannot stand in a pool: .* characters that can be printed"):
            pool.enqueue(this_process("job"), in_partition(name, 2))
    assert list(Path(pool.path).iterdir()) == []


def test_nobody_slips_past(pool: Pool) -> None:
    """A lease that asks for few waits behind one that asks for many, and gets its turn after it."""
    with holding(pool, wish(4)) as first:
        large, small = pool.enqueue(this_process("large"), wish(8)), pool.enqueue(this_process("small"), wish(1))
        assert (large.ipus, small.ipus) == ((), ())
        assert pool.retry(small, wish(1)).ipus == ()
        assert [lease.id for lease in pool.state().waiting("")] == [large.id, small.id]
        assert first.id < large.id
    large = pool.retry(large, wish(8))
    assert len(large.ipus) == 8
    assert pool.retry(small, wish(1)).ipus == ()
    pool.release(large)
    assert pool.retry(small, wish(1)).ipus == ("cpu/0",)
    pool.release(small)


def test_nothing_is_given_twice(pool: Pool) -> None:
    """Even a job that picks what is taken does not get it, and leaves the pool as it was."""
    with holding(pool, wish(1)):
        greedy = PoolRequest(num_ipus=1, choose=lambda _: CLUSTER.pick(1)(()))
        with pytest.raises(PoolError, match="cpu/0 cannot be held by two jobs"):
            pool.enqueue(this_process("greedy"), greedy)
        assert len(pool.state().leases) == 1


def test_who_asks_in_vain_leaves_nothing(pool: Pool) -> None:
    """Neither a file, whoever would clear it away later, nor an open lock."""

    def refuse(_: object) -> tuple[VirtualIpu, ...]:
        raise PartitionError("that does not fit")

    with holding(pool, wish(1)):
        before = len(list(Path("/proc/self/fd").iterdir()))
        with pytest.raises(PartitionError, match="that does not fit"):
            pool.enqueue(this_process("picky"), PoolRequest(num_ipus=1, choose=refuse))
        assert len(list(Path("/proc/self/fd").iterdir())) == before
        assert (len(names(pool, "lease")), len(names(pool, "lock")), len(names(pool, "new"))) == (1, 1, 0)


def test_partitions_are_kept(pool: Pool) -> None:
    """What is in a partition is in no lease but its own, until it is removed."""
    made = pool.create_partition("p", 4)
    assert (made.size, made.lease, made.is_temporary) == (4, None, False)
    with holding(pool, wish(4)) as lease:
        assert not set(lease.ipus) & set(made.ipus)
        with pytest.raises(IpusTakenError, match="no IPU-Link domain has 1 free IPUs"):
            pool.create_partition("q", 1)
    with pytest.raises(PartitionError, match="there is a partition p already"):
        pool.create_partition("p", 1)
    pool.remove_partition("p")
    with pytest.raises(PartitionError, match="there is no partition p: there is none"):
        pool.remove_partition("p")
    assert pool.state().taken == frozenset()


def test_a_partition_may_be_given_its_own_ipus_again(pool: Pool) -> None:
    """Where there are no others, too: what it has is as good as free for it."""
    made = pool.create_partition("p", 8)

    assert pool.reset_partition("p").ipus == made.ipus
    assert len(pool.state().taken) == 8


def test_a_partition_in_use(pool: Pool) -> None:
    """Who uses it is told; it is neither removed nor changed, and a second job waits."""
    pool.create_partition("p", 4)
    with holding(pool, in_partition("p", 4)) as lease:
        assert lease.ipus == ("cpu/0", "cpu/1", "cpu/2", "cpu/3")
        with pytest.raises(IpusTakenError, match=f"partition p is in use: process {os.getpid()} of .* holds it"):
            pool.remove_partition("p")
        with pytest.raises(IpusTakenError, match="partition p is in use"):
            pool.reset_partition("p")
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
    pool.create_partition("p", 2)
    with pytest.raises(PartitionError, match="partition p has 2 IPUs, and the job fits one of 4: change the job"):
        pool.enqueue(this_process("job"), in_partition("p", 4))
    assert pool.state().leases == ()
    with holding(pool, in_partition("p", 4, may_change=True)) as lease:
        assert len(lease.ipus) == 4
    partition = pool.state().partition("p")
    assert partition is not None
    assert partition.size == 4
    with pytest.raises(PartitionError, match="partition p has 4 IPUs, and the job fits one of 2: change the job"):
        pool.enqueue(this_process("job"), in_partition("p", 2))


def test_who_needs_a_larger_partition_waits_for_room(pool: Pool) -> None:
    """A free partition that is too small is no turn as long as there are not enough IPUs for the larger one."""
    pool.create_partition("p", 2)
    larger = in_partition("p", 4, may_change=True)
    with holding(pool, wish(5)), holding(pool, larger) as waiting:
        began = time.monotonic()
        wait_for_turn(pool, waiting, larger, 0.2)

        assert waiting.ipus == ()
        assert time.monotonic() - began >= 0.2


def test_a_partition_that_has_lost_an_ipu(pool: Pool) -> None:
    """Its IPUs are chosen anew, unless that is refused."""
    pool.create_partition("p", 2)
    with pytest.raises(PartitionError, match="partition p has lost cpu/0"):
        pool.enqueue(this_process("job"), replace(in_partition("p", 2, resets=False), is_known="cpu/0".__ne__))
    there = lambda taken: CLUSTER.pick(2)({*taken, "cpu/0"})  # noqa: E731 - what is left of the cluster
    wanted = replace(in_partition("p", 2), is_known="cpu/0".__ne__, choose=there)
    with holding(pool, wanted) as lease:
        assert lease.ipus == ("cpu/2", "cpu/3")


def test_a_lease_of_another_boot_has_ended(pool: Pool) -> None:
    """After a reboot nothing is held, whatever the process ids are, and the partition made for a job is gone."""
    ticket = pool.enqueue(this_process("job"), in_partition("p", 4))
    (file,) = names(pool, "lease")
    edit(file, lambda row: row["holder"].update(boot_id="another"))
    assert pool.state().taken == frozenset()
    with holding(pool, wish(8)) as lease:
        assert len(lease.ipus) == 8
    assert list(Path(pool.path).iterdir()) == []
    assert ticket.descriptor is not None
    os.close(ticket.descriptor)


def test_without_its_lock_file_the_process_decides() -> None:
    """A file that somebody removed ends no lease of a process that lives, nor of one that cannot be seen."""
    me = this_process("job")

    assert is_alive(me, lambda: None)
    assert not is_alive(replace(me, start_ticks=me.start_ticks - 1), lambda: None)
    assert not is_alive(replace(me, pid=2**22 + 1), lambda: None)
    assert is_alive(replace(me, pid=2**22 + 1, pid_namespace="pid:[1]"), lambda: None)


def test_what_a_crash_of_the_machine_left_is_no_lease(pool: Pool) -> None:
    """An empty row, a file that was never finished, a lock without a row: they go with the next transaction."""
    with holding(pool, wish(1)):
        for kind in ("lease", "lock", "new", "partition"):
            Path(pool.path, f"{kind}-{'0' * 32}").write_bytes(b"\0" * 9)
        assert len(pool.state().leases) == 1
        pool.create_partition("p", 1)
    assert [len(names(pool, kind)) for kind in ("lease", "lock", "new", "partition")] == [0, 0, 0, 1]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"nothing at all", "Expecting value"),
        (b"\xff", "codec can't decode"),
        (b"[]", "must be a mapping"),
        (b'{"version": 9}', "version 9: this poprun reads version 1"),
        (b" " * (4 * 2**20 + 1), "it is too long"),
    ],
    ids=["text", "bytes", "list", "version", "length"],
)
def test_a_damaged_file_is_left_as_it_is(pool: Pool, content: bytes, problem: str) -> None:
    """The error says what to do; not a byte changes; what this process holds is given back nevertheless."""
    ticket = pool.enqueue(this_process("job"), wish(1))
    damaged = Path(pool.path, f"lease-{'0' * 32}")
    damaged.write_bytes(content)
    with pytest.raises(PoolError, match=rf"as poprun writes it \(.*{problem}.*was left as it is.*: rm {damaged}"):
        pool.enqueue(this_process("job"), wish(1))
    assert damaged.read_bytes() == content
    pool.release(ticket)
    assert list(Path(pool.path).iterdir()) == [damaged]


def test_a_partition_whose_allocation_has_gone(pool: Pool) -> None:
    """It cannot be chosen anew, and the error says what there is."""
    pool.cluster = lambda: replace(CLUSTER, allocations={"ann": range(4)})
    pool.create_partition("p", 4, allocation="ann")
    pool.cluster = lambda: replace(CLUSTER, allocations={"bob": range(4)})

    with pytest.raises(PartitionError, match="there is no allocation ann: there is bob"):
        pool.reset_partition("p")


def test_places_that_are_no_places(tmp_path: Path) -> None:
    """A folder above that is missing, a file or a link in place of the pool, folders that others can empty."""
    (tmp_path / "file").touch()
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    for name, problem in (
        ("missing/p", "cannot be made: No such file or directory: make the folder above it"),
        ("file", "this is no folder, or a link"),
        ("link", "this is no folder, or a link"),
        ("open", "users can remove there what others have put: have .*, whose it is, do chmod [+]t"),
        ("open/p", "everybody can replace what is made in .*/open, which has no sticky bit"),
    ):
        with pytest.raises(PoolError, match=problem):
            Pool(str(tmp_path / name)).enqueue(this_process("job"), wish(1))
    assert list((tmp_path / "target").iterdir()) == []


@pytest.mark.parametrize("mode", [0o700, 0o770, 0o755, 0o1777])
def test_a_pool_is_open_to_whom_the_folder_above_is(tmp_path: Path, mode: int) -> None:
    """And nobody removes there what others have put; its files can be read by all who may look into it."""
    tmp_path.chmod(mode)
    pool = Pool(str(tmp_path / "p"))
    with holding(pool, wish(1)) as ticket:
        modes = [
            Path(pool.path, name).stat().st_mode for name in (".", f"lease-{ticket.key}", f"lock-{ticket.key}")
        ]
    assert [found & 0o7777 for found in modes] == [mode | 0o1000, 0o644, 0o644]


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
        pool.enqueue(this_process("job"), wish(1))
