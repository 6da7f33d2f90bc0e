"""LAMB and LARS: optimizers that scale the update of each parameter by norms over the whole parameter.

A step has two parts. The first part prepares the tensor whose norm is needed in addition to the norm of the
weights; the second part updates the weights with both norms. Between the parts, the sums over pieces of parameters
are added over the instances, once for all parameters.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from popdist.errors import OptimizerError
from popdist.optim.pieces import (
    PieceOptimizer,
    check_number,
    flat_in_order_of,
    gradient_of,
    node_sums,
    square_sums,
)

Settings: TypeAlias = Mapping[str, Any]
"""A parameter group of an optimizer: the parameters and their settings."""

_CACHED_ELEMENTS: Final = 1 << 16
"""Number of elements of small tensors that are updated at once on the CPU, so that they fit its caches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedUpdate:
    """Parameters of one parameter group, each with the tensor whose norm scales the parameter's update."""

    group: Settings
    parameters: list[Tensor]
    measured: list[Tensor]


class TrustRatioOptimizer(PieceOptimizer):
    """An optimizer that scales each parameter's update by norms over the whole parameter."""

    exchanges_norms = True

    element_names: frozenset[str]
    """The names of the optimizer's elementwise state."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:  # the arguments of a subclass's constructor, by name
        settings = {
            name: value for name, value in arguments.items() if name not in ("self", "params", "__class__")
        }
        super().__init__(arguments["params"], settings)

    @classmethod
    def names_of_elements(
        cls,
        defaults: Mapping[str, Any],  # noqa: ARG003 - the names are equal for all settings
        settings: Mapping[str, Any],  # noqa: ARG003 - the names are equal for all settings
        device: torch.device,  # noqa: ARG003 - the names are equal on all devices
    ) -> frozenset[str]:
        """Return the names of the state tensors that have one number for each element of a parameter."""
        return cls.element_names

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, as torch's optimizers do; raise OptimizerError if a setting is invalid."""
        self.check_settings(self.defaults | param_group)
        super().add_param_group(param_group)

    def check_settings(self, settings: Settings) -> None:
        """Raise OptimizerError if a setting of a parameter group is out of its range."""
        raise NotImplementedError

    def prepare(self, group: Settings, parameters: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
        """Return for each parameter the tensor whose norm is needed in addition to the weights' norm."""
        raise NotImplementedError

    def finish_update(self, prepared: PreparedUpdate, norms: Sequence[tuple[float, float]] | None) -> None:
        """Update the prepared parameters. ``norms`` has the norms of each weight and of its update, or is None for
        updates without trust ratios.
        """
        raise NotImplementedError

    def update(self) -> None:
        """Update the parameters that have a gradient; first those whose norms need sums of other instances."""
        work = [(group, [it for it in group["params"] if it.grad is not None]) for group in self.param_groups]
        for _, parameters in work:
            for parameter in parameters:
                gradient_of(parameter)  # raises an error before anything is updated
        if self._whole_sums is not None:
            self._step_on_pieces(work, self._whole_sums)
        for group, parameters in work:
            for some in _batches([it for it in parameters if not self._is_cut(group, it)], group["foreach"]):
                prepared = self._begin(group, some)
                self.finish_update(prepared, _norms(prepared) if group["trust_ratio"] else None)

    def _step_on_pieces(
        self,
        work: Sequence[tuple[Settings, list[Tensor]]],
        whole_sums: Callable[..., Mapping[Tensor, Sequence[float]]],
    ) -> None:
        """Update the parameters of which this instance has only a piece."""
        prepared_updates = []
        for group, parameters in work:
            if cut := [it for it in parameters if self._is_cut(group, it)]:
                prepared_updates.append(self._begin(group, cut))
        pieces = {
            parameter: [node_sums(flat_in_order_of(it, parameter), self._pieces[parameter]) for it in both]
            for prepared in prepared_updates
            for parameter, *both in zip(prepared.parameters, prepared.parameters, prepared.measured, strict=True)
        }
        whole = whole_sums(pieces)
        for prepared in prepared_updates:
            self.finish_update(prepared, [_roots(*whole[parameter]) for parameter in prepared.parameters])

    def _is_cut(self, group: Settings, parameter: Tensor) -> bool:
        """Whether this instance has only a piece of ``parameter``, so that norms need sums of other instances."""
        piece = self._pieces.get(parameter)
        return piece is not None and not piece.is_whole and bool(group["trust_ratio"])

    def _begin(self, group: Settings, parameters: list[Tensor]) -> PreparedUpdate:
        gradients = [gradient_of(parameter) for parameter in parameters]
        if group["maximize"]:
            gradients = list(torch._foreach_neg(gradients))  # noqa: SLF001 - torch's own optimizers call this function too
        measured = self.prepare(group, parameters, gradients)
        return PreparedUpdate(group=group, parameters=parameters, measured=measured)


def _batches(parameters: Sequence[Tensor], foreach: bool | None) -> Iterator[list[Tensor]]:  # noqa: FBT001 - torch's optimizers name the setting so
    """Yield groups of parameters to update in one call; the grouping does not change the results."""
    # on the CPU torch's foreach functions loop over tensors, so it is best if the tensors of a call stay in the
    # cache
    is_on_cpu = any(parameter.device.type == "cpu" for parameter in parameters)
    most = 0 if foreach is False else _CACHED_ELEMENTS if is_on_cpu else math.inf
    batch: list[Tensor] = []
    num_elements = 0
    for parameter in parameters:
        if batch and num_elements + parameter.numel() > most:
            yield batch
            batch, num_elements = [], 0
        batch.append(parameter)
        num_elements += parameter.numel()
    if batch:
        yield batch


def _norms(prepared: PreparedUpdate) -> list[tuple[float, float]]:
    weights = [flat_in_order_of(it, it) for it in prepared.parameters]
    measured = [flat_in_order_of(it, own) for it, own in zip(prepared.measured, prepared.parameters, strict=True)]
    sums = square_sums([*weights, *measured])
    return [_roots(*both) for both in zip(sums[: len(weights)], sums[len(weights) :], strict=True)]


def _roots(of_weights: float, of_measured: float) -> tuple[float, float]:
    return math.sqrt(of_weights), math.sqrt(of_measured)


class LAMB(TrustRatioOptimizer):
    """The optimizer LAMB (algorithm 2 of arXiv 1904.00962), for batches of thousands of samples.

    m and v are the running means of the gradient and of its square, as in Adam, and u = m / (sqrt(v) + eps) +
    weight_decay · w. Each parameter changes by -lr · r · u. The trust ratio r is min(‖w‖, max_weight_norm) / ‖u‖;
    r is 1 if either norm is 0. Each norm is over the whole parameter, added in one fixed order in float64, so that
    ``popdist.ShardedOptimizer(model, popdist.optim.LAMB, ...)`` gives bitwise equal weights.

    Biases and the parameters of normalization layers are commonly not scaled::

        decayed = [it for it in model.parameters() if it.dim() > 1]
        others = [it for it in model.parameters() if it.dim() <= 1]
        LAMB([{"params": decayed}, {"params": others, "weight_decay": 0.0, "trust_ratio": False}], lr=2e-3)

    Args:
        params: Parameters or groups of parameters, as for torch's optimizers.
        lr: Learning rate, at least 0.
        betas: The factors by which a step multiplies m and v, each from 0 to below 1.
        eps: Number that is added to sqrt(v), at least 0.
        weight_decay: Factor of the weights in the update, at least 0.
        bias_correction: Whether m and v are divided by 1 - beta**step, as in Adam.
        max_weight_norm: Upper limit of ‖w‖ in the trust ratio, above 0; None for no limit.
        trust_ratio: False for a group whose updates are not scaled: these updates are AdamW's updates.
        foreach: Whether each call of torch's foreach functions updates all parameters of a group; None decides by
            the device. The bits are the same.
        maximize: Whether to go up the gradient.

    Raises:
        OptimizerError: If a setting is out of its range.
    """

    element_names = frozenset({"exp_avg", "exp_avg_sq"})

    def __init__(  # noqa: PLR0913 - torch's optimizers have as many settings
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        *,
        bias_correction: bool = True,
        max_weight_norm: float | None = None,
        trust_ratio: bool = True,
        foreach: bool | None = None,
        maximize: bool = False,
    ) -> None:
        super().__init__(locals())

    def check_settings(self, settings: Settings) -> None:
        """Raise OptimizerError if a setting of a LAMB parameter group is out of its range."""
        for name in ("lr", "eps", "weight_decay"):
            check_number(name, settings[name])
        betas = settings["betas"]
        if not isinstance(betas, tuple | list) or len(betas) != 2:
            raise OptimizerError(f"betas={betas!r} must be two numbers")
        for index, beta in enumerate(betas):
            check_number(f"betas[{index}]", beta, below=1.0)
        if settings["max_weight_norm"] is not None:
            check_number("max_weight_norm", settings["max_weight_norm"], minimum=1e-300)

    def prepare(self, group: Settings, parameters: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
        """Update the moments m and v of each parameter, and return the update u of each parameter."""
        states = [self._state_of(parameter) for parameter in parameters]
        means, squares = [it["exp_avg"] for it in states], [it["exp_avg_sq"] for it in states]
        torch._foreach_add_([it["step"] for it in states], 1.0)
        beta_1, beta_2 = map(float, group["betas"])
        torch._foreach_lerp_(means, gradients, 1 - beta_1)
        torch._foreach_mul_(squares, beta_2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta_2)
        below = torch._foreach_sqrt(squares)  # noqa: SLF001 - torch's own optimizers call it
        if group["bias_correction"]:
            steps = [float(it["step"]) for it in states]
            roots = [(1 - beta_2**step) ** 0.5 for step in steps]
            torch._foreach_div_(below, roots)
            torch._foreach_add_(below, float(group["eps"]))
            torch._foreach_mul_(below, [1 - beta_1**step for step in steps])
        else:
            torch._foreach_add_(below, float(group["eps"]))
        if not group["weight_decay"]:
            return list(torch._foreach_div(means, below))  # noqa: SLF001 - torch's own optimizers call it
        updates = list(torch._foreach_mul(parameters, float(group["weight_decay"])))  # noqa: SLF001 - torch's own optimizers call it
        torch._foreach_addcdiv_(updates, means, below)
        return updates

    def finish_update(self, prepared: PreparedUpdate, norms: Sequence[tuple[float, float]] | None) -> None:
        """Add -lr · r · u to the weights, where r is the trust ratio and u the prepared update."""
        rate, limit = float(prepared.group["lr"]), prepared.group["max_weight_norm"]
        if norms is None:
            torch._foreach_mul_(prepared.measured, -rate)
        else:
            ratios = [_trust_ratio(*both, limit) for both in norms]
            torch._foreach_mul_(prepared.measured, [-rate * ratio for ratio in ratios])
        torch._foreach_add_(prepared.parameters, prepared.measured)

    def _state_of(self, parameter: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state


def _trust_ratio(weight_norm: float, update_norm: float, limit: float | None) -> float:
    if weight_norm == 0 or update_norm == 0:
        return 1.0
    return (weight_norm if limit is None else min(weight_norm, float(limit))) / update_norm


class LARS(TrustRatioOptimizer):
    """The optimizer LARS (algorithm 1 of arXiv 1708.03888), for batches of thousands of samples.

    With the gradient g, each parameter has the local rate λ = trust_coefficient · ‖w‖ / (‖g‖ + weight_decay ·
    ‖w‖); λ is 1 if either norm is 0. Then v = momentum · v + lr · λ · (g + weight_decay · w), and w changes by -v.
    So v contains the learning rates of earlier steps, as in the paper; torch's SGD instead multiplies v by the
    present learning rate. With ``nesterov``, w changes by -(momentum · v + lr · λ · (g + weight_decay · w)).

    Each norm is over the whole parameter, added in one fixed order in float64, so that
    ``popdist.ShardedOptimizer(model, popdist.optim.LARS, ...)`` gives bitwise equal weights.

    Args:
        params: Parameters or groups of parameters, as for torch's optimizers.
        lr: Learning rate, at least 0.
        momentum: The factor by which a step multiplies v, from 0 to below 1.
        weight_decay: Factor of the weights in the update, at least 0.
        trust_coefficient: The paper's η, at least 0.
        nesterov: Whether to use Nesterov momentum, which requires a momentum above 0.
        trust_ratio: False for a group whose λ is 1, such as biases and normalization layers.
        foreach: Whether each call of torch's foreach functions updates all parameters of a group; None decides by
            the device. The bits are the same.
        maximize: Whether to go up the gradient.

    Raises:
        OptimizerError: If a setting is out of its range.
    """

    element_names = frozenset({"momentum_buffer"})

    def __init__(  # noqa: PLR0913 - torch's optimizers have as many settings
        self,
        params: Iterable[Any],
        lr: float | Tensor = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        *,
        nesterov: bool = False,
        trust_ratio: bool = True,
        foreach: bool | None = None,
        maximize: bool = False,
    ) -> None:
        super().__init__(locals())

    def check_settings(self, settings: Settings) -> None:
        """Raise OptimizerError if a setting of a LARS parameter group is out of its range."""
        for name in ("lr", "weight_decay", "trust_coefficient"):
            check_number(name, settings[name])
        check_number("momentum", settings["momentum"], below=1.0)
        if settings["nesterov"] and not settings["momentum"]:
            raise OptimizerError("nesterov=True needs a momentum above 0: there is nothing to look ahead by")

    def prepare(self, group: Settings, parameters: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:  # noqa: ARG002 - LARS needs only the gradients
        """Return ``gradients`` unchanged, because LARS needs the norms of the gradients."""
        return gradients

    def finish_update(self, prepared: PreparedUpdate, norms: Sequence[tuple[float, float]] | None) -> None:
        """Update the momentum v and the weights of the prepared parameters."""
        group, parameters = prepared.group, prepared.parameters
        rate, decay, momentum = float(group["lr"]), float(group["weight_decay"]), float(group["momentum"])
        rates = [rate] * len(parameters)
        if norms is not None:
            rates = [rate * _local_rate(*both, decay, float(group["trust_coefficient"])) for both in norms]
        if decay:
            moves = list(torch._foreach_add(prepared.measured, parameters, alpha=decay))  # noqa: SLF001 - torch's own optimizers call it
            torch._foreach_mul_(moves, rates)
        else:
            moves = list(torch._foreach_mul(prepared.measured, rates))  # noqa: SLF001 - torch's own optimizers call it
        if momentum:
            speeds = [self._speed_of(parameter) for parameter in parameters]
            torch._foreach_mul_(speeds, momentum)
            torch._foreach_add_(speeds, moves)
            if group["nesterov"]:
                torch._foreach_add_(moves, speeds, alpha=momentum)
            else:
                moves = speeds
        torch._foreach_sub_(parameters, moves)

    def _speed_of(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        speed: Tensor = state["momentum_buffer"]
        return speed


def _local_rate(weight_norm: float, gradient_norm: float, decay: float, coefficient: float) -> float:
    if weight_norm == 0 or gradient_norm == 0:
        return 1.0
    return coefficient * weight_norm / (gradient_norm + decay * weight_norm)
