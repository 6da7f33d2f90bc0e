"""One step of a pipeline: torch's schedule runs this instance's stages over the samples of its replica.

The schedule adds the gradients of its own micro batches, in its own order. For popdist's step, the result in
``.grad`` is the gradient of one micro batch of the replica.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from inspect import signature
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from torch import Tensor, nn
from torch import distributed as dist

from popdist.data.randomness import remember_states
from popdist.errors import BatchError, OptimizerError, WeightsError, name_instances
from popdist.gradients.optimizer_steps import training_loop
from popdist.ground.contract import Contract
from popdist.ground.torch_private import PipelineParts, is_older_than, needs, parts_of_schedule
from popdist.job import context
from popdist.step.training.micro_batches import Nest, batches_of_loaders, split_batch

if TYPE_CHECKING:
    from weakref import WeakKeyDictionary

Arguments: TypeAlias = Callable[[Nest], tuple[Sequence[Any], Mapping[str, Any], Tensor]]
"""A function from samples to the arguments of ``schedule.step``: inputs, keyword arguments and the target."""

_SUCH_AS: Final = "such as ScheduleGPipe(stage, n_microbatches=8, loss_fn=loss_fn)"


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRun:
    """The data of one run of a schedule: first stage's inputs, keyword arguments of all stages, and the target."""

    inputs: tuple[Any, ...]
    keywords: dict[str, Any]
    target: Tensor


class Pipeline:
    """A schedule of torch.distributed.pipelining whose stages on this instance belong to a model."""

    def __init__(self, parts: PipelineParts, module: nn.Module) -> None:
        if is_older_than(2, 8):
            raise BatchError(needs(2, 8, "a pipeline of torch's stages"))
        stages = parts.stages
        _check_places(parts, context.environment().contract)
        _check_weights(parts, module)
        self.num_micro_batches = parts.num_micro_batches  # number of micro batches of one run
        self._is_first = any(stage.is_first for stage in stages)
        self._is_last = any(stage.is_last for stage in stages)
        self._stages = stages
        self._own = stages[0]
        self._trained: bool | None = None  # whether the last run trained; None before any run, and after an error
        places = [stages[0].stage_index_to_group_rank[index] for index in range(stages[0].num_stages)]
        self._last_rank = places[-1]
        self._can_evaluate = all(here != after for here, after in pairwise(places))
        # the shapes of the first run with gradients, and of the first run without gradients
        self._forms: dict[bool, list[str]] = {}

    def num_runs(self, batch: Nest, num_local_replicas: int, accumulation: int) -> int:
        """Return the number of runs of the schedule for each replica in a step on ``batch``."""
        dealt = batches_of_loaders(batch)
        number = len(dealt[0].micro_batches) // num_local_replicas if dealt else 1
        return max(1, number // self.num_micro_batches) if number > 1 else accumulation

    def runs(
        self, num_local_replicas: int, accumulation: int, arguments: Arguments | None, batch: Nest
    ) -> list[PipelineRun]:
        """Divide ``batch`` into runs of the schedule, in the order of local replicas."""
        if not (self._can_evaluate or torch.is_grad_enabled()):
            raise BatchError(
                "torch cannot evaluate with a schedule that has consecutive stages on one instance, such as "
                "ScheduleZBVZeroBubble and ScheduleDualPipeV: call pipeline_step outside torch.no_grad()"
            )
        number, contents, sizes = split_batch(batch, num_local_replicas, accumulation)
        together = 1  # number of the batch's micro batches in each run
        if batches_of_loaders(batch) and number > 1:
            together = self.num_micro_batches
            if number % together:
                raise BatchError(
                    f"the loader's batch has {number} micro batches of each replica, and the schedule takes "
                    f"{together}: make the loader with accumulation={together} or a multiple of it, or with "
                    "accumulation=1, whose micro batch the schedule cuts itself"
                )
        cut = self.num_micro_batches // together
        if len(set(sizes)) > 1 or not sizes[0] or sizes[0] % cut:
            raise BatchError(
                f"torch's schedules need micro batches of one size, and {', '.join(map(str, sizes))} samples "
                f"cannot be cut into {len(sizes) * cut} of them: make the loader with drop_last=True, or choose a "
                "batch size that fits"
            )
        run_arguments = [(arguments or _inputs_and_target)(content) for content in contents]
        starts = range(0, len(run_arguments), together)
        runs = [_joined(run_arguments[start : start + together]) for start in starts]
        for run in runs:
            self._check_forms(run)
        return runs

    def _check_forms(self, run: PipelineRun) -> None:
        """Raise BatchError if shapes differ from the first run's, for which torch's stages allocate memory."""
        forms = [_form(it) for it in (*run.inputs, *run.keywords.values()) if isinstance(it, Tensor)]
        has_own_forms = torch.is_grad_enabled() or not is_older_than(2, 13)  # for passes without gradients
        expected = self._forms.setdefault(torch.is_grad_enabled() if has_own_forms else True, forms)
        if forms != expected:
            raise BatchError(
                f"the inputs of this run of the schedule are {', '.join(forms)}, and those of the first were "
                f"{', '.join(expected)}: torch's stages take one shape only. Make the loader with "
                "drop_last=True, pad the samples to one length, or make another schedule for other shapes"
            )

    def run(self, step: Callable[..., object], run: PipelineRun) -> list[Tensor]:
        """Call a schedule's ``step``; return its micro batches' losses, or [] if the last stage is elsewhere."""
        losses: list[Tensor] | None = [] if self._is_last else None
        # torch learns shapes by a pass over uninitialized memory, when it begins to train or to evaluate
        learns, self._trained = self._trained is not torch.is_grad_enabled(), None
        options = {"return_outputs": False} if "return_outputs" in signature(step).parameters else {}
        try:
            with _learning_aside(self._stages) if learns else nullcontext():
                step(
                    *(run.inputs if self._is_first else ()),
                    target=run.target if self._is_last else None,
                    losses=losses,
                    **options,  # before torch 2.11 a schedule passes such an option to the stages
                    **run.keywords,
                )
        except RuntimeError as error:  # on the last stage torch raises this error if losses are missing
            self._check_loss(error)
            raise
        self._check_loss(None)
        self._trained = torch.is_grad_enabled()
        return [loss.detach() for loss in losses or ()]

    def evaluate(self, schedule: Any, run: PipelineRun) -> list[Tensor]:
        """Run the schedule without a backward pass, and return the losses; leave every ``.grad`` unchanged."""
        if not hasattr(schedule, "eval"):
            raise BatchError(needs(2, 9, "to evaluate a pipeline"))
        divides, schedule.scale_grads = schedule.scale_grads, False
        try:
            return self.run(schedule.eval, run)
        finally:
            schedule.scale_grads = divides

    def _check_loss(self, error: RuntimeError | None) -> None:
        """Raise BatchError if the schedule was made without a loss, and so has run no backward pass."""
        if torch.is_grad_enabled() and not self._own.has_backward:
            raise BatchError(f"the schedule computes no loss: make it with a loss_fn, {_SUCH_AS}") from error

    def losses(self, runs: Sequence[Sequence[Tensor]], number: int, *, share: bool) -> Tensor | None:
        """Return the losses of ``number`` micro batches; None before the last stage if not ``share``."""
        if self._is_last:
            found = torch.stack([loss.double() for losses in runs for loss in losses])
        elif share:
            found = torch.empty(number, dtype=torch.float64, device=self._own.device)
        else:
            return None
        if share and dist.get_world_size(self._own.group) > 1:
            dist.broadcast(found, group=self._own.group, group_src=self._last_rank)
        return found


@contextmanager
def _learning_aside(stages: Iterable[Any]) -> Iterator[None]:
    """A context in which torch learns shapes by running ``stages``, without change of buffers or random states."""
    with ExitStack() as attributes, ExitStack() as aside:
        aside.callback(remember_states())
        for stage in stages:
            _copy_buffers(stage.submod, aside)
            attributes.callback(delattr, stage, "forward_one_chunk")
            stage.forward_one_chunk = partial(_after, aside.close, stage.forward_one_chunk)
        yield


def _after(close: Callable[[], None], forward: Callable[..., object], *args: object, **kwargs: object) -> object:
    close()
    return forward(*args, **kwargs)


def _copy_buffers(module: nn.Module, until: ExitStack) -> None:
    """Replace the buffers of ``module`` by copies until the ExitStack ``until`` closes."""
    found = [
        (owner, *named)
        for owner in module.modules()
        for named in owner.named_buffers(recurse=False, remove_duplicate=False)
    ]
    copies = {id(buffer): buffer.clone() for _, _, buffer in found}
    for owner, name, buffer in found:
        until.callback(setattr, owner, name, buffer)
        setattr(owner, name, copies[id(buffer)])


Pipelines: TypeAlias = "WeakKeyDictionary[object, Pipeline]"
"""The pipelines of the schedules that have run over a model."""


def pipeline_of(known: Pipelines, schedule: object, module: nn.Module) -> Pipeline:
    """Return the ``Pipeline`` of ``schedule``; the first call makes it, and checks the stages."""
    parts = parts_of_schedule(schedule)
    if parts is None:
        raise BatchError(
            f"pipeline_step({type(schedule).__name__}): it takes a schedule of torch.distributed.pipelining, "
            f"{_SUCH_AS}"
        )
    if torch.is_grad_enabled() and (name := training_loop.in_closure_of):
        raise OptimizerError(
            f"pipeline_step() in the closure of {name}.step(closure): this instance's optimizer sees the "
            "gradients of its stages only, so others may call their closures more often. Call "
            "model.pipeline_step(schedule, batch), then optimizer.step() without a closure; take an optimizer "
            "that needs none, such as AdamW"
        )
    if schedule not in known:
        known[schedule] = Pipeline(parts, module)
    return known[schedule]


def _check_places(parts: PipelineParts, contract: Contract) -> None:
    """Raise BatchError unless the stages are on this replica's instances, with equally many on each instance."""
    stages, sharing, place = parts.stages, contract.parallelism, contract.replica_part
    ranks = dist.get_process_group_ranks(stages[0].group)
    first = place.replica * sharing.instances_per_replica
    stop = first + sharing.instances_per_replica
    expected = range(first + place.shard, stop, sharing.tensor) if sharing.has_mesh else range(first, stop)
    if ranks != [*expected] if sharing.has_mesh else not {*ranks} <= {*expected}:
        advice = (
            "make its stages with group=popdist.device_mesh()['pipeline'].get_group()"
            if sharing.pipeline > 1 or not sharing.has_mesh
            else f"start the job with poprun --parallelism pipeline={len(ranks)}"
        )
        raise BatchError(
            f"the schedule's stages lie on {name_instances(ranks)}, and this replica's on "
            f"{name_instances(expected)} (tensor={sharing.tensor}, pipeline={sharing.pipeline}): {advice}"
        )
    number = stages[0].num_stages
    if len(stages) * len(ranks) != number:
        raise BatchError(
            f"the stages say num_stages={number}, and the schedule has {len(stages)} on each of {len(ranks)} "
            f"instances: make them with num_stages={len(stages) * len(ranks)}, or cut the model for another "
            "--parallelism"
        )


def _check_weights(parts: PipelineParts, module: nn.Module) -> None:
    """Raise WeightsError unless the stages' parameters are in the model, and each in one stage only."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for stage in parts.stages:
        where = f"stage {stage.stage_index} of {stage.num_stages}"
        own = {id(it): it for it in stage.submod.parameters()}
        if not own:
            raise WeightsError(
                f"{where} has no parameters: a pipeline needs a layer for each stage, so take fewer stages "
                "(--parallelism pipeline=...), or cut the layers otherwise"
            )
        if not own.keys() <= names.keys():
            raise WeightsError(
                f"{where} has parameters that the model does not have: wrap what the stages hold, "
                "ReplicatedModel(stage.submod), or ReplicatedModel(nn.ModuleList(modules)) for several stages"
            )
        inside = {id(it) for it in stage.submod.modules()}
        for owner in module.modules():
            for name, parameter in owner.named_parameters(recurse=False):
                if id(owner) not in inside and id(parameter) in own and parameter.requires_grad:
                    raise WeightsError(
                        f"{names[id(parameter)]} of {where} is also the {name} of a {type(owner).__name__} "
                        "outside the stage: weights tied over stages would get the gradient of one of them only. "
                        "Give each stage weights of its own (tie_word_embeddings=False), or put both layers into "
                        "one stage"
                    )


def _inputs_and_target(content: Nest) -> tuple[Sequence[Any], Mapping[str, Any], Tensor]:
    if not isinstance(content, tuple | list) or not content or not isinstance(content[-1], Tensor):
        raise BatchError(
            f"the batch is a {type(content).__name__}, and pipeline_step takes tuples of the inputs and the "
            "target: for others give it arguments=lambda batch: ((batch['ids'],), {}, batch['labels'])"
        )
    return content[:-1], {}, content[-1]


def _joined(run_arguments: Sequence[tuple[Sequence[Any], Mapping[str, Any], Tensor]]) -> PipelineRun:
    """Return one run with the samples of all ``run_arguments``, which torch's schedule cuts into micro batches."""
    inputs, keywords, targets = zip(*run_arguments, strict=True)
    return PipelineRun(
        inputs=tuple(map(_join, zip(*inputs, strict=True))),
        keywords={name: _join([it[name] for it in keywords]) for name in keywords[0]},
        target=_join(targets),
    )


def _join(values: Sequence[Any]) -> Any:
    return torch.cat(list(values)) if isinstance(values[0], Tensor) and len(values) > 1 else values[0]


def _form(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
