"""`Options`: all that a program says of how its model runs, by setters, or by text that names these.

Text is read and not executed: the arguments of calls are literals and what `poptorch` has under public names.
"""

import ast
import copy
import importlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

import torch

from popdist.errors import seed_number
from poptorch import enums, environment
from poptorch._logging import logger
from poptorch.enums import AutoStage, CommGroupType, ConnectionType, OutputMode, SyncPattern
from poptorch.errors import ConfigFileError, Error
from poptorch.options.execution_strategies import ExecutionStrategy, PipelinedExecution
from poptorch.options.option_values import OptionValues, at_least_one, one_of
from poptorch.options.sub_options import (
    _DistributedOptions,
    _JitOptions,
    _PopartOptions,
    _PrecisionOptions,
    _TensorLocationOptions,
    _TrainingOptions,
)

_RANDOM_NORMAL: Final = 2  # PopART's number of synthetic data


class Options(OptionValues):
    """How a model runs: setters that return the options themselves, so that calls can be chained.

    ``POPTORCH_DEFAULT_OPTIONS`` (JSON: setter to value) and ``POPTORCH_CACHE_DIR`` are applied first. Options are
    frozen once a loader or a model uses them; ``clone()`` gives others that are not.
    """

    def __init__(self) -> None:
        super().__init__(
            replication_factor=1,
            input_group_size=1,
            input_group_type=CommGroupType.Consecutive,
            broadcast_buffers=True,
            device_iterations=1,
            log_dir=".",
            max_repeat_logs=4,
            auto_round_num_ipus=False,
            anchored_tensors={},
            output_mode=OutputMode.Default,
            output_return_period=1,
            connection_type=ConnectionType.Always,
            sync_pattern=SyncPattern.Full,
            available_memory_proportion={},
            source_location_excludes=[],
            show_compilation_progress_bar=True,
            relax_optimizer_checks=False,
            log_cycle_count=False,
            module_namescope_enabled=True,
        )
        self._defaults["max_repeat_logs"] = None  # which it may be
        self.Training = _TrainingOptions()  # how gradients become one
        self.Precision = _PrecisionOptions()  # dtypes and rounding
        self.Distributed = _DistributedOptions()  # which process of the job this one is
        self.TensorLocations = _TensorLocationOptions()  # where tensors lie
        self.Jit = _JitOptions()  # how the model was traced
        self._Popart = _PopartOptions()
        self._execution_strategy: ExecutionStrategy = PipelinedExecution()
        if folder := environment.setting("CACHE_DIR"):
            logger.info("POPTORCH_CACHE_DIR is set: setting cache path to %s", folder)
            self.enableExecutableCaching(folder)
        if text := environment.setting("DEFAULT_OPTIONS"):
            apply_json(self, text, "POPTORCH_DEFAULT_OPTIONS")

    @classmethod
    def from_json(cls, string: str) -> Self:
        """New options, with the setters called that a JSON object names: ``{"deviceIterations": 4}``."""
        made = cls()
        apply_json(made, string, "from_json")
        return made

    def loadFromFile(self, filepath: str) -> Self:
        """Call the setters in a file, each in a line as ``Training.gradientAccumulation(4)``; errors name it."""
        self.checkIsFrozen()
        names = {"options": self, "poptorch": importlib.import_module("poptorch")}
        for number, text in enumerate(Path(filepath).read_text(encoding="utf-8").splitlines(), start=1):
            line = text.strip()
            if not line or line.startswith("#"):
                continue
            call = f"options.{line.removeprefix('options.')}"
            try:
                _value_of(ast.parse(call, mode="eval").body, names)
            except Exception as error:
                kind = "SyntaxError" if isinstance(error, SyntaxError) else type(error).__name__
                reason = error.msg if isinstance(error, SyntaxError) else str(error)
                raise ConfigFileError(f"{kind} at line {number} of {filepath}: {reason}\n> {call}") from error
        return self

    def sourceLocationExcludes(self, excludes: Sequence[str]) -> Self:
        """Files left out of the compiler's traces. No effect: there are none."""
        return self.set(source_location_excludes=list(excludes))

    def appendToLocationExcludes(self, *excludes: str) -> Self:
        """More files left out of the compiler's traces. No effect: there are none."""
        return self.set(source_location_excludes=[*self.source_location_excludes, *excludes])

    def showCompilationProgressBar(self, show: bool = True) -> Self:
        """Whether ``compilationTime()`` tells; PopTorch also draws a bar."""
        return self.set(show_compilation_progress_bar=show)

    def relaxOptimizerAttributesChecks(self, relax: bool = True) -> Self:
        """Whether unexpected attributes of an optimizer are passed over in silence."""
        return self.set(relax_optimizer_checks=relax)

    def autoRoundNumIPUs(self, auto_round_num_ipus: bool = True) -> Self:
        """Take a power of two of IPUs. No effect: a replica has what poprun gave it."""
        return self.set(auto_round_num_ipus=auto_round_num_ipus)

    def deviceIterations(self, device_iterations: int) -> Self:
        """Steps that one call of a model makes; part of the combined batch."""
        return self.set(device_iterations=at_least_one("device_iterations", device_iterations))

    def setExecutionStrategy(self, strategy: ExecutionStrategy | AutoStage) -> Self:
        """How blocks are dealt to stages."""
        self.checkIsFrozen()
        if isinstance(strategy, AutoStage):
            strategy = PipelinedExecution(strategy)
        if not isinstance(strategy, ExecutionStrategy):
            raise AssertionError(
                f"{strategy!r} is no execution strategy: give a poptorch.PipelinedExecution or an AutoStage"
            )
        self._execution_strategy = strategy
        return self

    def setAvailableMemoryProportion(self, available_memory_proportion: Mapping[str, float]) -> Self:
        """Memory for products on each IPU, ``{"IPU0": 0.2}``. No effect: torch takes what it needs."""
        if not isinstance(available_memory_proportion, Mapping):
            raise AssertionError(
                f'setAvailableMemoryProportion takes a dict as {{"IPU0": 0.2}}, and was given '
                f"{available_memory_proportion!r}"
            )
        proportions = {}
        for key, value in available_memory_proportion.items():
            match = re.fullmatch(r"IPU(\d+)", str(key))
            if match is None or not hasattr(value, "__float__") or not 0 <= value <= 1:
                raise AssertionError(f'{key!r}: {value!r} must be of the form "IPU0": a proportion from 0 to 1')
            proportions[int(match[1])] = float(value)
        return self.set(available_memory_proportion=proportions)

    def replicationFactor(self, replication_factor: int) -> Self:
        """Replicas of this process; part of the combined batch."""
        return self.set(replication_factor=at_least_one("replication_factor", replication_factor))

    def inputReplicaGrouping(self, input_group_size: int, input_group_type: CommGroupType) -> Self:
        """Replicas that get the same samples; divides the combined batch."""
        return self.set(
            input_group_size=at_least_one("input_group_size", input_group_size),
            input_group_type=input_group_type,
        )

    def broadcastBuffers(self, broadcast_buffers: bool = True) -> Self:
        """Whether all replicas have the same buffers, or each its own."""
        return self.set(broadcast_buffers=broadcast_buffers)

    def logDir(self, log_dir: str) -> Self:
        """Where logs go. No effect: the log goes to stderr."""
        return self.set(log_dir=log_dir)

    def maxRepeatLogs(self, max_lines: int | None) -> Self:
        """How often a line may follow itself in the log. No effect: each is shown."""
        return self.set(max_repeat_logs=max_lines)

    def modelName(self, name: str) -> Self:
        """The name of the model in profiles. No effect: there are none."""
        return self.createOrSet(model_name=name)

    def enableExecutableCaching(self, path: str | None) -> Self:
        """Where compiled models are kept; None for nowhere. No effect: nothing is compiled."""
        self._Popart.set("enableEngineCaching", path is not None)
        self._Popart.set("cachePath", path or "")
        return self

    def useIpuModel(self, use_model: bool) -> Self:
        """Simulate an IPU. No effect: the model runs on the CPU or a GPU."""
        return self.createOrSet(use_model=use_model)

    def connectionType(self, connection_type: ConnectionType) -> Self:
        """When a device is attached; with ``ConnectionType.Never`` a model does not run."""
        return self.set(connection_type=connection_type)

    def syncPattern(self, sync_pattern: SyncPattern) -> Self:
        """Which IPUs wait for each other. No effect: replicas wait for each other once a step."""
        return self.set(sync_pattern=sync_pattern)

    def useIpuId(self, ipu_id: int) -> Self:
        """Which IPU to use. No effect: poprun gives each instance its devices."""
        return self.createOrSet(ipu_id=ipu_id)

    def useOfflineIpuTarget(self, ipu_version: int = 2) -> Self:
        """Only compile: as ``connectionType(ConnectionType.Never)``."""
        self.connectionType(ConnectionType.Never)
        return self.createOrSet(ipu_version=ipu_version)

    def anchorTensor(
        self,
        short_name: str,
        long_name: str,
        output_mode: OutputMode | None = None,
        output_return_period: int | None = 1,
    ) -> Self:
        """Keep a tensor of the model under a short name."""
        if not all(isinstance(name, str) for name in (short_name, long_name)):
            raise AssertionError(f"anchorTensor takes two names, and was given {(short_name, long_name)}")
        mode, period = _output_mode(OutputMode.All if output_mode is None else output_mode, output_return_period)
        return self.set(anchored_tensors={**self.anchored_tensors, short_name: [long_name, mode, period]})

    def outputMode(self, output_mode: OutputMode, output_return_period: int | None = None) -> Self:
        """Which micro batches' outputs a call returns: Final, EveryN (with its period), All or Sum."""
        mode, period = _output_mode(output_mode, output_return_period)
        return self.set(output_mode=mode, output_return_period=period)

    def defaultOutputMode(self) -> bool:
        """Whether no output mode was chosen: Final in training, All in inference."""
        return self.output_mode is OutputMode.Default

    def randomSeed(self, random_seed: int) -> Self:
        """The seed of torch, which is set at once, of shuffling and of the replicas' random states."""
        seed = seed_number(random_seed, AssertionError)
        self.createOrSet(random_seed=seed)
        torch.manual_seed(seed)
        return self

    def enableStableNorm(self, enabled: bool) -> Self:
        """The slower and stabler form of norms. No effect: torch has one form."""
        self._Popart.set("enableStableNorm", enabled)
        return self

    def enableSyntheticData(self, enabled: bool) -> Self:
        """Random data in place of inputs, to measure. No effect: inputs are used."""
        self._Popart.set("syntheticDataMode", _RANDOM_NORMAL if enabled else 0)
        return self

    def logCycleCount(self, log_cycle_count: bool) -> Self:
        """Count the cycles of an IPU."""
        return self.set(log_cycle_count=log_cycle_count)

    def enableProfiling(self, profile_dir: str | None = None) -> Self:
        """Write Poplar's profile. No effect: there is none; ``poprun --trace`` shows the time of each step."""
        self._Popart.setEngineOptions({"autoReport.all": "true"})
        if profile_dir is not None:
            self._Popart.setEngineOptions({"autoReport.directory": profile_dir})
        return self

    def disableModuleNamescope(self) -> Self:
        """Leave the names of modules out of the compiler's graph. No effect: there is no graph."""
        return self.set(module_namescope_enabled=False)

    def updatableNamedBuffers(self, buffers: Sequence[str]) -> Self:
        """Buffers that may be uploaded alone."""
        if not isinstance(buffers, list | tuple) or not all(isinstance(name, str) for name in buffers):
            raise AssertionError(f"updatableNamedBuffers takes a list of names, and was given {buffers!r}")
        self._Popart.set("updatableNamedBuffers", list(buffers))
        return self

    def toDict(self) -> dict[str, Any]:
        """All options by name, those of the parts too, with enumerations as their numbers."""
        values = super().toDict()
        for part in self._parts().values():
            values |= part.toDict()
        values["execution_mode"] = self._execution_strategy._execution_mode  # noqa: SLF001 - PopTorch's programs read the attribute by this name
        return values

    def clone(self) -> Self:
        """A copy that is independent, and not frozen."""
        return copy.deepcopy(self)

    def _freeze(self) -> None:
        super()._freeze()
        for part in self._parts().values():
            part._freeze()  # noqa: SLF001 - each part of the options has the same base class

    def _parts(self) -> dict[str, OptionValues]:
        return {name: part for name, part in vars(self).items() if isinstance(part, OptionValues)}

    def __repr__(self) -> str:
        parts = ", ".join(f"{name}={part!r}" for name, part in self._parts().items())
        return f"{super().__repr__().removesuffix(')')}, {parts})"


def check_options(call: str, options: object) -> Options:
    """Check that ``options`` is poptorch.Options, and return it."""
    if not isinstance(options, Options):
        raise Error(f"{call} takes poptorch.Options() as its options, and was given {type(options).__name__}")
    return options


def _output_mode(mode: OutputMode, period: int | None) -> tuple[OutputMode, int]:
    one_of("output_mode", mode, OutputMode)
    if mode is not OutputMode.EveryN:
        if period not in (None, 1):
            logger.warning("output_return_period=%s is only for OutputMode.EveryN, and not for %s", period, mode)
        return mode, 1
    if period is None:
        raise AssertionError("OutputMode.EveryN needs output_return_period: which outputs to return")
    return mode, at_least_one("output_return_period", period)


def apply_json(options: object, text: str, what: str) -> None:
    """Call the setters that the JSON object ``text`` names by their paths on ``options``; lists are arguments."""
    try:
        calls = json.loads(text)
    except ValueError as error:
        raise ConfigFileError(f"{what} is no JSON: {error}") from error
    if not isinstance(calls, dict):
        raise ConfigFileError(f'{what} must be a JSON object such as {{"deviceIterations": 4}}, and is {text!r}')
    for path, value in calls.items():
        setter: Any = options
        for name in path.split("."):
            setter = getattr(setter, name, None)
        if not callable(setter):
            raise ConfigFileError(f"{what} names {path!r}, which is no setter of poptorch.Options")
        setter(*map(_member, value if isinstance(value, list) else [value]))


def _member(value: object) -> object:
    """The member of an enumeration that a text such as ``OutputMode.All`` names; else ``value``."""
    if not isinstance(value, str) or value.count(".") != 1:
        return value
    kind, name = value.split(".")
    return getattr(getattr(enums, kind, None), name, value)


def _value_of(node: ast.expr, names: dict[str, object]) -> Any:
    """The value of an expression of calls, names, literals and collections of them."""
    match node:
        case ast.Call(func=function):
            arguments = [_value_of(argument, names) for argument in node.args]
            named = {str(keyword.arg): _value_of(keyword.value, names) for keyword in node.keywords}
            return _value_of(function, names)(*arguments, **named)
        case ast.Attribute(value=owner, attr=name) if not name.startswith("_") or name == "_Popart":
            return getattr(_value_of(owner, names), name)
        case ast.Name(id=name) if name in names:
            return names[name]
        case ast.List() | ast.Tuple():
            return [_value_of(part, names) for part in node.elts]
        case ast.Dict(keys=keys):
            pairs = zip(keys, node.values, strict=True)
            return {_value_of(key, names): _value_of(value, names) for key, value in pairs if key is not None}
        case _:
            try:
                return ast.literal_eval(node)
            except ValueError:
                raise SyntaxError(f"{ast.unparse(node)} is no call of a setter") from None
