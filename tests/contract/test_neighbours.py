"""Scripts of other libraries, which know nothing of poprun, join and train together under it.

Those of DDP, Lightning and accelerate run with the scripts of `tests/docs/test_from_ddp.py`, too.
"""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.contract.forked_calls import ForkedWorlds
from tests.docs.markdown import ROOT
from tests.docs.scripts_in_turn import agree, run_in_turn, trained
from tests.running import Poprun

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

EXAMPLES = ROOT / "examples"

FIRST = "import sys\nfrom tests.docs.scripts_in_turn import main\n\nmain(sys.argv[1:])\n"


def test_distributed_data_parallel_runs_unmodified(forked_world: ForkedWorlds) -> None:
    """A script with torch's own process group trains with a job's variables alone, and its ranks agree."""
    (first, *_), (second, *_) = forked_world.script(EXAMPLES / "plain_ddp.py", num_instances=2)

    assert first.startswith("rank 0 of 2: ")
    assert second == first.replace("rank 0", "rank 1")


@pytest.mark.parametrize("launcher", ["openmpi"], indirect=True)
def test_scripts_of_fabric_and_the_trainer_train(launcher: Poprun, tmp_path: Path) -> None:
    """One for `fabric run` leaves its devices open and never launches: its line becomes one for poprun.

    An untrained model has an accuracy of 10 %, or a loss of 2.8. Devices that are not the instances are refused
    with words, before anybody waits for ranks that nobody started.
    """
    if any(find_spec(package) is None for package in ("accelerate", "lightning", "transformers")):
        pytest.skip("the extra `neighbours` is not installed")
    refused, program = tmp_path / "refused.py", tmp_path / "train.py"
    refused.write_text(REFUSED, encoding="utf-8")
    text = (EXAMPLES / "with_fabric.py").read_text(encoding="utf-8")
    script = re.sub(r"Fabric\(devices=.*\)\n    fabric.launch\(\)", "Fabric()", text)
    program.write_text(FIRST + script, encoding="utf-8")
    commands = ((refused,), (EXAMPLES / "with_trainer.py",), (EXAMPLES / "plain_ddp.py",))
    finished = run_in_turn(launcher, commands, cwd=tmp_path, program=(str(program),)).succeeded_but_for_torch()
    loss, accuracy = trained(finished)

    assert 85 <= accuracy <= 100
    assert 0 <= loss <= 0.5
    assert agree(finished)
