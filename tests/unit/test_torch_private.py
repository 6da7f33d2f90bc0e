"""Private names of torch: what they do, and what happens in a torch that lacks one."""

import pytest
import torch

from popdist import torch_private


def test_autograd_runs_in_backward_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook sees it; without torch's name nobody knows."""
    seen = list[bool | None]()
    value = torch.ones(1, requires_grad=True)
    value.register_hook(lambda _: seen.append(torch_private.is_in_backward()))
    value.sum().backward()
    seen.append(torch_private.is_in_backward())
    monkeypatch.setattr(torch_private, "_current_graph_task_id", None)
    seen.append(torch_private.is_in_backward())

    assert seen == [True, False, None]
