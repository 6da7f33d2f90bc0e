"""What programs written for PopTorch ask of its inside: errors, names for the profiler, models in files.

Holds poptorch._impl, poptorch.executor.saved_models, poptorch.poptorch_core, poptorch.profiling and
poptorch.testing.
"""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import profile

import popdist
import poptorch
from poptorch import _impl, poptorch_core
from poptorch.custom_types import PARSERS
from poptorch.executor.saved_models import SavedModel, example_of, pickled, read, unpickled, write
from poptorch.poptorch_core import TestErrorType as Kind


def test_there_is_no_hardware() -> None:
    """And nothing is compiled."""
    assert not poptorch.ipuHardwareIsAvailable()
    assert not poptorch.ipuHardwareIsAvailable(num_ipus=4)
    with pytest.raises(AssertionError, match="No IPU"):
        poptorch.ipuHardwareVersion()
    assert not _impl.isDispatchTracing()
    assert _impl._restoreWrapperIfNecessary(_impl) is _impl
    assert not poptorch_core.isCompilingWithDispatcher()


@pytest.mark.parametrize(
    ("kind", "type_", "expected"),
    [
        (Kind.PoplarRecoverableFullReset, poptorch.RecoverableError, "poplar_recoverable_runtime_error"),
        (Kind.PoplarUnrecoverable, poptorch.UnrecoverableError, "poplar_unrecoverable_runtime_error"),
        (Kind.PoplarLinkError, poptorch.Error, "poplar_link_error"),
    ],
)
def test_a_program_can_test_its_own_handling(kind: Kind, type_: type[poptorch.Error], expected: str) -> None:
    """Text and location say where, the message does not; a copy from another process says the same."""
    with pytest.raises(type_) as caught:
        poptorch_core._throwTestError(kind)

    copied = pickle.loads(pickle.dumps(caught.value))  # noqa: S301 - our own
    for error in (caught.value, copied):
        for place in ("throwTestError::bottomLevel", "throwTestError::topLevel"):
            assert place in str(error)
            assert place in error.location
            assert place not in error.message
        assert error.type == expected
        assert getattr(error, "recovery_action", "FULL_RESET") == "FULL_RESET"
    assert hasattr(caught.value, "recovery_action") == (type_ is poptorch.RecoverableError)
    assert poptorch.Error is poptorch_core.Error
    assert set(Kind.__members__) == {"PoplarUnrecoverable", "PoplarRecoverableFullReset", "PoplarLinkError"}


def test_parts_of_a_program_have_names() -> None:
    """Which torch's profiler shows."""
    channel = poptorch.profiling.Channel("loop")
    values = [3, 1]
    owner = type("Owner", (), {"sort": lambda _: values.sort()})()
    with profile() as profiler:
        channel.instrument(owner, "sort")
        owner.sort()
        with channel.tracepoint("rest"):
            pass

    assert values == [1, 3]
    assert {"loop: sort", "loop: rest"} <= {event.key for event in profiler.key_averages()}


def test_a_model_lies_in_one_file(tmp_path: Path) -> None:
    """In a folder under a name of its own; its tensors are read without running anything."""
    options = poptorch.Options().deviceIterations(3).modelName("net")
    module = torch.nn.Linear(2, 1)
    saved = SavedModel(
        is_training=True,
        weights=module.state_dict(),
        optimizer_state={"Accl1___weight": torch.ones(2)},
        random_state=torch.get_rng_state(),
        example=example_of((torch.ones(3, 2), [1, None]), {"y": "text"}),
        objects=pickled(module, options, None),
    )
    assert write(saved, tmp_path) == tmp_path / "model.poptorch"
    assert write(saved, tmp_path / "new" / "file") == tmp_path / "new" / "file"
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["model.poptorch"]

    for found in (read(tmp_path), read(tmp_path / "new" / "file")):
        assert torch.equal(found.weights["weight"], module.weight)
        assert found.is_training
        assert found.optimizer_state.keys() == {"Accl1___weight"}
        assert found.example is not None
        (x, rest), kwargs = found.example
        assert (x.shape, x.untyped_storage().nbytes(), rest, kwargs) == ((3, 2), 4, [1, None], {"y": "text"})
        other, other_options, optimizer = unpickled(found, tmp_path)
        assert torch.equal(other.weight, module.weight)
        assert optimizer is None
        assert other_options.toDict() == options.toDict()


def test_other_files_are_no_models(tmp_path: Path) -> None:
    """And what was left out is not there."""
    path = tmp_path / "file"
    with pytest.raises(poptorch.Error, match="there is no saved model"):
        read(path)
    path.write_text("text")
    with pytest.raises(poptorch.Error, match="'poptorch model 1' is expected"):
        read(path)
    torch.save(poptorch.Options(), path)
    with pytest.raises(poptorch.Error, match="no model that poptorch saved"):
        read(path)
    torch.save({"format": "other"}, path)
    with pytest.raises(poptorch.Error, match="'poptorch model 1' is expected"):
        read(path)
    write(SavedModel(is_training=False, weights={}), path)
    with pytest.raises(poptorch.Error, match="export_model=False"):
        unpickled(read(path), path)
    with pytest.raises(poptorch.Error, match="cannot be pickled"):
        pickled(lambda: None)


class Scaled(torch.nn.Module):
    """A loss, and a count of its forwards in training."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The mean of squares."""
        return poptorch.identity_loss(self.linear(x) ** 2, "mean")


@pytest.mark.parametrize("make", [torch.optim.SGD, poptorch.optim.AdamW])
def test_a_loaded_model_goes_on(tmp_path: Path, make: Any) -> None:
    """As the saved one does, in a new executor, and in one of the program's own module."""
    inputs = torch.linspace(0, 1, 6).reshape(2, 3)
    module = Scaled()
    model = poptorch.trainingModel(module, optimizer=make(module.parameters(), lr=0.1))
    with pytest.raises(poptorch.Error, match="has not been compiled"):
        model.save(tmp_path / "early")
    model(inputs)
    model.save(tmp_path)
    found, _, optimizer = unpickled(read(tmp_path), tmp_path)
    assert optimizer.param_groups[0]["params"][0] is next(found.parameters())
    assert next(found.parameters()).requires_grad
    other = Scaled()
    own = poptorch.trainingModel(other, optimizer=make(other.parameters(), lr=0.1))
    own.loadExecutable(tmp_path)
    loaded = poptorch.load(tmp_path, lambda options: options.modelName("loaded"))

    expected = [model(inputs) for _ in range(3)]
    for one in (loaded, own):
        assert one.isCompiled()
        assert torch.equal(torch.stack([one(inputs) for _ in range(3)]), torch.stack(expected))
        with pytest.raises(poptorch.Error, match=r"expected torch.Size\(\[2, 3\]\)"):
            one(inputs[:1])
        one.destroy()
    assert loaded.options.model_name == "loaded"
    model.destroy()


def test_weights_lie_in_a_file_once(tmp_path: Path) -> None:
    """Those of the module and those of the model are the same."""
    large = torch.nn.Linear(500, 500)
    model = poptorch.inferenceModel(large)
    model(torch.ones(1, 500))
    model.save(tmp_path / "net")

    assert (tmp_path / "net").stat().st_size < 1.2 * 4 * 500 * 501


def test_an_offline_model_is_exported(tmp_path: Path) -> None:
    """It runs where it is loaded with a device; into another kind of model nothing is loaded."""
    module = Scaled()
    model = poptorch.inferenceModel(module, poptorch.Options().useOfflineIpuTarget())
    model.compileAndExport(tmp_path / "net", torch.ones(1, 3))
    with pytest.raises(AssertionError, match="offline device"):
        model(torch.ones(1, 3))
    loaded = poptorch.load(
        tmp_path / "net", lambda options: options.connectionType(poptorch.ConnectionType.Always)
    )

    assert torch.equal(loaded(torch.ones(1, 3)), module(torch.ones(1, 3)))
    with pytest.raises(poptorch.Error, match="is of an inference model"):
        poptorch.trainingModel(Scaled()).loadExecutable(tmp_path / "net")
    with pytest.raises(poptorch.Error, match="is compiled"):
        loaded.loadExecutable(tmp_path / "net")


def test_programs_find_these_names() -> None:
    """Numbers of enumerations, the version, the logger, and a comparison of nested results."""
    assert (poptorch.CommGroupType.NoGrouping, poptorch.VariableRetrievalMode.AllReplicas) == (3, 2)
    assert poptorch.__version__ == popdist.__version__
    assert poptorch.logger.name == "poptorch::python"
    one = torch.ones(2)
    assert poptorch.testing.allclose([one, (one,)], [one, (one + 1e-7,)])
    assert not poptorch.testing.allclose([one], [one + 1])
    assert not poptorch.testing.allclose([one], [one, one])
    options = poptorch.Options().modelName("net")
    options.update({"device_iterations": 3}).deleteIfExists("model_name", "other", "log_dir")
    assert (options.device_iterations, options.exists("model_name"), options.log_dir) == (3, False, ".")


class _Parser(poptorch.ICustomArgParser):
    pass


KEYWORDS: list[tuple[Any, dict[str, object]]] = [
    (
        poptorch.cond,
        {"condition": torch.tensor([1]), "then_body": abs, "then_inps": [torch.ones(1)]}
        | {"else_body": abs, "else_inps": []},
    ),
    (poptorch.set_overlap_for_input, {"input_tensors": [torch.ones(1)], "mode": poptorch.OverlapMode.NoOverlap}),
    (poptorch.set_overlap_for_output, {"output_tensors": [torch.ones(1)], "mode": poptorch.OverlapMode.NoOverlap}),
    (poptorch.removeBlocks, {"module": torch.nn.Linear(1, 1)}),
    (poptorch.Options().logDir, {"log_dir": "."}),
    (poptorch.Options().useOfflineIpuTarget, {"ipu_version": 21}),
    (poptorch.registerCustomArgParser, {"arg_data_type": _Parser, "arg_parser": _Parser()}),
    (poptorch.setLogLevel, {"level": "WARN", "update_cpp": False}),
]


@pytest.mark.parametrize(("function", "arguments"), KEYWORDS)
def test_programs_call_these_keywords(function: Any, arguments: dict[str, object]) -> None:
    """As PopTorch names them."""
    function(**arguments)
    PARSERS.pop(_Parser, None)


def test_parameters_are_those_of_all_replicas() -> None:
    """Other groups are for one replica."""
    module = Scaled()
    for group in (poptorch.CommGroupType.All, poptorch.CommGroupType.NoGrouping):
        model: Any = poptorch.inferenceModel(module, poptorch.Options().replicationFactor(2))
        model.linear.weight.replicaGrouping(group, 0, poptorch.VariableRetrievalMode.OnePerGroup)
        if group is poptorch.CommGroupType.All:
            model(torch.ones(2, 3))
    with pytest.raises(poptorch.Error, match=r"replicaGrouping of linear.weight asks for values that differ"):
        model(torch.ones(2, 3))
    assert poptorch.inferenceModel(module)(torch.ones(2, 3)).dim() == 0
    with pytest.raises(AssertionError, match="comm_group_type must be one of"):
        model.linear.weight.replicaGrouping(0, 0, poptorch.VariableRetrievalMode.OnePerGroup)


made: Any = poptorch
"""Whose names are called with what they do not take."""


@pytest.mark.parametrize(
    ("asked", "error", "words"),
    [
        (
            lambda it: made.trainingModel(it, {"a": 1}),
            poptorch.Error,
            "takes poptorch.Options.*given dict",
        ),
        (lambda it: made.inferenceModel(it, "x"), poptorch.Error, "takes poptorch.Options.*given str"),
        (lambda it: made.trainingModel(it, None, "SGD"), poptorch.Error, "cannot train with a str"),
        (lambda _: made.trainingModel(None), poptorch.Error, "torch.nn.Module can be wrapped.*NoneType"),
        (lambda _: made.DataLoader(None, []), poptorch.Error, "takes poptorch.Options.*given NoneType"),
        (lambda _: _loader(batch_size="4"), AssertionError, "batch_size must be a whole number.*'4'"),
        (lambda _: _loader(batch_size=-1), AssertionError, "batch_size must be a whole number.*-1"),
        (lambda _: made.Options().setAvailableMemoryProportion(None), AssertionError, "takes a dict.*None"),
        (
            lambda _: made.Options().setAvailableMemoryProportion({"IPU0": "1"}),
            AssertionError,
            "from 0 to 1",
        ),
        (
            lambda _: made.Options().TensorLocations.numIOTiles("32"),
            AssertionError,
            "even number between 32 and 192",
        ),
        (lambda it: made.optim.LAMB(it.parameters(), max_weight_norm=-1), poptorch.Error, "must be a norm"),
        (lambda it: made.optim.SGD(it.parameters(), 0.1, loss_scaling=0), poptorch.Error, "above 0, and is 0"),
        (
            lambda it: made.optim.Adam(it.parameters(), max_grad_norm="1"),
            poptorch.Error,
            "above 0.*'1'",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_words(asked: Any, error: type[Exception], words: str) -> None:
    """Before anything is made of it: what was asked, and what was found."""
    with pytest.raises(error, match=words):
        asked(Scaled())


def _loader(**arguments: Any) -> object:
    return made.DataLoader(poptorch.Options(), torch.utils.data.TensorDataset(torch.ones(4)), **arguments)
