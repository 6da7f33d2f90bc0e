"""The private names of torch that popdist and poptorch use: these and no others.

Each is looked up once, here, and the function there says what happens in a torch without it. Where a name is
missing, what takes its place is slower or checks less; only where nothing can take its place is it an error.
"""

from typing import Any, Final

import torch


def _find(owner: object, name: str) -> Any:  # noqa: ANN401 - whatever torch has there
    """The attribute, or None in a torch that lacks it."""
    return getattr(owner, name, None)


_current_graph_task_id: Final = _find(torch._C, "_current_graph_task_id")  # noqa: SLF001 - the place of such names


def is_in_backward() -> bool | None:
    """Whether autograd runs in this thread. Without the name: None, nobody knows."""
    return None if _current_graph_task_id is None else _current_graph_task_id() >= 0
