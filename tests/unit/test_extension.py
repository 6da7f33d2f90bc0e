"""The extension in C: used where it is as old as the sources beside it, else left, with a warning."""

import shutil
from pathlib import Path

import pytest

from popdist.errors import PopdistWarning
from popdist.ground import extension

FOLDER = Path(extension.__file__).parent
EXTENSION = FOLDER / "_extension.abi3.so"


def test_one_that_was_not_built_is_none() -> None:
    """Without a warning: there was no compiler."""
    assert extension.find("popdist.ground.extension._nobody_built_this") is None


@pytest.mark.skipif(not EXTENSION.exists(), reason="there was no C compiler that could make the extension")
@pytest.mark.parametrize("name", ["as_built", "changed", "one_more", "of_long_ago", "installed"])
def test_one_of_other_sources_is_left(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A source that changed or is new, or a build without a digest: the warning says how to build it again."""
    folder = tmp_path / f"extension_{name}"
    shutil.copytree(FOLDER, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    (folder / "__init__.py").touch()
    if name == "changed":
        (folder / "philox.c").write_text("/* another one */", encoding="utf-8")
    elif name == "one_more":
        (folder / "more.c").touch()
    elif name == "of_long_ago":
        (folder / EXTENSION.name).write_bytes(EXTENSION.read_bytes()[:-32])
    elif name == "installed":
        for source in folder.glob("*.[ch]"):
            source.unlink()
    monkeypatch.syspath_prepend(tmp_path)

    if name in ("as_built", "installed"):
        found = extension.find(f"extension_{name}._extension")
        assert hasattr(found, "square_sum")
    else:
        with pytest.warns(PopdistWarning, match="was built from other sources .* pip install --no-deps -e "):
            assert extension.find(f"extension_{name}._extension") is None
        assert extension.find(f"extension_{name}._extension") is None  # and says so once
