"""Detection of wrong writes in a step, by checksums of parameters and by copies of buffers.

The checksums also show whether weights are equal on all instances.
"""

import hashlib
import struct
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parameter import is_lazy

from popdist.errors import PopdistWarning, WeightsError, name_first
from popdist.exchange.groups import MAX_NUMBERS, Group
from popdist.ground import torch_private
from popdist.ground.local_tensors import is_distributed, local_part
from popdist.job import context
from popdist.job.weights import is_in_memory, sums_of
from popdist.step.training.step import modules_in, reduced_modules


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSums:
    """Checksums of a module's parameters or gradients; a checksum adds a tensor's memory as 64-bit integers."""

    names: Sequence[str]
    parameters: Sequence[Tensor]
    sums: Sequence[int]

    @property
    def word(self) -> int:
        """A 64-bit digest of all tensors' checksums in this object; never 0, which stands for no digest."""
        return _word(self.sums) or 1

    def first_change(self) -> str | None:
        """Return the name of the first tensor changed since the checksums were made; None if none changed."""
        rows = zip(self.names, self.sums, sums_of(self.parameters), strict=True)
        return next((name for name, before, now in rows if before != now), None)


def sum_parameters(module: nn.Module) -> ParameterSums:
    """Return the checksums of the parameters of ``module`` that `is_comparable` accepts."""
    return sum_tensors((name, it) for name, it in module.named_parameters() if is_comparable(it))


def sum_tensors(named: Iterable[tuple[str, Tensor]]) -> ParameterSums:
    """Return the checksums of the tensors in ``named``, which has pairs of a name and a tensor."""
    pairs = list(named)
    tensors = [tensor for _, tensor in pairs]
    return ParameterSums(names=[name for name, _ in pairs], parameters=tensors, sums=sums_of(tensors))


def compare_weights(
    group: Group, words: Sequence[int], own: ParameterSums | None, timeout_seconds: float | None = None
) -> None:
    """Raise WeightsError on all instances if their weights differ; the error names the first such parameter."""
    difference = find_difference(group, "weights", words, own, timeout_seconds)
    if difference is not None:
        raise WeightsError(
            f"the weights of the instances are no longer equal: {difference}. It may have begun some steps ago. "
            "The usual reasons: one instance left out a step, as for a NaN that it alone has seen; a learning "
            "rate differs, as a scheduler steps on one instance only, or follows a loss of one instance in place "
            "of the mean over all; weights are written on one instance only, as by load_state_dict(); a layer "
            "was made after ReplicatedModel, with another seed on each instance. "
            "popdist.broadcast_weights(model) makes them equal"
        )


def check_equal(module: nn.Module) -> None:
    """Raise WeightsError on all instances if their weights differ. Every instance must call the function."""
    group = context.data_parallel_group()
    if len(group.instances) > 1 and context.current_job().is_checked:
        sums = sum_parameters(module)
        words = [word for (word,) in group.start("compare the weights of all instances", [sums.word]).wait()]
        compare_weights(group, words, sums)


def compare_copies(module: nn.Module) -> None:
    """Raise WeightsError if the instances that share a pipeline stage have different copies of a parameter, or
    shards of a parameter that do not fit together.
    """
    contract = context.environment().contract
    if contract.parallelism.tensor == 1:
        return
    group = context.current_group().limited_to(tuple(contract.parallelism.stage_of(contract.instance_index)))
    named = [(name, it) for name, it in module.named_parameters() if is_comparable(it)]
    copies = sum_tensors((name, it) for name, it in named if is_copied(it))
    cut = [(name, it) for name, it in named if not is_copied(it)]
    sums = ParameterSums(
        names=[*copies.names, *(name for name, _ in cut)],
        parameters=[*copies.parameters, *(it for _, it in cut)],
        sums=[*copies.sums, *(_word_of_cut(it) for _, it in cut)],
    )
    words = [word for (word,) in group.start("compare what shards have alike", [sums.word]).wait()]
    if difference := find_difference(group, "weights", words, sums):
        raise WeightsError(
            f"the shards of a stage do not fit together: {difference}. The usual reasons: another seed on each "
            "instance; a layer that is larger on one; a layer on a part of the sequence whose weights are no "
            "DTensor (SequenceParallel makes them so); torch.nn.utils.clip_grad_norm_, which knows of no other "
            "shards, as popdist.clip_grad_norm_ does; weights cut by hand, which need --instances-per-replica in "
            "place of --parallelism"
        )


def find_difference(
    group: Group, noun: str, words: Sequence[int], own: ParameterSums | None, timeout_seconds: float | None = None
) -> str | None:
    """Return a text with the first tensor that differs and the instances where it differs; None if none does.

    Every instance must call the function.
    """
    if not any(words) or len(set(words) - {0}) <= 1:
        return None
    sums = own.sums if own is not None else ()
    headers = group.start(f"the {noun} differ, count them", [len(sums)]).wait(timeout_seconds)
    counts = {i: count for i, (count,) in zip(group.instances, headers, strict=True) if count}
    if len(set(counts.values())) > 1:
        return ", ".join(f"{count} {noun} on {group.name([instance])}" for instance, count in counts.items())
    span = range(max(counts.values()))
    while True:
        step = -(-len(span) // MAX_NUMBERS)
        parts = [span[start : start + step] for start in range(0, len(span), step)]
        words_of_parts = [_word(sums[part.start : part.stop]) for part in parts] if sums else []
        text = f"the {noun} differ, look at {span.start} to {span.stop}"
        headers = group.start(text, words_of_parts).wait(timeout_seconds)
        answers = {i: numbers for i, numbers in zip(group.instances, headers, strict=True) if numbers}
        place = next(k for k, answer in enumerate(zip(*answers.values(), strict=True)) if len(set(answer)) > 1)
        span = parts[place]
        if len(span) == 1:
            name = own.names[span.start] if own is not None else f"number {span.start}"
            first = min(answers)
            others = [i for i, answer in answers.items() if answer[place] != answers[first][place]]
            return f"{name} of {group.name(others)} is not that of {group.name([first])}"


def is_copied(parameter: Any) -> bool:
    """Whether all instances that share a pipeline stage must have ``parameter`` whole and with equal values."""
    return not is_distributed(parameter) or all(it.is_replicate() for it in parameter.placements)


def is_comparable(parameter: Tensor) -> bool:
    """Whether ``parameter`` must be equal on all instances, and has numbers that can be added."""
    if is_lazy(parameter) or parameter.layout != torch.strided or parameter.device.type == "meta":
        return False
    if not is_in_memory(parameter):
        return False
    return type(parameter.data) is Tensor or is_distributed(parameter)


def _word_of_cut(parameter: Any) -> int:
    """Return a 64-bit checksum of the global shape and of the placements of the DTensor ``parameter``."""
    return _digest(f"{tuple(parameter.shape)} {parameter.placements}".encode())


def _word(sums: Sequence[int]) -> int:
    """Return a signed 64-bit digest of 64-bit sums; for a single sum, the sum itself."""
    if len(sums) == 1:
        return sums[0]
    return _digest(struct.pack(f"={len(sums)}q", *sums))


def _digest(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little", signed=True)


def sum_others(module: nn.Module, others: Iterable[nn.Module]) -> ParameterSums:
    """Return the checksums of the parameters of ``others`` that ``module`` does not have."""
    return sum_tensors(_other_parameters(module, others))


def _other_parameters(module: nn.Module, others: Iterable[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    seen = {id(parameter) for parameter in module.parameters()}
    for other in others:
        for name, parameter in other.named_parameters():
            if id(parameter) not in seen and is_comparable(parameter):
                seen.add(id(parameter))
                yield f"{name} of {type(other).__name__}", parameter


class UntrackedBuffers:
    """Copies of the buffers of modules outside of all wrapped models, made at each module's first call."""

    def __init__(self) -> None:
        wrapped = [part for module in modules_in(reduced_modules) for part in module.modules()]
        self._tracked = {id(tensor) for part in wrapped for tensor in part.buffers(recurse=False)}
        self._copies: dict[nn.Module, dict[str, Tensor]] = {}
        is_compiled = any(map(torch_private.is_compiled, wrapped))
        self._hook = None if is_compiled else register_module_forward_pre_hook(self._remember)

    def _remember(self, module: nn.Module, _args: object) -> None:
        if not torch.compiler.is_compiling() and module.training and module not in self._copies:
            buffers = {name: it for name, it in module.named_buffers(recurse=False) if id(it) not in self._tracked}
            self._copies[module] = {name: local_part(tensor).detach().clone() for name, tensor in buffers.items()}

    def close(self, *, warns: bool) -> None:
        """Stop watching modules; if ``warns``, warn of the buffers that have changed."""
        if self._hook is not None:
            self._hook.remove()
        names = [
            f"{name} of {type(module).__name__}"
            for module, copies in (self._copies.items() if warns else ())
            for name, before in copies.items()
            if not _is_equal(local_part(getattr(module, name, None)), before)
        ]
        if names:
            warnings.warn(
                f"{name_first(names)} changed in a loop over micro batches, and nothing wraps "
                "the module: so the buffer differs between instances, and depends on how the replicas are dealt "
                "to them. Put it into one ModuleDict with the model, or wrap it, ReplicatedModel(module); or call "
                "module.eval() where it shall not change",
                PopdistWarning,
                stacklevel=3,
            )


def _is_equal(now: object, before: Tensor) -> bool:
    if not isinstance(now, Tensor) or now.shape != before.shape or now.device != before.device:
        return False
    return torch.equal(now, before)
