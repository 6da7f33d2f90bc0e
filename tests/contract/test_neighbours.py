"""Scripts of other libraries, which know nothing of poprun, join and train together under it."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.docs.markdown import ROOT
from tests.running import Finished, Poprun

RESULT = re.compile(r"world size (?P<world_size>\d+), (test accuracy|evaluation loss) (?P<metric>[\d.]+)%?")


def run_example(poprun: Poprun, library: str, *words: str, cwd: Path) -> Finished:
    """The library's script with two instances."""
    package = {"fabric": "lightning", "trainer": "transformers"}.get(library, library)
    if find_spec(package) is None:
        pytest.skip("the extra `neighbours` is not installed")
    program = [str(poprun.python), str(ROOT / "examples" / f"with_{library}.py"), *words]
    options = ["-n", "2", "--tag-output=no"]
    return poprun(*options, *program, env={"HF_HUB_OFFLINE": "1"}, cwd=cwd)


@pytest.mark.parametrize(
    ("launcher", "library", "words", "expected"),
    [
        ("mpich", "lightning", ["--devices", "2"], (85, 100)),
        ("local", "accelerate", [], (85, 100)),
        ("local", "trainer", [], (0, 0.5)),
    ],
    indirect=["launcher"],
)
def test_a_script_of_another_library_trains(
    launcher: Poprun, library: str, words: list[str], expected: tuple[float, float], tmp_path: Path
) -> None:
    """Rank 0 alone tells the result of both. An untrained model has an accuracy of 10 %, or a loss of 2.8."""
    finished = run_example(launcher, library, *words, cwd=tmp_path)
    (found,) = RESULT.finditer(finished.succeeded_but_for_torch().out)

    assert found["world_size"] == "2"
    assert expected[0] <= float(found["metric"]) <= expected[1]


@pytest.mark.parametrize("launcher", ["openmpi"], indirect=True)
def test_a_script_for_fabric_run_trains_as_it_is(launcher: Poprun, tmp_path: Path) -> None:
    """It leaves its devices open and never launches: the line for `fabric run` becomes one for poprun."""
    if find_spec("lightning") is None:
        pytest.skip("the extra `neighbours` is not installed")
    text = (ROOT / "examples" / "with_fabric.py").read_text()
    script = tmp_path / "train.py"
    script.write_text(re.sub(r"Fabric\(devices=.*\)\n    fabric.launch\(\)", "Fabric()", text))
    finished = launcher("-n", "2", "--tag-output=no", str(launcher.python), str(script))
    (found,) = RESULT.finditer(finished.succeeded_but_for_torch().out)

    assert found["world_size"] == "2"
    assert float(found["metric"]) >= 85


def test_lightning_hears_that_its_devices_are_not_the_instances(tmp_path: Path) -> None:
    """It ends with words instead of waiting for ranks that nobody started."""
    finished = run_example(Poprun(options=("--launcher", "local")), "fabric", "--devices", "4", cwd=tmp_path)

    assert finished.code == 1
    assert "does not match the world size (2)" in finished.err
