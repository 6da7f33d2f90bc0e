"""The programs' standard streams while a job runs: opened for each instance, read, fed, and finished."""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from poprun.job.orders import JobIdentity
from poprun.job.output.descriptors import StreamPlan
from poprun.plan.plan import LaunchPlan

if TYPE_CHECKING:
    from poprun.job.output.input_feed import InputFeed
    from poprun.job.output.relay import Relay


class Traffic:
    """What goes between poprun's own streams and those of the programs of one attempt.

    Raises:
        PlanError: If there are to be logs and they cannot be made.
        LaunchError: If poprun may not open as many files.
    """

    def __init__(self, plan: LaunchPlan, environ: Mapping[str, str], identity: JobIdentity) -> None:
        self._streams = StreamPlan(plan, environ, identity)
        self._relay: Relay | None = None
        self._feed: InputFeed | None = None

    @property
    def is_inherited(self) -> bool:
        """Whether the one program has poprun's own streams."""
        return self._streams.is_inherited

    def open(self, instance: int, sockets: Mapping[int, int]) -> list[int]:
        """The descriptors for ``instance``, which :meth:`close` closes here: see :meth:`StreamPlan.open`."""
        return self._streams.open(instance, sockets)

    def close(self, streams: list[int]) -> None:
        """Close what was passed on."""
        self._streams.close(streams)

    def start(self, on_closed: Callable[[], None]) -> None:
        """Begin to read and to feed; ``on_closed`` is called when nobody reads poprun's output any more."""
        if self._streams.sources:
            from poprun.job.output.relay import Relay  # noqa: PLC0415 - was loaded while the shims started

            self._relay = Relay(self._streams.sources, self._streams.displays(on_closed), self._streams.logs)
            self._relay.start()
        if self._streams.fed is not None:
            from poprun.job.output.input_feed import InputFeed  # noqa: PLC0415 - jobs of one host need none

            self._feed = InputFeed(0, self._streams.fed)
            self._feed.start()

    def finish(self, timeout_seconds: float) -> None:
        """Read what the pipes still hold, and end."""
        if self._feed is not None:
            self._feed.end()
        if self._relay is not None:
            self._relay.finish(timeout_seconds)

    def last_line(self, instance: int) -> str:
        """The last line that ``instance`` wrote to its standard error, or nothing."""
        tail = [] if self._relay is None else self._relay.tail(instance)
        return tail[-1] if tail else ""

    def tails(self, instances: Iterable[int]) -> dict[int, list[str]]:
        """What each of ``instances`` wrote last to its standard error."""
        relay = self._relay
        return {} if relay is None else {index: relay.tail(index) for index in instances}

    def leave_out_interrupts(self) -> None:
        """From now on, do not show the tracebacks of KeyboardInterrupt: Ctrl-C was pressed."""
        if self._relay is not None:
            self._relay.leave_out_interrupts()

    @property
    def interrupted(self) -> tuple[int, ...]:
        """The instances whose tracebacks of KeyboardInterrupt were not shown, ascending."""
        return () if self._relay is None else self._relay.interrupted
