"""One instance's JSON value for all: a configuration, a path, a decision. Nothing is pickled."""

import json
from typing import Any, Final

import torch

from popdist.context import current_group
from popdist.errors import CollectiveError
from popdist.headers import name_instances
from popdist.queries import device

_NO_JSON: Final = -1
"""Said in place of the size of the value."""


def broadcast_object(value: Any, root: int = 0) -> Any:  # noqa: ANN401 - any JSON value
    """The value of instance ``root``, on every instance.

    Args:
        value: None, a bool, a number, a string, or lists and dicts of them; it matters only on the root.
        root: Job-wide number of the instance whose value all get.

    Returns:
        What JSON makes of the value, the same on every instance, the root included: tuples become lists, the keys
        of dicts strings.

    Raises:
        CollectiveError: If the value is none of JSON (every instance raises it), there is no instance ``root``, or
            the instances do other things.
        NotInitializedError: Before ``popdist.init()``.
        BackendError: If an instance was lost or came too late.
    """
    group = current_group()
    text = f"broadcast_object(root={root})"
    if root not in group.instances:
        raise CollectiveError(f"{text}: root is not one of {name_instances(group.instances)}")
    is_root = group.backend.instance_index == root
    data, fault = _encode(value) if is_root else (b"", None)
    sizes = group.start(text, [_NO_JSON if fault else len(data)]).wait()
    (num_bytes,) = sizes[group.instances.index(root)]
    if num_bytes == _NO_JSON:
        found = f": {type(value).__name__}, {fault}" if is_root else ""
        raise CollectiveError(f"{text}: what instance {root} brought is no JSON value{found}")
    message = torch.frombuffer(bytearray(data), dtype=torch.uint8) if is_root else torch.empty(num_bytes).byte()
    if "cpu" not in group.backend.device_types:
        message = message.to(device())
    group.backend.broadcast(message, root)
    return json.loads(message.cpu().numpy().tobytes())


def _encode(value: object) -> tuple[bytes, str | None]:
    """The value in JSON, or why it is none."""
    try:
        return json.dumps(value, allow_nan=False).encode(), None
    except (TypeError, ValueError, RecursionError) as error:
        return b"", str(error)
