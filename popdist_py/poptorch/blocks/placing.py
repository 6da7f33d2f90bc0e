"""Which virtual IPU, and which device, has a parameter, as the blocks say; and tensors that meet on one device."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter, tree_map

from poptorch.blocks.annotations import BlockModule, begun_by
from poptorch.blocks.first_forward import FirstForward
from poptorch.blocks.stages import deal_blocks, strategy_of
from poptorch.options import Options


def devices_of_tensors(
    module: nn.Module, devices: Sequence[torch.device], options: Options
) -> dict[str, torch.device]:
    """Where the parameters and buffers of ``module`` lie before it has run: virtual IPU ``k`` is device ``k``.

    A block goes from a module that ``BeginBlock`` was given up to the next one, in the order of their definition;
    ``with poptorch.Block`` places nothing. More virtual IPUs than devices share these out evenly.

    Args:
        module: Its tensors stay where they are.
        devices: Those of one replica, at least one.
        options: Their execution strategy deals blocks to virtual IPUs.

    Returns:
        The device of each parameter and buffer by name. One that several modules share has that of the first.
    """
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
    """The virtual IPU of each parameter, by name: that of the block in which its module ran first.

    A module that never ran has that of the module around it, and 0 without one.
    """
    ipu_of: dict[str, int] = {}
    for path, part in module.named_modules():
        around = ipu_of.get(path.rpartition(".")[0], 0)
        ipu_of[path] = seen.ipus[seen.block_of[part]] if part in seen.block_of else around
    return {name: ipu_of[name.rpartition(".")[0]] for name, _ in module.named_parameters()}


class MovedArguments(TorchFunctionMode):
    """Within it the tensors of an operation meet on one device: that of its parameter, else that of the last one.

    Operations that write into a tensor take place where it lies.

    Args:
        device: Where operations take place before there was a parameter.
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
