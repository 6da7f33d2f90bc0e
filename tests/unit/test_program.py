"""Which scripts for Lightning Fabric are told of the job's devices: those that leave them open."""

from pathlib import Path

import pytest

from poprun.probe.program import fabric_variables

OPEN = {"LT_DEVICES": "2", "LT_NUM_NODES": "3", "LT_CLI_USED": "1", "LT_ACCELERATOR": "cpu"}


def variables(
    folder: Path, text: str, *, user: dict[str, str] | None = None, on_cpu: bool = True
) -> dict[str, str]:
    """What a script with this text is told in a job of three hosts with two instances each."""
    (folder / "train.py").write_text(text)
    words = ("/usr/bin/python", "-u", "train.py", "other.py")
    return fabric_variables(words, str(folder), (2, 3), user or {}, on_cpu=on_cpu)


def test_a_script_that_leaves_its_devices_open_is_told_what_fabric_run_tells(tmp_path: Path) -> None:
    """One that launches by itself must not hear that it was launched; one that names the accelerator keeps it."""
    assert variables(tmp_path, "fabric = Fabric()") == OPEN
    assert variables(tmp_path, "fabric = L.Fabric(precision=16)") == OPEN
    assert "LT_ACCELERATOR" not in variables(tmp_path, "Fabric()", on_cpu=False)
    assert "LT_ACCELERATOR" not in variables(tmp_path, "Fabric('cuda')")
    assert "LT_CLI_USED" not in variables(tmp_path, "fabric = Fabric()\nfabric.launch()")


@pytest.mark.parametrize(
    "text",
    [
        "Fabric(devices=2)",
        "Fabric('cpu', 'ddp', 2)",
        "Fabric(num_nodes=1)",
        "Fabric(**options)",
        "Fabric(",
        "import Fabric",
        "",
    ],
)
def test_a_script_that_says_what_it_wants_is_left_alone(tmp_path: Path, text: str) -> None:
    """So is one that cannot be read."""
    assert variables(tmp_path, text) == {}


def test_whoever_sets_a_variable_of_fabric_sets_them_all(tmp_path: Path) -> None:
    """And a job of one instance, or without such a file, needs none."""
    assert variables(tmp_path, "Fabric()", user={"LT_DEVICES": "1"}) == {}
    assert fabric_variables(("python", "train.py"), str(tmp_path), (1, 1), {}, on_cpu=True) == {}
    assert fabric_variables(("python", "absent.py"), str(tmp_path), (2, 1), {}, on_cpu=True) == {}
