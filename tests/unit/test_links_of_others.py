"""A file that poprun writes goes where the user said, not where another user's link leads."""

import os
import stat
from pathlib import Path

import pytest

from poprun.text.atomic_file import check_target, write_whole


@pytest.mark.parametrize("name", ["mine", "chain", "dangling"])
def test_links_of_ones_own_stay_links(tmp_path: Path, name: str) -> None:
    """The file that they name in the end is written, whether or not it is there."""
    (tmp_path / "file").write_text("old")
    (tmp_path / "mine").symlink_to("file")
    (tmp_path / "chain").symlink_to(tmp_path / "mine")
    (tmp_path / "dangling").symlink_to(tmp_path / "new")
    check_target(str(tmp_path / name))
    write_whole(str(tmp_path / name), "text")

    assert (tmp_path / name).is_symlink()
    assert (tmp_path / name).read_text() == "text"


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
        with pytest.raises(PermissionError, match="it is a symbolic link of another user"):
            write(str(link))
    assert precious.read_text() == "secret"
    assert stat.S_ISLNK(link.lstat().st_mode)
    assert sorted(tmp_path.iterdir()) == [precious, link]
