"""Lines of source for stacks, from files that may be anything."""

import os
from pathlib import Path

from poprun.job.stacks import read_lines


def test_lines_are_read_where_there_are_any(tmp_path: Path) -> None:
    """Bare, and fit for a terminal; what is no file is not waited for."""
    program, pipe = tmp_path / "train.py", tmp_path / "pipe"
    program.write_text("import time\n    time.sleep(600)  # \x1b[2J\n")
    os.mkfifo(pipe)
    places = {(str(program), 2), (str(program), 99), (str(pipe), 1), (str(tmp_path), 1), ("<string>", 1)}

    found = {place: text for place, text in read_lines(places).items() if text}

    assert found == {(str(program), 2): "time.sleep(600)  #  [2J"}
