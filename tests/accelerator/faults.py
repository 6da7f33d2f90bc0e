"""Programs with a planted fault of their use of a device, and the same programs without the fault.

Run as a program, this module prints a line for each: its name, ``faulty`` or ``right``, and how its process ended.
"""

import ctypes
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor

from tests.accelerator import simulated

_DEVICE: Final = torch.device("simulated")

Program = Callable[[bool], None]
"""A program; its argument says whether it has the fault."""


@contextmanager
def _side_stream(*, is_late: bool = False) -> Iterator[torch.Stream]:
    """Compute in another stream, which waits for what was computed so far, unless ``is_late``."""
    stream, current = torch.Stream(_DEVICE), simulated.current_stream()
    if not is_late:
        stream.wait_stream(current)
    with stream:
        yield stream


def _expect(value: Tensor, expected: float) -> None:
    found = value.tolist()
    assert found == [expected] * len(found), f"{expected} was computed, {found[0]} was found"


def _expect_on_device(value: Tensor, expected: float) -> None:
    _expect(value.cpu(), expected)


def side_stream_begins_too_early(is_faulty: bool) -> None:  # noqa: FBT001
    """A side stream reads what the current stream has not computed yet."""
    value = torch.full((8,), 2.0, device=_DEVICE)
    with _side_stream(is_late=is_faulty) as stream:
        doubled = value * 2
    simulated.current_stream().wait_stream(stream)
    _expect_on_device(doubled, 4)


def result_is_not_waited_for(is_faulty: bool) -> None:  # noqa: FBT001
    """The current stream reads what a side stream has not computed yet."""
    value = torch.full((8,), 2.0, device=_DEVICE)
    with _side_stream() as stream:
        doubled = value * 2
    if not is_faulty:
        simulated.current_stream().wait_stream(stream)
    _expect_on_device(doubled + 1, 5)


def operand_is_overwritten(is_faulty: bool) -> None:  # noqa: FBT001
    """The current stream changes in place what a side stream still reads."""
    value = torch.full((8,), 2.0, device=_DEVICE)
    with _side_stream() as stream:
        doubled = value * 2
    if not is_faulty:
        simulated.current_stream().wait_stream(stream)
    value.zero_()
    stream.synchronize()
    _expect_on_device(doubled, 4)


def event_is_recorded_before_the_work(is_faulty: bool) -> None:  # noqa: FBT001
    """An event stands before the work that another stream waits for."""
    value = torch.full((8,), 2.0, device=_DEVICE)
    with _side_stream() as stream:
        early = stream.record_event()
        doubled = value * 2
        late = stream.record_event()
    simulated.current_stream().wait_event(early if is_faulty else late)
    _expect_on_device(doubled + 1, 5)


def copy_goes_in_another_stream(is_faulty: bool) -> None:  # noqa: FBT001
    """A batch is copied to the device in a side stream, and used without a wait."""
    batch = torch.full((8,), 2.0).pin_memory()
    with _side_stream() as stream:
        copied = batch.to(_DEVICE, non_blocking=True)
    if not is_faulty:
        simulated.current_stream().wait_stream(stream)
    _expect_on_device(copied + 1, 3)


def late_copy_is_read(is_faulty: bool) -> None:  # noqa: FBT001
    """The host reads what a copy without a wait has yet to bring."""
    loss = torch.full((8,), 2.0, device=_DEVICE).to("cpu", non_blocking=True)
    if not is_faulty:
        simulated.synchronize()
    _expect(loss, 2)


def late_copy_is_not_asked_for(is_faulty: bool) -> None:  # noqa: FBT001
    """The host asks whether a copy is done, and does not listen to the answer."""
    loss = torch.full((8,), 2.0, device=_DEVICE).to("cpu", non_blocking=True)
    event = simulated.current_stream().record_event()
    while not event.query() and not is_faulty:
        pass
    _expect(loss, 2)


def source_is_changed(is_faulty: bool) -> None:  # noqa: FBT001
    """The host fills a pinned buffer again, while it is still copied to the device."""
    buffer = torch.full((8,), 2.0).pin_memory()
    copied = buffer.to(_DEVICE, non_blocking=True)
    if not is_faulty:
        simulated.synchronize()
    buffer.fill_(3)
    _expect_on_device(copied, 2)


def target_is_changed(is_faulty: bool) -> None:  # noqa: FBT001
    """The host fills a buffer where a copy from the device has yet to write."""
    buffer = torch.empty(8, pin_memory=True)
    buffer.copy_(torch.full((8,), 2.0, device=_DEVICE), non_blocking=True)
    if not is_faulty:
        simulated.synchronize()
    buffer.fill_(3)
    simulated.synchronize()
    _expect(buffer, 3)


def buffer_of_two_streams(is_faulty: bool) -> None:  # noqa: FBT001
    """A stream copies a buffer of the host to the device that another stream has yet to fill."""
    buffer = torch.empty(8, pin_memory=True)
    buffer.copy_(torch.full((8,), 2.0, device=_DEVICE), non_blocking=True)
    with _side_stream(is_late=is_faulty) as stream:
        copied = buffer.to(_DEVICE, non_blocking=True)
    simulated.current_stream().wait_stream(stream)
    _expect_on_device(copied, 2)


def host_reads_device_memory(is_faulty: bool) -> None:  # noqa: FBT001
    """The host reads at the address of a device."""
    value = torch.full((8,), 2.0, device=_DEVICE)
    value = value if is_faulty else value.cpu()
    assert ctypes.string_at(value.data_ptr(), 4) == b"\0\0\0\x40"


def freed_memory_is_reused(is_faulty: bool) -> None:  # noqa: FBT001
    """Memory that a side stream still reads is given to another tensor, as its stream was not recorded."""
    value = torch.full((8,), 2.0, device=_DEVICE)
    with _side_stream() as stream:
        doubled = value * 2
        if not is_faulty:
            value.record_stream(stream)
    del value
    torch.full((8,), 3.0, device=_DEVICE)
    stream.synchronize()
    _expect_on_device(doubled, 4)


def new_memory_is_read(is_faulty: bool) -> None:  # noqa: FBT001
    """A sum begins with what happened to be in the memory."""
    total = torch.empty(8, device=_DEVICE) if is_faulty else torch.zeros(8, device=_DEVICE)
    _expect_on_device(total + 1, 1)


def hook_does_not_wait(is_faulty: bool) -> None:  # noqa: FBT001
    """A hook, in the thread of the backward pass, sends a gradient on in a stream that does not wait for it."""
    weight = torch.full((8,), 2.0, device=_DEVICE, requires_grad=True)
    stream, doubled = torch.Stream(_DEVICE), []

    def send(parameter: Tensor) -> None:
        assert parameter.grad is not None
        if not is_faulty:
            stream.wait_stream(simulated.current_stream())
        with stream:
            doubled.append(parameter.grad * 2)

    weight.register_post_accumulate_grad_hook(send)
    (weight * 3).sum().backward()
    simulated.current_stream().wait_stream(stream)
    _expect_on_device(doubled[0], 6)


def backward_of_a_side_stream(is_faulty: bool) -> None:  # noqa: FBT001
    """Gradients that a backward pass made within a side stream are read outside of it."""
    weight = torch.full((8,), 2.0, device=_DEVICE, requires_grad=True)
    with _side_stream() as stream:
        (weight * 3).sum().backward()
    if not is_faulty:
        simulated.current_stream().wait_stream(stream)
    assert weight.grad is not None
    _expect_on_device(weight.grad, 3)


PROGRAMS: Final[tuple[Program, ...]] = (
    side_stream_begins_too_early,
    result_is_not_waited_for,
    operand_is_overwritten,
    event_is_recorded_before_the_work,
    copy_goes_in_another_stream,
    late_copy_is_read,
    late_copy_is_not_asked_for,
    source_is_changed,
    target_is_changed,
    buffer_of_two_streams,
    host_reads_device_memory,
    freed_memory_is_reused,
    new_memory_is_read,
    hook_does_not_wait,
    backward_of_a_side_stream,
)


def _end_of(program: Program, *, is_faulty: bool) -> str:
    """Run ``program`` in a process of its own; return the last line of its error, its signal, or ``passed``."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            program(is_faulty)
        except BaseException as error:  # noqa: BLE001 - it is what the caller asks for
            os.write(writing, traceback.format_exception_only(error)[-1].encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        told = pipe.read().decode().strip()
    _child, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return told or ("passed" if code == 0 else f"signal {-code}")


if __name__ == "__main__":
    for chosen in PROGRAMS:
        for is_faulty in (True, False):
            end = _end_of(chosen, is_faulty=is_faulty).splitlines()[0]
            sys.stdout.write(f"{chosen.__name__}\t{'faulty' if is_faulty else 'right'}\t{end}\n")
            sys.stdout.flush()
