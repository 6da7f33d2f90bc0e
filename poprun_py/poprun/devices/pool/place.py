"""The place of a machine's pool: its folder is made or found, and checked before a file in it is used.

The default folder outlives a reboot and is on a local disk. Every user may write in the folder, because there is
no daemon. The sticky bit protects each user's files from all users but root and the folder's owner. The open
folder is checked, and files are opened relative to the open folder: nobody can replace the folder after the check.
"""

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from popdist.ground.trusted_paths import opened_parent
from poprun.errors import PoolError
from poprun.launch.process.process_tree import user_name

DEFAULT_POOL: Final = "/var/tmp/poprun-pool"
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
_ALL: Final = 0o777
_OTHERS_WRITE: Final = 0o022


def pool_folder(named: str | None) -> str:
    """Return the absolute path of the pool's folder ``named``, or of the machine's default folder if None."""
    return os.path.abspath(named or DEFAULT_POOL)


@contextmanager
def opened_place(path: str, *, makes: bool) -> Iterator[int]:
    """A context with the descriptor of the pool's folder ``path``; PoolError if the folder is not safe."""
    if makes:
        _make(path)
    try:
        with opened_parent(f"{os.path.dirname(path)}/.") as (above, _):
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(os.path.basename(path), flags, dir_fd=above)
    except NotADirectoryError:
        raise PoolError(
            f"pool {path}: this is no folder, or a link: set {POOL_VARIABLE} to a folder that poprun may make"
        ) from None
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not makes:
            raise
        raise PoolError(f"pool {path}: {error.strerror}: set {POOL_VARIABLE}") from None
    try:
        _check(path, descriptor, makes=makes)
        yield descriptor
    finally:
        os.close(descriptor)


def _make(path: str) -> None:
    """Make the pool's folder ``path``, unless it exists, with the permissions of its parent folder."""
    if os.path.lexists(path):
        return
    above = os.path.dirname(path)
    try:
        with opened_parent(f"{above}/.") as (folder, _):
            mode = os.fstat(folder).st_mode
            if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
                raise PoolError(
                    f"pool {path}: everybody can replace what is made in {above}, which has no sticky bit: set "
                    f"{POOL_VARIABLE} to another place"
                )
            old = os.umask(0)  # so that mkdir sets the mode itself, and the folder never has another mode
            try:
                os.mkdir(os.path.basename(path), mode & _ALL | stat.S_ISVTX, dir_fd=folder)
            finally:
                os.umask(old)
    except FileExistsError:
        return
    except OSError as error:
        cure = "" if error.errno == errno.EROFS else "make the folder above it, or "
        raise PoolError(f"pool {path} cannot be made: {error.strerror}: {cure}set {POOL_VARIABLE}") from None


def _check(path: str, descriptor: int, *, makes: bool) -> None:
    status = os.fstat(descriptor)
    if status.st_mode & _OTHERS_WRITE and not status.st_mode & stat.S_ISVTX:
        raise PoolError(
            f"pool {path}: users can remove there what others have put: have {user_name(status.st_uid)}, whose it "
            f"is, do chmod +t {path}, or set {POOL_VARIABLE}"
        )
    if makes and os.fstatvfs(descriptor).f_flag & os.ST_RDONLY:
        raise PoolError(
            f"pool {path}: it is on a read-only file system: set {POOL_VARIABLE} to a folder to write in"
        )
    needed = os.R_OK | os.X_OK | (os.W_OK if makes else 0)
    if not os.access(".", needed, dir_fd=descriptor, effective_ids=True):
        raise PoolError(
            f"pool {path}: you may not {'write' if makes else 'look'} there, and it belongs to "
            f"{user_name(status.st_uid)}: have it opened with chmod 1777, or set {POOL_VARIABLE}"
        )
    with suppress(OSError):  # a system may lack /proc/self/mountinfo
        with open(_MOUNTS, encoding="utf-8", errors="surrogateescape") as mounts:
            kind = file_system_of(os.readlink(f"/proc/self/fd/{descriptor}"), mounts)
        if kind in _NETWORK:
            raise PoolError(
                f"pool {path}: this is on a network file system ({kind}), where several hosts would take it for "
                f"the pool of their own devices: set {POOL_VARIABLE} to a folder on a local disk"
            )


def file_system_of(path: str, mounts: Iterable[str]) -> str:
    """Return the type of the file system of ``path``, given lines of /proc/self/mountinfo; "" if unknown."""
    # If two mounts have the same mount point, the later mount counts: proc_pid_mountinfo(5).
    longest, kind = "", ""
    for line in mounts:
        left, _, right = line.partition(" - ")
        point = left.split()[4]
        for escape, letter in _ESCAPES:
            point = point.replace(escape, letter)
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(longest):
            longest, kind = point, right.split()[0]
    return kind
