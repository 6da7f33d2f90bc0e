"""The sharded optimizer: each instance updates its own part of the weights, and has only this part's state.

An error on one instance is an error on all instances: no instance continues with weights of which a part was not
updated, or was updated with another learning rate.
"""

import hashlib
import math
import reprlib
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import add
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from popdist.errors import OptimizerError, check_flags
from popdist.exchange.groups import Group, wait_for_first_error
from popdist.gradients.reduction import check_whole_job
from popdist.gradients.shards import remember
from popdist.ground.tree import Node, aligned_nodes, finish
from popdist.job import context
from popdist.optim.elementwise import check_elementwise, check_in_training, quiet_step
from popdist.optim.low_precision import LowPrecision
from popdist.optim.one_by_one import OF_SCALERS, State, settings_of
from popdist.optim.pieces import BLOCK, NodeSums, Piece, PieceOptimizer, load_uncast, refuse_distributed
from popdist.optim.sharded.parameters import (
    Named,
    ShardedParameter,
    copy_state,
    describe,
    gather_state,
    own_state,
    shard_parameters,
)
from popdist.optim.sharded.weight_copies import WeightCopies
from popdist.step.checks.step_checks import is_checked
from popdist.step.training.replicated_model import ReplicatedModel

PLAIN = (bool, int, float, str, tuple, type(None))
"""The types of optimizer settings that are shown and compared by value."""


def in_words(settings: Mapping[str, Any]) -> str:
    """Return optimizer settings as text, such as ``, lr=0.1``; for a value such as a tensor, only the name."""
    return "".join(
        f", {name}={value!r}" if isinstance(value, PLAIN) else f", {name}" for name, value in settings.items()
    )


def report(group: Group, text: str, trouble: Exception | None, settings: int = 0) -> None:
    """Raise an error on all instances if an instance has failed, or if the digests of their settings differ."""
    headers = group.start(text, [trouble is not None, settings]).wait()
    if trouble is not None:
        raise trouble
    if failed := [i for i, (has_failed, _) in zip(group.instances, headers, strict=True) if has_failed]:
        wait_for_first_error()
        raise OptimizerError(
            f"{group.name(failed)} failed in {text} (see the error there), so a part of the weights was not "
            "updated"
        )
    if differing := [i for i, (_, other) in zip(group.instances, headers, strict=True) if other != settings]:
        raise OptimizerError(
            f"{text}: the settings of the parameter groups of {group.name([group.backend.instance_index])} are "
            f"not those of {group.name(differing)}, and each updates a part of the weights: set the same learning "
            "rate and the like everywhere; a schedule that goes by a metric needs its mean over all instances"
        )


def digest_of_groups(groups: Iterable[Mapping[str, Any]], names: Iterable[str]) -> int:
    """Return a digest of the settings ``names`` in all parameter groups, to compare them between instances."""
    known = sorted(names)
    texts = [repr([group.get(name) for name in known if isinstance(group.get(name), PLAIN)]) for group in groups]
    return int.from_bytes(hashlib.blake2b("\n".join(texts).encode(), digest_size=7).digest(), "little")


class ShardedOptimizer(Optimizer):
    """An optimizer that shards ``optimizer_class``: each of n instances has 1/n of the state and of the work.

    The weights are bitwise equal to the weights of ``optimizer_class`` alone. It is used like any optimizer:
    parameter groups, ``zero_grad``, schedulers, closures, GradScaler::

        optimizer = popdist.ShardedOptimizer(model, torch.optim.AdamW, lr=1e-3, weight_decay=0.1)

    Every instance must make the optimizer, step, and call ``state_dict()``. The elements of a group's parameters,
    in a row, are cut into one range for each instance. When each instance has updated its range, all instances get
    the ranges of the other instances. The method is the method of torch's ZeroRedundancyOptimizer and of ZeRO's
    first stage (Rajbhandari et al., 2020), but by elements instead of parameters. If gradients are sent over a
    network, as between hosts, an instance gets only the gradients that it needs for its update; other code that
    reads a ``.grad`` makes all instances exchange the gradients.

    Args:
        model: The model whose parameters the optimizer updates.
        optimizer_class: A class of torch or your own. It must update each element independently, as SGD and the
            Adam family do. LAMB and LARS of ``popdist.optim`` are exceptions, because they can work on shards.
        params: Parameters of the model, or groups of parameters, as for torch's optimizers; None means all.
        **defaults: The keyword arguments of ``optimizer_class``.

    Raises:
        OptimizerError: If the optimizer does not update each element independently, as LBFGS, Adafactor, Muon and
            LAMB of other libraries, or a parameter is not the model's or has gaps in its memory.
        CollectiveError: If the instances make different optimizers.
        BackendError: If an instance was lost or did not come in time.
    """

    def __init__(
        self,
        model: ReplicatedModel,
        optimizer_class: type[Optimizer],
        /,
        params: Iterable[Any] | None = None,
        **defaults: Any,
    ) -> None:
        if not isinstance(model, ReplicatedModel):
            raise OptimizerError(f"ShardedOptimizer takes a popdist.ReplicatedModel, not a {type(model).__name__}")
        given: object = optimizer_class
        if not (isinstance(given, type) and issubclass(given, Optimizer)):
            raise OptimizerError(f"ShardedOptimizer takes a class of optimizers, not {optimizer_class!r}")
        self._model = weakref.ref(model)
        self._optimizer_class = optimizer_class
        self._keys: frozenset[str] = frozenset()
        self._sharded: list[ShardedParameter] = []
        self._num_steps = 0
        self._copies = WeightCopies()
        self._inside: Optimizer | None = None
        self._norms: NormExchange | None = None
        self._group().agree(f"ShardedOptimizer({optimizer_class.__name__}{in_words(defaults)})")
        self._given = defaults
        super().__init__(model.parameters() if params is None else params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of the model's parameters, as torch's optimizers do; all instances must add the same group.

        Raises:
            OptimizerError: If a parameter is not the model's or comes twice, or with the group's settings the
                optimizer does not update each element independently.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            named = self._named(group["params"])
            refuse_distributed("ShardedOptimizer", group["params"])
            device = named[0][1].device if named else torch.device("cpu")
            settings = settings_of(group)
            keys = check_elementwise(self._optimizer_class, self._given, settings, device)
            whole_job = self._group()
            whole_job.agree(f"ShardedOptimizer.add_param_group({describe(named)})")
            self._copies.share(whole_job, named, self)
            sharded = shard_parameters(named, whole_job)
        except Exception:
            del self.param_groups[-1]
            raise
        inner = {**settings, "params": [parameter.shard for parameter in sharded if parameter.mine]}
        if self._inside is None:
            self._inside = self._optimizer_class([inner], **self._given)
            self.defaults = self._inside.defaults
        else:
            self._inside.add_param_group(inner)
        for name in settings:
            del group[name]
        group |= settings_of(self._inside.param_groups[-1])
        self._keys |= keys
        self._sharded += sharded
        if isinstance(self._inside, PieceOptimizer):
            self._norms = NormExchange(whole_job, self._sharded) if self._inside.exchanges_norms else None
            self._inside.place(pieces_of(self._sharded), self._norms.run if self._norms else None)
        remember([(parameter.whole, parameter.ranges) for parameter in sharded], self)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update this instance's shards, and receive the other instances' shards; all instances must call this.

        Args:
            closure: A function that computes the loss and the gradients anew, as for torch's optimizers.

        Returns:
            The result of ``closure``, or None.

        Raises:
            OptimizerError: If a parameter was moved, a gradient is sparse, or an instance failed or has other
                settings.
            Exception: The error of the optimizer; the other instances then raise an OptimizerError.
            MicroBatchError: If the gradients of some replicas are missing.
            CollectiveError: If the instances make other calls.
            BackendError: If an instance was lost or did not come in time.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        group, text = self._group(), f"ShardedOptimizer.step() of {len(self._sharded)} parameters"
        with group.undivided(text):
            self._begin(group, text)
            trouble = self._update()
            with group.doing(f"{text}, the update"):
                self._copies.update(group, self._sharded)
        report(group, f"{text}, the update", trouble)
        return loss

    def _begin(self, group: Group, text: str) -> None:
        """Begin a step: check the parameters, and wait until no instance computes with the weights any more."""
        trouble: OptimizerError | None = None
        try:
            for parameter in self._sharded:
                parameter.check()
        except OptimizerError as error:
            trouble = error
        report(group, text, trouble, digest_of_groups(self.param_groups, self.defaults))

    def _update(self) -> Exception | None:
        """Update this instance's shards of the parameters; return the error if the step fails, else None."""
        inside = self._completed_settings()
        if self._norms is not None:
            self._norms.begin_step()
        try:
            for parameter in self._sharded:
                parameter.set_gradient()
            self._num_steps += 1
            if is_checked(self._num_steps) and context.current_job().is_checked:
                check_in_training(inside)
            with self._scaled(inside):
                quiet_step(inside)
        except Exception as error:  # noqa: BLE001 - the other instances must know of the error before it is raised
            return error
        finally:
            for parameter in self._sharded:
                parameter.shard.grad = None
            if self._norms is not None:
                self._norms.end_step()
        for own, within in zip(self.param_groups, inside.param_groups, strict=True):
            own.update(settings_of(within))
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state in the form without sharding, on all instances; all must call this.

        The state can be loaded into ``optimizer_class`` itself. ``popdist.checkpoint.save`` gathers the state
        tensor by tensor, only on the instance that writes.

        Raises:
            OptimizerError: If a state contains anything except tensors and single values, or differs between
                instances.
            CollectiveError: If some instances do not call it.
            BackendError: If an instance was lost or did not come in time.
        """
        return self.gather_state_dict(keep=True)

    @torch.no_grad()
    def gather_state_dict(self, *, keep: bool) -> dict[str, Any]:
        """Gather and return the state dict; with ``keep=False``, its states are empty. All instances call this."""
        check_flags(OptimizerError, keep=keep)
        text = f"ShardedOptimizer.state_dict() of {len(self._sharded)} parameters"
        inner = self._completed_settings().state
        group = self._group()
        with group.undivided(text):
            for parameter, state in gather_state(group, self._sharded, inner, self._keys, text):
                if keep:
                    self.state[parameter.whole] = state
        try:
            return super().state_dict()
        finally:
            self.state.clear()

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load this instance's part of ``state_dict``, the state that this class or ``optimizer_class`` itself has
        saved. The call does not communicate with other instances.

        Raises:
            OptimizerError: If ``state_dict`` is no state, or of another precision or another optimizer inside
                LowPrecision.
            ValueError: If ``state_dict`` has other parameter groups.
        """
        state: object = state_dict
        if not isinstance(state, Mapping) or "param_groups" not in state:
            raise OptimizerError(f"{reprlib.repr(state)} is no state_dict() of an optimizer")
        if isinstance(self._inside, LowPrecision):
            self._inside.check_state(state_dict)
            states = load_uncast(self, state_dict)
            self.state.update(states)
        else:
            super().load_state_dict(dict(state_dict))
        inside = self._completed_settings()
        mine = [parameter for parameter in self._sharded if parameter.mine and parameter.whole in self.state]
        states = {
            parameter.shard: own_state(parameter, self.state[parameter.whole], self._keys) for parameter in mine
        }
        inside.__setstate__({"state": defaultdict(dict, states), "param_groups": inside.param_groups})
        self.state.clear()

    def __reduce__(self) -> Any:
        raise OptimizerError(
            "a ShardedOptimizer cannot be copied or pickled: the other instances hold parts of its state. Take "
            "its state_dict(), or popdist.checkpoint.save()"
        )

    @property
    def own_state(self) -> Mapping[Tensor, State]:
        """The optimizer state on this instance; the keys are this instance's shards of the parameters."""
        return self._completed_settings().state

    def remember(self) -> Callable[[], None]:
        """Copy this instance's state and settings, and return a function that restores both."""
        inside = self._completed_settings()
        states = {piece: copy_state(state) for piece, state in inside.state.items()}
        settings = [settings_of(group) for group in self.param_groups]

        def give_back() -> None:
            inside.state.clear()
            inside.state.update(states)
            for group, before in zip(self.param_groups, settings, strict=True):
                group.update(before)

        return give_back

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether the inner optimizer, not torch's GradScaler, divides gradients and skips steps."""
        return isinstance(self._inside, LowPrecision)

    @contextmanager
    def _scaled(self, inside: Optimizer) -> Iterator[None]:
        """A context in which the inner optimizer has the scale and ``found_inf`` of a GradScaler."""
        handed = {name: it for name, it in vars(self).items() if name in OF_SCALERS}
        vars(inside).update(handed)
        try:
            yield
        finally:
            for name in handed:
                del vars(inside)[name]

    def _completed_settings(self) -> Optimizer:
        """Copy all groups' settings to the inner optimizer of this instance's shards; return the optimizer."""
        assert self._inside is not None  # noqa: S101 - mypy cannot know that __init__ makes a group
        for own, within in zip(self.param_groups, self._inside.param_groups, strict=True):
            within.update(settings_of(own))
        return self._inside

    def _named(self, parameters: list[Parameter]) -> list[Named]:
        model = self._model()
        names = {} if model is None else {id(parameter): name for name, parameter in model.named_parameters()}
        for parameter in parameters:
            if id(parameter) not in names:
                raise OptimizerError(
                    f"a parameter of shape {tuple(parameter.shape)} is none of the model's: give ShardedOptimizer "
                    "parameters of the ReplicatedModel that it was made with"
                )
        if len(set(map(id, parameters))) < len(parameters):
            raise OptimizerError("a group of parameters holds one of them twice: name each once")
        return [(names[id(parameter)], parameter) for parameter in parameters]

    def _group(self) -> Group:
        context.ensure_init()
        group = context.data_parallel_group()
        check_whole_job(group, context.environment().contract.layout)
        return group


_NUM_SUMS: Final = 2
"""Number of sums of squares for each parameter: of the weights, and of the tensor compared with the weights."""


class NormExchange:
    """The exchange of norms of parameters of which several instances have parts; one exchange in each step."""

    def __init__(self, group: Group, sharded: Sequence[ShardedParameter]) -> None:
        self._group = group
        self._cut = [parameter for parameter in sharded if sum(map(bool, parameter.ranges)) > 1]
        self._nodes = [
            [_nodes_of(parameter, elements) for elements in parameter.ranges] for parameter in self._cut
        ]
        self._is_over = True  # whether the exchange of this step is finished

    def begin_step(self) -> None:
        """Begin a step of the optimizer, in which the instances must exchange norms once."""
        self._is_over = not self._cut

    def run(self, own: NodeSums) -> Mapping[Tensor, Sequence[float]]:
        """Run the exchange: add all instances' sums over pieces, and return the sums over whole parameters."""
        if self._is_over:
            return {}
        received = self._gather([0.0, *self._numbers_of(own)])
        if failed := [i for i, row in zip(self._group.instances, received, strict=True) if row[0]]:
            wait_for_first_error()
            raise OptimizerError(
                f"{self._group.name(failed)} failed in a step (see the error there), so norms of parameters are "
                "not known"
            )
        positions = [1] * len(received)
        totals: dict[Tensor, list[float]] = {}
        for parameter, nodes_of_all in zip(self._cut, self._nodes, strict=True):
            sums: list[dict[Node, float]] = []
            for _ in range(_NUM_SUMS):
                values: dict[Node, float] = {}
                for instance, nodes in enumerate(nodes_of_all):
                    start, positions[instance] = positions[instance], positions[instance] + len(nodes)
                    values |= zip(nodes, received[instance][start : positions[instance]], strict=True)
                sums.append(values)
            if parameter.shard in own:
                totals[parameter.shard] = [finish(values, _num_blocks(parameter), add) for values in sums]
        return totals

    def end_step(self) -> None:
        """End a step: if this instance failed before the exchange of norms, take part now, as others wait."""
        if not self._is_over:
            self._gather([1.0])

    def _numbers_of(self, own: NodeSums) -> list[float]:
        """Return the partial sums for norms that this instance sends; zeros for a parameter without a gradient."""
        mine = self._group.backend.instance_index
        numbers: list[float] = []
        for parameter, nodes_of_all in zip(self._cut, self._nodes, strict=True):
            none = [[0.0] * len(nodes_of_all[mine])] * _NUM_SUMS
            numbers += [number for values in own.get(parameter.shard, none) for number in values]
        return numbers

    def _gather(self, numbers: list[float]) -> list[list[float]]:
        self._is_over = True
        width = 1 + max(
            _NUM_SUMS * sum(len(nodes[instance]) for nodes in self._nodes)
            for instance in range(len(self._group.instances))
        )
        device = self._cut[0].whole.device
        sent = torch.zeros(width, dtype=torch.float64, device="cpu")
        sent[: len(numbers)] = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        text = f"the norms of {len(self._cut)} parameters"
        with self._group.undivided(text), self._group.doing(text):
            rows: list[list[float]] = self._group.backend.all_gather(sent.to(device)).tolist()
        return rows


def pieces_of(sharded: Sequence[ShardedParameter]) -> dict[Tensor, Piece]:
    """Return, for each shard of this instance, which consecutive elements of its parameter the shard has."""
    return {
        parameter.shard: Piece(position=position, elements=parameter.mine, num_elements=parameter.whole.numel())
        for position, parameter in enumerate(sharded)
        if parameter.mine
    }


def _num_blocks(parameter: ShardedParameter) -> int:
    return math.ceil(parameter.whole.numel() / BLOCK)


def _nodes_of(parameter: ShardedParameter, elements: range) -> list[Node]:
    if not elements:
        return []
    return aligned_nodes(elements.start // BLOCK, math.ceil(elements.stop / BLOCK), _num_blocks(parameter))
