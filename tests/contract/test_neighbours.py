"""Scripts of other libraries, which know nothing of poprun, join and train together under it."""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.docs.markdown import ROOT
from tests.docs.scripts_in_turn import run_in_turn
from tests.running import Poprun

RESULT = re.compile(r"world size (?P<world_size>\d+), (test accuracy|evaluation loss) (?P<metric>[\d.]+)%?")

REFUSED = """
import os
from lightning.fabric import Fabric

for name in [name for name in os.environ if name.startswith("LT_")]:
    del os.environ[name]
try:
    Fabric(devices=4).launch()
except ValueError as error:
    assert "does not match the world size (2)" in str(error)
else:
    raise AssertionError("it would wait for ranks that nobody starts")
"""

FIRST = "import sys\nfrom tests.docs.scripts_in_turn import main\n\nmain(sys.argv[1:])\n"

ACCURACY, LOSS = (85, 100), (0, 0.5)
"""An untrained model has an accuracy of 10 %, or a loss of 2.8."""


def trained(launcher: Poprun, folder: Path, *commands: tuple[str, ...], **options: Any) -> list[float]:  # noqa: ANN401
    """What each of these scripts tells of its model: rank 0 alone tells it, of both ranks."""
    if any(find_spec(package) is None for package in ("accelerate", "lightning", "transformers")):
        pytest.skip("the extra `neighbours` is not installed")
    finished = run_in_turn(launcher, commands, cwd=folder, **options).succeeded_but_for_torch()
    found = [*RESULT.finditer(finished.out)]

    assert [it["world_size"] for it in found] == ["2"] * len(found)
    return [float(it["metric"]) for it in found]


def example(library: str) -> str:
    """The script for a library."""
    return str(ROOT / "examples" / f"with_{library}.py")


@pytest.mark.parametrize("launcher", ["mpich"], indirect=True)
def test_scripts_of_lightning_and_accelerate_train(launcher: Poprun, tmp_path: Path) -> None:
    """Both libraries know MPI's launchers, too, and believe poprun's variables."""
    found = trained(launcher, tmp_path, (example("lightning"), "--devices", "2"), (example("accelerate"),))

    assert len(found) == 2
    assert all(ACCURACY[0] <= metric <= ACCURACY[1] for metric in found)


@pytest.mark.parametrize("launcher", ["openmpi"], indirect=True)
def test_scripts_of_fabric_and_the_trainer_train(launcher: Poprun, tmp_path: Path) -> None:
    """One for `fabric run` leaves its devices open and never launches: its line becomes one for poprun.

    Devices that are not the instances are refused with words, before anybody waits for ranks that nobody started.
    """
    refused, program = tmp_path / "refused.py", tmp_path / "train.py"
    refused.write_text(REFUSED, encoding="utf-8")
    text = Path(example("fabric")).read_text(encoding="utf-8")
    script = re.sub(r"Fabric\(devices=.*\)\n    fabric.launch\(\)", "Fabric()", text)
    program.write_text(FIRST + script, encoding="utf-8")
    loss, accuracy = trained(launcher, tmp_path, (str(refused),), (example("trainer"),), program=(str(program),))

    assert ACCURACY[0] <= accuracy <= ACCURACY[1]
    assert LOSS[0] <= loss <= LOSS[1]
