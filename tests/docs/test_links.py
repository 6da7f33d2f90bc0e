"""Links lead somewhere, and so do the names of files."""

import re
from pathlib import Path

import pytest

from tests.docs.markdown import ROOT, anchors, documents, links


@pytest.mark.parametrize("document", documents(), ids=lambda path: str(path.name))
def test_a_link_within_the_project_has_its_target(document: Path) -> None:
    """Each relative link names a file that exists, and a heading in it."""
    lost = []
    for link in links(document):
        name, _, anchor = link.partition("#")
        target = document.parent / name if name else document
        if "://" not in link and (not target.exists() or (anchor and anchor not in anchors(target))):
            lost.append(link)

    assert lost == []


@pytest.mark.parametrize("document", documents(), ids=lambda path: str(path.name))
def test_a_file_that_is_named_is_there(document: Path) -> None:
    """A path below one of the packages, such as ``poprun/cli/options.py``, exists; the changelog is history."""
    named = re.findall(r"`((poprun|popdist)/[\w/]+(?:\.\w+)?)", document.read_text(encoding="utf-8"))
    lost = [path for path, package in named if not (ROOT / f"{package}_py" / path).exists()]

    assert lost == [] or document.name == "CHANGELOG.md"
