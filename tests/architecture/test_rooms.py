"""Every module has tests that one can find."""

from tests.architecture.rooms import claimed, holders
from tests.architecture.source_tree import all_modules


def test_every_module_is_held() -> None:
    """One that tests reach through a process only is named in the docstring of a file of them: ``Holds …``."""
    assert {room for room, files in holders().items() if not files} == set()


def test_a_docstring_names_modules_that_are_there() -> None:
    """Those that it holds."""
    known = {module.name for module in all_modules()}
    lost = {file: names - known for file, names in claimed().items() if not names <= known}

    assert lost == {}
