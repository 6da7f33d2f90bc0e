"""Examples that no page holds run, and show what they are there for."""

import json
import re
from pathlib import Path

from tests.contract.forked_calls import ForkedWorlds
from tests.docs.markdown import ROOT

EXAMPLES = ROOT / "examples"


def test_packed_training_runs(forked_world: ForkedWorlds, tmp_path: Path) -> None:
    """Two steps of ``examples/pack_bert.py``, of two instances with two replicas each, and their curve."""
    curve = tmp_path / "curve.json"
    words = ["--steps", "2", "--curve", str(curve)]
    printed = forked_world.script(EXAMPLES / "pack_bert.py", *words, num_instances=2, num_replicas=4)

    assert re.search(r"2\.\d\d sequences a row, 9\d\.\d% real tokens", "\n".join(printed[0]))
    assert len(json.loads(curve.read_text(encoding="utf-8"))["steps"]) == 2


def test_an_onnx_model_trains_and_runs_alike_in_any_split(forked_world: ForkedWorlds, tmp_path: Path) -> None:
    """One instance and four write the same bytes; one instance and two compute the same scores of them."""
    files, scores = [], []
    for count in (1, 4):
        file = tmp_path / f"trained-by-{count}.onnx"
        words = [str(file), "--epochs", "1"]
        forked_world.script(EXAMPLES / "onnx_training.py", *words, num_instances=count, num_replicas=4)
        files.append(file.read_bytes())
    for count in (1, 2):
        words = [str(tmp_path / "trained-by-4.onnx")]
        printed = forked_world.script(EXAMPLES / "onnx_inference.py", *words, num_instances=count, num_replicas=4)
        scores.append(printed[0])

    assert files[0] == files[1]
    assert scores[0] == scores[1]
    assert scores[0][0].startswith("test accuracy 6")


def test_float16_rounded_by_chance_trains_as_float32(forked_world: ForkedWorlds, tmp_path: Path) -> None:
    """A short run of ``examples/low_precision.py`` ends within 1 %; rounded to the nearest it stays behind."""
    picture = tmp_path / "curves.png"
    words = ["--steps", "250", "--plot", str(picture)]
    (printed,) = forked_world.script(EXAMPLES / "low_precision.py", *words)

    found = re.findall(r"loss ([\d.]+) -> ([\d.]+), ([\d.]+) of", "\n".join(printed))
    drops = [float(first) - float(last) for first, last, _ in found]
    assert abs(float(found[2][2]) - 1) < 0.01
    assert drops[1] < drops[0] / 2
    assert drops[2] > 0.9 * drops[0]
    assert picture.read_bytes().startswith(b"\x89PNG")
