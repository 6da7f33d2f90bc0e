"""A file is written wholly or not at all, where the user said, and not where another user's link leads."""

import os
import stat
from pathlib import Path

import pytest

from poprun.devices.pool.place import opened_place
from poprun.devices.server.server_client import make_token
from poprun.errors import PoolError, ServerError
from poprun.text.atomic_file import check_target, write_whole


@pytest.mark.parametrize("name", ["mine", "chain", "dangling"])
def test_links_of_ones_own_stay_links(tmp_path: Path, name: str) -> None:
    """The file that they name in the end is written, whether or not it is there; nothing is left beside it."""
    (tmp_path / "file").write_text("old")
    (tmp_path / "mine").symlink_to("file")
    (tmp_path / "chain").symlink_to(tmp_path / "mine")
    (tmp_path / "dangling").symlink_to(tmp_path / "new")
    files = {"file", "mine", "chain", "dangling"}
    for _ in range(2):
        check_target(str(tmp_path / name))
        write_whole(str(tmp_path / name), "néw\n")

    assert (tmp_path / name).is_symlink()
    assert (tmp_path / name).read_text(encoding="utf-8") == "néw\n"
    assert {it.name for it in tmp_path.iterdir()} == files | ({"new"} if name == "dangling" else set())


def test_a_file_that_cannot_be_written_is_refused_before(tmp_path: Path) -> None:
    """A missing directory, a file in the place of one, a directory, a device, a pipe, a name that is too long."""
    (tmp_path / "file").write_text("x")
    os.mkfifo(tmp_path / "pipe")
    wrong = ("missing/report.json", "file/report.json", ".", "pipe", "/dev/null", "x" * 300)

    for name in wrong:
        with pytest.raises(OSError, match=r"\S"):
            check_target(str(tmp_path / name))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["file", "pipe"]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    """And no half of the new one."""
    (tmp_path / "report.json").write_text("old")

    with pytest.raises(UnicodeEncodeError):
        write_whole(str(tmp_path / "report.json"), "\udcff")
    assert [(entry.name, entry.read_text()) for entry in tmp_path.iterdir()] == [("report.json", "old")]


def test_a_circle_of_links(tmp_path: Path) -> None:
    """It leads nowhere."""
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        write_whole(str(tmp_path / "a"), "text")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user, too")
def test_a_link_of_another_user_is_not_followed(tmp_path: Path) -> None:
    """Whatever it names stays as it was."""
    precious, link = tmp_path / "precious", tmp_path / "report.json"
    precious.write_text("secret")
    link.symlink_to(precious)
    os.lchown(link, 54321, -1)

    for write in (check_target, lambda path: write_whole(path, "text")):
        with pytest.raises(
            PermissionError, match=rf"{link} is a symbolic link of another user: .*, give {precious}"
        ):
            write(str(link))
    assert precious.read_text() == "secret"
    assert stat.S_ISLNK(link.lstat().st_mode)
    assert sorted(tmp_path.iterdir()) == [precious, link]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user, too")
def test_no_folder_of_the_way_is_another_users_link(tmp_path: Path) -> None:
    """The message has the whole path to type; a link of one's own is followed there."""
    (tmp_path / "target").mkdir()
    (tmp_path / "mine").symlink_to("target")
    (tmp_path / "other").symlink_to("target")
    os.lchown(tmp_path / "other", 54321, -1)
    write_whole(str(tmp_path / "mine" / "report.json"), "text")

    for write in (check_target, lambda path: write_whole(path, "other text")):
        with pytest.raises(PermissionError, match=rf"give {tmp_path}/target/report\.json:"):
            write(str(tmp_path / "other" / "report.json"))
    assert [(file.name, file.read_text()) for file in (tmp_path / "target").iterdir()] == [("report.json", "text")]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user, too")
def test_no_pool_and_no_token_lie_below_another_users_link(tmp_path: Path) -> None:
    """Nothing is made where it leads."""
    (tmp_path / "target").mkdir()
    (tmp_path / "other").symlink_to("target")
    os.lchown(tmp_path / "other", 54321, -1)

    with (
        pytest.raises(PoolError, match="is a symbolic link of another user"),
        opened_place(str(tmp_path / "other" / "pool"), makes=True),
    ):
        pass
    with pytest.raises(ServerError, match="is a symbolic link of another user"):
        make_token(str(tmp_path / "other" / "new" / "token"))
    assert list((tmp_path / "target").iterdir()) == []
