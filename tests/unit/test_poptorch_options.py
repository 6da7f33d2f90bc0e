"""Options of poptorch: what setters take, what they refuse, and where their defaults come from.

Holds poptorch.options.option_values, poptorch.options.model_options and poptorch.options.sub_options.
"""

import copy
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import popdist
import poptorch
from poptorch import poptorch_core
from poptorch._logging import logger, setPopartLogLevel
from poptorch.environment import process_in
from poptorch.options.model_options import apply_json

OPTIONS = poptorch.Options

ACTS: list[tuple[Callable[[Any], object], str, object]] = [
    (lambda o: o.deviceIterations(4), "device_iterations", 4),
    (lambda o: o.replicationFactor(2), "replication_factor", 2),
    (lambda o: o.Training.gradientAccumulation(8), "gradient_accumulation", 8),
    (lambda o: o.outputMode(poptorch.OutputMode.EveryN, 3), "output_return_period", 3),
    (lambda o: o.outputMode(poptorch.OutputMode.All), "output_mode", 2),
    (lambda o: o.randomSeed(7), "random_seed", 7),
    (lambda o: o.Distributed.configureProcessId(1, 3), "distributed_process_id", 1),
    (lambda o: o.setExecutionStrategy(poptorch.ShardedExecution()), "execution_mode", 1),
    (lambda o: o.setAvailableMemoryProportion({"IPU1": 0.5}), "available_memory_proportion", {1: 0.5}),
    (lambda o: o.enableSyntheticData(enabled=True), "syntheticDataMode", 2),
    (lambda o: o.useOfflineIpuTarget(), "connection_type", 2),
    (lambda o: o.enableExecutableCaching("/c"), "cachePath", "/c"),
    (lambda o: o.maxRepeatLogs(None), "max_repeat_logs", None),
    (lambda o: o.anchorTensor("a", "b"), "anchored_tensors", {"a": ["b", 2, 1]}),
    (lambda o: o.Precision.setPartialsType(torch.half), "partials_type", torch.half),
    (lambda o: o._Popart.set("autoRecomputation", 3), "autoRecomputation", 3),
    (lambda o: o._Popart.setEngineOptions({"a": "b"}), "engineOptions", {"a": "b"}),
    (
        lambda o: o.TensorLocations.setOptimizerLocation(
            poptorch.TensorLocationSettings().useReplicatedTensorSharding().useOnChipStorage(use=False)
        ),
        "location_optimizer",
        {"useReplicatedTensorSharding": True, "onChip": False},
    ),
]

REFUSED: list[Callable[[Any], object]] = [
    lambda o: o.deviceIterations(0),
    lambda o: o.replicationFactor(1.5),
    lambda o: o.Training.gradientAccumulation(True),  # noqa: FBT003 - as programs have it
    lambda o: o.outputMode(poptorch.OutputMode.EveryN),
    lambda o: o.outputMode("All"),
    lambda o: o.randomSeed("1"),
    lambda o: o.set(no_such=1),
    lambda o: o.set(device_iterations="1"),
    lambda o: o.setAvailableMemoryProportion({"0": 0.5}),
    lambda o: o.TensorLocations.numIOTiles(31),
    lambda o: o.TensorLocations.numIOTiles(194),
    lambda o: o.Precision.setPartialsType(torch.int),
    lambda o: o.Distributed.configureProcessId(3, 3),
    lambda o: o.setExecutionStrategy("pipelined"),
    lambda o: o._Popart.set(3, "dotChecks"),
]


@pytest.fixture(autouse=True)
def _log_as_it_was() -> Iterator[None]:
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.mark.parametrize(("call", "name", "value"), ACTS)
def test_a_setter_is_in_the_dictionary(call: Callable[[Any], object], name: str, value: object) -> None:
    """Each returns what it belongs to; toDict has it, a clone has it, and the validation passes it."""
    options = OPTIONS()
    owner = call(options)

    assert owner is options or any(owner is getattr(options, part) for part in vars(options))
    assert options.toDict()[name] == options.clone().toDict()[name] == value
    poptorch_core._validateOptions(options.toDict())


@pytest.mark.parametrize("call", REFUSED)
def test_a_setter_refuses_what_cannot_be(call: Callable[[Any], object]) -> None:
    """And leaves the options as they were."""
    options = OPTIONS()
    before = options.toDict()

    with pytest.raises(AssertionError):
        call(options)

    assert options.toDict() == before


@pytest.mark.parametrize("call", [call for call, *_ in ACTS] + [lambda o: setattr(o, "device_iterations", 2)])
def test_frozen_options_do_not_change(call: Callable[[Any], object]) -> None:
    """The parts neither; copies do, and are independent."""
    options = OPTIONS()
    options.checkIsFrozen()
    options._freeze()
    before = options.toDict()

    with pytest.raises(AttributeError, match="Can't modify frozen Options"):
        call(options)
    call(copy.deepcopy(options))

    assert options.toDict() == before
    assert options.isFrozen()
    with pytest.raises(AttributeError):
        options.checkIsFrozen()


def test_attributes_are_the_values() -> None:
    """Programs read them, set them and ask for them."""
    options = OPTIONS()
    assert (options.replication_factor, options.log_dir, options.broadcast_buffers) == (1, ".", True)
    assert not options.exists("random_seed")
    options.replication_factor = 4

    assert repr(options).startswith("Options(")
    assert "replication_factor=4" in repr(options)
    assert options.defaultOutputMode()
    with pytest.raises(AttributeError, match="no_such"):
        _ = options.no_such


def test_the_seed_is_torch_s_at_once() -> None:
    """A model that is made next has the same weights everywhere."""
    with torch.random.fork_rng():
        OPTIONS().randomSeed(5)
        assert torch.initial_seed() == 5


@given(st.integers(1, 50), st.data())
def test_one_process_poses_as_every_process(num_processes: int, data: st.DataObject) -> None:
    """No call of the options speaks with another process."""
    process = data.draw(st.integers(0, num_processes - 1))
    options = OPTIONS()
    options.Distributed.configureProcessId(process, num_processes)

    assert (options.Distributed.processId, options.Distributed.numProcesses) == (process, num_processes)
    options.Distributed.disable()
    assert (options.Distributed.processId, options.Distributed.numProcesses) == (0, 1)


def test_the_environment_numbers_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Open MPI's variables, or those that the program names; a half of them is an error."""
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setenv("MY_RANK", "2")
    monkeypatch.setenv("MY_SIZE", "3")
    options = OPTIONS()
    assert (options.Distributed.processId, options.Distributed.numProcesses) == (1, 4)

    options.Distributed.setEnvVarNames("MY_SIZE", "MY_RANK")
    assert (options.Distributed.processId, options.Distributed.numProcesses) == (2, 3)
    with pytest.raises(AssertionError, match="NO_SIZE=None"):
        process_in("MY_RANK", "NO_SIZE")


def test_defaults_come_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Accessor paths, lists of arguments, and members of enumerations by name."""
    said = {
        "deviceIterations": 3,
        "Training.gradientAccumulation": 2,
        "outputMode": ["OutputMode.EveryN", 2],
        "_Popart.set": ["dotChecks", ["FWD0"]],
    }
    monkeypatch.setenv("POPTORCH_DEFAULT_OPTIONS", json.dumps(said))
    monkeypatch.setenv("POPTORCH_CACHE_DIR", str(tmp_path))
    found = OPTIONS().toDict()

    assert (found["device_iterations"], found["gradient_accumulation"]) == (3, 2)
    assert (found["output_mode"], found["output_return_period"]) == (1, 2)
    assert (found["dotChecks"], found["cachePath"]) == (["FWD0"], str(tmp_path))
    monkeypatch.setenv("POPTORCH_DEFAULT_OPTIONS", "{}")
    assert OPTIONS.from_json('{"deviceIterations": 5}').device_iterations == 5
    for wrong in ("[", "[1]", '{"noSuch": 1}', '{"Training.no": 1}'):
        with pytest.raises(poptorch.ConfigFileError):
            apply_json(OPTIONS(), wrong, "this")


def test_a_file_calls_setters(tmp_path: Path) -> None:
    """One a line; blank lines and comments do not count."""
    path = tmp_path / "poptorch.cfg"
    path.write_text(
        "deviceIterations(2)\n\n# a comment\nTraining.gradientAccumulation(gradient_accumulation=4)\n"
        "_Popart.set('autoRecomputation', 3)\nsetAvailableMemoryProportion({'IPU0': 0.1})\n"
        "outputMode(poptorch.OutputMode.All)\n"
        "TensorLocations.setWeightLocation(poptorch.TensorLocationSettings().useOnChipStorage(False))\n"
    )
    options = OPTIONS().loadFromFile(str(path))

    assert (options.device_iterations, options.Training.gradient_accumulation) == (2, 4)
    assert options.TensorLocations.location_weight["onChip"] is False
    assert options._Popart.options["autoRecomputation"] == 3


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("deviceIterations(", "SyntaxError"),
        ("deviceIterations(__import__('os').getpid())", "SyntaxError"),
        ("deviceIterations(0)", "AssertionError"),
        ("noSuch(1)", "AttributeError"),
        ("_values.clear()", "SyntaxError"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, kind: str) -> None:
    """With its number and file; nothing but setters is called."""
    path = tmp_path / "poptorch.cfg"
    path.write_text(f"\ndeviceIterations(2)\n{line}\n")

    with pytest.raises(poptorch.ConfigFileError) as caught:
        OPTIONS().loadFromFile(str(path))

    assert str(caught.value).startswith(f"{kind} at line 3 of {path}: ")
    assert str(caught.value).endswith(f"\n> options.{line}")


def test_options_are_logged_when_they_are_validated(capsys: pytest.CaptureFixture[str]) -> None:
    """In PopTorch's form."""
    poptorch.setLogLevel("DEBUG")
    options = OPTIONS().enableSyntheticData(enabled=True).setExecutionStrategy(poptorch.ShardedExecution())
    options._Popart.set("dotChecks", ["FWD0"]).setEngineOptions({"debug.allowOutOfMemory": "true"})
    poptorch_core._validateOptions(options.toDict())
    said = capsys.readouterr().err

    for text in (
        "[poptorch::python] [debug] poptorch.Options set auto_round_num_ipus to value false\n",
        "poptorch.Options set syntheticDataMode to value 2\n",
        "poptorch.Options set execution_mode to value 1\n",
        "poptorch.Options added FWD0 to dotChecks\n",
        "poptorch.Options set engineOptions[debug.allowOutOfMemory] to true\n",
    ):
        assert text in said


def test_unknown_types_are_refused_when_they_are_validated() -> None:
    """PopART's options may have any name, because they have no effect."""
    options = OPTIONS()
    options._Popart.set("noSuchOption", 3)
    poptorch_core._validateOptions(options.toDict())
    with pytest.raises(poptorch_core.Error, match="Unknown value type Tensor for option dotChecks"):
        poptorch_core._validateOptions({"dotChecks": torch.tensor(3)})


def test_log_levels_have_names_and_numbers() -> None:
    """Others are refused."""
    poptorch.setLogLevel(1)
    assert logger.level == logging.DEBUG
    poptorch.setLogLevel("OFF")
    assert not logger.isEnabledFor(logging.CRITICAL)
    setPopartLogLevel("DEBUG")
    with pytest.raises(ValueError, match="Invalid log level integer"):
        poptorch.setLogLevel(5)
    with pytest.raises(
        ValueError, match=r"Unknown log level: no. Valid values are DEBUG, ERR, INFO, OFF, TRACE, WARN"
    ):
        poptorch.setLogLevel("no")
    with pytest.raises(ValueError, match="Level must be one of"):
        setPopartLogLevel("1")


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("useIpuId", (1,)),
        ("replicationFactor", (2,)),
        ("Distributed.disable", ()),
        ("Distributed.setEnvVarNames", ("A", "B")),
        ("Distributed.configureProcessId", (0, 1)),
    ],
)
def test_a_job_s_options_refuse_what_the_job_decides(name: str, arguments: tuple[object, ...]) -> None:
    """Copies do, too."""
    for options in (popdist.poptorch.Options(ipus_per_replica=2), popdist.poptorch.Options(2).clone()):
        method: Any = options
        for part in name.split("."):
            method = getattr(method, part)
        with pytest.raises(RuntimeError, match=f"^Cannot call `{name}` with popdist.poptorch.Options"):
            method(*arguments)


def test_a_job_s_options_stand_without_a_job() -> None:
    """Process 0 of 1, one replica; in every other way they are options."""
    options = popdist.poptorch.Options(ipus_per_replica=2)
    options._freeze()

    assert isinstance(options, poptorch.Options)
    assert (options.Distributed.processId, options.Distributed.numProcesses) == (0, 1)
    assert options.toDict()["replication_factor"] == 1


def test_a_program_may_have_its_own_distributed_options() -> None:
    """A class of its own in place of ours."""

    class Own(poptorch.options._DistributedOptions):
        @property
        def processId(self) -> int:  # noqa: N802 - as PopTorch has it
            return 3

    options = OPTIONS()
    options.Distributed.__class__ = Own
    assert options.Distributed.processId == 3


def test_strategies_hold_stages_or_a_rule() -> None:
    """Not both."""
    strategy = poptorch.PipelinedExecution(poptorch.Stage("a", "b").ipu(1), "c")

    assert [stage.blocks for stage in strategy.stages] == [["a", "b"], ["c"]]
    assert strategy.stage(0) is strategy.stages[0]
    assert poptorch.PipelinedExecution(poptorch.AutoStage.AutoIncrement).auto_stage.name == "AutoIncrement"
    for wrong in (("a", poptorch.AutoStage.SameAsIpu), (poptorch.AutoStage.SameAsIpu,) * 2):
        with pytest.raises(AssertionError):
            poptorch.PipelinedExecution(*wrong)
    with pytest.raises(AssertionError):
        poptorch.Stage()
