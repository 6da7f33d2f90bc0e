"""Streams of other projects can be dealt to the replicas."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.contract.forked_calls import ForkedWorlds, run_script
from tests.docs.markdown import ROOT
from tests.running import DEADLINE_SECONDS


def run_example(package: str, folder: Path) -> list[str]:
    """What the example prints on this instance; its files are in ``folder``."""
    os.environ["HF_HOME"] = str(folder / "cache")
    words = ("--folder", str(folder / "digits")) if package == "webdataset" else ()
    return run_script(ROOT / "examples" / f"stream_{package}.py", words)


@pytest.mark.parametrize("package", ["webdataset", "datasets"])
def test_every_sample_of_a_stream_comes_once(forked_world: ForkedWorlds, package: str, tmp_path: Path) -> None:
    """The examples train on all 1797 images in each of two epochs, with a worker in each instance."""
    if find_spec(package) is None:
        pytest.skip("the extra `neighbours` is not installed")
    told, _ = forked_world(run_example, package, tmp_path, num_instances=2, timeout_seconds=DEADLINE_SECONDS)

    assert told[-1].startswith(f"{2 * 1797} samples, weights ")
