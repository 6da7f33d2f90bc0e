"""``poprun-size`` as its users start it: exit codes, files, and what it says of what cannot be planned.

Holds poprun.size.
"""

import csv
import io
import json
import os
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

import poprun.size
from popsize.catalogue import model_text, named_model
from popsize.mapping import Training, loaded
from tests.running import Finished, run, run_here

PROGRAM = str(Path(sys.executable).with_name("poprun-size"))
ASKED = ("--model", "gpt2-xl", "--devices", "8xA100-80GB", "--global-batch", "64")


def size(*words: str, cwd: Path | None = None) -> Finished:
    """What the program says."""
    return run_here(poprun.size.size, "poprun-size", *words, cwd=cwd)


def refused(*words: str, cwd: Path | None = None) -> str:
    """What it says of words that it cannot plan with: one error, exit code 2, nothing on standard output."""
    finished = size(*words, cwd=cwd)

    assert (finished.code, finished.out) == (2, "")
    assert finished.err.startswith("poprun-size: error: ")
    assert "Traceback" not in finished.err
    return finished.err.removeprefix("poprun-size: error: ")


def test_every_format_of_an_answer(tmp_path: Path) -> None:
    """A table, JSON, CSV and a picture of the same mapping, and a file for poprun."""
    table = run([PROGRAM, *ASKED, "--top", "2", "--save", "mapping.json"], cwd=tmp_path).succeeded().out
    found = json.loads(size(*ASKED, "--top", "2", "--format", "json").succeeded().out)
    rows = list(csv.DictReader(io.StringIO(size(*ASKED, "--top", "2", "--format", "csv").succeeded().out)))
    root = ET.fromstring(size(*ASKED, "--format", "svg").succeeded().out)  # noqa: S314 - our own
    kept = loaded((tmp_path / "mapping.json").read_text(encoding="utf-8"), "mapping.json")

    assert [path.name for path in tmp_path.iterdir()] == ["mapping.json"]
    assert kept.training == Training(global_batch=64)
    assert "     a step  peak  bubble" in table
    assert len(found["mappings"]) == len(rows) == 2
    assert float(rows[0]["seconds"]) == pytest.approx(found["mappings"][0]["seconds"], rel=1e-5)
    assert found["mappings"][0]["mapping"]["replicas"] == int(rows[0]["replicas"]) == kept.mapping.replicas
    assert root.tag.endswith("svg")


def test_one_mapping_is_explained() -> None:
    """With the names of the field; what the words leave out is found from the machine."""
    text = size(*ASKED, "--explain", "tp=5,pp=1,dp=1").succeeded().out
    asked = json.loads(size(*ASKED, "--explain", "tensor=1", "--format", "json").succeeded().out)
    (found,) = asked["mappings"]

    assert "tensor=5,pipeline=1,replicas=1" in text
    assert "sums over the tensor group" in text
    assert found["mapping"]["replicas"] == 8


def test_a_saved_mapping_is_explained_for_its_model_only(tmp_path: Path) -> None:
    """Not for one with other numbers."""
    size(*ASKED, "--fix", "tp=5,pp=8", "--devices", "40xA100", "--save", "m.json", cwd=tmp_path).succeeded()
    words = ("--explain", "m.json", "--devices", "40xA100")

    assert "tensor=5,pipeline=8," in size(*ASKED, *words, cwd=tmp_path).succeeded().out
    assert "m.json was planned for gpt2-xl of 1," in refused(*ASKED, "layers=47", *words, cwd=tmp_path)
    assert "leave out --fix" in refused(*ASKED, *words, "--fix", "tp=5", cwd=tmp_path)


def test_what_is_fixed_is_kept() -> None:
    """By our option, and by the field's."""
    words = ("--fix", "pp=2", "--pipeline-parallel-size", "2", "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(size(*ASKED, *words).succeeded().out)))

    assert {row["pipeline"] for row in rows} == {"2"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--devices", "8xA100", "--global-batch", "8"), "there is no model: give --model with a name (bert-base"),
        (("--model", "gtp2", "--devices", "8xA100", "--global-batch", "8"), "nearest are gpt2"),
        (("gpt2-xl", "--devices", "8xA100", "--global-batch", "8"), "there is no model: write --model gpt2-xl"),
        (("--model", "gpt2", "--devices", "8xA100"), "a step needs its number of samples: give --global-batch"),
        (("--model", "gpt2", "--devices", "8xB1", "--global-batch", "8"), "no machine is called 'B1'"),
        (
            ("--model", "gpt2", "--pod", "POD16", "--devices", "8xA100", "--global-batch", "8"),
            "give one of --devices, --pod and --cpu",
        ),
        (
            (*ASKED, "--explain", "tensor=3"),
            "tensor=3 does not divide hidden=1600 of gpt2-xl: nearest are 1 and 5",
        ),
        ((*ASKED, "--explain", "replicas=16"), "uses 16 devices; 8xA100-80GB has 8"),
        ((*ASKED, "--store", "/"), "--store is measured with --cpu"),
        (
            (*ASKED, "--memory-limit", "2 pounds"),
            "--memory-limit 2 pounds is no size: give GiB, or a unit, as 2GB",
        ),
        ((*ASKED, "--memory-limit", "500MB"), "in place of 0.47, for"),
        ((*ASKED, "--memory-limit", "0.5"), "what would fit:\n  devices of "),
        ((*ASKED, "--precision", "int4"), "Invalid value for '--precision'"),
    ],
)
def test_what_cannot_be_planned(words: tuple[str, ...], said: str) -> None:
    """Exit code 2, what was asked, the rule, and what is nearest."""
    assert said in refused(*words)


def test_files_that_describe_nothing(tmp_path: Path) -> None:
    """Each is named with what is wrong in it."""
    contents = {
        "config.json": '{"model_type": "llama", "num_hidden_layers": 2}',
        "broken.json": "{",
        "machines.yaml": "box: 8\n",
        "broken.yaml": "a: [",
        "binary.json": "\udcff",
        "deep.json": "[" * 200_000,
        "deep.yaml": "[" * 5000,
        "date.yaml": "box: 2020-13-45\n",
        "large.yaml": "box: {memory_gib: 0x" + "f" * 6000 + "}\n",
        "measured.json": model_text(named_model("gpt2")),
    }
    for name, content in contents.items():
        (tmp_path / name).write_text(content, encoding="utf-8", errors="surrogateescape")
    rest = ("--devices", "8xA100", "--global-batch", "8")

    def said(*words: str) -> str:
        return refused(*words, *rest, cwd=tmp_path)

    assert "config.json has no hidden_size" in said("--model", "config.json")
    assert "broken.json is not JSON" in said("--model", "broken.json")
    assert "--model none.json: No such file or directory" in said("--model", "none.json")
    assert "machines.yaml: box has no figures below it" in said("--machines", "machines.yaml", "--model", "gpt2")
    assert "broken.yaml is not YAML" in said("--machines", "broken.yaml", "--model", "gpt2")
    assert "binary.json: line 1 is not in UTF-8" in said("--model", "binary.json")
    assert "deep.json is not JSON: more than 32 lists" in said("--model", "deep.json")
    assert "deep.yaml is not YAML: more than 32 lists" in said("--machines", "deep.yaml", "--model", "gpt2")
    assert "date.yaml is not YAML: month must be in 1..12" in said("--machines", "date.yaml", "--model", "gpt2")
    assert "large.yaml: box needs memory_gib" in said("--machines", "large.yaml", "--model", "gpt2")
    assert "which layers=2 cannot change" in said("--model", "measured.json", "layers=2")


def test_machines_of_a_yaml_file(tmp_path: Path) -> None:
    """They have names as any others."""
    (tmp_path / "machines.yaml").write_text(
        "box:\n  memory_gib: 32\n  tflops: {fp32: 10, bf16: 100}\n  memory_gb_per_second: 900\n"
        "  devices_per_host: 4\n  link_gb_per_second: 100\n  network_gb_per_second: 50\n"
    )
    words = ("--machines", "machines.yaml", "--model", "gpt2", "--devices", "8xbox", "--global-batch", "8")

    assert "on 8 x box" in " ".join(size(*words, cwd=tmp_path).succeeded().out.split())


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    """It is named, and nothing is left beside it."""
    finished = size(*ASKED, "--save", "none/mapping.json", cwd=tmp_path)

    assert finished.code == 73
    assert finished.err == "poprun-size: error: cannot write none/mapping.json: No such file or directory\n"
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_saved_where_a_link_leads_and_only_in_a_file(tmp_path: Path) -> None:
    """The link stays; a pipe is refused, and stays one."""
    (tmp_path / "link.json").symlink_to("mapping.json")
    os.mkfifo(tmp_path / "pipe")
    size(*ASKED, "--save", "link.json", cwd=tmp_path).succeeded()
    finished = size(*ASKED, "--save", "pipe", cwd=tmp_path)

    assert (tmp_path / "link.json").is_symlink()
    assert loaded((tmp_path / "mapping.json").read_text(encoding="utf-8"), "mapping.json").mapping.replicas
    assert finished.err == "poprun-size: error: cannot write pipe: it is no ordinary file\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.json", "mapping.json", "pipe"]


def test_a_closed_standard_output_is_an_error() -> None:
    """Of one line."""
    finished = run(["sh", "-c", '"$0" "$@" >&-', PROGRAM, *ASKED])

    assert (finished.code, finished.err) == (73, "poprun-size: error: standard output is closed\n")


def test_a_pod_computes_in_its_16_bits() -> None:
    """It has no bf16: what is printed says so."""
    words = ("--model", "bert-large", "--pod", "POD16", "--global-batch", "64", "--top", "1")

    assert "global batch 64, fp16, adamw" in " ".join(size(*words).succeeded().out.split())


def test_one_mapping_that_does_not_fit_is_saved_with_a_warning(tmp_path: Path) -> None:
    """And one that leaves devices without work has one, too."""
    words = ("--memory-limit", "2", "--explain", "tp=5,dp=1", "--save", "mapping.json", "--format", "json")
    finished = size(*ASKED, *words, cwd=tmp_path)

    assert finished.code == 0
    assert json.loads(finished.out)["fitting"] == 0
    assert "uses 5 of 8 devices" in finished.err
    assert "does not fit; mapping.json has it nevertheless" in finished.err


def test_what_contradicts_is_refused() -> None:
    """No value silently gives way to another one."""
    assert "tensor is given twice: 5 and 1" in refused(*ASKED, "--fix", "tensor=5", "--tensor-parallel-size", "1")
