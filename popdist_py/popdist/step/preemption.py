"""Preemption: save on SIGTERM after the same step on all instances, and exit together.

A signal only sets a flag, which travels in headers that the instances exchange anyway. So all instances know of
the signal at the same place of the program (`popdist.exchange.groups`), and act at the next end of a step
(`popdist.gradients.optimizer_steps.TrainingLoop`).
"""

import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final

from torch.optim.optimizer import register_optimizer_step_post_hook

from popdist.errors import CollectiveError, MicroBatchError, PopdistError, PopdistWarning, whole_number
from popdist.gradients.optimizer_steps import training_loop, watch_optimizers
from popdist.job import context
from popdist.job.instances import end_in_failure, end_together
from popdist.step.training.step import is_in_step

EXIT_CODE: Final = 128 + signal.SIGTERM
"""The exit code that a shell shows for a program that SIGTERM has ended."""

NUM_PATIENT_STEPS: Final = 10
"""The number of optimizer steps after a signal before a warning says that the program has not ended."""

_LARGEST_EXIT_CODE: Final = 255
_POSSIBLE: Final = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}


@dataclass(slots=True, kw_only=True)
class _PreemptionState:
    """The settings of this process for its exit after a signal (preemption), and the earlier signal handlers."""

    fn: Callable[[], object] | None = None  # the function that is called
    exit_code: int = EXIT_CODE
    previous: dict[int, Any] = field(default_factory=dict)  # the handlers that the signals had before
    num_steps_at_notice: int | None = None  # optimizer steps at the end of the first step after a signal


_state = _PreemptionState()


def on_preemption(
    fn: Callable[[], object],
    *,
    signals: Iterable[int] = (signal.SIGTERM, signal.SIGUSR1),
    exit_code: int = EXIT_CODE,
) -> None:
    """Make all instances call ``fn`` after the same step, and then exit, as soon as one instance gets a signal.

    All instances must call this function with the same arguments, at any time, from the main thread; a later call
    replaces an earlier call. A signal to one instance is enough. The current step is finished, and ``fn`` is
    called, usually to save a checkpoint. When ``fn`` has returned on every instance, each instance raises
    ``SystemExit(exit_code)``, so that ``finally`` blocks run::

        popdist.on_preemption(lambda: save("run1", model=model, optimizer=optimizer, loader=loader, epoch=epoch))

    ``fn`` is called when the loop asks ``popdist.data_loader`` or a ``ReplicaSampler`` for its next batch (also
    after the last batch), if an optimizer has stepped since the batch before. So loops that only evaluate are not
    interrupted, and the loop's counters are up to date. In a loop without such a loader, ``fn`` is called when a
    model begins its next step. If ``DistributedDataParallel`` or the program itself reduces gradients, and in all
    other cases, ``fn`` is called only in :func:`check_preemption`.

    Until then the signal, and any further signal, changes nothing. A signal before the first step takes effect
    after the first step. A signal after the last step has no effect, and the program ends as it would have. The
    sender of the signal must give the program the time for one step and ``fn``: see ``--stop-timeout`` of poprun.
    A forked child has the handlers from before this call. Workers of ``popdist.data_loader`` that start after this
    call survive the signals. If several instances share a replica, all instances exchange a header at the end of
    each step, so either all instances must read a loader, or none.

    Args:
        fn: Function without arguments. It may call collectives; it is called once.
        signals: Signals that can be handled, such as ``signal.SIGTERM``. Their handlers are replaced.
        exit_code: 0 to 255; poprun does not restart a job that ends with 143, whatever its ``--max-restarts``.

    Raises:
        CollectiveError: If an argument is not possible, this is not the main thread, or the arguments differ
            between instances (found only after ``popdist.init()``). Later, instead of ``SystemExit``, if ``fn``
            raised an error on another instance.
    """
    signums = _check(fn, signals, exit_code)
    if context.is_initialized():
        names = ", ".join(signal.Signals(signum).name for signum in signums)
        context.current_group().agree(f"on_preemption(signals=({names}), {exit_code=})")
    _restore()
    _prepare_process()
    training_loop.on_step_end = _leave_if_preempted
    training_loop.leaving_signals = tuple(signums)
    _state.fn, _state.exit_code = fn, exit_code
    _state.num_steps_at_notice = None
    for signum in signums:
        _state.previous[signum] = signal.signal(signum, _set_flag)


def check_preemption() -> None:
    """Check for a signal on any instance; after a signal, call the function of :func:`on_preemption` and exit.

    All instances must call the function, in long evaluations and in other kinds of loops. It costs one exchange of
    headers, which waits for the slowest instance. Everything that ``fn`` saves must be complete here.

    Raises:
        SystemExit: If an instance has got a signal, and ``fn`` has returned on all instances.
        MicroBatchError: In the middle of a step.
        CollectiveError: If an instance makes another call, or ``fn`` raised an error on another instance.
        NotInitializedError: Before ``popdist.init()``.
        BackendError: If an instance was lost or came too late.
    """
    if is_in_step():
        raise MicroBatchError("check_preemption() in the middle of a step: call it before or after one")
    context.current_group().agree("check_preemption()")
    training_loop.end_step()


def _check(fn: object, signals: object, exit_code: int) -> list[int]:
    """Check the arguments of :func:`on_preemption`, and return the signals without repetitions."""
    if not callable(fn):
        raise CollectiveError(f"on_preemption({fn!r}): expected a function without arguments")
    if whole_number("exit_code", exit_code, CollectiveError, minimum=0) > _LARGEST_EXIT_CODE:
        raise CollectiveError(f"exit_code={exit_code} must be 0 to {_LARGEST_EXIT_CODE}")
    signums = list(dict.fromkeys(signals)) if isinstance(signals, Iterable) else []
    if not signums or not set(signums) <= _POSSIBLE:
        raise CollectiveError(f"signals={signals!r}: expected some that can be handled, such as (signal.SIGTERM,)")
    if threading.current_thread() is not threading.main_thread():
        raise CollectiveError(
            "on_preemption() in a thread: Python handles signals in the main one, so call it there"
        )
    return signums


def _set_flag(_signum: int, _frame: object) -> None:
    context.notice().is_given = True


def _restore() -> None:
    """Restore the earlier handler of every signal, or the system's handler if Python has not set one."""
    for signum, handler in _state.previous.items():
        signal.signal(signum, signal.SIG_DFL if handler is None else handler)
    _state.previous.clear()


@cache
def _prepare_process() -> None:
    """Prepare the process once: count optimizer steps, and restore the signal handlers in forked children."""
    watch_optimizers()
    register_optimizer_step_post_hook(_warn_if_stuck)
    os.register_at_fork(after_in_child=_forget_in_child)


def _forget_in_child() -> None:
    _state.fn, training_loop.on_step_end = None, None
    _restore()


def _warn_if_stuck(*_: object) -> None:
    """Warn if the program has not acted on a signal after ``NUM_PATIENT_STEPS`` optimizer steps."""
    if _state.fn is None or not context.notice().is_given:
        return
    if _state.num_steps_at_notice is None:
        _state.num_steps_at_notice = training_loop.num_optimizer_steps
    if training_loop.num_optimizer_steps - _state.num_steps_at_notice == NUM_PATIENT_STEPS:
        warnings.warn(
            f"a signal asked this program to leave, and {NUM_PATIENT_STEPS} optimizer steps later it has not come "
            "to a place where it can: call popdist.check_preemption() between two steps",
            PopdistWarning,
            stacklevel=3,
        )


def _leave_if_preempted() -> None:
    notice, fn = context.notice(), _state.fn
    if fn is None or not _is_for_all():
        return
    _state.fn = None
    has_failed = True
    try:
        fn()
        has_failed = False
    finally:
        notice.is_given = notice.is_known = False
        _end(has_failed=has_failed)
    raise SystemExit(_state.exit_code)


def _is_for_all() -> bool:
    """Whether all instances make this check after the same step, and know that one of them has got a signal."""
    notice, contract = context.notice(), context.environment().contract
    if threading.current_thread() is not threading.main_thread():
        return False
    if contract.num_instances == 1:
        return notice.is_given
    if not context.is_initialized() or len(context.current_group().instances) < contract.num_instances:
        return False
    if contract.parallelism.is_shared:  # a step's headers reach only the instances with the same part of a replica
        context.current_group().agree("the end of a step, for on_preemption()")
    return notice.is_known


def _end(*, has_failed: bool) -> None:
    """Send all instances that the program's function failed here; without failure, wait until all succeed."""
    if not context.is_initialized():
        return
    group, text = context.current_group(), "the end of on_preemption"
    if has_failed:
        with suppress(PopdistError):
            end_in_failure(group, text)
    else:
        end_together(group, text, "the function given to on_preemption() failed on {} (see the error there)")
