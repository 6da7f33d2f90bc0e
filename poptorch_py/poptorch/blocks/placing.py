"""Where blocks run: on which stages, virtual IPUs and devices, as an execution strategy says."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from poptorch._logging import logger
from poptorch.blocks.annotations import BlockModule, begun_by
from poptorch.blocks.first_forward import EnteredBlock, FirstForward
from poptorch.enums import AutoStage
from poptorch.errors import Error
from poptorch.options import Options
from poptorch.options.execution_strategies import ExecutionStrategy, PipelinedExecution, ShardedExecution, Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class DealtBlocks:
    """Where the blocks of a forward run."""

    num_stages: int  # stages of the forward pass, at least 1
    # for each block, its virtual IPU in the replica; at first that of what runs before any block
    ipus: tuple[int, ...]


def deal_blocks(strategy: ExecutionStrategy, blocks: Sequence[EnteredBlock]) -> DealtBlocks:
    """Which stages and virtual IPUs ``blocks`` get by ``strategy``."""
    if strategy.stages:
        found = [_stage_of(strategy, block) for block in blocks]
        ipus = [strategy.ipu_of(stage) for stage in (strategy.stages[0], *found)]
        return DealtBlocks(num_stages=len(strategy.stages) if blocks else 1, ipus=tuple(ipus))
    numbers: dict[Hashable, int] = {}
    ipus = [0]
    for position, block in enumerate(blocks):
        number = numbers.setdefault(block.user_id or block.module or position, len(numbers))
        is_next = strategy.auto_stage is AutoStage.AutoIncrement
        otherwise = number if is_next else ipus[-1]
        ipus.append(otherwise if block.ipu_id is None else block.ipu_id)
    counted = len(numbers) if strategy.auto_stage is AutoStage.AutoIncrement else max(ipus) + 1
    return DealtBlocks(num_stages=max(1, counted), ipus=tuple(ipus))


def _stage_of(strategy: ExecutionStrategy, block: EnteredBlock) -> Stage:
    for stage in strategy.stages:
        if block.user_id in stage.blocks:
            return stage
    name = "without a user_id" if block.user_id is None else repr(block.user_id)
    raise Error(
        f"the model has a block {name}, and no stage of {type(strategy).__name__} names it: "
        f"{[stage.blocks for stage in strategy.stages]}"
    )


def check_stages(seen: FirstForward, options: Options, *, is_training: bool) -> None:
    """Deal the blocks of a forward to virtual IPUs, which ``seen`` has then."""
    strategy = strategy_of(options)
    seen.ipus = (dealt := deal_blocks(strategy, seen.blocks)).ipus
    num_stages = dealt.num_stages
    logger.debug("poptorch.Options enablePipelining set to value %d", is_pipeline(strategy) and num_stages > 1)
    if not is_pipeline(strategy):
        return
    accumulation, iterations = options.Training.gradient_accumulation, options.device_iterations
    if is_training and accumulation < 2 * num_stages - 1:
        raise Error(
            f"options.Training.gradientAccumulation is {accumulation}, and must be greater than or equal to the "
            f"number of pipeline stages ({2 * num_stages - 1}) of training: {num_stages} forward, "
            f"{num_stages - 1} backward"
        )
    if not is_training and iterations < num_stages:
        raise Error(
            f"options.deviceIterations must be greater than or equal to the number of pipeline stages "
            f"({num_stages}) in inference, and is {iterations}"
        )


def strategy_of(options: Options) -> ExecutionStrategy:
    """The execution strategy of ``options``."""
    return options._execution_strategy  # noqa: SLF001 - programs read it so too


def is_pipeline(strategy: ExecutionStrategy) -> bool:
    """Whether its stages work at the same time, so that a call must fill them."""
    return isinstance(strategy, PipelinedExecution) and not isinstance(strategy, ShardedExecution)


def devices_of_tensors(
    module: nn.Module, devices: Sequence[torch.device], options: Options
) -> dict[str, torch.device]:
    """Where each parameter and buffer lies before ``module`` runs, by name: virtual IPU ``k`` is device ``k``."""
    parts = list(module.named_modules())
    ipus = deal_blocks(
        strategy_of(options), [begun_by(part) for _, part in parts if isinstance(part, BlockModule)]
    ).ipus
    num_ipus = max(ipus) + 1
    found: dict[str, torch.device] = {}
    device_of: dict[int, torch.device] = {}
    here, number = devices[0], 0
    for path, part in parts:
        if isinstance(part, BlockModule):
            number += 1
            ipu = ipus[number]
            here = devices[ipu if num_ipus <= len(devices) else ipu * len(devices) // num_ipus]
        for name, tensor in (
            *part.named_parameters(path, recurse=False),
            *part.named_buffers(path, recurse=False),
        ):
            found[name] = device_of.setdefault(id(tensor), here)
    return found


def ipus_of_parameters(module: nn.Module, seen: FirstForward) -> dict[str, int]:
    """The virtual IPU of each parameter, by name: that of the block in which its module ran first."""
    ipu_of: dict[str, int] = {}
    for path, part in module.named_modules():
        around = ipu_of.get(path.rpartition(".")[0], 0)
        ipu_of[path] = seen.ipus[seen.block_of[part]] if part in seen.block_of else around
    return {name: ipu_of[name.rpartition(".")[0]] for name, _ in module.named_parameters()}


class MovedArguments(TorchFunctionMode):
    """Within it an operation's tensors are moved to the device of its parameter, else of the last one before."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self,
        func: Any,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        del types
        given = (args, kwargs or {})
        tensors: list[torch.Tensor] = []
        _map_tensors(given, tensors.append)
        self._device = next((one.device for one in tensors if isinstance(one, nn.Parameter)), self._device)
        if len({one.device for one in tensors if one.dim()}) > 1:
            name = getattr(func, "__name__", "")
            is_in_place = name.endswith("_") and not name.endswith("__")
            place = tensors[0].device if is_in_place else self._device
            given = _map_tensors(given, lambda tensor: tensor.to(place))
        return func(*given[0], **given[1])


def _map_tensors(arguments: Any, function: Callable[[torch.Tensor], object]) -> Any:
    """An operation's arguments with what ``function`` makes of each tensor."""
    if isinstance(arguments, torch.Tensor):
        return function(arguments)
    if isinstance(arguments, dict):
        return {name: _map_tensors(value, function) for name, value in arguments.items()}
    if type(arguments) in (tuple, list):
        return type(arguments)(_map_tensors(value, function) for value in arguments)
    return arguments
