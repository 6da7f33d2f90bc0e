"""What the replicas of an instance have used and changed in a step, exchanged among the instances.

Almost always it is the same on all of them. So each sends a digest in the header that ends the step, and all that
it stands for only where digests differ.

A buffer that was made in a micro batch, or got another shape or dtype there, cannot be combined. It is right as it
is where the instances have the same, or where one has more of it than another and both begin alike: a table for
longer sequences, a mask. Anything else depends on the split, and is an error.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from torch import Tensor

from popdist.errors import CollectiveError, WeightsError, name_instances
from popdist.gradients.buffers import ReplicaBuffers
from popdist.groups import Group
from popdist.weights import bytes_of, gather_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StepChanges:
    """What was used and changed in a step.

    Bit i of ``mask`` stands for what the instances count alike: the parameters that had a gradient, and above them
    the buffers of the model that changed. ``others`` are keys of the changed buffers of other models,
    ``irregular`` those of buffers that were made, removed or given another form, each with what it is now. In a
    checked step, ``starts`` has the model's buffers with checksums of what they were when it began.
    """

    mask: int = 0
    others: tuple[str, ...] = ()
    irregular: tuple[tuple[str, str], ...] = ()
    starts: tuple[tuple[str, int], ...] = ()

    @property
    def digest(self) -> int:
        """Equal numbers, of 56 bits, mean equal changes."""
        return _digest(self.mask, self.others, self.irregular, self.starts)


NO_CHANGES: Final = StepChanges()


@lru_cache(maxsize=64)
def _digest(mask: int, *others: object) -> int:
    """The digest of changes, most of which come again in each step."""
    data = mask.to_bytes(mask.bit_length() // 8 + 1, "little")
    if any(others):
        data += repr(others).encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=7).digest(), "little")


@lru_cache(maxsize=64)
def _only(used: int) -> StepChanges:
    """The changes of a step in which no buffer has changed."""
    return StepChanges(mask=used)


def changes_of(used: int, num_parameters: int, buffers: ReplicaBuffers | None) -> StepChanges:
    """What this instance's replicas have used and changed, when all have ended."""
    if buffers is None:
        return _only(used)
    own, others = buffers.changed()
    found = buffers.irregular_now()
    if not own and not others and not found and not buffers.is_checked:
        return _only(used)
    irregular = tuple((key, _describe(tensor)) for key, tensor in sorted(found.items()))
    return StepChanges(
        mask=used | own << num_parameters,
        others=tuple(others),
        irregular=irregular,
        starts=tuple(buffers.start_sums),
    )


def agree_on_changes(
    group: Group, own: StepChanges, digests: Iterable[int], buffers: ReplicaBuffers | None
) -> StepChanges:
    """What the replicas of all instances have used and changed; every instance calls it.

    ``digests`` are those of all instances. A WeightsError says that a buffer differs between them, a
    CollectiveError that one has another model.
    """
    if len(set(digests)) == 1:
        return own
    labels = [] if buffers is None else buffers.labels
    message = json.dumps([f"{own.mask:x}", own.others, [key for key, _ in own.irregular], labels, own.starts])
    received = [
        json.loads(data) for data in gather_bytes(group, "exchange what a step has changed", message.encode())
    ]
    mask = 0
    for digits, *_ in received:
        mask |= int(digits, 16)
    _compare_starts(group, [it[4] for it in received])
    others = sorted({key for it in received for key in it[1]})
    irregular = sorted({key for it in received for key in it[2]})
    for key in [*others, *irregular]:
        label = key.rpartition(" ")[0]
        if label and (
            without := [i for i, it in zip(group.instances, received, strict=True) if label not in it[3]]
        ):
            raise CollectiveError(
                f"a step has changed the buffer {key.rpartition(' ')[2]} of a model that is not on "
                f"{name_instances(without)}: wrap the same models, and copy them, on all instances"
            )
    if irregular and buffers is not None:
        _compare(group, buffers, irregular)
        buffers.set_apart(irregular)
    return StepChanges(mask=mask, others=tuple(others))


def _compare_starts(group: Group, starts: Sequence[Sequence[tuple[str, int]]]) -> None:
    """Raise, on every instance, if a buffer differed between instances when the step began."""
    for (name, first), *others in zip(*starts, strict=False):
        if differing := [i for i, (_, it) in zip(group.instances[1:], others, strict=True) if it != first]:
            raise WeightsError(
                f"the buffers of the instances are no longer equal: {name} of {name_instances(differing)} was not "
                f"that of instance {group.instances[0]} when the step began. The usual reasons: a part of the "
                "model was called in training mode outside of all loops, on other samples on each instance; "
                "load_state_dict() on one instance only; a write of the program's own that follows the samples of "
                "one instance. popdist.broadcast_weights(model) makes them equal"
            )


def _compare(group: Group, buffers: ReplicaBuffers, keys: Sequence[str]) -> None:
    """Raise, on every instance, unless the instances have the same of each buffer, as far as they have it."""
    tensors = [buffers.tensor_of(key) for key in keys]
    forms = [None if tensor is None else [str(tensor.dtype), *tensor.shape] for tensor in tensors]
    text = "compare buffers that were made in a step"
    received = [json.loads(data) for data in gather_bytes(group, text, json.dumps(forms).encode())]
    digests = []
    for tensor, *forms_of_one in zip(tensors, *received, strict=True):
        known = [form for form in forms_of_one if form is not None]
        is_alike = len({(form[0], len(form)) for form in known}) == 1
        if tensor is None or not is_alike:
            digests.append("" if tensor is None else _describe(tensor))
            continue
        common = [min(sizes) for sizes in zip(*(form[1:] for form in known), strict=True)]
        digests.append(_describe(tensor[tuple(slice(size) for size in common)]))
    found = [json.loads(data) for data in gather_bytes(group, f"{text}, contents", json.dumps(digests).encode())]
    for key, *own in zip(keys, *found, strict=True):
        if len(set(own) - {""}) > 1:
            first = next(digest for digest in own if digest)
            differing = [i for i, it in zip(group.instances, own, strict=True) if it not in ("", first)]
            raise WeightsError(
                f"the buffer {buffers.describe(key)} was made in a micro batch, or changed its shape or dtype "
                f"there, and differs between instances (on {name_instances(differing)}): nothing tells what it is "
                "for all replicas. Register it before training, in its shape and dtype; keep in it what does not "
                "follow from the samples; or hand the state to forward() and return it"
            )


def _describe(tensor: Tensor | None) -> str:
    """Form and contents of a buffer: equal texts are equal bits."""
    if tensor is None:
        return "none"
    digest = hashlib.blake2b(bytes_of(tensor), digest_size=8).hexdigest()
    return f"{tensor.dtype} {tuple(tensor.shape)} {digest}"


def raise_fault(group: Group, fault: str | None) -> None:
    """Raise, on every instance, the fault of the first instance that has one; all call it."""
    received = gather_bytes(group, "exchange what is wrong", (fault or "").encode())
    faults = {instance: data.decode() for instance, data in zip(group.instances, received, strict=True) if data}
    raise WeightsError(f"{next(iter(faults.values()))} (found on {name_instances(faults)})")
