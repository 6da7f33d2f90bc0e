"""Links lead somewhere."""

from pathlib import Path

import pytest

from tests.docs.markdown import anchors, documents, links


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
