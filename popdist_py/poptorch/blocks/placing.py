"""Parameters on the devices of a replica, as the blocks that ``BeginBlock`` made say."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter, tree_map

from poptorch.blocks.annotations import BlockModule, begun_by
from poptorch.blocks.first_forward import FirstForward
from poptorch.blocks.stages import deal_blocks, strategy_of
from poptorch.options import Options


def place(module: nn.Module, devices: Sequence[torch.device], options: Options) -> None:
    """Put the parameters and buffers of ``module`` on ``devices``, those of virtual IPU ``k`` on device ``k``.

    A block goes from a module that ``BeginBlock`` was given up to the next one, in the order of their definition.
    More virtual IPUs than devices share these out evenly. On several devices the tensors of an operation are moved
    to that of its parameter, else to where the last parameter lay. ``with poptorch.Block`` moves nothing.

    Args:
        module: What is placed; on one device it is only moved there, on none it stays.
        devices: Those of one replica.
        options: Their execution strategy deals blocks to virtual IPUs.
    """
    if len({*devices}) <= 1:
        module.to(devices[0] if devices else None)
        return
    blocks = [begun_by(part) for part in module.modules() if isinstance(part, BlockModule)]
    ipus = deal_blocks(strategy_of(options), blocks).ipus
    num_ipus = max(ipus) + 1
    here, number = devices[0], 0
    placed: set[int] = set()

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) in placed:  # a parameter that two modules share lies where the first of them does
            return tensor
        placed.add(id(tensor))
        return tensor.to(here)

    for part in module.modules():
        if isinstance(part, BlockModule):
            number += 1
            ipu = ipus[number]
            here = devices[ipu if num_ipus <= len(devices) else ipu * len(devices) // num_ipus]
        part._apply(moved, recurse=False)  # noqa: SLF001 - as Module.to() does
    _follow_parameters(module, devices[0])


def ipus_of_parameters(module: nn.Module, seen: FirstForward) -> dict[str, int]:
    """The virtual IPU of each parameter, by name: that of the block in which its module ran first.

    A module that never ran has that of the module around it, and 0 without one.
    """
    ipu_of: dict[str, int] = {}
    for path, part in module.named_modules():
        around = ipu_of.get(path.rpartition(".")[0], 0)
        ipu_of[path] = seen.ipus[seen.block_of[part]] if part in seen.block_of else around
    return {name: ipu_of[name.rpartition(".")[0]] for name, _ in module.named_parameters()}


class _MovedArguments(TorchFunctionMode):
    """Brings the tensors of an operation to one device.

    Args:
        device: Where operations without a parameter take place at first.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self,
        func: Any,  # noqa: ANN401 - as torch has it
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - what the operation gives
        del types
        given = (args, kwargs or {})
        tensors = [leaf for leaf in tree_iter(given) if isinstance(leaf, torch.Tensor)]
        self._device = next((one.device for one in tensors if isinstance(one, nn.Parameter)), self._device)
        if len({one.device for one in tensors if one.dim()}) > 1:
            name = getattr(func, "__name__", "")
            is_in_place = name.endswith("_") and not name.endswith("__")
            place = tensors[0].device if is_in_place else self._device
            given = tree_map(lambda leaf: leaf.to(place) if isinstance(leaf, torch.Tensor) else leaf, given)
        return func(*given[0], **given[1])


def _follow_parameters(module: nn.Module, device: torch.device) -> None:
    """Have the tensors of each operation in ``module``'s forward meet on one device; at first it is ``device``."""
    scopes: list[ExitStack] = []

    def begin(_module: nn.Module, _arguments: object) -> None:
        scopes.append(ExitStack())
        scopes[-1].enter_context(_MovedArguments(device))

    def end(_module: nn.Module, _arguments: object, _output: object) -> None:
        scopes.pop().close()

    module.register_forward_pre_hook(begin, prepend=True)
    module.register_forward_hook(end, always_call=True)
