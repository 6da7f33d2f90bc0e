"""Which optimizer updates parameters on the device, by their dtypes, those of the state, and where it lies."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.nn import Parameter

import popdist
from poptorch._logging import logger
from poptorch.optim.arithmetic import arithmetic_of
from poptorch.optim.whole_parameters import WidenedLAMB
from poptorch.options import Options

_EXACT: Final = (torch.float32, torch.float64)

_SEEDS_OF_A_JOB: Final = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """How the state lies.

    Attributes:
        model: Whose parameters are updated; None if the state is not dealt to instances.
        rounding: "stochastic" or "nearest".
        seed: Of the random bits.
    """

    model: popdist.ReplicatedModel | None
    rounding: str
    seed: int

    @classmethod
    def of(cls, options: Options, model: popdist.ReplicatedModel | None) -> "Placement":
        """As the options say."""
        location = options.TensorLocations.location_optimizer
        is_sharded = bool(location.get("useReplicatedTensorSharding")) and popdist.num_instances() > 1
        return cls(
            model=model if is_sharded else None,
            rounding="stochastic" if options.Precision.stochastic_rounding else "nearest",
            seed=options.random_seed if options.exists("random_seed") else 0,
        )


def make_stepper(
    kind: str,
    settings: Mapping[str, Any],
    parameters: Sequence[Parameter],
    moments: Mapping[str, torch.dtype],
    placement: Placement,
    number: int,
) -> torch.optim.Optimizer:
    """The optimizer that updates ``parameters``.

    Args:
        kind: SGD, Adam, AdamW, RMSprop or LAMB.
        settings: Of their group.
        parameters: At least one, on the device.
        moments: The dtype of what has a number for each element, by torch's name of it.
        placement: How the state lies.
        number: Of the group: each has other random bits.
    """
    found, taken = arithmetic_of(kind, settings)
    is_exact = all(it.dtype in _EXACT for it in parameters) and set(moments.values()) <= {torch.float32}
    own: dict[str, Any] = {
        "rounding": placement.rounding,
        "seed": (placement.seed + number * 0x9E3779B97F4A7C15) % _SEEDS_OF_A_JOB,
    }
    if not is_exact and found is popdist.optim.LAMB:
        if placement.model is not None:
            logger.debug("LAMB in half precision takes whole parameters: its state is not sharded")
        return WidenedLAMB(parameters, moments=moments, **own, **taken)
    if not is_exact:
        first = next(iter(moments.values()), torch.float32)
        held = first if set(moments.values()) == {first} and kind == "SGD" else torch.float32
        taken |= {"optimizer_class": found, "moments": held, **own}
        found = popdist.optim.LowPrecision
    if placement.model is not None:
        return popdist.ShardedOptimizer(placement.model, found, parameters, **taken)
    return found(parameters, **taken)


def scales_gradients(stepper: torch.optim.Optimizer) -> bool:
    """Whether ``stepper`` divides gradients by its ``grad_scale``, once they are in float32."""
    if isinstance(stepper, popdist.ShardedOptimizer):
        return "moments" in stepper.param_groups[0]
    return isinstance(stepper, WidenedLAMB | popdist.optim.LowPrecision)
