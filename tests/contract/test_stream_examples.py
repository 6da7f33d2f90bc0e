"""Streams of other projects can be dealt to the replicas."""

import sys
from pathlib import Path

import pytest

from tests.docs.markdown import ROOT
from tests.running import run

JOB = ["-m", "poprun", "--launcher", "local", "--no-tag-output", "-n", "2", "--num-replicas", "2"]


@pytest.mark.parametrize(("package", "words"), [("webdataset", ["--folder", "digits"]), ("datasets", [])])
def test_every_sample_of_a_stream_comes_once(package: str, words: list[str], tmp_path: Path) -> None:
    """The examples train on all 1797 images in each of two epochs, with a worker in each instance."""
    pytest.importorskip(package, reason="the extra `neighbours` is not installed")
    program = [sys.executable, str(ROOT / "examples" / f"stream_{package}.py"), *words]

    ended = run([sys.executable, *JOB, *program], env={"HF_HOME": str(tmp_path / "cache")}, cwd=tmp_path)

    assert ended.succeeded().lines[-1].startswith(f"{2 * 1797} samples, weights ")
