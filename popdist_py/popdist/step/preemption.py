"""Preemption: save on SIGTERM after the same step on all instances, and exit together.

A signal only sets a flag. It travels with the headers that the instances exchange anyway, so that all of them know
of it at the same place of the program (`popdist.exchange.groups`), and they act on it at the next end of a step
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
"""What a shell shows of a program that SIGTERM has ended."""

NUM_PATIENT_STEPS: Final = 10
"""Optimizer steps that may follow a signal before a warning says that none of them was the last."""

_LARGEST_EXIT_CODE: Final = 255
_POSSIBLE: Final = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}


@dataclass(slots=True, kw_only=True)
class _PreemptionState:
    """What this process will do at a preemption."""

    fn: Callable[[], object] | None = None  # what is called
    exit_code: int = EXIT_CODE
    previous: dict[int, Any] = field(default_factory=dict)  # the handlers that the signals had before
    num_steps_at_notice: int | None = None  # optimizer steps at the end of the first one after a signal


_state = _PreemptionState()


def on_preemption(
    fn: Callable[[], object],
    *,
    signals: Iterable[int] = (signal.SIGTERM, signal.SIGUSR1),
    exit_code: int = EXIT_CODE,
) -> None:
    """At a signal, have all instances call ``fn`` after the same step, and end.

    All instances call this with the same arguments, at any time, from their main thread; a later call replaces the
    one before. It is enough that one instance gets a signal. The step that is being made is finished, ``fn`` is
    called, usually to save a checkpoint, and when it has returned on every instance each raises
    ``SystemExit(exit_code)``, so that ``finally`` blocks run::

        popdist.on_preemption(lambda: save("run1", model=model, optimizer=optimizer, loader=loader, epoch=epoch))

    ``fn`` is called where the loop asks ``popdist.data_loader`` or a ``ReplicaSampler`` for its next batch, the
    question after the last one included, if an optimizer has stepped since the batch before: so loops that only
    evaluate are not interrupted, and what the loop has counted after the step is up to date. In loops without such
    a loader it is called when a model begins its next step; where ``DistributedDataParallel`` or the program
    itself reduces gradients, and elsewhere, in :func:`check_preemption` only.

    Until then a signal changes nothing, and more of them change nothing either. One that comes before the first
    step takes effect after it; one that comes after the last step has none, and the program ends as it would have.
    Who sends it must give the program the time for one step and ``fn``: see ``--stop-timeout`` of poprun. A forked
    child has the handlers that were there before this call. Workers of ``popdist.data_loader`` that start after
    this call outlive the signals. Where several
    instances share a replica, all exchange a header at the end of each step, so all read a loader or none.

    Args:
        fn: Takes no arguments. It may call collectives; it is called once.
        signals: Each one that may be handled, such as ``signal.SIGTERM``. Their handlers are replaced.
        exit_code: 0 to 255; poprun starts a job that ends with 143 not again, whatever its ``--max-restarts``.

    Raises:
        CollectiveError: If an argument is not possible, this is not the main thread, or the instances give
            different arguments; the last is not found out before ``popdist.init()``. Later, in place of
            ``SystemExit``, if ``fn`` raised on another instance.
    """
    asked = _check(fn, signals, exit_code)
    if context.is_initialized():
        names = ", ".join(signal.Signals(signum).name for signum in asked)
        context.current_group().agree(f"on_preemption(signals=({names}), {exit_code=})")
    _restore()
    _prepare_process()
    training_loop.on_step_end = _leave_if_preempted
    training_loop.leaving_signals = tuple(asked)
    _state.fn, _state.exit_code = fn, exit_code
    _state.num_steps_at_notice = None
    for signum in asked:
        _state.previous[signum] = signal.signal(signum, _set_flag)


def check_preemption() -> None:
    """Let the program leave here, if it was asked to: see :func:`on_preemption`. All instances call it.

    For long evaluations and for loops of other kinds. It costs one exchange of headers, which waits for the
    slowest instance. What ``fn`` saves must be whole here.

    Raises:
        SystemExit: If an instance was asked to leave and ``fn`` has returned on all of them.
        MicroBatchError: In the middle of a step.
        CollectiveError: If an instance makes another call, or ``fn`` raised there.
        NotInitializedError: Before ``popdist.init()``.
        BackendError: If an instance was lost or came too late.
    """
    if is_in_step():
        raise MicroBatchError("check_preemption() in the middle of a step: call it before or after one")
    context.current_group().agree("check_preemption()")
    training_loop.end_step()


def _check(fn: object, signals: object, exit_code: int) -> list[int]:
    """The signals, each once, when all arguments are possible."""
    if not callable(fn):
        raise CollectiveError(f"on_preemption({fn!r}): expected a function without arguments")
    if whole_number("exit_code", exit_code, CollectiveError, minimum=0) > _LARGEST_EXIT_CODE:
        raise CollectiveError(f"exit_code={exit_code} must be 0 to {_LARGEST_EXIT_CODE}")
    asked = list(dict.fromkeys(signals)) if isinstance(signals, Iterable) else []
    if not asked or not set(asked) <= _POSSIBLE:
        raise CollectiveError(f"signals={signals!r}: expected some that can be handled, such as (signal.SIGTERM,)")
    if threading.current_thread() is not threading.main_thread():
        raise CollectiveError(
            "on_preemption() in a thread: Python handles signals in the main one, so call it there"
        )
    return asked


def _set_flag(_signum: int, _frame: object) -> None:
    context.notice().is_given = True


def _restore() -> None:
    """Give every signal the handler that it had; one that Python has not seen has the system's own."""
    for signum, handler in _state.previous.items():
        signal.signal(signum, signal.SIG_DFL if handler is None else handler)
    _state.previous.clear()


@cache
def _prepare_process() -> None:
    """Do what is done once: count optimizer steps, and let forked children have no part in this."""
    watch_optimizers()
    register_optimizer_step_post_hook(_warn_if_stuck)
    os.register_at_fork(after_in_child=_forget_in_child)


def _forget_in_child() -> None:
    _state.fn, training_loop.on_step_end = None, None
    _restore()


def _warn_if_stuck(*_: object) -> None:
    """Warn a loop that never acts on a signal: one without ends of steps, or whose instances exchange nothing."""
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
    """Whether all instances are here and know that one was asked to leave."""
    notice, contract = context.notice(), context.environment().contract
    if threading.current_thread() is not threading.main_thread():
        return False
    if contract.num_instances == 1:
        return notice.is_given
    if not context.is_initialized() or len(context.current_group().instances) < contract.num_instances:
        return False
    if contract.parallelism.is_shared:  # a step's headers reach those with the same part of a replica alone
        context.current_group().agree("the end of a step, for on_preemption()")
    return notice.is_known


def _end(*, has_failed: bool) -> None:
    """Say to the others how ``fn`` has ended here; after a success wait until it has on all."""
    if not context.is_initialized():
        return
    group, text = context.current_group(), "the end of on_preemption"
    if has_failed:
        with suppress(PopdistError):
            end_in_failure(group, text)
    else:
        end_together(group, text, "the function given to on_preemption() failed on {} (see the error there)")
