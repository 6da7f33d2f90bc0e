"""The collectives of a job: sums, copies, barriers, JSON values and rows of all instances.

Every call first checks that all instances make the same call, with the same shape, dtype and arguments. So a
difference raises an error on every instance, with the arguments of each instance; no instance hangs or gets a
wrong result. Floats are added in the order of `popdist.ground.tree`, so that every instance gets bitwise equal
results, whatever the number of instances.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Literal, TypeVar, get_args

import torch
from torch import Tensor

from popdist.errors import CollectiveError, PopdistError, name_instances
from popdist.exchange.groups import Group
from popdist.exchange.host_memory import shared_storages
from popdist.job.context import current_group, device, environment, shares_tensors

ReduceOp = Literal["sum", "mean", "min", "max"]

FLOATS: Final = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS: Final = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
DTYPES: Final = (*FLOATS, *INTEGERS, torch.bool)

_REFUSED: Final = -1
"""The number that an instance sends in place of a size if its value or its rows cannot be sent."""

AnyTensor = TypeVar("AnyTensor", bound=Tensor)


def all_reduce(tensor: AnyTensor, op: ReduceOp = "sum") -> AnyTensor:
    """Overwrite ``tensor`` with the sum, mean, minimum or maximum of all instances' tensors, element by element.

    Args:
        tensor: float64, float32, float16, bfloat16, an integer dtype or bool; shape, dtype and type of device must
            be equal on every instance. Any strides; scalars and empty tensors are allowed.
        op: ``"sum"``; ``"mean"`` (floating dtypes only); ``"min"`` or ``"max"``. Sums and means of floats are
            added in a fixed order in float32 (float64 for float64) and are bitwise equal on every instance. Sums
            of integers wrap around; bools have only ``"min"`` (all) and ``"max"`` (any). The result of ``"min"``
            and ``"max"`` with a NaN is NaN.

    Returns:
        The same tensor. With one instance the tensor is unchanged.

    Raises:
        CollectiveError: If instances pass different arguments or make another call, or the tensor is refused.
        NotInitializedError: Before ``popdist.init()``.
        BackendError: If an instance was lost or came too late.
    """
    text = f"all_reduce({_describe(tensor)}, op={op!r})"
    _refuse(text, _fault(tensor) or _place_fault(tensor) or _op_fault(tensor, op))
    flat, group = _flat(tensor), current_group()
    group.run(text, lambda values, _: group.backend.all_reduce(values, op), flat)
    return _give_back(tensor, flat)


def shared_empty(*size: int | Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """Make a CPU tensor in memory that the other instances of the host can map; all elements are zero.

    An all-reduce, by popdist or over the backend ``popdist``, adds in place and copies nothing if all instances
    pass such a tensor. Otherwise the tensor is an ordinary tensor of this instance only. Each instance makes its
    own tensor, at any time. A process that this process forks has a copy. With ``POPDIST_SHARE_TENSORS=0`` the
    memory is ordinary memory.

    Args:
        size: Length of each dimension, as numbers or as one sequence.
        dtype: None means torch's default.

    Returns:
        The tensor; all zero.

    Raises:
        BackendError: If there is no room.
        ContractError: If ``POPDIST_SHARE_TENSORS`` is neither 0 nor 1.
    """
    shape: Any = size[0] if len(size) == 1 and isinstance(size[0], Sequence) else size
    tensor = torch.zeros(shape, dtype=dtype, device="meta")
    if not shares_tensors() or not tensor.numel():
        return torch.zeros(shape, dtype=dtype, device="cpu")
    memory = torch.empty(0, dtype=dtype, device="cpu")
    return memory.set_(shared_storages.make(tensor.nbytes), 0, tensor.shape, tensor.stride())


def broadcast(tensor: AnyTensor, root: int = 0) -> AnyTensor:
    """Overwrite ``tensor`` on every instance with the tensor of instance ``root``, in place.

    Args:
        tensor: As in :func:`all_reduce`; only the root's elements matter.
        root: Job-wide number of the instance whose elements all instances get.

    Returns:
        The same tensor.

    Raises:
        CollectiveError: If instances pass different arguments or make another call, the tensor is refused, or
            there is no instance ``root``.
        NotInitializedError: Before ``popdist.init()``.
        BackendError: If an instance was lost or came too late.
    """
    text = f"broadcast({_describe(tensor)}, root={root!r})"
    _refuse(text, _fault(tensor) or _place_fault(tensor) or _root_fault(root))
    flat, group = _flat(tensor), current_group()
    group.run(text, lambda values, _: group.backend.broadcast(values, root), flat)
    return _give_back(tensor, flat)


def all_gather(tensor: Tensor) -> Tensor:
    """Return the tensors of all instances, stacked in instance order.

    Args:
        tensor: As in :func:`all_reduce`.

    Returns:
        A new tensor of shape ``(num_instances, *tensor.shape)`` on the same device, without gradient.

    Raises:
        CollectiveError: If instances pass different arguments or make another call, or the tensor is refused.
        NotInitializedError: Before ``popdist.init()``.
        BackendError: If an instance was lost or came too late.
    """
    text = f"all_gather({_describe(tensor)})"
    _refuse(text, _fault(tensor))
    group = current_group()
    gathered = group.run(text, lambda values, _: group.backend.all_gather(values), _flat(tensor))
    return gathered.view(len(gathered), *tensor.shape)


def barrier() -> None:
    """Wait until every instance has called ``barrier()``.

    Raises:
        CollectiveError: If an instance makes another call.
        NotInitializedError: Before ``popdist.init()``.
        BackendError: If an instance was lost or came too late.
    """
    current_group().agree("barrier()")


def _refuse(text: str, fault: str | None) -> None:
    """Raise CollectiveError on all instances because of ``fault``; do nothing if ``fault`` is None."""
    if fault is None:
        return
    group = current_group()
    try:
        group.agree(f"{text}, refused")
    except CollectiveError as error:
        raise CollectiveError(f"{text}: {fault}") from error
    raise CollectiveError(f"{text}: {fault}")


def _describe(tensor: object) -> str:
    if not isinstance(tensor, Tensor):
        return type(tensor).__name__
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype}[{', '.join(map(str, tensor.shape))}] on {tensor.device.type}"


def _fault(tensor: object) -> str | None:
    """Return why ``tensor`` cannot take part in a collective; None if the tensor can."""
    if not isinstance(tensor, Tensor):
        return "expected a torch.Tensor"
    if tensor.layout is not torch.strided:
        return f"only dense tensors can be sent, not {tensor.layout}: call to_dense() first"
    if tensor.dtype not in DTYPES:
        return f"{tensor.dtype} cannot be sent: the dtypes are {', '.join(map(str, DTYPES))}"
    if tensor.requires_grad and not tensor.is_leaf:
        return "autograd would not follow the values: detach() the tensor first"
    if tensor.is_meta:
        return "a tensor on the meta device has no numbers"
    accepted, kind = current_group().backend.device_kinds, "cpu" if tensor.device.type == "cpu" else "accelerator"
    if kind not in accepted:
        return f"popdist.init() was told to send tensors on the {' and the '.join(sorted(accepted))} only"
    return None


def _place_fault(tensor: Tensor) -> str | None:
    """Return why a collective cannot write into ``tensor``; None if the collective can."""
    if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        return "its elements share memory, as those of an expanded tensor do: clone() it first"
    return None


def _op_fault(tensor: Tensor, op: str) -> str | None:
    if op not in get_args(ReduceOp):
        return f"unknown op {op!r}: choose from {', '.join(map(repr, get_args(ReduceOp)))}"
    if op == "mean" and tensor.dtype not in FLOATS:
        return f"a mean of {tensor.dtype} is no {tensor.dtype}: convert to a floating dtype first"
    if op == "sum" and tensor.dtype == torch.bool:
        return "a sum of bools is no bool: convert to an integer dtype, or use 'max' (any) or 'min' (all)"
    return None


def _root_fault(root: int) -> str | None:
    members = current_group().instances
    return None if root in members else f"root={root!r} is not one of {name_instances(members)}"


def _flat(tensor: Tensor) -> Tensor:
    """Return the elements of ``tensor`` as a contiguous flat tensor; no copy if ``tensor`` is contiguous."""
    return tensor.detach().resolve_neg().contiguous().view(-1)


def _give_back(tensor: AnyTensor, flat: Tensor) -> AnyTensor:
    if flat.data_ptr() != tensor.data_ptr() or tensor.is_neg():
        tensor.detach().copy_(flat.view(tensor.shape))
    return tensor


def broadcast_object(value: Any, root: int = 0) -> Any:
    """Return the value of instance ``root`` on every instance.

    Args:
        value: None, a bool, a number, a string, or lists and dicts of such values; only the root's value matters.
        root: Job-wide number of the instance whose value all instances get.

    Returns:
        The value, written to JSON and read back, equal on every instance and on the root: tuples become lists, and
            the keys of dicts become strings.

    Raises:
        CollectiveError: If JSON cannot contain the value (every instance raises this error), there is no instance
            ``root``, or the instances make other calls.
        NotInitializedError: Before ``popdist.init()``.
        BackendError: If an instance was lost or came too late.
    """
    group = current_group()
    text = f"broadcast_object(root={root})"
    if root not in group.instances:
        raise CollectiveError(f"{text}: root is not one of {name_instances(group.instances)}")
    is_root = group.backend.instance_index == root
    data, fault = _encode(value) if is_root else (b"", None)
    kind = type(value).__name__

    def send(data: bytes, sizes: list[list[int]]) -> bytes:
        (num_bytes,) = sizes[group.instances.index(root)]
        if num_bytes == _REFUSED:
            explanation = f": {kind}, {fault}" if is_root else ""
            raise CollectiveError(f"{text}: what instance {root} brought is no JSON value{explanation}")
        return send_bytes(group, data, num_bytes, root)

    return json.loads(group.run(text, send, data, [_REFUSED if fault else len(data)]))


def send_bytes(group: Group, data: bytes, num_bytes: int, root: int) -> bytes:
    """Send ``data`` of instance ``root`` to all instances, and return the bytes; all pass their ``num_bytes``."""
    message = _message_of(group, data if group.backend.instance_index == root else b"", num_bytes)
    group.backend.broadcast(message, root)
    return message.cpu().numpy().tobytes()


def gather_bytes(group: Group, text: str, data: bytes) -> list[bytes]:
    """Return the ``data`` of every instance; ``text`` names the collective, and is equal on all instances."""

    def send(data: bytes, lengths: list[list[int]]) -> list[bytes]:
        rows = group.backend.all_gather(_message_of(group, data, max(lengths)[0])).cpu()
        return [row[:length].numpy().tobytes() for row, (length,) in zip(rows, lengths, strict=True)]

    return group.run(text, send, data, [len(data)])


def gather_json(group: Group, text: str, value: Any) -> list[Any]:
    """Return the JSON value of every instance; all instances must call this function with the same ``text``."""
    return [json.loads(data) for data in gather_bytes(group, text, json.dumps(value).encode())]


@contextmanager
def fail_together(group: Group, text: str, error: type[PopdistError]) -> Iterator[None]:
    """A context in which an error on one instance makes all other instances raise ``error``. The block must not
    wait for other instances.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as raised:  # noqa: BLE001 - every error is sent to the other instances and raised below
        failure = raised
    words = "" if failure is None else f"{failure}" or type(failure).__name__
    message = words.encode(errors="backslashreplace")  # the name of a file may be no valid text
    received = zip(group.instances, group.start(text, [len(message)]).wait(), strict=True)
    if lengths := {instance: length for instance, (length,) in received if length}:
        first = next(iter(lengths))
        reason = send_bytes(group, message, lengths[first], first)
        raise failure or error(f"{group.name(lengths)} failed: {reason.decode(errors='replace')}")


def _message_of(group: Group, data: bytes, num_bytes: int) -> Tensor:
    """Return ``data``, with zeros up to ``num_bytes``, as a tensor on a device from which the group can send."""
    message = torch.zeros(num_bytes, dtype=torch.uint8, device="cpu")
    if data:
        message[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return message if "cpu" in group.backend.device_kinds else message.to(device())


def _encode(value: object) -> tuple[bytes, str | None]:
    """Return ``value`` as JSON bytes, and None; if JSON cannot contain ``value``, no bytes and the reason."""
    try:
        return json.dumps(value, allow_nan=False).encode(), None
    except (TypeError, ValueError, RecursionError) as error:
        return b"", str(error)


def gather(rows: Tensor | Sequence[Tensor]) -> Tensor:
    """Return on every instance the rows of all instances, such as predictions, one instance after another.

    If called once for each batch of ``data_loader``, the result has the rows of the step's samples in the order in
    which the samples were dealt, replica by replica, without duplicates. Without shuffling this is the order of
    the dataset::

        for batch in popdist.data_loader(test, 64):
            predictions.append(popdist.gather([model(x).argmax(1) for x, _ in batch]))

    If several instances share a replica, the result has the rows of the last instance of the replica that passes
    rows. Rows gathered over several batches at once are ordered by instance: gather
    ``torch.tensor(batch.indices)`` too, and sort by these indices.

    Args:
        rows: A tensor whose dim 0 counts samples, or a list of such tensors, one for each micro batch; an empty
            list is allowed. Instances may pass different numbers of rows, but rows of the same shape and dtype.

    Returns:
        A new tensor, equal on every instance, without gradient. (If no instance has rows: an empty float32 tensor
        of shape (0,).)

    Raises:
        CollectiveError: If the rows of the instances differ in shape or dtype, a tensor cannot be sent or has no
            rows (every instance raises this error), or the instances make other calls.
        NotInitializedError: Before ``popdist.init()``.
        BackendError: If an instance was lost or came too late.
    """
    group = current_group()
    parts = _as_list(rows)
    fault = _rows_fault(parts)
    own_rows = torch.cat([part.detach() for part in parts]) if parts and fault is None else None

    def send(own_rows: Tensor | None, received: list[list[int]]) -> Tensor:
        _check_kinds(dict(zip(group.instances, received, strict=True)), fault)
        return _gather(group, own_rows, received, of_each_replica(group, [bool(kind) for kind in received]))

    return group.run("gather()", send, own_rows, [_REFUSED] if fault else _describe_rows(own_rows))


def of_each_replica(group: Group, brought: Sequence[bool]) -> list[int]:
    """Return for each replica the index in ``group`` of its last instance that has data (``brought`` is true): all
    instances of a replica have the same samples, and only the last stage of a pipeline has results.
    """
    size = environment().contract.parallelism.instances_per_replica
    places = {it // size: place for place, it in enumerate(group.instances) if brought[place]}
    return sorted(places.values())


def _gather(group: Group, own_rows: Tensor | None, received: list[list[int]], places: list[int]) -> Tensor:
    """Gather the rows of the instances whose indices in ``group`` are ``places``, as one tensor. ``received`` has
    the number, the dtype and the shape of each instance's rows.
    """
    brought = [kind for kind in received if kind]
    if not brought:
        return torch.empty(0, dtype=torch.float32, device="cpu")
    _, dtype, *shape = brought[0]
    most = max(kind[0] for kind in brought)
    place = device() if own_rows is None else own_rows.device
    sent = torch.zeros((most, *shape), dtype=DTYPES[dtype], device=place)
    if own_rows is not None:
        sent[: len(own_rows)] = own_rows
    gathered = group.backend.all_gather(sent)
    return torch.cat([gathered[place][: received[place][0]] for place in places])


def _as_list(rows: object) -> list[Any]:
    return list(rows) if isinstance(rows, Iterable) and not isinstance(rows, Tensor) else [rows]


def _describe_rows(rows: Tensor | None) -> list[int]:
    """Return the number of ``rows``, their dtype's index in ``DTYPES``, and a row's shape; [] for None."""
    return [] if rows is None else [len(rows), DTYPES.index(rows.dtype), *rows.shape[1:]]


def _rows_fault(parts: Sequence[object]) -> str | None:
    """Return why the tensors ``parts`` cannot be gathered; None if the tensors can."""
    tensors = [part for part in parts if isinstance(part, Tensor)]
    if others := [part for part in parts if not isinstance(part, Tensor)]:
        return f"expected a tensor or a list of them, and found a {type(others[0]).__name__}"
    for part in tensors:
        if part.layout is not torch.strided or part.dtype not in DTYPES:
            return f"expected dense tensors of one of the dtypes that can be sent, not {part.dtype}"
        if not part.dim():
            return "a tensor of shape () has no rows: keep one value for each sample"
    kinds = {(part.dtype, part.shape[1:], part.device) for part in tensors}
    return f"the micro batches' rows differ: {kinds}" if len(kinds) > 1 else None


def _check_kinds(kinds: dict[int, list[int]], fault: str | None) -> None:
    """Raise CollectiveError on every instance if an instance cannot send its rows, or shapes or dtypes differ."""
    if refused := [instance for instance, kind in kinds.items() if kind == [_REFUSED]]:
        raise CollectiveError(f"gather(): {fault or f'{name_instances(refused)} refused its rows (see there)'}")
    different = {tuple(kind[1:]): instance for instance, kind in kinds.items() if kind}
    if len(different) > 1:
        rows = ", ".join(
            f"{str(DTYPES[dtype]).removeprefix('torch.')}{list(shape)} on instance {instance}"
            for (dtype, *shape), instance in different.items()
        )
        raise CollectiveError(f"gather(): the rows of the instances differ: {rows}")
