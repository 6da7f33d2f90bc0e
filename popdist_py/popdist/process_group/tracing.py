"""What keeps torch.compile from tracing a process group.

torch's own groups are C++, where tracing ends by itself. In a compiled DistributedDataParallel, C++ calls the
group in the middle of what is being traced; a Python method would be traced as a frame of its own, and that fails.
"""

from types import FunctionType
from typing import Final, TypeVar

from torch._C._dynamo import eval_frame

_SKIP: Final = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)  # noqa: SLF001 - what torch.compiler.disable() does, without the seconds that importing the compiler takes

C = TypeVar("C", bound=type)


def never_traced(cls: C) -> C:
    """Run the class's own methods, and what they call, as they are."""
    for method in vars(cls).values():
        if isinstance(method, FunctionType):
            eval_frame.set_code_exec_strategy(method.__code__, _SKIP)
    return cls
