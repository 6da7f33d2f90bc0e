"""The place of a machine's pool, and whether it can be trusted.

The default is a folder of its own below ``/var/tmp``, which outlives a reboot and is on a local disk. Everybody
may write in it, because there is no daemon that could write for them. It has no sticky bit: with one, Linux
(``fs.protected_regular``) forbids users to open each other's files for writing. What another user may then do to
the file can hinder jobs, and do no more: SQLite follows no symbolic link at its side files, the pool's own file
must be a plain one and is never made through a link, and what is read from it is never executed.
"""

import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

from poprun.errors import PoolError
from poprun.process.tree import user_name

DEFAULT_POOL: Final = "/var/tmp/poprun/pool.sqlite"  # noqa: S108 - checked by prepare_folder
POOL_VARIABLE: Final = "POPRUN_POOL"

_MOUNTS: Final = "/proc/self/mountinfo"
_NETWORK: Final = frozenset(
    {
        *("9p", "afs", "afpfs", "beegfs", "ceph", "cifs", "coda", "gfs", "gfs2", "glusterfs", "gpfs", "lustre"),
        *("mmfs", "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "panfs", "prl_fs", "pvfs2", "smb", "smb2", "smb3"),
        *("smbfs", "vboxsf", "virtiofs", "wekafs", "fuse.beegfs", "fuse.ceph", "fuse.gcsfuse", "fuse.glusterfs"),
        *("fuse.juicefs", "fuse.rclone", "fuse.s3fs", "fuse.sshfs", "fuse.weed"),
    }
)
_ESCAPES: Final = (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\"))


def pool_file(named: str | None) -> str:
    """Absolute path of the pool in the file ``named``; of the machine's own pool without a name."""
    return os.path.abspath(named or DEFAULT_POOL)


def prepare_folder(file: str) -> None:
    """Check that ``file`` can be a pool, and make the folder of the default one.

    Args:
        file: Absolute path of the pool.

    Raises:
        PoolError: If its folder is missing, a link, closed to this user, or on a network file system, or the file
            is no plain file.
    """
    folder = os.path.dirname(file)
    if file == DEFAULT_POOL:
        _make_shared(folder)
    try:
        found = os.lstat(folder)
    except OSError as error:
        raise PoolError(f"pool {file}: {folder}: {error.strerror}: make that folder first") from None
    if not stat.S_ISDIR(found.st_mode) and (file == DEFAULT_POOL or not os.path.isdir(folder)):
        raise PoolError(f"pool {file}: {folder} is no folder: set {POOL_VARIABLE} to a file in one that you trust")
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise PoolError(
            f"pool {file}: you may not write in {folder}, which belongs to {user_name(found.st_uid)}: have it "
            f"opened with chmod 777, or set {POOL_VARIABLE}"
        )
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(os.lstat(file).st_mode):
            raise PoolError(f"pool {file}: this is no plain file: remove it, or set {POOL_VARIABLE}")
    _refuse_network(file, folder)


def _make_shared(folder: str) -> None:
    """Make a folder in which every user may write; leave one that is there."""
    try:
        os.mkdir(folder)
        os.chmod(folder, 0o777)  # noqa: S103 - open to all users on purpose, see above
    except FileExistsError:
        return
    except OSError as error:
        raise PoolError(f"pool: {folder} cannot be made: {error.strerror}: set {POOL_VARIABLE}") from None


def _refuse_network(file: str, folder: str) -> None:
    try:
        with open(_MOUNTS, encoding="utf-8", errors="surrogateescape") as mounts:
            kind = file_system_of(os.path.realpath(folder), mounts)
    except OSError:
        return  # a system without /proc/self/mountinfo
    if kind in _NETWORK:
        raise PoolError(
            f"pool {file}: {folder} is on a network file system ({kind}), where several hosts would take it for "
            f"the pool of their own devices: set {POOL_VARIABLE} to a file on a local disk"
        )


def file_system_of(path: str, mounts: Iterable[str]) -> str:
    """The type of the file system that holds ``path``, by lines of ``/proc/self/mountinfo``; empty if none does.

    ``path`` is absolute, without links. Of two mounts at one place the later one counts: proc_pid_mountinfo(5).
    """
    best, found = "", ""
    for line in mounts:
        left, _, right = line.partition(" - ")
        point = left.split()[4]
        for escape, letter in _ESCAPES:
            point = point.replace(escape, letter)
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, found = point, right.split()[0]
    return found
