"""The agent of one instance: it starts the program, tells poprun how it ended, and leaves nothing behind.

It has a session of its own, out of reach of Ctrl-C and of the MPI runtime, and is a subreaper. It ends the
program's tree when poprun says so, when poprun or its shim is gone, and when the program has ended by itself.
Standard library only, and little of it: each shim of an MPI job loads this in a bare interpreter.
"""

from __future__ import annotations

import errno
import os
import select
import time

from poprun.launch.messages import ProtocolError
from poprun.launch.messages.control import RECEIVE_BYTES, Link, Message, connect, is_remote, notice_death
from poprun.launch.mpi_leftovers import remove_abandoned
from poprun.launch.process.process_tree import (
    ancestors,
    catchers,
    descendants,
    has_ended,
    key_of,
    reap,
    send,
)
from poprun.launch.process.spawn import (
    ProcessStart,
    become_subreaper,
    die_with_parent,
    start_process,
    take_memory_from,
)
from poprun.launch.program_watch import ProgramQuestion, ProgramWatch
from poprun.launch.tree_ending import TreeEnding

TYPE_CHECKING = False  # as typing has it
if TYPE_CHECKING:
    import signal
    import socket
    from collections.abc import Collection, Mapping
    from typing import Any, NamedTuple

    from poprun.launch.clock_answers import ClockAnswers
else:
    import _signal as signal  # signal and socket themselves load enum and more
    import _socket as socket

    from poprun.launch.process import NamedTuple

_BACKLOG = 2048
NUM_STREAMS = 3
_CONNECT_SECONDS = 30.0
_WALK_MILLISECONDS = 20
_LOOK_MILLISECONDS = 200
_WORD_SECONDS = 2.0


class Parentage(NamedTuple):
    """The processes that an agent comes from."""

    shim: int  # the process id of its shim
    runtime: int  # that of the process which started the shim
    ends: Collection[int]  # descriptors that become readable when one of the two is gone
    # what the shim was given, which is that of the program but for what poprun adds
    environment: Mapping[str, str]


class HeldKey(NamedTuple):
    """The key of the agent's job; both are empty where the kernel knows the agents."""

    text: str
    file: str  # where it was read


def forget_key(key: HeldKey) -> None:
    """Remove the key's file, which every shim has read by now; another agent may have done so."""
    try:
        os.unlink(key.file)
    except OSError:
        return


def bind(cores: Collection[int], memory_nodes: Collection[int]) -> dict[str, str]:
    """Bind this process to cores and memory nodes; the words returned say why the memory is not bound, if so."""
    # what a process starts inherits both: sched_setaffinity(2), and set_mempolicy(2), which containers may forbid
    if cores:
        os.sched_setaffinity(0, cores)
        if os.sched_getaffinity(0) != set(cores):  # the kernel leaves out what is not to be had, without a word
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    if memory_nodes:
        try:
            take_memory_from(memory_nodes)
        except OSError as error:
            return {"memory_not_bound": error.strerror or str(error)}
    return {}


def hold_port(address: str) -> socket.socket:
    """A socket that keeps a free port of ``address`` for a library of the program, without listening there."""
    # Every instance must know it before that program listens there. The kernel gives a port that is bound with
    # SO_REUSEADDR to nobody who asks for any, and the library's listener, which sets that too, may bind it.
    holder = socket.socket(_family(address), socket.SOCK_STREAM)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((address, 0))
    return holder


def is_in_use(holder: socket.socket) -> bool:
    """Whether a library listens at the port that ``holder`` keeps; if not, nobody can from now on."""
    try:
        holder.listen()
    except OSError:
        return True
    return False


def open_store_listener(address: str) -> socket.socket:
    """A listening socket at ``address`` for popdist's own store, which instance 0's program inherits."""
    listener = socket.socket(_family(address), socket.SOCK_STREAM)
    listener.bind((address, 0))
    listener.listen(_BACKLOG)
    return listener


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def connect_streams(address: str, key: str, index: int, timeout_seconds: float) -> list[int]:
    """The descriptors of a program whose poprun is on another host: sockets, and to read only for instance 0."""
    streams = [] if index == 0 else [os.open(os.devnull, os.O_RDONLY)]
    for number in range(len(streams), NUM_STREAMS):
        link = connect(address, key, timeout_seconds)
        link.send({"event": "stream", "instance": index, "stream": number})
        streams.append(link.connection.detach())
    return streams


def detach_streams() -> None:
    """Close the pipes of the MPI runtime, which may wait until they are closed."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(NUM_STREAMS):
        os.dup2(null, descriptor)
    os.close(null)


def run_agent(address: str, key: HeldKey, index: int, parentage: Parentage) -> int:
    """Be the agent of instance ``index``; its exit code. poprun is told of an OSError, if possible."""
    os.setsid()
    try:
        streams = connect_streams(address, key.text, index, _CONNECT_SECONDS) if is_remote(address) else []
        control = connect(address, key.text, _CONNECT_SECONDS)
        if is_remote(address):
            notice_death(control.connection)
    except (ConnectionError, TimeoutError, ProtocolError):
        return 1  # poprun is gone: there is nobody to tell
    try:
        Agent(control, index, parentage, streams, key).run()
    except OSError as error:
        control.send({"event": "agent_lost", "instance": index, "errno": error.errno or 0})
        raise
    forget_key(key)
    control.close()
    return 0


class Agent:
    """An agent: its state, and what it does at each event; :meth:`run` is its loop."""

    def __init__(self, control: Link, index: int, parentage: Parentage, streams: list[int], key: HeldKey) -> None:
        self._control = control
        self._index = index
        self._parentage = parentage
        self._streams = streams
        self._key = key
        self._is_remote = bool(key.text)
        self._address = control.own_address()
        # for TensorFlow's worker, which listens on all addresses; for torch's store and JAX's coordinator
        self._held = [hold_port("::" if ":" in self._address else "0.0.0.0")]  # noqa: S104 - nobody listens there
        self._held += [hold_port(self._address) for _ in range(2 if index == 0 else 0)]
        self._store = open_store_listener(self._address) if index == 0 else None
        self._program: int | None = None
        self._ending = TreeEnding()
        self._was_terminated = False
        self._is_over = False
        self._is_orphan = False
        self._began_at_seconds = time.monotonic()
        self._watch = ProgramWatch()
        self._question: ProgramQuestion | None = None
        self._poll = select.poll()
        self._clock: ClockAnswers | None = None
        self._lease_address = ""
        self._numbers: int | None = None
        self._surroundings: tuple[dict[str, str], str] = ({}, "/")
        self._unsent: list[Message] = []

    def run(self) -> None:
        """Serve orders until the program's whole tree has ended, or there is nothing to start."""
        detach_streams()
        wakeup = self._catch_signals()
        self._report_ready()
        become_subreaper()
        die_with_parent(signal.SIGCONT)  # if somebody has stopped this agent, it wakes up to end what it started
        poll = self._poll
        ends = set(self._parentage.ends)
        for descriptor in (self._control.fileno(), wakeup, *ends):
            poll.register(descriptor, select.POLLIN)
        while not self._is_over:
            self._send()
            for descriptor, _ in poll.poll(self._patience_milliseconds()):
                if descriptor == wakeup:
                    os.read(wakeup, RECEIVE_BYTES)
                elif descriptor in self._parentage.ends:
                    self._lose_shim(poll, ends)
                elif not self._listen_to(descriptor):
                    poll.unregister(descriptor)
            if self._was_terminated and not self._ending.was_stopped:
                self._ending.stop(self._program)
            self._reap()
            self._is_over |= self._ending.is_over(self._program)
            self._report_program()
        self._await_word_of_shim(ends)
        self._queue({"event": "ended"})
        self._send()
        if self._is_orphan or self._is_remote:  # else it is poprun's to do, once for all instances
            remove_abandoned(time.monotonic() - self._began_at_seconds)
        self._leave_lease()
        if self._is_orphan and self._is_remote:
            self._end_runtime()
        self._continue_parents()

    def _lose_shim(self, poll: select.poll, ends: set[int]) -> None:
        """End the program because the shim or its parent is gone; only the first of the two counts."""
        if ends:
            self._queue({"event": "shim_lost"})
            self._ending.stop(self._program)
        while ends:
            poll.unregister(ends.pop())

    def _await_word_of_shim(self, ends: set[int]) -> None:
        """Let a shim tell poprun first that what started it is gone, and who was hit; then it ends."""
        if ends and has_ended(self._parentage.runtime):
            select.select(ends, (), (), _WORD_SECONDS)

    def _report_ready(self) -> None:
        sockets = [*self._held, *([self._store] if self._store else [])]
        ports = [one.getsockname()[1] for one in sockets]
        known = {"shim": self._parentage.shim, "runtime": self._parentage.runtime, "address": self._address}
        self._queue({"event": "hello", "instance": self._index, "pid": os.getpid(), **known, "ports": ports})

    def _end_runtime(self) -> None:
        """End the MPI daemon that started the shim: it would wait for its unreachable mpiexec for ever."""
        runtime = key_of(self._parentage.runtime)
        if runtime is not None and any(key.pid == self._parentage.shim for key in descendants(runtime.pid)):
            send([runtime], signal.SIGTERM)

    def _continue_parents(self) -> None:
        """Continue the shim and what started it where somebody has stopped them: they have to end now."""
        # a poprun that lives continues its own children, and may be stopped itself because its user wants it
        shim, runtime = self._parentage.shim, self._parentage.runtime
        pids = [shim, *([runtime] if self._is_orphan or self._is_remote else [])]
        pids += list(ancestors(runtime))[:1] if self._is_orphan else []
        send([key for key in map(key_of, pids) if key is not None], signal.SIGCONT)

    def _report_program(self) -> None:
        """Tell poprun what the program uses, now and then, and where it stands when poprun has asked."""
        if self._program is not None and self._watch.is_due():
            self._queue(self._watch.measure())
        if left := self._ending.news():
            self._queue(left)
        if self._question is not None and (answer := self._question.answer()):
            self._queue(answer)
            self._question = None

    def _patience_milliseconds(self) -> float | None:
        if self._ending.has_begun or self._question is not None:
            return _WALK_MILLISECONDS if self._program or not self._ending.is_patient else _LOOK_MILLISECONDS
        return None if self._program is None else self._watch.patience_seconds() * 1000

    def _catch_signals(self) -> int:
        """Wake the loop when a child ends; stop in order when somebody terminates the agent itself."""
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._on_terminate)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        return reader

    def _on_terminate(self, *_: object) -> None:
        self._was_terminated = True

    def _queue(self, message: Message) -> None:
        self._unsent.append(message)

    def _send(self) -> None:
        """Send all queued events at once, so that poprun wakes up once."""
        messages, self._unsent = self._unsent, []
        try:
            self._control.send(*messages)
        except OSError:  # poprun is gone; its end of the socket says so to the loop
            return

    def _listen_to(self, descriptor: int) -> bool:
        """Answer the program or obey poprun; False when the other end is gone. Without poprun the program ends."""
        if self._clock is not None and descriptor == self._clock.fileno():
            return self._clock.answer()
        if self._receive():
            return True
        self._is_orphan = True
        self._ending.stop(self._program)
        return False

    def _receive(self) -> bool:
        """Read what poprun sent and obey; False when poprun is gone or sends what is no message."""
        received = self._control.receive()
        if received is None or received.refusals:
            return False
        self._streams += received.descriptors
        for message in received.messages:
            self._execute(message)
        return True

    def _execute(self, order: dict[str, Any]) -> None:
        if order["order"] == "start" and not self._ending.was_stopped:
            self._start(order)
        elif order["order"] == "signal" and self._program is not None:
            os.killpg(self._program, order["signal"])
            self._watch.pause_or_resume(order["signal"])
        elif order["order"] == "offer_signal" and self._program is not None:
            self._pass_signal(order["signal"])
        elif order["order"] == "stacks" and self._program is not None:
            self._question = self._watch.ask_for_stacks(order["most_helpers"])
        elif order["order"] == "clock":
            self._queue({"event": "clock", "sent_ns": order["sent_ns"], "answered_ns": time.time_ns()})
        elif order["order"] == "calls" and self._program is not None and self._question is None:
            # two questions at once would mix up what processes write; one about calls is asked again anyway
            self._question = self._watch.ask_for_calls(order["most_helpers"])
        elif order["order"] == "stop":
            is_kept = self._program is not None and (self._watch.uses_jax() or is_in_use(self._held[0]))
            self._ending.grace_seconds = order["grace_seconds_in_vain" if is_kept else "grace_seconds"]
            self._ending.stop(self._program)
        elif order["order"] == "kill":
            self._ending.kill()

    def _start(self, order: dict[str, Any]) -> None:
        """Run the program of the ``start`` order, in the environment of the shim with what the order adds."""
        forget_key(self._key)  # poprun has heard of every agent
        self._ending.grace_seconds = order["grace_seconds"]
        given = self._parentage.environment
        environment = {name: value for name, value in given.items() if not name.startswith("POPRUN_")}
        environment |= order["environment"]
        if self._store is not None:
            environment[order["store_variable"]] = str(self._store.fileno())
        page = self._watch.open_page(order)
        if order["progress_variable"]:
            environment[order["progress_variable"]] = str(page)
        if order["numbers_variable"]:
            self._numbers = self._watch.open_numbers()
            environment[order["numbers_variable"]] = f"{self._numbers}:{os.fstat(self._numbers).st_ino}"
        if order["clock_variable"]:
            environment[order["clock_variable"]] = str(self._open_clock())
        self._lease_address = order["lease_address"]
        try:
            self._streams += self._fetch_lease()
        except OSError as error:
            self._fail({"event": "failed_to_hold", "errno": error.errno or 0})
            return
        try:
            to_tell = bind(order["cores"], order["memory_nodes"])
        except OSError as error:
            self._fail({"event": "failed_to_bind", "errno": error.errno, "cores": order["cores"]})
        else:
            self._run(order, environment, to_tell)
        self._let_go()

    def _open_clock(self) -> int:
        """Begin to answer a traced program; the descriptor that it inherits."""
        from poprun.launch.clock_answers import ClockAnswers

        self._clock = ClockAnswers()
        self._poll.register(self._clock.fileno(), select.POLLIN)
        return self._clock.for_program.fileno()

    def _fetch_lease(self) -> list[int]:
        """The descriptors of the job's lease, when a process of this host keeps it."""
        if not self._lease_address:
            return []
        from poprun.launch.fetched_lease import fetch_lease

        return fetch_lease(self._lease_address)

    def _leave_lease(self) -> None:
        """Have the keeper of the lease end where poprun is out of reach, else see that it can hear poprun."""
        if self._lease_address:
            from poprun.launch.fetched_lease import give_up_lease, wake_holder

            (give_up_lease if self._is_orphan else wake_holder)(self._lease_address)

    def _fail(self, event: Message) -> None:
        """Report why the program cannot be started, and end."""
        self._queue(event)
        self._is_over = True

    def _run(self, order: dict[str, Any], environment: dict[str, str], to_tell: dict[str, str]) -> None:
        kept = [int(environment[name]) for name in order["descriptor_variables"] if name in environment]
        kept += [] if self._numbers is None else [self._numbers]
        streams = self._streams[:NUM_STREAMS]
        start = ProcessStart(
            order["words"],
            order["working_directory"],
            environment,
            streams,
            signal.SIGKILL,
            kept,
            order["open_files"],
        )
        try:
            self._program = start_process(start)
        except OSError as error:
            self._fail({"event": "failed_to_start", "errno": error.errno, "place": error.filename})
        else:
            self._watch.begin()
            self._surroundings = (environment, order["working_directory"])
            self._queue({"event": "started", "pid": self._program, **to_tell})

    def _let_go(self) -> None:
        """Close what the program inherited: its pipes would not close while they are open here."""
        # further descriptors are leases on the job's virtual IPUs and cores, which last until this agent has ended
        for descriptor in self._streams[:NUM_STREAMS]:
            os.close(descriptor)
        if self._store is not None:
            self._store.close()
        if self._numbers is not None:
            os.close(self._numbers)
        if self._clock is not None:
            self._clock.for_program.close()

    def _pass_signal(self, signum: int) -> None:
        """Pass a signal on to the processes that handle it, and tell if there are none."""
        catching = catchers(signum)
        send(catching, signum)
        if not catching:
            self._queue({"event": "signal_unhandled", "signal": signum})

    def _reap(self) -> None:
        for ended in reap():
            if ended.pid == self._program:
                self._program = None
                self._queue(self._watch.last_event())
                event = {"event": "exited", "code": ended.code, "at_seconds": time.monotonic()}
                end = {"peak_bytes": ended.peak_bytes, "was_stopped": self._ending.was_stopped}
                remains = {} if ended.code == 0 else self._watch.remains(*self._surroundings)
                self._queue({**event, **end, **remains})
                if ended.code and self._is_remote:
                    self._send()
                    self._queue(self._watch.machine_event())
                self._ending.end_leftovers(after_good_end=ended.code == 0)
